"""The judge of all tests by force finds each kind of fault."""

from __future__ import annotations

import pytest
from crash.checker import judge

SOUND = """
    attempt p/1 0 p/1
    attempt p/2 1000 p/2
    begin p/1 one 1 0 0 500 run-1
    confirmed p/1 one
    confirmed p/2 two
    seen one run-1
    begin p/2 two 1 0 0 1000 run-2
    begin p/2 two 1 1 0 1200 run-3
    seen two run-3
"""


def check(text: str, *found: str, in_order: bool = False) -> None:
    lines = [line for line in map(str.strip, text.splitlines()) if line]
    assert judge(lines, in_order=in_order).faults().keys() == set(found)


def test_a_sound_history_is_found_sound_and_counted() -> None:
    check(SOUND)
    verdict = judge(line.strip() for line in SOUND.strip().splitlines())
    assert (verdict.attempted, verdict.acknowledged, verdict.delivered, verdict.duplicated) == (2, 2, 3, 1)


@pytest.mark.parametrize(
    ("fault", "also"),
    [
        ("lost", "attempt p/3 0 p/3\nconfirmed p/3 three\nseen three run-9"),
        ("unexpected", "begin p/9 nine 1 0 0 0 run-9\nseen nine run-9"),
        ("unexpected", "attempt p/9 0 p/9\nrefused p/9\nbegin p/9 nine 1 0 0 0 run-9\nseen nine run-9"),
        ("resurrected", "begin p/1 one 1 1 1 0 run-9"),
        ("forked", "seen one run-9"),
        ("stuck", "attempt p/9 0 p/9\nbegin p/9 nine 1 0 0 0 run-9"),
        ("early", "attempt p/9 900 p/9\nbegin p/9 nine 1 0 0 897 run-9\nseen nine run-9"),
        ("torn", "attempt p/8 0 b\nattempt p/9 0 b\nbegin p/9 nine 1 0 0 0 run-9\nseen nine run-9"),
        (
            "unflagged",
            "attempt p/9 0 p/9\nbegin p/9 nine 1 0 0 0 run-8\nbegin p/9 nine 1 0 0 0 run-9\nseen nine run-9",
        ),
    ],
)
def test_each_fault_is_found(fault: str, also: str) -> None:
    found = [fault, "forked"] if fault == "lost" else [fault]
    check(f"{SOUND}\n{also}", *found)


def test_what_overtakes_is_found_where_order_is_promised() -> None:
    text = "attempt p/3 0 p/3\nattempt p/4 0 p/4\n"
    text += "begin p/4 four 1 0 0 0 run-4\nbegin p/3 three 1 0 0 0 run-3\nseen four run-4\nseen three run-3"
    check(text)
    check(text, "disordered", in_order=True)
