"""Envelopes of arguments and results, as msgpack. The broker stores them without reading them.

    body of a job    [args, kwargs]
    value, succeeded Success, below
    value, failed    Failure
    note             ErrorRecord: one failed attempt; or, written by the broker when a worker
                     process died, the reason as text

These are arrays: a new field is added at the end and has a default, so that older and newer versions of penstock can
read each other's envelopes.
"""

from __future__ import annotations

import msgspec


class ErrorRecord(msgspec.Struct, array_like=True, frozen=True):
    """Error of a failed attempt."""

    module: str
    """Module of the error's type, as its process imports it. Together with ``qualname`` it names the type."""
    qualname: str
    message: str
    arguments: bytes | None
    """Encoded [args, attributes, arguments of the type's constructor]; None when they are not serializable."""
    traceback: str
    attempt: int
    """Number of the attempt, from 0; crashes are not counted."""
    worker: str
    started_ms: int
    finished_ms: int


class Success(msgspec.Struct, array_like=True, frozen=True):
    task: str
    attempt: int
    crashes: int
    enqueued_ms: int
    started_ms: int
    finished_ms: int
    worker: str
    notes: list[bytes]
    result: msgspec.Raw


class Failure(msgspec.Struct, array_like=True, frozen=True):
    task: str
    crashes: int
    enqueued_ms: int
    notes: list[bytes]
    """Errors of all attempts, oldest first. The last one is the reason why the job failed."""


encode = msgspec.msgpack.Encoder().encode
decode_success = msgspec.msgpack.Decoder(Success).decode
decode_failure = msgspec.msgpack.Decoder(Failure).decode
decode_error = msgspec.msgpack.Decoder(ErrorRecord).decode


def read_note(note: bytes) -> ErrorRecord | str:
    """Decode a note: a record, or the broker's text. No UTF-8 text begins with the byte of a msgpack array."""
    if note and note[0] & 0xF0 == 0x90:
        return decode_error(note)
    return note.decode(errors="replace")
