"""Random workflows as plain data, and their outcomes, computed without the product.

A tree is drawn from a seed, so every process that knows its number knows the tree. `evaluate` walks it and returns its
result, the calls that run, and the arguments of each. Tasks are pure functions of their label, their arguments and the
attempt, so there is one answer, whatever dies. A failed step has an answer, too: the labels of the calls that may have
failed it, of which a group names those that came first.
"""

from __future__ import annotations

import hashlib
import random
import re
from dataclasses import dataclass, field
from typing import TypeAlias

DEEPEST = 6
WIDEST = 40
# Retries of a call that fails at first, or every time.
RETRIES = 3


@dataclass(frozen=True)
class Step:
    links: tuple[Tree, ...] = field(default=(), kw_only=True)
    errbacks: tuple[Call, ...] = field(default=(), kw_only=True)


@dataclass(frozen=True)
class Call(Step):
    label: str
    kind: str = "ok"
    """Kind: ok, flaky (fails at first), fail, stubborn (fails each attempt), late (expires before it is due)."""
    failures: int = 0
    """Number of failing attempts."""
    takes: bool = True
    kept: str = "day"
    """Lifetime of its result: day, briefly, or not at all (except for the step that reads it)."""
    pad: int = 0
    """Extra bytes of its result."""
    is_async: bool = False

    def attempts(self) -> int:
        return 1 + min(self.failures, RETRIES)


@dataclass(frozen=True)
class Chain(Step):
    steps: tuple[Tree, ...]


@dataclass(frozen=True)
class Group(Step):
    members: tuple[Tree, ...]
    max_failures: int = 0
    each: tuple[Call, ...] = ()
    """Errbacks of each member."""
    added: tuple[Call, ...] = ()
    """Calls that a member, the adder, adds to the group when it succeeds."""
    adder: int = 0


@dataclass(frozen=True)
class EmptyChord(Step):
    body: Call


@dataclass(frozen=True)
class MapReduce(Step):
    label: str
    """Label shared by its reduces; leaves have `LABEL.i`."""
    items: tuple[str, ...]
    """Outcome of each: ok or fail."""
    fan_in: int


@dataclass(frozen=True)
class Chunks(Step):
    label: str
    """Label of the group; its calls have `LABEL.i`."""
    items: tuple[str, ...]
    """Outcome of each: ok or fail."""
    size: int
    """Number of calls per job."""


Tree: TypeAlias = Call | Chain | Group | EmptyChord | MapReduce | Chunks

# Drawing.


def draw(seed: str, number: int) -> Tree:
    """Draw the tree of a number; its calls have the labels NUMBER.0, NUMBER.1 and so on."""
    return _Drawing(random.Random(f"{seed} {number}"), number).root()


