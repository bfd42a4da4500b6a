"""Bad network in user space: a TCP proxy between clients and a server that delays, cuts, swallows and dribbles."""

from __future__ import annotations

import random
import socket
import struct
import threading
import time
from dataclasses import dataclass


@dataclass
class Weather:
    """Disturbances of the network while they last."""

    delay_s: float = 0.0
    """Longest random delay of each piece, in seconds."""
    dribbles: bool = False
    """Whether each byte is sent in a separate packet."""
    swallows: tuple[str, ...] = ()
    """Directions, "there" and "back", in which no more data arrives. A connection that was hit stays that way."""
    refuses: bool = False
    """Whether connections are accepted and reset at once."""


class Proxy:
    def __init__(self, target: tuple[str, int], chance: random.Random) -> None:
        self.weather = Weather()
        self._target = target
        self._chance = chance
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._connections: set[_Connection] = set()
        self._lock = threading.Lock()
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *exception: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()

    def cut(self, *, only_hit: bool = False) -> int:
        """Reset all connections, or only those that lost data; return their number."""
        with self._lock:
            cut = [one for one in self._connections if one.swallowed or not only_hit]
            self._connections.difference_update(cut)
        for connection in cut:
            connection.reset()
        return len(cut)

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            try:
                if self.weather.refuses:
                    raise ConnectionResetError
                server = socket.create_connection(self._target, timeout=5)
            except OSError:
                reset(client)
                continue
            connection = _Connection(self, client, server, self._chance.getrandbits(32))
            with self._lock:
                self._connections.add(connection)
            connection.start()


class _Connection:
    def __init__(self, proxy: Proxy, client: socket.socket, server: socket.socket, seed: int) -> None:
        self._proxy = proxy
        self._ends = client, server
        self._chance = random.Random(seed)
        self.swallowed: set[str] = set()
        for end in self._ends:
            end.settimeout(None)
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def start(self) -> None:
        client, server = self._ends
        for way in [("there", client, server), ("back", server, client)]:
            threading.Thread(target=self._carry, args=way, daemon=True).start()

    def reset(self) -> None:
        for end in self._ends:
            reset(end)

    def _carry(self, direction: str, source: socket.socket, target: socket.socket) -> None:
        try:
            while data := source.recv(64 * 1024):
                weather = self._proxy.weather
                if direction in weather.swallows:
                    self.swallowed.add(direction)
                if direction in self.swallowed:
                    continue
                if weather.delay_s:
                    time.sleep(self._chance.uniform(0, weather.delay_s))
                if weather.dribbles:
                    for index in range(len(data)):
                        target.sendall(data[index : index + 1])
                else:
                    target.sendall(data)
            if direction not in self.swallowed:
                target.shutdown(socket.SHUT_WR)
        except OSError:
            self.reset()


def reset(end: socket.socket) -> None:
    """Close with RST, and wake local readers."""
    try:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        end.shutdown(socket.SHUT_RD)
    except OSError:
        pass  # the other side closed it first
    end.close()
