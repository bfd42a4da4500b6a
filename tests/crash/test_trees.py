"""The evaluator of workflows gives the expected answers, and the judge of their books finds each fault."""

from __future__ import annotations

import json
from typing import Any

import pytest
from crash.forest import Judgement, judge_tree
from crash.trees import (
    Blocked,
    Call,
    Chain,
    Chunks,
    EmptyChord,
    Failed,
    Group,
    MapReduce,
    Tree,
    draw,
    evaluate,
    pure,
    shown,
)


def a(label: str, **about: Any) -> Call:
    return Call(label, **about)


def failed(label: str) -> Call:
    return Call(label, "fail", 4)


def test_results_are_those_of_functions_that_call_each_other() -> None:
    one, two = pure("0.1", 1, []), pure("0.2", 1, [])
    both = pure("0.3", 1, [[one, two]])
    assert evaluate(Chain((Group((a("0.1"), a("0.2"))), a("0.3")))).result == both
    assert evaluate(Chain((a("0.1"), a("0.2", takes=False)))).result == two
    assert evaluate(Chain((a("0.1"), Group(()), a("0.3")))).result == pure("0.3", 1, [one])
    assert (
        evaluate(Chain((Group(()), a("0.3")))).result == evaluate(EmptyChord(a("0.3"))).result == pure("0.3", 1, [[]])
    )
    assert evaluate(MapReduce("0.1", ("ok", "ok", "ok"), 2)).result == "0.1.0|0.1.1|0.1.2"
    assert evaluate(Chunks("0.1", ("ok", "ok", "ok"), 2)).result == [["0.1.0", "0.1.1"], ["0.1.2"]]
    assert evaluate(Chunks("0.1", ("fail", "ok", "ok"), 2)).calls.keys() == {"0.1.0", "0.1.2"}
    assert evaluate(a("0.1", kind="flaky", failures=2)).result == pure("0.1", 3, [])


def test_a_failure_blocks_what_comes_after_it_and_nothing_else() -> None:
    group = Group((failed("0.1"), a("0.2")), errbacks=(a("0.5"),))
    verdict = evaluate(Chain((group, a("0.3", errbacks=(a("0.6"),)), a("0.4"))))
    assert verdict.result == Failed(frozenset(["0.1"]))
    assert verdict.calls.keys() == {"0.1", "0.2", "0.5", "0.6"}
    assert (verdict.calls["0.1"].value, verdict.calls["0.5"].roots) == (None, {"0.1"})


def test_a_group_puts_up_with_as_many_failures_as_it_says() -> None:
    members = (failed("0.1"), a("0.2"), failed("0.3"))
    assert shown(evaluate(Group(members, 2)).result) == ["!", pure("0.2", 1, []), "!"]
    assert evaluate(Group(members, 1)).result == Failed(frozenset(["0.1", "0.3"]))
    assert evaluate(Group(members, 2, each=(a("0.4"),))).calls["0.4"].jobs == 2


def test_calls_that_a_member_adds_come_last_and_only_if_it_succeeds() -> None:
    one, two, added = pure("0.1", 1, []), pure("0.2", 1, []), pure("0.3", 1, [])
    assert evaluate(Group((a("0.1"), a("0.2")), added=(a("0.3"),), adder=1)).result == [one, two, added]
    verdict = evaluate(Group((a("0.1"), failed("0.2")), 1, added=(a("0.3"),), adder=1))
    assert shown(verdict.result) == [one, "!"]
    assert verdict.calls.keys() == {"0.1", "0.2"}
    failing = evaluate(Group((failed("0.1"), a("0.2")), added=(a("0.3"),), adder=1))
    assert failing.calls.keys() == {"0.1", "0.2", "0.3"}


