"""Sentences of docs/guarantees.md, the tests that they name, and whether those tests ran.

``make test`` writes the names of passed tests to ``.ran/``. Run as a program, this file compares the page
with that list. A test may be skipped if the machine lacks something, but not where CI=true.
"""

from __future__ import annotations

import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/guarantees.md"
RAN = ROOT / ".ran"

FOOTNOTE = r"^\[\^([\w-]+)\]: (.*(?:\n +.*)*)"
NOTE = re.compile(r"\[\^([\w-]+)\]")


# Starts the line of a skipped test.
SKIPPED = "skipped "

# Represents every check that the simulator makes at each step of each seed.
SIMULATOR = "make simulate"


@dataclass(frozen=True)
class Sentence:
    text: str
    line: int
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Proof:
    """A test, written ``path::name``."""

    path: str
    name: str

    def __str__(self) -> str:
        return f"{self.path}::{self.name}"

    def exists(self) -> bool:
        file = ROOT / self.path
        define = "def" if file.suffix == ".py" else "fn"
        return file.is_file() and bool(re.search(rf"\b{define} {self.name}\b", file.read_text()))

    def ran(self, passed: set[str]) -> bool:
        """Whether this test, or a case of it, passed."""
        parts = Path(self.path).parts
        if parts[:3] == ("crates", "penstock-sim", "src"):
            return SIMULATOR in passed
        if parts[0] == "crates":
            # Tests of crates/penstock-x/src/... run in penstock_x, tests of crates/penstock-x/tests/y/... in y.
            within = parts[1].replace("-", "_") if parts[2] == "src" else Path(parts[3]).stem
            if within == "penstock_conformance":
                # Scenarios run as tests of the conformance suite's drivers.
                within = "drivers::conformance"
            here = re.compile(rf"{within}::(\w+::)*{self.name}")
        else:
            here = re.compile(rf"{re.escape(self.path)}::(\w+::)*{self.name}(\[.*\])?")
        return any(here.fullmatch(test) for test in passed)


def sentences(text: str) -> list[Sentence]:
    """Return every promise of the page: all sentences below its first section's heading, except footnotes."""
    found = []
    begun = 0
    for skipped in (r"^```.*?^```$", FOOTNOTE):
        text = re.sub(skipped, lambda block: "\n" * block[0].count("\n"), text, flags=re.MULTILINE | re.DOTALL)
    paragraph: list[str] = []
    promises = False
    for number, line in enumerate([*text.splitlines(), ""], start=1):
        ends = not line.strip() or re.match(r"\s*(#|\||- |\d+\. )", line)
        if ends and paragraph:
            found += split(" ".join(paragraph), begun)
            paragraph = []
        if line.startswith("## "):
            promises = True
        elif promises and re.match(r"\|(?! *-)", line) and NOTE.search(line):
            found += split(line.strip("| "), number)
        elif promises and line.strip() and not re.match(r"\s*(#|\|)", line):
            if not paragraph:
                begun = number
            paragraph.append(re.sub(r"^\s*(- |\d+\. )", "", line).strip())
    return found


def split(paragraph: str, line: int) -> list[Sentence]:
    parts = re.split(r"(?<=[.!?\]])(?<!e\.g\.) +(?=[A-Z`*\"])", paragraph)
    # A bracket ends a sentence only if it closes a footnote reference.
    whole: list[str] = []
    for part in parts:
        if whole and not re.search(r"([.!?:]|[.!?:]?(\[\^[\w-]+\])+)[*|]*$", whole[-1]):
            whole[-1] += " " + part
        else:
            whole.append(part)
    return [Sentence(NOTE.sub("", part).strip(), line, tuple(NOTE.findall(part))) for part in whole]


def proofs(text: str) -> dict[str, list[Proof]]:
    """Return the tests that each footnote names."""
    found = {}
    for note, named in re.findall(FOOTNOTE, text, re.MULTILINE):
        found[note] = [Proof(path, name) for path, name in re.findall(r"`([\w./-]+)::(\w+)`", named)]
    return found


def passed(ran: Path = RAN) -> set[str]:
    """Return the tests that passed in `make test`: pytest's node ids, and Rust tests as binary::module::name."""
    names = {line for line in (ran / "python.txt").read_text().splitlines() if not line.startswith(SKIPPED)}
    if re.search(r"^\d+ seeds, \d+ steps", (ran / "simulate.txt").read_text(), re.MULTILINE):
        names.add(SIMULATOR)
    binary = ""
    for line in (ran / "rust.txt").read_text().splitlines():
        if run := re.match(r"\s+Running .*\(.*/([\w-]+)-[0-9a-f]+\)", line):
            binary = run[1]
        elif test := re.match(r"test (\S+) \.\.\. ok", line):
            names.add(f"{binary}::{test[1]}")
    return names


def skipped(ran: Path = RAN) -> set[str]:
    """Return the pytest node ids of tests that `make test` skipped."""
    lines = (ran / "python.txt").read_text().splitlines()
    return {line.removeprefix(SKIPPED) for line in lines if line.startswith(SKIPPED)}


def missing(text: str, ran: set[str]) -> list[str]:
    return [
        f"[^{note}] names {proof}, which did not run"
        for note, named in proofs(text).items()
        for proof in named
        if not proof.ran(ran)
    ]


if __name__ == "__main__":
    page = PAGE.read_text()
    unproven = missing(page, passed())
    if os.environ.get("CI") != "true":
        excused = {*unproven} - {*missing(page, passed() | skipped())}
        for line in sorted(excused):
            print(f"{line}: it was skipped")
        unproven = [line for line in unproven if line not in excused]
    sys.exit("\n".join(unproven) or None)
