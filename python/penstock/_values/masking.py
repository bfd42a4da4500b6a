"""Removes a job's secrets from stored and logged errors.

An error may contain anything, such as a URL with a token or a line of a file. So its message, traceback and arguments
are searched for the values of secret arguments before any of them is stored or logged.
"""

from __future__ import annotations

import json
import re
import urllib.parse
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, cast

from penstock._durations import is_a
from penstock._values.preview import SPEAKING_MODULES
from penstock._values.secrets import MASK, is_secret_hint, is_secret_name, is_secret_type
from penstock._values.shapes import hints_by_name, shape_of, type_of

if TYPE_CHECKING:
    from penstock._values.arguments import Arguments

SHORTEST_SECRET = 4
"""Shortest masked secret, in characters. Shorter ones occur in so many words that masking would leave nothing to
read."""

_CONTAINERS = (list, tuple, set, frozenset, deque)
_NUMBERS = (int, float, complex)
_PLAIN = re.compile("[0-9A-Za-z]*")
_LONGEST_PIECE = 256
# Longer than the stored part at either end of a message or a traceback.
_LONGEST_END = 16_384


class Masking:
    """Replaces secrets wherever they occur, including as escaped by ``repr``, JSON and URLs."""

    def __init__(self, secrets: Iterable[str | bytes]) -> None:
        pieces = {piece for secret in secrets for piece in _pieces(secret) if len(piece) >= SHORTEST_SECRET}
        # Longest first, because a shorter one may be part of a longer one.
        self._pieces = sorted(pieces, key=len, reverse=True)

    @property
    def is_needed(self) -> bool:
        return bool(self._pieces)

    def text(self, text: str) -> str:
        for piece in self._pieces:
            # Letters and digits are the same in every form. This test avoids compiling slow patterns for the many
            # secrets that do not occur.
            if max(_PLAIN.findall(piece), key=len) in text:
                text = _pattern(piece).sub(MASK, text)
        return text

    def value(self, value: Any) -> Any:
        """Mask text, bytes and numbers in built-in containers. Other objects stay as they are."""
        if not self._pieces:
            return value
        kind = type_of(value)
        if kind is str:
            return self.text(value)
        if kind is bytes:
            return MASK.encode() if self.is_in(value) else value
        if kind in (int, float):
            return MASK if _written(value) in self._pieces else value
        if kind in _CONTAINERS:
            return cast("Callable[[Iterable[Any]], Any]", kind)(map(self.value, value))
        if kind is dict:
            return {self.value(key): self.value(item) for key, item in value.items()}
        return value

    def is_in(self, encoded: bytes) -> bool:
        """Whether these bytes contain any of the secrets."""
        text = encoded.decode(errors="backslashreplace")
        return self.text(text) != text


NOTHING_SECRET = Masking(())


def masking_of(arguments: Arguments, body: bytes) -> Masking:
    """Return a masking of the secret arguments in the body of a job."""
    # Decoded again, because the task may have modified the arguments that it was called with.
    args, kwargs = arguments.decode_unchecked(body)
    named = [(value, arguments.is_secret(name)) for name, value in arguments.named(args, kwargs)]
    secrets = list(_secrets_in(named))
    return Masking(secrets) if secrets else NOTHING_SECRET


def _secrets_in(named: Iterable[tuple[Any, bool]]) -> Iterator[str | bytes]:
    """Yield secret values and the values inside them. Dictionary keys are names, not secrets."""
    waiting = list(named)
    while waiting:
        value, secret = waiting.pop()
        kind = type_of(value)
        if is_secret_type(kind):
            waiting.append((value.get_secret_value(), True))
        elif kind in (str, bytes, bytearray):
            if secret:
                yield value if kind is str else bytes(value)
        elif kind in _NUMBERS or kind.__module__ in SPEAKING_MODULES:
            if secret:
                yield _written(value)
        elif is_a(value, Mapping):
            for key, item in value.items():
                waiting.append((item, secret or (isinstance(key, str) and is_secret_name(key))))
        elif kind in _CONTAINERS:
            waiting.extend((item, secret) for item in value)
        else:
            hints = hints_by_name(kind)
            for name, item in _fields(value).items():
                waiting.append((item, secret or is_secret_name(str(name)) or is_secret_hint(hints.get(name))))


def _fields(value: Any) -> Mapping[str, Any]:
    shape = shape_of(type_of(value))
    # Instance attributes, for a class with a codec.
    state: Any = getattr(value, "__dict__", None) if shape is None else shape.take(value)
    if is_a(state, Mapping) and is_a(state.get("__dict__"), Mapping):
        state = state["__dict__"]
    return state if is_a(state, Mapping) else {}


def _written(value: object) -> str:
    try:
        return str(value)
    except ValueError:
        return ""  # more digits than Python writes


def _pieces(secret: str | bytes) -> Iterator[str]:
    """Yield the lines of a secret, because an error may show just one, and the parts of long lines.

    The middle of a very long secret is skipped: a text of that length is cut there before it is stored.
    """
    if isinstance(secret, bytes):
        secret = secret.decode(errors="backslashreplace")
    if len(secret) > 2 * _LONGEST_END:
        secret = f"{secret[:_LONGEST_END]}\n{secret[-_LONGEST_END:]}"
    for line in secret.splitlines():
        for start in range(0, len(line), _LONGEST_PIECE):
            yield line[start : start + _LONGEST_PIECE]


def _pattern(piece: str) -> re.Pattern[str]:
    """Match a text in all of its escaped forms, including nested ones such as the ``repr`` of JSON."""
    return re.compile("".join(_letter(letter) for letter in re.findall(r"\\+|.", piece, re.DOTALL)))


def _letter(letter: str) -> str:
    if _PLAIN.fullmatch(letter):
        return letter
    if letter[0] == "\\":
        return r"(?:\\+|(?i:%5c)+)"
    encoded = letter.encode(errors="replace")
    escaped = {repr(letter)[1:-1], ascii(letter)[1:-1], json.dumps(letter)[1:-1], repr(encoded)[2:-1]} - {letter}
    forms = [re.escape(each).replace(r"\\", r"\\+") for each in escaped]
    forms += [rf"\\*{re.escape(letter)}", f"(?i:{urllib.parse.quote(encoded, safe='')})"]
    if letter == " ":
        forms.append(r"\+")
    return f"(?:{'|'.join(sorted(forms, key=len, reverse=True))})"
