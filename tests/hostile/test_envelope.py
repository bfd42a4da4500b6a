"""Bytes from a queue can come from anybody: whatever they are, the job fails with an error, and the reader gets one."""

from __future__ import annotations

import contextlib
import random
import time
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from fractions import Fraction
from pathlib import PurePosixPath
from uuid import UUID

import msgspec
import pytest

from penstock._values import envelope
from penstock._values.arguments import Arguments
from penstock._values.remote_errors import rebuild

SEEDS = range(4)
EACH = 300


@dataclass
class Parcel:
    weight: float
    to: list[str]


def send(parcel: Parcel, when: datetime, *more: object, **named: object) -> None:
    """Has an annotation that names a class."""


ARGUMENTS = Arguments("shop.send", send, {}, bytes)

VALUES = [
    None,
    2**200,
    -(2**63),
    1.5,
    "größe",
    b"bytes",
    [1, [2, [3]]],
    {"a": {"b": 1}},
    (1, 2),
    {1, 2},
    frozenset({3}),
    complex(1, 2),
    Decimal("1.50"),
    Fraction(1, 3),
    date(2026, 11, 21),
    datetime(2026, 11, 21, tzinfo=UTC),
    timedelta(days=1, microseconds=3),
    UUID(int=7),
    PurePosixPath("a/b"),
    range(0, 10, 3),
]


def changed(body: bytes, chance: random.Random) -> bytes:
    """Return the bytes with a few changes, so that most results still have a readable shape."""
    bytes_ = bytearray(body)
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(len(bytes_))
        match chance.randrange(4):
            case 0:
                bytes_[at] = chance.randrange(256)
            case 1:
                bytes_[at] ^= 1 << chance.randrange(8)
            case 2:
                del bytes_[at:]
            case _:
                piece = bytes_[at : at + chance.randrange(1, 20)]
                bytes_[at:at] = piece
        if not bytes_:
            bytes_ = bytearray(b"\x90")
    return bytes(bytes_)


def nested_extensions(chance: random.Random, depth: int) -> bytes:
    """Return nested extensions with any codes around any values, which Penstock itself never writes."""
    if depth == 0:
        return msgspec.msgpack.encode(chance.choice([None, -1, 2**63, "x" * 5, b"", [], {}, [1, 2, 3], 1e308]))
    inside = nested_extensions(chance, depth - 1)
    match chance.randrange(3):
        case 0:
            return msgspec.msgpack.encode(msgspec.msgpack.Ext(chance.randrange(-3, 70), inside))
        case 1:
            return b"\x92" + inside + msgspec.msgpack.encode(chance.choice(["1e9999", "int", "9" * 20, -5, 2**62]))
        case _:
            return b"\x93" + inside * 3


@pytest.mark.parametrize("seed", SEEDS)
def test_arguments_of_any_bytes_are_refused_with_an_error_or_read(seed: int) -> None:
    chance = random.Random(seed)
    body = ARGUMENTS.encode((Parcel(1.5, ["ada"]), datetime.now(UTC), *VALUES), {"more": VALUES})
    for _ in range(EACH):
        kind = chance.randrange(3)
        if kind == 0:
            wrong = changed(body, chance)
        elif kind == 1:
            wrong = chance.randbytes(chance.randrange(60))
        else:
            wrong = b"\x92\x91" + nested_extensions(chance, chance.randrange(6)) + b"\x80"
        start = time.process_time()
        with contextlib.suppress(Exception):
            ARGUMENTS.decode(wrong)
        assert time.process_time() - start < 1, wrong


@pytest.mark.parametrize("seed", SEEDS)
def test_what_travels_around_a_result_is_read_or_refused(seed: int) -> None:
    chance = random.Random(seed)
    record = envelope.encode(
        envelope.ErrorRecord(
            "builtins", "ValueError", "no", ARGUMENTS.codec.encode([["no"], {}, ["no"]]), "Traceback", 0, "w", 1, 2
        )
    )
    success = envelope.encode(envelope.Success("shop.send", 0, 0, 1, 2, 3, "w", [record], msgspec.Raw(b"\x01")))
    failure = envelope.encode(envelope.Failure("shop.send", 0, 1, [record, b"a worker died"]))
    for _ in range(EACH):
        for decode, valid in [
            (envelope.decode_success, success),
            (envelope.decode_failure, failure),
            (envelope.read_note, record),
        ]:
            wrong = changed(valid, chance) if chance.random() < 0.8 else chance.randbytes(chance.randrange(60))
            try:
                read = decode(wrong)
            except (msgspec.DecodeError, UnicodeDecodeError):
                continue
            if isinstance(read, envelope.ErrorRecord):
                error = rebuild(read, ARGUMENTS.codec)
                assert isinstance(error, Exception), "no record may raise what ends a program"
                str(error)


def test_arguments_nested_too_deep_are_an_error_and_not_the_end_of_the_process() -> None:
    for opening in (b"\x91", b"\x81\x01", b"\xc7\x02\x03"):
        with pytest.raises((TypeError, ValueError, RecursionError)):
            ARGUMENTS.decode(opening * 100_000)