def test_callbacks_run_for_their_own_outcome() -> None:
    linked = a("0.1", links=(a("0.2"),), errbacks=(a("0.3", errbacks=(a("0.4"),)),))
    assert evaluate(linked).calls.keys() == {"0.1", "0.2"}
    linked = Call("0.1", "fail", 4, links=linked.links, errbacks=linked.errbacks)
    assert evaluate(linked).calls.keys() == {"0.1", "0.3"}


def test_trees_are_of_all_kinds_and_drawn_again_from_their_seed() -> None:
    trees = [draw("1", number) for number in range(200)]
    assert trees == [draw("1", number) for number in range(200)]
    results = [evaluate(tree) for tree in trees]
    ends = [isinstance(each.result, Failed) for each in results]
    assert 20 < sum(ends) < 180
    assert not any(isinstance(each.result, Blocked) for each in results)
    assert {type(part) for tree in trees for part in parts(tree)} == {Call, Chain, Group, EmptyChord, MapReduce, Chunks}


def parts(tree: Tree) -> list[Tree]:
    inner = getattr(tree, "steps", ()) or getattr(tree, "members", ())
    return [tree, *(part for each in (*inner, *tree.links, *tree.errbacks) for part in parts(each))]


TREE = Chain((a("0.1"), a("0.2")))
ONE, TWO = pure("0.1", 1, []), pure("0.2", 1, [pure("0.1", 1, [])])
SENT: list[dict[str, Any]] = [{"event": "attempt"}, {"event": "confirmed"}]


def begin(label: str, run: str, given: list[Any], saw: list[list[str]], attempt: int = 1) -> dict[str, Any]:
    about = {"event": "begin", "label": label, "job": f"job {label}", "attempt": attempt, "run": run, "failures": []}
    return {**about, "given": given, "saw": saw}


FIRST = begin("0.1", "one", [], [])
SECOND = begin("0.2", "two", [ONE], [["0.1", "one"]])
READ = {"event": "result", "value": TWO, "saw": [["0.2", "two"]]}
SOUND = [*SENT, begin("0.1", "lost", [], []), FIRST, SECOND, READ]


def faults(*entries: dict[str, Any]) -> list[str]:
    judgement = Judgement()
    judge_tree(judgement, 0, evaluate(TREE), list(enumerate(json.loads(json.dumps(entries)))))
    return judgement.faults


def test_sound_books_are_found_sound() -> None:
    assert faults(*SOUND) == []
    assert faults(SENT[0]) == []
    assert faults(SENT[0], *SOUND[2:5]) == []


@pytest.mark.parametrize(
    ("told", "entries"),
    [
        ("0.2 did not run", [SENT[0], FIRST]),
        ("nobody has read its result", SOUND[:-1]),
        ("ran, and must not", [*SOUND, begin("0.9", "nine", [], [])]),
        ("began again after its result was read", [*SOUND, begin("0.1", "again", [], [])]),
        ("has 2 results", [*SOUND[:-1], begin("0.2", "2", [ONE], [["0.1", "lost"]]), READ]),
        ("has a result of no run", [*SOUND, {**READ, "saw": [["0.2", "ghost"]]}]),
        ("was given", [*SENT, FIRST, {**SECOND, "given": [TWO]}, READ]),
        ("had the attempts [1, 2], not 1", [*SENT, FIRST, begin("0.1", "one", [], [], 2), SECOND, READ]),
        ("was 2 jobs, not 1", [*SENT, {**FIRST, "job": "other"}, *SOUND[3:]]),
        ("it has the result", [*SOUND[:-1], {**READ, "value": ONE}]),
        ("it failed, and must not", [*SOUND[:-1], {"event": "failed", "told": "", "labels": [], "count": 1}]),
        ("it did not end", [*SOUND[:-1], {"event": "stuck"}]),
        ("it was refused for sure, and ran", [SENT[0], {"event": "refused"}, *SOUND[2:5]]),
    ],
)
def test_each_fault_is_found(told: str, entries: list[dict[str, Any]]) -> None:
    assert any(told in fault for fault in faults(*entries)), faults(*entries)
