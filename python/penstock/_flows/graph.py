"""Graphs: named steps that depend on each other by name."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, NamedTuple, Self, TypeAlias, cast

from penstock._durations import is_a
from penstock._flows.steps import FAILED, SUCCEEDED, Chain, Composed, Partial, S, check_step
from penstock._public import public

Outcome: TypeAlias = Literal["succeeded", "failed", "ended"]

# Limited because a graph is sent in one transaction.
MOST_STEPS = 100_000

# Outcomes with their numbers in the core.
_OUTCOMES: dict[str, int] = {"succeeded": SUCCEEDED, "failed": FAILED, "ended": 2}


class Named(NamedTuple):
    """Step of a graph, with the outcome that it needs from other steps, by their names."""

    step: Partial[Any, Any]
    needs: dict[str, int]


@public
class Graph(Composed[dict[str, Any]]):
    """Named steps, each of which runs once the steps that it needs have ended: see ``graph``."""

    __slots__ = ("_steps", "name")

    def __init__(self, name: str = "") -> None:
        super().__init__()
        if not is_a(name, str):
            raise TypeError(f"graph takes a name, not {name!r}; add(name, step) adds a step to it")
        self.name: str = name
        self._steps: dict[str, Named] = {}

    def add(self, name: str, step: Partial[Any, Any], /, needs: Iterable[str] | Mapping[str, Outcome] = ()) -> str:
        """Add a step, and return its name.

        ``needs``: names of the steps to wait for, or a dictionary from names to the outcome to wait for:
        ``"succeeded"``, ``"failed"`` or ``"ended"``, which means either. The named steps may be added later. Their
        results become the step's first arguments, in this order, unless its calls were made by ``si``; the result of a
        failed step is a ``Failure``. A step whose needs can no longer be met never runs: it is blocked, or cancelled if
        it waits for a failure that did not happen. Raises ``ValueError`` for a duplicate name, a step that needs
        itself, an unknown outcome, and more than 100,000 steps.
        """
        if not is_a(name, str) or not name:
            raise TypeError(f"the name of a step must be a string such as 'load', not {name!r}")
        step = check_step("add", step)
        if name in self._steps:
            raise ValueError(
                f"{self} has a step {name!r} already: {self._steps[name].step}; give this one another name"
            )
        if len(self._steps) == MOST_STEPS:
            raise ValueError(
                f"a graph may have at most {MOST_STEPS:,} steps, because it is sent in one transaction;"
                " one of them can be a group"
            )
        needed = _checked_needs(name, needs)
        if name in needed:
            raise ValueError(f"step {name!r} needs itself, so it would never run")
        self._steps[name] = Named(step, needed)
        return name

    @property
    def steps(self) -> tuple[Partial[Any, Any], ...]:
        return tuple(named.step for named in self._steps.values())

    def __or__(self, other: Partial[dict[str, Any], S], /) -> Chain[S]:
        return Chain([self._as_it_is(), check_step("|", other)])

    def __len__(self) -> int:
        return len(self._steps)

    def __bool__(self) -> bool:
        return True

    def __iter__(self) -> Iterator[str]:
        return iter(self._steps)

    def __contains__(self, name: object) -> bool:
        return name in self._steps

    def _as_it_is(self) -> Self:
        return copy.copy(self)

    def __copy__(self) -> Self:
        other = type(self)(self.name)
        other._steps = self._steps.copy()
        other._links = self._links
        return other

    def __eq__(self, other: object) -> bool:
        if not is_a(other, Graph):
            return NotImplemented
        mine, others = ((each.name, each._steps, each._links) for each in (self, cast("Graph", other)))
        return mine == others

    __hash__: None = None  # type: ignore[assignment]  # as of calls

    def __str__(self) -> str:
        return f"graph {self.name!r}" if self.name else "a graph"

    def _takes_value(self) -> bool:
        return any(named.step._takes_value() for named in self._steps.values() if not named.needs)


def graph(name: str = "") -> Graph:
    """Create a graph of named steps: ``g = graph("nightly")``, then ``g.add("load", load.s(), needs=["extract"])``.

    The result is a dictionary with the results of the last steps by name: the steps whose success no other step waits
    for. Steps that run only after a failure are not in the result, and do not change the outcome. The graph fails when
    any other step fails. ``workflow["load"]`` is the job of a step.
    """
    return Graph(name)


class Order(NamedTuple):
    """Dependencies between the steps of a graph, by index."""

    needs: list[tuple[tuple[int, int], ...]]
    """Needs of each step, as (index, outcome)."""
    sequence: list[int]
    """Steps in an order where each follows the steps that it needs."""
    ends: list[int]
    """Steps whose outcomes decide the graph's outcome."""


