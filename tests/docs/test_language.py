"""Keeps the worst patterns of unidiomatic English out of comments, documents and messages.

Prose that reads as if translated costs every reader a second look. The rules and what to write instead are in
CONTRIBUTING.md; the nouns are in docs/internals/words.md. Add justified findings to ``EXCEPTIONS``.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("bench", "crates", "docs", "examples", "fuzz", "proto", "python", "tests", "tools")
SKIPPED = re.compile(r"(^|/)(target|\.venv|\.ran|_build|__pycache__|_bin|results)(/|$)|/generated\.rs$|_pb2\.py$")

# (path, part of the line): why it is justified.
EXCEPTIONS: dict[tuple[str, str], str] = {}

# The first line of a doc comment or docstring begins with a verb or a concrete noun.
FIRST_WORD = re.compile(r"(What|Whoever|Who|Of|Those|It|One|So many|They|That)\b")

# Phrase, and its replacement.
PHRASES = {
    r"whoever": "any client that",
    r"all the same": "anyway",
    r"unless (?:it is |they are )?told": "by default",
    r"told otherwise": "configured otherwise",
    r"worked off": "drained",
    r"(?:has|have) got (?:a|an|no|the|its|another)": "has",
    r"for ever": "forever",
    r"lets? go of": "drops, releases",
    r"puts? up with": "tolerates",
    r"mends?": "fixes, repairs",
    r"(?:is|are|was|were) told of": "learns of, is notified of",
    r"hears? of": "learns of",
    r"nothing of (?:it|them)": "nothing",
    r"goes by (?:the|its|their)": "uses, is called",
    r"has to do with": "concerns",
    r"stands? in (?:the|a|an|its|their|it)": "is in",
    r"so many of (?:them|these)": "this many",
}
# One `\b` before all phrases takes a fifth of the time of one before each.
PHRASE = re.compile(rf"\b(?:{'|'.join(f'(?P<p{n}>{phrase})' for n, phrase in enumerate(PHRASES))})\b", re.IGNORECASE)
ADVICE = list(PHRASES.values())


def test_no_line_reads_as_if_translated() -> None:
    found = [finding for path in sorted(every_path()) for finding in findings(path)]
    assert not found, f"{len(found)} lines to rewrite:\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("text", "suffix", "expected"),
    [
        ("/// What it had to say.\nfn a() {}", ".rs", ["1: first word 'What': begin with a verb or a noun"]),
        ("/// Returns it.\n/// That is all.\nfn a() {}", ".rs", []),
        ("//! One per queue.", ".rs", ["1: first word 'One': begin with a verb or a noun"]),
        ("fn a() {} // mends it", ".rs", ["1: 'mends': fixes, repairs"]),
        ('def a():\n    """Of each queue."""', ".py", ["2: first word 'Of': begin with a verb or a noun"]),
        ('class A:\n    x: int\n    """So many of them."""', ".py", ["3: 'So many of them': this many"]),
        ('X = "has got a field"', ".py", ["1: 'has got a': has"]),
        ("It waits.\n\nWhoever comes", ".md", ["3: 'Whoever': any client that"]),
        ("It waits until told; others go on.", ".md", []),
    ],
)
def test_the_rules_find_what_they_should(text: str, suffix: str, expected: list[str]) -> None:
    assert [f"{line}: {rule}" for line, rule in rules(text, suffix)] == expected


def every_path() -> Iterator[Path]:
    for folder in FOLDERS:
        for suffix in (".rs", ".py", ".pyi", ".md"):
            yield from (ROOT / folder).rglob(f"*{suffix}")
    yield from ROOT.glob("*.md")


def findings(path: Path) -> list[str]:
    name = path.relative_to(ROOT).as_posix()
    if SKIPPED.search(name) or path == Path(__file__):
        return []
    text = path.read_text(encoding="utf-8")
    lines = text.split("\n")
    return [
        f"{name}:{number}: {rule}: {lines[number - 1].strip()[:100]}"
        for number, rule in rules(text, path.suffix)
        if not any(name == where and part in lines[number - 1] for where, part in EXCEPTIONS)
    ]


def rules(text: str, suffix: str) -> Iterator[tuple[int, str]]:
    """Yield the number of each line that breaks a rule, and the rule."""
    for number, line in sorted(doc_starts(text, suffix)):
        match = FIRST_WORD.match(line)
        if match and not PHRASE.match(line):
            yield number, f"first word {match.group()!r}: begin with a verb or a noun"
    for match in PHRASE.finditer(text):
        assert match.lastgroup is not None
        yield text.count("\n", 0, match.start()) + 1, f"{match.group()!r}: {ADVICE[int(match.lastgroup[1:])]}"


def doc_starts(text: str, suffix: str) -> Iterator[tuple[int, str]]:
    """Yield the line number and first line of each doc comment or docstring, without its marker."""
    if suffix == ".rs":
        before = ""
        for number, line in enumerate(text.split("\n"), 1):
            marker = re.match(r"\s*(//[/!])\s?(.*)", line)
            kind = "" if marker is None else marker[1]
            if marker is not None and kind != before:
                yield number, marker[2]
            before = kind
    elif suffix in (".py", ".pyi"):
        for node in ast.walk(ast.parse(text)):
            for statement in getattr(node, "body", None) if isinstance(getattr(node, "body", None), list) else []:
                if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                    value = statement.value.value
                    if isinstance(value, str):
                        yield statement.lineno, value.split("\n")[0].strip()