class _Drawing:
    def __init__(self, chance: random.Random, number: int) -> None:
        self._chance = chance
        self._number = number
        self._labels = 0
        self._room = WIDEST
        # A few trees have many reasons to fail and most have few, or nothing deep would ever succeed.
        self._fails = chance.choice([0.0, 0.02, 0.1, 0.25])
        # More than fits into a delivery: a step that reads a few of them has to ask for them.
        self._pads = chance.choices([0.02, 0.7], [12, 1])[0]

    def root(self) -> Tree:
        depth = self._chance.randrange(2, DEEPEST + 1)
        tree = self._group(depth, False, False) if self._chance.random() < 0.3 else self._chain(depth, False, False)
        return self._with_callbacks(tree, 1)

    def _label(self) -> str:
        self._labels += 1
        self._room -= 1
        return f"{self._number}.{self._labels - 1}"

    def _tree(self, depth: int, waits: bool, inner: bool) -> Tree:
        """Draw a step. ``waits``: it has a previous step. ``inner``: a later step, or nothing, reads its value."""
        chance = self._chance
        if depth <= 0 or self._room <= 0:
            return self._with_callbacks(self._call(waits, inner), depth)
        kinds = ["call", "chain", "group", "empty chord", "map_reduce", "chunks"]
        kind = chance.choices(kinds, [10, 8, 10, 2, 2, 1])[0]
        match kind:
            case "call":
                tree: Tree = self._call(waits, inner)
            case "chain":
                tree = self._chain(depth, waits, inner)
            case "group":
                tree = self._group(depth, waits, inner)
            case "empty chord":
                tree = EmptyChord(self._call(True, inner))
            case _:
                is_reduced = kind == "map_reduce"
                count = chance.randrange(0 if is_reduced else 1, 8)
                items = tuple("fail" if chance.random() < self._fails / 2 else "ok" for _ in range(count))
                make = MapReduce if is_reduced else Chunks
                tree = make(self._label(), items, chance.randrange(2, 5))
                self._room -= count
        return self._with_callbacks(tree, depth)

    def _call(self, waits: bool, inner: bool) -> Call:
        chance = self._chance
        kinds = ["ok", "flaky", "fail", "stubborn", "ok" if waits else "late"]
        kind = chance.choices(kinds, [12, 1.5, 12 * self._fails, 4 * self._fails, 4 * self._fails])[0]
        failures = {"flaky": chance.randrange(1, RETRIES + 1), "fail": RETRIES + 1, "stubborn": RETRIES + 1}.get(
            kind, 0
        )
        kept = "day"
        if inner and kind in ("ok", "flaky"):
            kept = chance.choice(["day", "briefly", "not"])
        pad = 60_000 if chance.random() < self._pads else chance.choice([0, 0, 0, 100])
        takes, is_async = chance.random() < 0.85, chance.random() < 0.3
        return Call(self._label(), kind, failures, takes, kept, pad, is_async)

    def _chain(self, depth: int, waits: bool, inner: bool) -> Chain:
        chance = self._chance
        count = chance.randrange(2, 5)
        steps: list[Tree] = []
        for place in range(count):
            if chance.random() < 0.12:
                steps.append(Group(()))
            is_last = place + 1 == count
            steps.append(self._tree(depth - 1, waits or place > 0, inner or not is_last))
            if is_last and chance.random() < 0.05:
                steps.append(Group(()))
        return Chain(tuple(steps))

    def _group(self, depth: int, waits: bool, inner: bool) -> Group:
        chance = self._chance
        count = chance.choices([1, 2, 3, 5, 12], [3, 6, 4, 2, 1])[0]
        members = [self._tree(depth - 1, waits, inner) for _ in range(min(count, max(1, self._room)))]
        max_failures = chance.choice([0, 0, 0, 1, 2, len(members)])
        each = (self._errback(),) if chance.random() < 0.1 else ()
        # With two adders, the order of what they add would depend on which of them ends first.
        adders = [place for place, member in enumerate(members) if isinstance(member, Call) and member.kind != "late"]
        if not adders or self._room <= 0 or chance.random() > 0.25:
            return Group(tuple(members), max_failures, each)
        added = [Call(self._label(), takes=False) for _ in range(chance.randrange(1, 3))]
        return Group(tuple(members), max_failures, each, tuple(added), chance.choice(adders))

    def _with_callbacks(self, tree: Tree, depth: int) -> Tree:
        chance = self._chance
        if self._room <= 0:
            return tree
        changes: dict[str, tuple[Tree, ...]] = {}
        if chance.random() < 0.12:
            changes["links"] = tuple(self._link(depth) for _ in range(chance.randrange(1, 3)))
        if chance.random() < 0.15:
            changes["errbacks"] = tuple(self._errback() for _ in range(chance.randrange(1, 3)))
        return tree if not changes else type(tree)(**{**tree.__dict__, **changes})

    def _link(self, depth: int) -> Tree:
        return self._tree(min(depth - 1, 1), True, True)

    def _errback(self) -> Call:
        chance = self._chance
        call = self._call(True, True)
        if chance.random() < 0.15:
            return Call(**{**call.__dict__, "links": (self._call(True, True),)})
        if chance.random() < 0.15:
            return Call(**{**call.__dict__, "errbacks": (self._call(True, True),)})
        return call


# Evaluating.


@dataclass(frozen=True)
class Failed:
    """Value of a step that failed because of some of these calls."""

    roots: frozenset[str]


@dataclass(frozen=True)
class Blocked:
    """Value of a step whose predecessor failed: it does not run, and counts as failed for the same calls."""

    roots: frozenset[str]


Value: TypeAlias = "str | list[Value] | Failed"


@dataclass(frozen=True)
class Ran:
    """Call that runs: its final result, if any, and the failures that it may receive."""

    value: str | None
    attempts: int
    roots: frozenset[str] = frozenset()
    jobs: int = 1
    """Number of runs; more than one for an errback of several members of a group."""


@dataclass
class Verdict:
    result: Value = ""
    calls: dict[str, Ran] = field(default_factory=dict)
    reduces: dict[str, bool] = field(default_factory=dict)
    """Labels of reduces, and whether all of their jobs run; otherwise some may."""


_NOTHING = object()


def evaluate(tree: Tree) -> Verdict:
    verdict = Verdict()
    verdict.result = _evaluate(tree, _NOTHING, verdict)
    return verdict


