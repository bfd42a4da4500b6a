"""Listing of a failed job: the error's type, first line and fingerprint, for lists, filters and groups."""

from __future__ import annotations

import functools
import hashlib
import os
import re
import site
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import TypeAlias

import penstock
from penstock._values.masking import NOTHING_SECRET, Masking
from penstock._values.remote_errors import message_of, sound
from penstock._values.shapes import module_name

Listing: TypeAlias = tuple[str, str, int, bytes]
"""(class, message, fingerprint, preview of the arguments), in the broker's form."""

# The broker's limit for each text.
_LONGEST_TEXT_BYTES = 200

_PACKAGES = {"site-packages", "dist-packages"}
# Since Python 3.12 these have no frames of their own.
_COMPREHENSION = re.compile(r"\.<locals>\.<(list|dict|set)comp>")


def listing_of(error: BaseException, preview: bytes = b"", masking: Masking = NOTHING_SECRET) -> Listing:
    """Return the listing of an error, with a preview of the arguments."""
    type_name = type_name_of(type(error))
    lines = (line.strip() for line in masking.text(message_of(error)).splitlines())
    first = next((line for line in lines if line), "")
    return _cut(type_name), _cut(first), _fingerprint(type_name, error), preview


def type_name_of(kind: type[BaseException]) -> str:
    """Return the full name of a type, or just the name of a built-in one."""
    module = module_name(kind.__module__)
    return sound(kind.__qualname__ if module == "builtins" else f"{module}.{kind.__qualname__}")


def _fingerprint(type_name: str, error: BaseException) -> int:
    """Hash the error's type and the last place in the user's own code that raised or passed it.

    Line numbers and the message are left out, since both change when nothing else does.
    """
    module = function = ""
    for frame in _frames(error):
        if _is_users_own(frame.f_code.co_filename):
            module = module_name(str(frame.f_globals.get("__name__", "")))
            function = _COMPREHENSION.sub("", frame.f_code.co_qualname)
    text = sound("\0".join((type_name, module, function)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def _frames(error: BaseException) -> Iterator[FrameType]:
    """Yield the frames from the outermost to the one that raised."""
    traceback = error.__traceback__
    while traceback is not None:
        yield traceback.tb_frame
        traceback = traceback.tb_next


@functools.lru_cache(maxsize=4096)
def _is_users_own(filename: str) -> bool:
    """Whether a file is the user's own code: not Python's, not an installed package, not Penstock's."""
    if filename.startswith("<frozen "):
        return False
    path = Path(filename)
    return _PACKAGES.isdisjoint(path.parts) and not any(path.is_relative_to(place) for place in _not_users_own())


@functools.cache
def _not_users_own() -> tuple[Path, ...]:
    python = (sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))
    # The file of `os` shows where Python's own modules are, whatever links lead there.
    places = (*python, os.path.dirname(os.__file__), site.getusersitepackages(), os.path.dirname(penstock.__file__))
    return tuple(Path(place) for place in places if place)


def _cut(text: str) -> str:
    return text.encode()[:_LONGEST_TEXT_BYTES].decode(errors="ignore")
