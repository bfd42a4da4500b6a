"""Kinds of slots, and tasks whose source is written once for all kinds.

``@KIND``, ``@DEF``, ``@SLEEP`` and ``@AWAIT`` in a source become a kind's own words. ``@NOTES`` and ``@OVERFLOWS``
become functions that several tests use.
"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass

import pytest
from project import Project

# Notes are on disk, so they outlive every process.
NOTES = """
import os
from pathlib import Path

here = Path(__file__).parent

def note(*words) -> None:
    # A single write, so that lines of different processes don't mix.
    with open(here / "notes.txt", "ab", buffering=0) as file:
        file.write((" ".join(map(str, words)) + "\\n").encode())
"""

OVERFLOWS = """
def overflows() -> None:
    # In C, where nothing limits the depth: glibc's pattern compiler recurses for each open parenthesis. Python
    # 3.12 and newer count their own calls from C, so a callback that calls itself raises RecursionError there.
    import ctypes
    ctypes.CDLL(None).regcomp(ctypes.create_string_buffer(512), b"(" * 2_000_000, 1)
"""


def source(text: str) -> str:
    """Return the source with ``@NOTES`` and ``@OVERFLOWS`` filled in."""
    return textwrap.dedent(text).replace("@NOTES\n", NOTES).replace("@OVERFLOWS\n", OVERFLOWS)


@dataclass(frozen=True)
class Kind:
    """A kind of slots, and the options of a worker that has such slots."""

    name: str
    options: tuple[str, ...]
    """Worker options: the number of processes first, then the number of slots in each."""

    @property
    def processes(self) -> int:
        return int(self.options[1])

    @property
    def is_shared(self) -> bool:
        """Whether one process runs several jobs at once."""
        return self.name in ("thread", "async")

    @property
    def slots(self) -> int:
        """Number of slots in one process."""
        return int(self.options[3]) if self.is_shared else 1

    def source(self, text: str) -> str:
        """Return the source for slots of this kind."""
        is_async = self.name == "async"
        marks = {
            "@KIND": self.name,
            "@DEF": "async def" if is_async else "def",
            "@SLEEP": "await asyncio.sleep" if is_async else "time.sleep",
            "@AWAIT ": "await " if is_async else "",
        }
        written = source(text)
        for mark, meaning in marks.items():
            written = written.replace(mark, meaning)
        return written


def named(kinds: list[Kind]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("kind", kinds, ids=lambda kind: kind.name)


def lines(project: Project) -> list[list[str]]:
    """Return the words of each note, in order."""
    file = project.directory / "notes.txt"
    return [line.split(" ") for line in file.read_text().splitlines()] if file.exists() else []


def notes(project: Project, word: str) -> list[str]:
    """Return the notes that begin with this word, with the word removed."""
    return [" ".join(rest) for first, *rest in lines(project) if first == word]