def order_of(graph: Graph) -> Order:
    """Return the order of a graph's steps. Raises ``ValueError`` for a graph that cannot run."""
    names = list(graph._steps)
    if not names:
        raise ValueError(f"{graph} has no steps; add(name, step) adds one")
    places = {name: place for place, name in enumerate(names)}
    needs: list[tuple[tuple[int, int], ...]] = []
    waiting: list[int] = []
    needed_by: list[list[int]] = [[] for _ in names]
    for number, (name, named) in enumerate(graph._steps.items()):
        unknown = next((other for other in named.needs if other not in places), None)
        if unknown is not None:
            raise ValueError(f"step {name!r} of {graph} needs {unknown!r}, but there is no step of that name")
        needs.append(tuple((places[other], outcome) for other, outcome in named.needs.items()))
        waiting.append(len(named.needs))
        for other in named.needs:
            needed_by[places[other]].append(number)
    sequence = [place for place, count in enumerate(waiting) if not count]
    for place in sequence:  # grows during the loop
        for follower in needed_by[place]:
            waiting[follower] -= 1
            if not waiting[follower]:
                sequence.append(follower)
    if len(sequence) < len(names):
        circle = " -> ".join(repr(names[at]) for at in _circle(needs, waiting))
        raise ValueError(f"steps of {graph} form a cycle, so they would never run: {circle}")
    return Order(needs, sequence, _ends(needs, sequence))


def _ends(needs: list[tuple[tuple[int, int], ...]], sequence: list[int]) -> list[int]:
    """Return the steps that must succeed, and whose failure no other such step passes on."""
    after_failure = [False] * len(needs)
    is_passed_on = [False] * len(needs)
    for place in sequence:
        after_failure[place] = any(
            outcome == FAILED or (outcome == SUCCEEDED and after_failure[other]) for other, outcome in needs[place]
        )
        if not after_failure[place]:
            for other, outcome in needs[place]:
                is_passed_on[other] = is_passed_on[other] or outcome == SUCCEEDED
    return [place for place in range(len(needs)) if not after_failure[place] and not is_passed_on[place]]


def _circle(needs: list[tuple[tuple[int, int], ...]], waiting: list[int]) -> list[int]:
    """Return a cycle among the waiting steps, in which each step needs the next one."""
    at = next(place for place, count in enumerate(waiting) if count)
    path: list[int] = []
    seen: dict[int, int] = {}
    while at not in seen:
        seen[at] = len(path)
        path.append(at)
        at = next(other for other, _ in needs[at] if waiting[other])
    return [*path[seen[at] :], at]


def _checked_needs(name: str, needs: Iterable[str] | Mapping[str, Outcome]) -> dict[str, int]:
    if isinstance(needs, str) or not is_a(needs, Iterable):
        raise TypeError(f"needs must be a list of names, such as needs=['extract'], not {needs!r}")
    if not is_a(needs, Mapping):
        needs = dict.fromkeys(needs, "succeeded")
    outcomes: dict[str, int] = {}
    for other, outcome in cast("Mapping[str, str]", needs).items():
        if not is_a(other, str):
            raise TypeError(f"needs must be a list of names, and {other!r} is not a name")
        if outcome not in _OUTCOMES:
            raise ValueError(f"step {name!r} needs {other!r} to be {outcome!r}; use 'succeeded', 'failed' or 'ended'")
        outcomes[other] = _OUTCOMES[outcome]
    return outcomes