def _evaluate(tree: Tree, given: object, verdict: Verdict) -> Value:
    match tree:
        case Call():
            value = _call(tree, given, verdict)
        case Chain():
            value = _chain(tree, given, verdict)
        case Group():
            value = _group(tree, given, verdict)
        case EmptyChord():
            value = _evaluate(tree.body, given if isinstance(given, Blocked) else [], verdict)
        case MapReduce():
            value = _map_reduce(tree, given, verdict)
        case Chunks():
            value = _chunks(tree, given, verdict)
    if isinstance(value, Failed):
        for errback in tree.errbacks:
            _evaluate(errback, value, verdict)
    for link in tree.links:
        _evaluate(link, Blocked(value.roots) if isinstance(value, Failed) else value, verdict)
    return value


def _call(call: Call, given: object, verdict: Verdict) -> Value:
    if isinstance(given, Blocked):
        return Failed(given.roots)
    if call.kind == "late":
        return Failed(frozenset([call.label]))
    values: list[Value] = [given] if call.takes and given is not _NOTHING else []  # type: ignore[list-item]
    fails = call.failures > RETRIES or call.kind == "fail"
    attempts = 1 if call.kind == "fail" else call.attempts()
    value = None if fails else pure(call.label, attempts, values, call.pad)
    roots, jobs = _roots(values), 1
    if (other := verdict.calls.get(call.label)) is not None:
        roots, jobs = roots | other.roots, other.jobs + 1
    verdict.calls[call.label] = Ran(value, attempts, roots, jobs)
    return Failed(frozenset([call.label])) if value is None else value


def _chain(chain: Chain, given: object, verdict: Verdict) -> Value:
    for step in chain.steps:
        if isinstance(step, Group) and not step.members:
            # Skipped, except at the beginning, where it is an empty list.
            given = [] if given is _NOTHING else given
            continue
        given = _evaluate(step, given, verdict)
        if isinstance(given, Failed):
            given = Blocked(given.roots)
    return Failed(given.roots) if isinstance(given, Blocked) else given  # type: ignore[return-value]


def _group(group: Group, given: object, verdict: Verdict) -> Value:
    values: list[Value] = []
    for member in group.members:
        value = _evaluate(member, given, verdict)
        if isinstance(value, Failed):
            for errback in group.each:
                _evaluate(errback, value, verdict)
        values.append(value)
    if group.added and not isinstance(values[group.adder], Failed):
        values += [_evaluate(call, _NOTHING, verdict) for call in group.added]
    failed = [value for value in values if isinstance(value, Failed)]
    if len(failed) > group.max_failures:
        return Failed(frozenset().union(*(each.roots for each in failed)))
    return values


def _map_reduce(tree: MapReduce, given: object, verdict: Verdict) -> Value:
    if isinstance(given, Blocked):
        verdict.reduces[tree.label] = False
        return Failed(given.roots)
    failed: set[str] = set()
    leaves: list[str] = []
    for index, kind in enumerate(tree.items):
        label = f"{tree.label}.{index}"
        if kind == "fail":
            failed.add(label)
        else:
            leaves.append(label)
        verdict.calls[label] = Ran(None if kind == "fail" else label, 1)
    verdict.reduces[tree.label] = not failed
    return Failed(frozenset(failed)) if failed else reduced(leaves)


def _chunks(tree: Chunks, given: object, verdict: Verdict) -> Value:
    if isinstance(given, Blocked):
        return Failed(given.roots)
    labels = [f"{tree.label}.{index}" for index in range(len(tree.items))]
    failed: set[str] = set()
    values: list[Value] = []
    for first in range(0, len(labels), tree.size):
        chunk: list[Value] = []
        for label, kind in list(zip(labels, tree.items, strict=True))[first : first + tree.size]:
            verdict.calls[label] = Ran(None if kind == "fail" else label, 1)
            if kind == "fail":
                # Later calls are not made.
                failed.add(label)
                break
            chunk.append(label)
        values.append(chunk)
    return Failed(frozenset(failed)) if failed else values


def _roots(values: Value | list[Value]) -> frozenset[str]:
    match values:
        case Failed():
            return values.roots
        case list():
            return frozenset().union(*map(_roots, values))
    return frozenset()


# Return values of tasks, here as in the worker.


def pure(label: str, attempt: int, values: list[Value], pad: int = 0) -> str:
    told = f"{label} {attempt} {[shown(value) for value in values]}"
    return f"{label}:{hashlib.sha256(told.encode()).hexdigest()[:12]}+{pad}"


def reduced(values: list[str]) -> str:
    return "|".join(value for value in values if value)


def named_in(text: str) -> list[str]:
    """Return the calls that an error's text names: each says `boom LABEL.`."""
    return re.findall(r"boom (\S+?)\.(?!\d)", text)


def shown(value: Value) -> object:
    """Return a comparable form of a value, in which all failures are equal."""
    match value:
        case Failed():
            return "!"
        case list():
            return [shown(each) for each in value]
    return value
