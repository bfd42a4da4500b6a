"""Status of a workflow: its jobs by state, and its steps as a tree."""

# No `from __future__ import annotations`: see `_public.py`.
import asyncio
import json
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from penstock import _core
from penstock._durations import is_a
from penstock._flows.failure import Failure
from penstock._jobs.info import JobState
from penstock._public import public

if TYPE_CHECKING:
    from penstock._flows.workflow import Workflow
    from penstock._tasks.app import App


@public
@dataclass(frozen=True, slots=True)
class WorkflowCounts:
    """Numbers of a workflow's jobs by state."""

    waiting: int
    """Number of jobs in their queues, delayed, or held until other jobs have ended."""
    running: int
    """Number of jobs that workers have taken."""
    succeeded: int
    failed: int
    """Number of jobs that failed for good and were not retried since."""
    cancelled: int
    """Number of jobs that were cancelled, purged, or not started before they expired."""
    blocked: int
    """Number of jobs that wait for a failed job."""


@dataclass(frozen=True, slots=True)
class _Facts:
    """Fields of a workflow in both a list and its status."""

    id: str
    name: str
    state: JobState
    """``RUNNING`` until the step that yields the result has ended, then ``SUCCEEDED``, ``FAILED``, ``CANCELLED`` or
    ``EXPIRED``."""
    jobs: WorkflowCounts
    sent_at: datetime
    ended_at: datetime | None
    """Time at which the last of its jobs that could run ended."""
    deadline: datetime | None
    parent: str | None
    """Id of the job that sent the workflow; None if another program sent it."""


@public
@dataclass(frozen=True, slots=True)
class WorkflowInfo(_Facts):
    """Entry in a list of workflows: see ``App.workflows``. Times are in UTC."""

    _app: Any = field(repr=False, compare=False)

    @property
    def workflow(self) -> "Workflow[Any]":
        """Handle of the workflow, to wait for it, cancel it, or ask for its status."""
        workflow: Workflow[Any] = self._app.workflow(self.id)
        return workflow


@public
@dataclass(frozen=True, slots=True)
class StepStatus:
    """Step of a workflow: a call, a group, or a chain of steps."""

    kind: str
    """``"job"``, ``"chain"`` or ``"group"``; a graph counts as a group."""
    task: str
    """Name of the task. For a group with many members, a description of what they run. Empty for a chain and for a
    small group."""
    state: JobState | None
    """State of the step; None where it is not known, because the workflow has more steps than one query returns."""
    id: str | None
    """Id of the job or the group; None for a chain."""
    members: int
    """Number of members of a group; 0 for other steps."""
    ended: int | None
    """Number of members that have ended, including failed ones. None for other steps, and for a group that is no longer
    known."""
    failed: int | None
    steps: tuple["StepStatus", ...]
    """Steps of a chain, or members of a small group."""
    left_out: int
    """Number of further steps of a chain that are not described."""
    links: tuple[tuple[str, "StepStatus"], ...]
    """Callbacks, each with the outcome on which it runs: ``"succeeded"`` or ``"failed"``."""
    name: str
    """Name of the step in its graph; empty for other steps."""
    needs: tuple[tuple[str, str], ...]
    """Names of the steps of its graph that it waits for, each with the awaited outcome: ``"succeeded"``, ``"failed"``
    or ``"ended"``."""
    replaced_by: str
    """Replacement of a job: the name of a task, or a group such as ``"group of 3"``. Empty if there is none."""


@public
@dataclass(frozen=True, slots=True)
class WorkflowStatus(_Facts):
    """Status of a workflow: see ``Workflow.status``. ``print`` draws it as a tree. Times are in UTC."""

    steps: StepStatus | None
    """Steps of the workflow; None if the program that sent it did not describe them."""
    failures: tuple[Failure, ...]
    """First 100 failed jobs that are kept."""
    _drawn: str = field(repr=False, compare=False)

    def __str__(self) -> str:
        return _core.draw_workflow(self._drawn, "tree").rstrip("\n")

    def dot(self) -> str:
        """Return the steps as a Graphviz graph."""
        return _core.draw_workflow(self._drawn, "dot")

    def svg(self) -> str:
        """Return the steps as an SVG document. Does not need Graphviz."""
        return _core.draw_workflow(self._drawn, "svg")


