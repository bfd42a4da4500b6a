"""A broker whose engine lacks a feature: a real one, behind a relay that removes the feature from its welcome."""

from __future__ import annotations

import os
import socket
import struct
import threading
from contextlib import suppress
from pathlib import Path
from typing import Literal

Lacking = Literal["disk durability", "results", "tasks of consumers", "asks"]

# Fields 3, 14, 26 and 41 of `Capabilities` in proto/penstock.proto.
ABSENT: dict[Lacking, bytes] = {
    "disk durability": bytes([0x18, 1]),
    "results": bytes([0x70, 0]),
    "tasks of consumers": bytes([0xD0, 0x01, 0]),
    "asks": bytes([0xC8, 0x02, 0]),
}


def within(field: int, message: bytes) -> bytes:
    """A message as a field of another."""
    assert field < 16 and len(message) < 128
    return bytes([field << 3 | 2, len(message)]) + message


class Lesser:
    """Listens at its own socket and relays the frames between clients and a project's broker."""

    def __init__(self, broker: Path, listens_at: Path, lacks: Lacking) -> None:
        self.url = f"unix:{listens_at}"
        self._broker = broker
        engine = within(1, b"Lesser 1")
        # Of a field that comes twice, the later one holds; of a message, field by field.
        self._said = within(1, within(9, engine + ABSENT[lacks]))
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(os.fspath(listens_at))
        self._listener.listen()
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> Lesser:
        return self

    def __exit__(self, *exception: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with client, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as broker:
            broker.connect(os.fspath(self._broker))
            there = threading.Thread(target=self._carry, args=(client, broker), daemon=True)
            there.start()
            with suppress(OSError):
                self._welcome(broker, client)
                client.shutdown(socket.SHUT_WR)
            there.join()

    def _welcome(self, broker: socket.socket, client: socket.socket) -> None:
        with broker.makefile("rb") as frames:
            header = frames.read(4)
            if len(header) == 4:
                (length,) = struct.unpack("<I", header)
                frame = frames.read(length) + self._said
                client.sendall(struct.pack("<I", len(frame)) + frame)
            while some := frames.read1():
                client.sendall(some)

    def _carry(self, client: socket.socket, broker: socket.socket) -> None:
        with suppress(OSError):
            while some := client.recv(1 << 16):
                broker.sendall(some)
            broker.shutdown(socket.SHUT_WR)
