"""Previews of a failed job's arguments for people: short, and without secrets.

The worker, which alone knows the task's signature, writes the preview, and the broker keeps it. No ``repr`` of a user's
own class is called, because it may reveal secrets, take long, or raise.
"""

from __future__ import annotations

import collections
import datetime
import decimal
import enum
import fractions
import pathlib
import uuid
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from penstock._durations import is_a
from penstock._values.secrets import MASK, is_secret_hint, is_secret_name, is_secret_type
from penstock._values.shapes import hints_by_name, shape_of, type_of

if TYPE_CHECKING:
    from penstock._values.arguments import Arguments

LONGEST_BYTES = 1024
"""Largest preview that the broker keeps, in bytes."""

_MORE = "…"
_DEEPEST = 6
_PLAIN = (bool, float, complex, type(None))
_SPEAKING = (
    *(datetime.date, datetime.time, datetime.timedelta, datetime.tzinfo),
    *(decimal.Decimal, fractions.Fraction, uuid.UUID, pathlib.PurePath),
)
SPEAKING_MODULES = frozenset({"datetime", "decimal", "fractions", "uuid", "pathlib", "pathlib._local", "zoneinfo"})
"""Modules whose values are shown by their ``str``."""
_CONTAINERS: dict[type, tuple[str, str]] = {
    list: ("[", "]"),
    tuple: ("(", ")"),
    set: ("{", "}"),
    frozenset: ("{", "}"),
    collections.deque: ("[", "]"),
}


def preview_of(arguments: Arguments, body: bytes) -> bytes:
    """Write ``name=value, …`` for the arguments in the body of a job: at most 1 KiB of UTF-8."""
    # Decoded again, because the task may have modified the arguments that it was called with.
    args, kwargs = arguments.decode(body)
    text = _Text()
    try:
        for index, (name, value) in enumerate(arguments.named(args, kwargs)):
            text.add(f"{', ' if index else ''}{name}=")
            if arguments.is_secret(name):
                text.add(MASK)
            else:
                text.add_value(value, _DEEPEST)
    except _Full:
        pass
    return text.encoded()


class _Full(Exception):
    pass


class _Text:
    """Text buffer that stops growing at the size limit."""

    def __init__(self) -> None:
        self._bytes = b""

    def add(self, text: str) -> None:
        # Names and values may contain any character; a lone surrogate cannot be encoded.
        self._bytes += text.encode(errors="backslashreplace")
        if len(self._bytes) > LONGEST_BYTES:
            room = LONGEST_BYTES - len(_MORE.encode())
            self._bytes = self._bytes[:room].decode(errors="ignore").encode() + _MORE.encode()
            raise _Full

    def encoded(self) -> bytes:
        return self._bytes

    def add_value(self, value: Any, depth: int) -> None:
        kind = type_of(value)
        if is_secret_type(kind):
            self.add(MASK)
        elif isinstance(value, enum.Enum):
            self.add(f"{kind.__qualname__}.{value.name}")
        elif kind in _PLAIN:
            self.add(repr(value))
        elif kind is int:
            # Python refuses to write integers with more than a few thousand digits.
            self.add(repr(value) if value.bit_length() <= 256 else f"<int of {value.bit_length()} bits>")
        elif kind is str:
            self.add(repr(value if len(value) <= LONGEST_BYTES else value[:LONGEST_BYTES]))
        elif kind in (bytes, bytearray, memoryview):
            self.add(f"<{len(value)} bytes>")
        elif kind.__module__ in SPEAKING_MODULES and isinstance(value, _SPEAKING):
            self.add(str(value)[: LONGEST_BYTES + 1])
        elif depth == 0:
            self.add(_MORE)
        elif is_a(value, dict):
            self.add_items(kind.__name__ if kind is not dict else "", value.items(), depth)
        elif kind in _CONTAINERS:
            opening, closing = _CONTAINERS[kind]
            self.add(opening)
            for index, item in enumerate(value):
                self.add(", " if index else "")
                self.add_value(item, depth - 1)
            self.add(",)" if kind is tuple and len(value) == 1 else closing)
        else:
            self.add_object(value, depth)

    def add_items(self, name: str, items: Iterable[tuple[Any, Any]], depth: int) -> None:
        self.add(f"{name}{{")
        for index, (key, item) in enumerate(items):
            self.add(", " if index else "")
            self.add_value(key, depth - 1)
            self.add(": ")
            if isinstance(key, str) and is_secret_name(key):
                self.add(MASK)
            else:
                self.add_value(item, depth - 1)
        self.add("}")

    def add_object(self, value: Any, depth: int) -> None:
        kind = type_of(value)
        shape = shape_of(kind)
        state: Any = None if shape is None else shape.take(value)
        if is_a(state, Mapping) and is_a(state.get("__dict__"), Mapping):
            state = state["__dict__"]
        if not is_a(state, Mapping):
            # The user may have a codec for it; its content is not known here.
            self.add(f"<{kind.__qualname__}>")
            return
        hints = hints_by_name(kind)
        self.add(f"{kind.__qualname__}(")
        for index, (name, item) in enumerate(state.items()):
            self.add(f"{', ' if index else ''}{name}=")
            if is_secret_name(str(name)) or is_secret_hint(hints.get(name)):
                self.add(MASK)
            else:
                self.add_value(item, depth - 1)
        self.add(")")
