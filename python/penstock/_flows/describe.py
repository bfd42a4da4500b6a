"""Description of a workflow for people: its name and its steps as JSON. The broker keeps it without reading it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

from penstock._durations import is_a
from penstock._flows.graph import Graph
from penstock._flows.steps import FAILED, Chain, Group, Partial, Signature
from penstock._jobs.current import format_id

if TYPE_CHECKING:
    from penstock._flows.build import Described

# The broker's limits, in bytes.
_LONGEST_NAME = 255
_LONGEST_DESCRIPTION = 16 << 10
# Largest group whose members are described one by one.
_FEW = 10
# Largest number of described steps, which is also the number of states that one query returns.
_MOST_STEPS = 1_000
# Names of outcomes, by their numbers in the core.
_OUTCOMES = ("succeeded", "failed", "ended")
# Number of steps and members that a name lists.
_NAMED = 4


def name_of(step: Partial[Any, Any]) -> str:
    """Return a name made of the workflow's steps: ``group(10 x fetch) | bind``."""
    return _cut(_short(step), _LONGEST_NAME)


def checked_name(name: object) -> str:
    """Return the user's name for a workflow. Raises ``TypeError`` or ``ValueError``."""
    if not isinstance(name, str):
        raise TypeError(f"name must be a string, not {name!r}")
    length = len(name.encode(errors="replace"))
    if not 0 < length <= _LONGEST_NAME:
        raise ValueError(f"the name of a workflow must be 1 to {_LONGEST_NAME} bytes long, not {length}")
    return name


def description(steps: Described, most: int = _MOST_STEPS) -> bytes:
    """Encode the steps for ``crates/penstock-drawing``. In a very large workflow, only the first steps are
    described."""
    text = json.dumps(_Describer(steps, most).described(), ensure_ascii=False, separators=(",", ":"))
    encoded = text.encode(errors="replace")
    if len(encoded) <= _LONGEST_DESCRIPTION:
        return encoded
    return description(steps, most // 2) if most > 1 else b""


class _Describer:
    def __init__(self, steps: Described, room: int) -> None:
        self._steps = steps
        self._room = room

    def described(self) -> dict[str, Any]:
        return self._node(self._steps.root)

    def _node(self, node: Any) -> dict[str, Any]:
        from penstock._flows import build

        self._room -= 1
        if isinstance(node, int):
            return {"job": self._steps.signatures[node].task.name, "id": format_id(self._steps.job_ids[node])}
        if isinstance(node, build._Linked):
            linked = self._node(node.node)
            if self._room > 0:
                linked["links"] = [
                    {**self._node(callback), "on": "failed" if when == FAILED else "succeeded"}
                    for callback, when in node.callbacks
                ]
            return linked
        if isinstance(node, build._Sequence):
            steps: list[dict[str, Any]] = []
            for step in node.nodes:
                if self._room <= 0:
                    break
                steps.append(self._node(step))
            more = len(node.nodes) - len(steps)
            return {"chain": steps, "more": more} if more else {"chain": steps}
        if isinstance(node, build._Empty):
            return {"group": 0, "id": format_id(self._steps.groups[id(node)]), "steps": []}
        found: dict[str, Any] = {"group": len(node.nodes), "id": format_id(self._steps.groups[id(node)])}
        if isinstance(node, build._Graph) and len(node.nodes) <= self._room:
            found["steps"] = [
                {
                    "name": name,
                    **({"needs": [[place, _OUTCOMES[when]] for place, when in needs]} if needs else {}),
                    **self._node(step),
                }
                for name, needs, step in zip(node.names, node.needs, node.nodes, strict=True)
            ]
        elif len(node.nodes) <= min(_FEW, self._room):
            found["steps"] = [self._node(member) for member in node.nodes]
        else:
            found["of"] = self._members(node.nodes)
        if isinstance(node, build._Group) and node.is_growing:
            found["grows"] = True
        return found

    def _label(self, node: Any) -> str:
        """Describe what a member of a large group runs."""
        from penstock._flows import build

        if isinstance(node, int):
            return self._steps.signatures[node].task.name
        if isinstance(node, build._Linked):
            return self._label(node.node)
        if isinstance(node, build._Sequence):
            shown = " | ".join(map(self._label, node.nodes[:_NAMED]))
            return f"({shown}{' | …' if len(node.nodes) > _NAMED else ''})"
        if isinstance(node, build._Empty):
            return "group()"
        return f"group of {len(node.nodes):,} x {self._members(node.nodes)}"

    def _members(self, nodes: Sequence[Any]) -> str:
        """Describe what the first members of a group run."""
        return " or ".join(dict.fromkeys(map(self._label, nodes[:_FEW])))


def _short(step: Partial[Any, Any]) -> str:
    if isinstance(step, Signature):
        return step.task.name.rpartition(".")[2]
    if is_a(step, Group):
        # Members that an iterator makes later are left out.
        return _group(cast("Group[Any]", step)._first)
    if isinstance(step, Graph):
        return step.name or f"graph({', '.join(list(step)[:_NAMED])}{', …' if len(step) > _NAMED else ''})"
    steps: Sequence[Partial[Any, Any]] = cast("Chain[Any]", step).steps if is_a(step, Chain) else ()
    named = steps[:_NAMED]
    texts = zip(named, map(_short, named), strict=True)
    shown = [f"({text})" if type(each) is Chain else text for each, text in texts]
    return " | ".join(shown + ["…"] * (len(steps) > _NAMED))


def _group(members: Sequence[Partial[Any, Any]]) -> str:
    if not members:
        return "group()"
    names = list(dict.fromkeys(map(_short, members[:_FEW])))
    if len(members) > _NAMED or len(names) < len(members):
        return f"group({len(members):,} x {' or '.join(names)})"
    return f"group({', '.join(names)})"


def _cut(text: str, most: int) -> str:
    encoded = text.encode(errors="replace")
    if len(encoded) <= most:
        return encoded.decode()
    return encoded[: most - len("…".encode())].decode(errors="ignore") + "…"