@public
class Workflows:
    """Workflows that match a filter: see ``App.workflows``. Every use asks the broker again.

    Iterating, with ``for`` or ``async for``, yields a ``WorkflowInfo`` for each, newest first. It reads one page at a
    time.
    """

    def __init__(self, app: "App", state: JobState | str | None, name: str | None) -> None:
        if state is not None and state not in _STATES:
            known = ", ".join(map(repr, map(str, _STATES)))
            raise ValueError(f"the state of workflows must be {known}, not {str(state)!r}")
        if name is not None and not is_a(name, str):
            raise TypeError(f"the name of workflows must be a string, not {name!r}")
        self._app = app
        self._state = None if state is None else str(state)
        self._name = name

    def __iter__(self) -> Iterator[WorkflowInfo]:
        after: bytes | None = b""
        while after is not None:
            found, after = self._page(after)
            yield from found

    async def __aiter__(self) -> AsyncIterator[WorkflowInfo]:
        after: bytes | None = b""
        while after is not None:
            found, after = await asyncio.to_thread(self._page, after)
            for workflow in found:
                yield workflow

    def _page(self, after: bytes) -> tuple[list[WorkflowInfo], bytes | None]:
        app = self._app
        found, following = app._connected().workflows(self._state, self._name, after or None, app.call_timeout)
        return [_info(app, json.loads(text)) for text in found], following


_STATES = (JobState.RUNNING, JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED, JobState.EXPIRED)


def status_of(drawn: str, failures: Sequence[Failure]) -> WorkflowStatus:
    """Parse the status of a workflow from the core's JSON."""
    given: Mapping[str, Any] = json.loads(drawn)
    steps = given["steps"]
    return WorkflowStatus(
        **_common(given), steps=None if steps is None else _step(steps), failures=tuple(failures), _drawn=drawn
    )


def _info(app: "App", given: Mapping[str, Any]) -> WorkflowInfo:
    return WorkflowInfo(**_common(given), _app=app)


def _common(given: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "id": given["id"],
        "name": given["name"],
        "state": JobState(given["state"]),
        "jobs": WorkflowCounts(
            given["waiting"],
            given["running"],
            given["succeeded"],
            given["failed"],
            given["cancelled"],
            given["blocked"],
        ),
        "sent_at": _moment(given["opened_at_ms"]),
        "ended_at": _moment(given["ended_at_ms"]),
        "deadline": _moment(given["deadline_ms"]),
        "parent": given["parent"],
    }


def _moment(ms: int | None) -> Any:
    return None if ms is None else datetime.fromtimestamp(ms / 1000, UTC)


def _step(given: Mapping[str, Any], siblings: Sequence[Mapping[str, Any]] = ()) -> StepStatus:
    kind = next(kind for kind in ("job", "group", "chain") if kind in given)
    inner: Sequence[Mapping[str, Any]] = given["chain"] if kind == "chain" else given.get("steps", ())
    needs: Sequence[tuple[int, str]] = given.get("needs", ())
    state = given.get("state")
    return StepStatus(
        kind=kind,
        task=given["job"] if kind == "job" else given.get("of", ""),
        state=None if state is None else JobState(state),
        id=given.get("id"),
        members=given["group"] if kind == "group" else 0,
        ended=given.get("ended"),
        failed=given.get("failed"),
        steps=tuple(_step(step, inner) for step in inner),
        left_out=given.get("more", 0),
        links=tuple((link["on"], _step(link)) for link in given.get("links", ())),
        name=given.get("name", ""),
        needs=tuple((siblings[place].get("name", ""), outcome) for place, outcome in needs if place < len(siblings)),
        replaced_by=given.get("replaced_by", ""),
    )
