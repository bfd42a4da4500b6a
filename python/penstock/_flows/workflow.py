"""Handle of a workflow, for the program that sent it or any program that has its id."""

# No `from __future__ import annotations`: see `_public.py`.
import asyncio
import contextlib
import itertools
import math
import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar, cast

from penstock._durations import Seconds, is_int, timeout_s
from penstock._flows.failure import (
    CANCELLED,
    FAILED,
    GATHERED,
    GONE,
    SUCCEEDED,
    UPSTREAM,
    Asking,
    Failure,
    failure_of,
    failures_of,
    places_of,
)
from penstock._flows.results import (
    EMPTY,
    LIST,
    NAMED,
    MemberIds,
    Results,
    afinish,
    finish,
    is_join,
    kind_of,
    member_id,
    names_id,
    outcome,
    read_gathered,
    read_names,
    wraps,
)
from penstock._flows.status import StepStatus, WorkflowCounts, WorkflowStatus, status_of
from penstock._habits import answer_habits
from penstock._jobs.current import format_id
from penstock._jobs.info import JobState
from penstock._jobs.job import Job, app_of, check_cancel, job_id_of
from penstock._jobs.waits import BLOCK, AsCompleted, InBlocks, as_completed, only_asks
from penstock._public import public
from penstock.errors import (
    BrokerUnavailable,
    CallTimeout,
    NoSuchJob,
    PenstockError,
    ResultExpired,
    ResultTimeout,
)

if TYPE_CHECKING:
    from penstock._jobs.progress import Progress
    from penstock._tasks.app import App

A = TypeVar("A")
R_co = TypeVar("R_co", covariant=True)

_PAGE = 1_000
# Number of jobs among which an error looks for one that keeps the others waiting.
_LOOKED_AT = 16
# Interval at which a caller that waits and draws asks for progress.
_DRAWN_EVERY_S = 1.0


@public
@dataclass(frozen=True, slots=True)
class PartialResults(Generic[A]):
    """Progress of a workflow: see ``Workflow.partial``."""

    done: int
    """Number of successful members."""
    failed: int
    """Number of members that failed for good, were cancelled or expired."""
    pending: int
    """Number of members that have not ended."""
    results: dict[int, A | Failure]
    """Result or failure of each ended member whose result is kept, by index."""


@public
class Workflow(Generic[R_co]):
    """Sent chain, group, chord or graph. Equal to any other ``Workflow`` of the same id.

    ``workflow[i]`` is the job of member i of a group (or a chord's group), or of step i of a chain or a graph, and
    ``len(workflow)`` is their number. ``workflow["load"]`` is the job of the graph's step with that name. ``await
    workflow`` is ``await workflow.aresult()``. A workflow can be pickled.
    """

    __slots__ = ("__weakref__", "_app", "_graph", "_id", "_members", "_names", "_nothing")

    def __init__(
        self,
        app: "App | None",
        id: bytes,
        members: Sequence[bytes] | None,
        names: Sequence[str] | None = None,
        nothing: Any = None,
    ) -> None:
        # None for a workflow without jobs, which no broker knows.
        self._app = app
        self._id = id
        # None if the workflow was found by its id and the broker was not asked for its members yet.
        self._members = members
        # Names of the members, where they are steps of a graph.
        self._names = names
        # Names and ids of the steps of the graph at its end, once the broker was asked for them.
        self._graph: tuple[Sequence[str], Sequence[bytes]] | None = None
        # Result of a workflow without jobs.
        self._nothing = nothing

    @property
    def id(self) -> str:
        """Id for ``app.workflow()``: the id of its group or its last job. Empty for a workflow without jobs."""
        return format_id(self._id) if self._id else ""

    def result(self, timeout: Seconds | None = None) -> R_co:
        """Wait for the end of the workflow and return its result. For a group that is the list of its members' results.

        ``timeout``: seconds or a timedelta; with 0 it asks once without waiting. By default it waits forever. Raises
        ``GroupError`` when a job before the last one, or too many members of the group, failed. Raises the error of the
        last job if that failed, and otherwise like ``Job.result``.
        """
        if self._app is None:
            return cast(R_co, self._nothing)
        limit_s = timeout_s("timeout", timeout)
        try:
            return cast(R_co, Job[Any](self._app, self._id, self._is_sent).result(limit_s))
        except NoSuchJob as error:
            if error.__cause__ is not None:
                raise  # the error of the last job
            raise self._unknown(self._app) from None
        except ResultTimeout:
            raise self._late(self._ended_by_now(), limit_s) from None

    async def aresult(self, timeout: Seconds | None = None) -> R_co:
        """Like ``result``, but awaitable. Cancelling the await does not cancel the workflow."""
        if self._app is None:
            return cast(R_co, self._nothing)
        limit_s = timeout_s("timeout", timeout)
        try:
            return cast(R_co, await Job[Any](self._app, self._id, self._is_sent).aresult(limit_s))
        except NoSuchJob as error:
            if error.__cause__ is not None:
                raise  # the error of the last job
            raise self._unknown(self._app) from None
        except ResultTimeout:
            raise await self._alate(limit_s) from None

    def __await__(self) -> Generator[Any, None, R_co]:
        return self.aresult().__await__()

    def results(self: "Workflow[list[A]]", timeout: Seconds | None = None) -> Results[A]:
        """Wait until all members of the group have ended, and return a sequence that reads their results on access.

        ``timeout`` is as for ``result``. A failed member has a ``Failure`` in its place, even if the group failed.
        Raises ``TypeError`` when the workflow's result does not come from a group, and ``GroupError`` when the group
        never started because an earlier step failed.
        """
        app, limit_s = self._app, timeout_s("timeout", timeout)
        if app is None:
            return Results(None, b"\0" * 16, 0)
        try:
            end = self._wait(app, limit_s)
            if self._lacks_members(end):
                self._known_members()
            join, count, all_ended = finish(app, self._group_of(*end), app.call_timeout)
            ids = MemberIds(join, count)
            for first in range(0, 0 if all_ended else count, _PAGE):
                self._wait_all(app, ids[first : first + _PAGE], limit_s)
        except ResultTimeout:
            raise self._late(self._ended_by_now(), limit_s) from None
        return Results(app, join, count)

    async def aresults(self: "Workflow[list[A]]", timeout: Seconds | None = None) -> Results[A]:
        """Like ``results``, but awaitable."""
        app, limit_s = self._app, timeout_s("timeout", timeout)
        if app is None:
            return Results(None, b"\0" * 16, 0)
        try:
            end = await self._await(app, limit_s)
            if self._lacks_members(end):
                await asyncio.to_thread(self._known_members)
            join, count, all_ended = await afinish(app, self._group_of(*end), app.call_timeout)
            ids = MemberIds(join, count)
            for first in range(0, 0 if all_ended else count, _PAGE):
                await self._await_all(app, ids[first : first + _PAGE], limit_s)
        except ResultTimeout:
            raise await self._alate(limit_s) from None
        return Results(app, join, count)

    def as_completed(self, timeout: Seconds | None = None) -> AsCompleted[Any]:
        """Iterate over the jobs of the members, or of a chain's steps, in the order in which they end.

        Iterate with ``for`` or ``async for``. ``timeout``: seconds or a timedelta for the whole iteration. Groups of
        more than 10,000 members are handled in blocks of 10,000. Raises ``ResultTimeout`` when the time is up.
        """
        if len(self) > BLOCK:
            return InBlocks(cast("Sequence[Job[Any]]", self), timeout)
        return as_completed(list(self), timeout)

    def partial(self) -> PartialResults[Any]:
        """Return how many members, or steps of a chain, have ended, and their results."""
        app, members = self._app, self._known_members()
        if app is None:
            return PartialResults(0, 0, 0, {})
        ended: dict[int, tuple[int, bytes]] = {}
        for first in range(0, len(members), BLOCK):
            block = members[first : first + BLOCK]
            for place, end in app._connected().each(block, 0, app.call_timeout):
                if end is not None:
                    ended[first + place] = end
        return finish(app, self._partial(ended), app.call_timeout)

    async def apartial(self) -> PartialResults[Any]:
        """Like ``partial``, but awaitable."""
        app, members = self._app, await asyncio.to_thread(self._known_members)
        if app is None:
            return PartialResults(0, 0, 0, {})
        ended: dict[int, tuple[int, bytes]] = {}
        for first in range(0, len(members), BLOCK):
            block = members[first : first + BLOCK]
            async for place, end in app._connected().aeach(block, 0, app.call_timeout):
                if end is not None:
                    ended[first + place] = end
        return await afinish(app, self._partial(ended), app.call_timeout)

    def cancel(self, reason: str = "", *, running: Literal["ask", "kill", "leave"] = "ask") -> None:
        """Cancel all jobs of the workflow that have not ended. Returns once that is decided and durable.

        Waiting jobs never start. ``running`` is as for ``Job.cancel``: a running job is asked to stop, killed, or left
        alone. ``reason``: text of at most 200 bytes for the ``JobCancelled`` error. Raises ``BrokerUnavailable`` or
        ``CallTimeout`` after ``app.call_timeout``.
        """
        check_cancel(reason, running)
        if self._app is not None:
            self._app._connected().cancel_workflow(self._id, reason, running, self._app.call_timeout)

    async def acancel(self, reason: str = "", *, running: Literal["ask", "kill", "leave"] = "ask") -> None:
        """Like ``cancel``, but awaitable."""
        check_cancel(reason, running)
        if self._app is not None:
            await self._app._connected().acancel_workflow(self._id, reason, running, self._app.call_timeout)

    def retry_failed(self) -> int:
        """Put the failed jobs of the workflow back into their queues, with all of their retries; return their number.

        The workflow continues: it is ``RUNNING`` again, and jobs that the failures had blocked wait for the new runs.
        Neither jobs that have succeeded nor errbacks that have run are run again. Cancelled and expired jobs do not
        count as failed, and cannot be retried. Raises ``BrokerUnavailable`` or ``CallTimeout`` after
        ``app.call_timeout``.
        """
        return 0 if self._app is None else self._app.failed(workflow=self).retry()

    async def aretry_failed(self) -> int:
        """Like ``retry_failed``, but awaitable. Cancelling the await does not withdraw the order."""
        return 0 if self._app is None else await self._app.failed(workflow=self).aretry()

    def state(self) -> JobState:
        """Return the state: ``RUNNING`` until the workflow has ended, then its final state.

        Raises ``NoSuchJob`` when the broker does not know the workflow, and ``BrokerUnavailable`` or ``CallTimeout``
        after ``app.call_timeout``.
        """
        if self._app is None:
            return JobState.SUCCEEDED
        try:
            end = self._app._connected().peek(self._id, self._app.call_timeout)
        except ResultExpired:
            return self._gone()
        return _state_of(end)

    async def astate(self) -> JobState:
        """Like ``state``, but awaitable."""
        if self._app is None:
            return JobState.SUCCEEDED
        try:
            end = await self._app._connected().peek_async(self._id, self._app.call_timeout)
        except ResultExpired:
            return self._gone()
        return _state_of(end)

    def status(self) -> WorkflowStatus:
        """Return the workflow's status: its jobs by state, its steps as a tree, the first failures. ``print`` draws it.

        A large group counts as one step. Raises ``NoSuchJob`` when the broker does not list the workflow: it never
        existed, an older client sent it, or it has ended and was forgotten, which happens a day after success. Raises
        ``BrokerUnavailable`` or ``CallTimeout`` after ``app.call_timeout``.
        """
        app = self._app
        if app is None:
            raise NoSuchJob("this workflow has no jobs, so the broker does not list it: it has succeeded")
        connection = app._connected()
        found = connection.workflow_status(self._id, app.call_timeout)
        if found is None:
            raise NoSuchJob(
                f"workflow {self.id}: the broker at {connection.broker} does not list this workflow: it never"
                " existed, an older client sent it, or it has ended and was forgotten"
            )
        drawn, failed = found
        return status_of(drawn, finish(app, failures_of(failed, self._id), app.call_timeout))

    async def astatus(self) -> WorkflowStatus:
        """Like ``status``, but awaitable."""
        return await asyncio.to_thread(self.status)

    def wait(self, timeout: Seconds | None = None, *, progress: bool = False) -> JobState:
        """Wait for the end of the workflow and return its final state.

        ``timeout`` is as for ``result``. ``progress=True`` shows how many of its jobs have ended while it waits, like
        ``Job.wait``. Raises ``ResultTimeout`` when the time is up.
        """
        app, limit_s = self._app, timeout_s("timeout", timeout)
        if app is None:
            return JobState.SUCCEEDED
        if progress:
            limit_s = self._wait_drawing(limit_s)
        try:
            return _state_of(self._wait(app, limit_s))
        except ResultExpired:
            return self._gone()
        except ResultTimeout:
            raise self._late(self._ended_by_now(), limit_s) from None

    def _wait_drawing(self, limit_s: float | None) -> float | None:
        """Draw the progress until the workflow has ended or the time is up. Return the time left."""
        for left_s in self._draw(limit_s):
            with contextlib.suppress(ResultTimeout, ResultExpired):
                self._wait(cast("App", self._app), left_s)
        return 0.0

    async def _await_drawing(self, limit_s: float | None) -> float | None:
        slices = self._draw(limit_s)
        while (left_s := await asyncio.to_thread(next, slices, None)) is not None:
            with contextlib.suppress(ResultTimeout, ResultExpired):
                await self._await(cast("App", self._app), left_s)
        return 0.0

    def _draw(self, limit_s: float | None) -> Iterator[float]:
        """Draw the progress repeatedly, and yield each pause, until the workflow has ended or the time is up."""
        from penstock._jobs.progress import Drawing

        until = math.inf if limit_s is None else time.monotonic() + limit_s
        drawing = Drawing(f"workflow {self.id}")
        try:
            while True:
                state = self.state()
                # An older client may have sent it, it may have been forgotten, or the broker may be restarting.
                with contextlib.suppress(NoSuchJob, BrokerUnavailable, CallTimeout):
                    drawing.show(_progress_of(self.status().jobs))
                left_s = until - time.monotonic()
                if state is not JobState.RUNNING:
                    return drawing.end(str(state))
                if left_s <= 0:
                    return drawing.drop()
                yield min(left_s, _DRAWN_EVERY_S)
        except BaseException:
            drawing.drop()
            raise

    async def async_wait(self, timeout: Seconds | None = None, *, progress: bool = False) -> JobState:
        """Like ``wait``, but awaitable."""
        app, limit_s = self._app, timeout_s("timeout", timeout)
        if app is None:
            return JobState.SUCCEEDED
        if progress:
            limit_s = await self._await_drawing(limit_s)
        try:
            return _state_of(await self._await(app, limit_s))
        except ResultExpired:
            return self._gone()
        except ResultTimeout:
            raise await self._alate(limit_s) from None

    def done(self) -> bool:
        """Return whether the workflow has ended, in whatever way. Raises like ``state``."""
        return self.state() is not JobState.RUNNING

    async def adone(self) -> bool:
        """Like ``done``, but awaitable."""
        return await self.astate() is not JobState.RUNNING

    def __len__(self) -> int:
        return len(self._known_members())

    def __getitem__(self, index: int | str) -> Job[Any]:
        if isinstance(index, str):
            return self._named(index)
        if not is_int(index):
            raise TypeError(f"a workflow is indexed by position or by name, not by {index!r}")
        app = self._app
        if app is None:
            raise IndexError("this workflow has no members")
        if self._members is None and is_join(self._id) and index >= 0:
            # The id is computed; the number of members is not known here.
            return Job(app, member_id(self._id, index))
        try:
            return Job(app, self._known_members()[index], self._is_sent)
        except IndexError:
            raise IndexError(f"this workflow has {len(self)} members, so there is none at index {index}") from None

    def __iter__(self) -> Iterator[Job[Any]]:
        for member in self._known_members():
            assert self._app is not None
            yield Job(self._app, member, self._is_sent)

    def __bool__(self) -> bool:
        return True

    def __eq__(self, other: object) -> bool:
        return self._id == other._id if isinstance(other, Workflow) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._id)

    def __repr__(self) -> str:
        return f"<Workflow {self.id}>" if self._id else "<Workflow without jobs>"

    def __reduce__(self) -> tuple[Any, ...]:
        app, home = self._app, (self._id, self._members, self._names, self._nothing)
        return _unpickled, (None if app is None else (app.name, app.url), *home)

    @property
    def _is_sent(self) -> bool:
        """Whether a broker has certainly accepted the workflow."""
        return self._members is not None

    def _named(self, name: str) -> Job[Any]:
        app = self._app
        if app is None or (self._names is None and not (is_join(self._id) and kind_of(self._id) == NAMED)):
            raise TypeError(f"workflow {self.id}: its steps have no names; only those of a graph as its last step do")
        # The members of a chain that ends with a graph are the chain's steps.
        names, ids = self._named_steps(app) if self._names is None else (self._names, self._known_members())
        try:
            return Job(app, ids[names.index(name)], self._is_sent)
        except ValueError:
            raise KeyError(f"workflow {self.id} has no step {name!r}") from None

    def _named_steps(self, app: "App") -> tuple[Sequence[str], Sequence[bytes]]:
        if self._graph is None:
            (end,) = app._connected().wait_all([names_id(self._id)], app.call_timeout)
            steps = read_names(self._id, end)
            self._graph = steps.names, [steps.id_of(place) for place in range(len(steps.names))]
        return self._graph

    def _known_members(self) -> Sequence[bytes]:
        """Return the ids of the members. For a workflow found by its id, this asks the broker once."""
        if self._members is None:
            self._members = self._described_members()
        return self._members

    def _described_members(self) -> Sequence[bytes]:
        root, app = self.status().steps, self._app
        assert app is not None
        if root is not None and root.kind == "group" and kind_of(job_id_of(root.id or "")) == NAMED:
            self._names, members = self._named_steps(app)
            return members
        found = None if root is None else _members_of(root)
        if found is None:
            raise LookupError(
                f"workflow {self.id}: it has more steps than the broker lists, so only the program that sent it can"
                " index them; status() has the first ones"
            )
        return found

    def _wait(self, app: "App", limit_s: float | None) -> tuple[int, bytes]:
        if limit_s is None or limit_s > 0:
            return app._connected().wait(self._id, limit_s)
        return _ended(app._connected().peek(self._id, app.call_timeout))

    async def _await(self, app: "App", limit_s: float | None) -> tuple[int, bytes]:
        if limit_s is None or limit_s > 0:
            return await app._connected().watch(self._id, limit_s)
        return _ended(await app._connected().peek_async(self._id, app.call_timeout))

    def _wait_all(self, app: "App", ids: list[bytes], limit_s: float | None) -> None:
        if limit_s is None or limit_s > 0:
            app._connected().wait_all(ids, limit_s)
            return
        for _, end in app._connected().each(ids, 0, app.call_timeout):
            _ended(end)

    async def _await_all(self, app: "App", ids: list[bytes], limit_s: float | None) -> None:
        if limit_s is None or limit_s > 0:
            await app._connected().watch_all(ids, limit_s)
            return
        async for _, end in app._connected().aeach(ids, 0, app.call_timeout):
            _ended(end)

    def _lacks_members(self, end: tuple[int, bytes]) -> bool:
        """Whether this is a failed group found by its id: its end does not include the number of members."""
        return self._members is None and end[0] == UPSTREAM and is_join(self._id) and kind_of(self._id) == LIST

    def _group_of(self, status: int, body: bytes) -> Asking[tuple[bytes, int, bool]]:
        """Return the join of the group that yields the result, its size, and whether all members have ended."""
        assert self._app is not None
        job_id = self._id
        while status == GATHERED:
            join, count = read_gathered(body)
            if kind_of(join) == EMPTY:
                return join, 0, True
            if kind_of(join) == NAMED:
                raise TypeError(f"workflow {self.id}: its result is a graph's, not a group's: use result()")
            if not wraps(join):
                return join, count, True
            job_id = member_id(join, 0)
            ((status, body),) = yield [job_id]
        if status == UPSTREAM:
            if isinstance(self._members, MemberIds) and self._members.join == self._id:
                # Members that were added later and failed are among the causes.
                added = (place + 1 for place in places_of(body, self._id))
                return self._id, max(len(self._members), *added, 0), False
            yield from outcome(self._app, job_id, status, body)
        if status == SUCCEEDED:
            raise TypeError(f"workflow {self.id}: its result is one value, not a group's: use result()")
        if status == GONE:
            raise ResultExpired(f"workflow {self.id}: it has ended, and its result is not kept")
        raise (yield from failure_of(job_id, None, status, body)).exception()

    def _partial(self, ended: dict[int, tuple[int, bytes]]) -> Asking[PartialResults[Any]]:
        assert self._app is not None
        members = self._known_members()
        found: dict[int, Any] = {}
        done = failed = 0
        for place, (status, body) in sorted(ended.items()):
            if status in (SUCCEEDED, GATHERED, GONE):
                done += 1
                if status == SUCCEEDED:
                    found[place] = Job[Any](self._app, members[place], True)._outcome((status, body))
                elif status == GATHERED:
                    found[place] = yield from outcome(self._app, members[place], status, body)
            else:
                failed += 1
                found[place] = yield from failure_of(members[place], place, status, body)
        return PartialResults(done, failed, len(members) - len(ended), found)

    def _late(self, ended: set[int] | None, limit_s: float | None) -> ResultTimeout:
        """Make the error for a caller whose time is up. ``ended``: the indexes of the members that have ended."""
        app, how_far = self._app, ""
        if app is not None:
            if ended is not None and self._members is not None:
                how_far = f": {len(ended):,} of {len(self._members):,} members have ended"
            where = "" if only_asks(limit_s) else self._whereabouts(app, ended or set())
            how_far += where and f"{'; ' if how_far else ': '}{where}"
        return ResultTimeout(
            f"workflow {self.id}: it did not end in time, and was not cancelled{how_far}. Ask for its result again to"
            " keep waiting"
        )

    async def _alate(self, limit_s: float | None) -> ResultTimeout:
        return await asyncio.to_thread(self._late, await self._aended_by_now(), limit_s)

    def _ended_by_now(self) -> set[int] | None:
        """Return the indexes of the members that have ended; None when that is not known."""
        if self._app is None or self._members is None or len(self._members) > BLOCK:
            return None
        try:
            ends = self._app._connected().each(list(self._members), 0, self._app.call_timeout)
            return {place for place, end in ends if end is not None}
        except PenstockError:
            return None

    async def _aended_by_now(self) -> set[int] | None:
        if self._app is None or self._members is None or len(self._members) > BLOCK:
            return None
        ends = self._app._connected().aeach(list(self._members), 0, self._app.call_timeout)
        try:
            return {place async for place, end in ends if end is not None}
        except PenstockError:
            return None

    def _whereabouts(self, app: "App", ended: set[int]) -> str:
        """Describe a job that keeps the others waiting; empty if none is found."""
        connection = app._connected()
        broker, limit_s = connection.broker, app.call_timeout
        found = connection.whereabouts_of_one(self._not_ended(ended), broker, limit_s)
        if found:
            return found
        try:
            # Composite members have no job of their id.
            steps = self.status().steps
        except PenstockError:
            return ""
        jobs = () if steps is None else itertools.islice(_on_their_way(steps), _LOOKED_AT)
        return connection.whereabouts_of_one(list(jobs), broker, limit_s)

    def _not_ended(self, ended: set[int]) -> list[bytes]:
        """Return the ids of jobs that may not have ended, earlier ones first."""
        steps = itertools.chain(
            (step for place, step in enumerate(self._members or ()) if place not in ended),
            (self._id,),
        )
        jobs = (job for step in steps for job in (MemberIds(step, _LOOKED_AT) if is_join(step) else (step,)))
        return list(itertools.islice(jobs, _LOOKED_AT))

    def _gone(self) -> JobState:
        if self._is_sent:
            return JobState.ENDED
        assert self._app is not None
        raise self._unknown(self._app)

    def _unknown(self, app: "App") -> NoSuchJob:
        broker = app._connected().broker
        return NoSuchJob(
            f"workflow {self.id}: the broker at {broker} does not know it: it never existed, or it has ended and its"
            " result is not kept"
        )


answer_habits(Workflow)


def _members_of(root: StepStatus) -> Sequence[bytes] | None:
    """Return the ids of a workflow's members by its steps: members of a group or chord, or steps of a chain.

    Returns None if not all steps were described.
    """
    if root.kind == "job":
        return None if root.id is None else (job_id_of(root.id),)
    if root.kind == "group":
        return None if root.id is None else MemberIds(job_id_of(root.id), root.members)
    ids = [job_id_of(step.id) for step in root.steps if step.id is not None]
    if root.left_out or len(ids) < len(root.steps):
        return None
    header = root.steps[0]
    if len(ids) == 2 and header.kind == "group" and kind_of(ids[0]) == LIST:
        return MemberIds(ids[0], header.members)
    return ids


def _on_their_way(step: StepStatus) -> Iterator[bytes]:
    """Yield the ids of jobs that may be waiting in queues or running."""
    if step.state is not None and step.state not in _NOT_ENDED:
        return
    for inner in step.steps:
        yield from _on_their_way(inner)
    if step.steps or step.id is None:
        return
    yield from (job_id_of(step.id),) if step.kind == "job" else MemberIds(job_id_of(step.id), step.members)


_NOT_ENDED = (JobState.WAITING, JobState.DELAYED, JobState.RUNNING, JobState.CANCELLING)


def _ended(end: tuple[Any, ...] | None) -> tuple[int, bytes]:
    if end is None:
        raise ResultTimeout("it has not ended yet")
    status, body = end[:2]
    return status, body


_STATES = {
    SUCCEEDED: JobState.SUCCEEDED,
    GATHERED: JobState.SUCCEEDED,
    CANCELLED: JobState.CANCELLED,
    FAILED: JobState.FAILED,
    UPSTREAM: JobState.FAILED,
    2: JobState.EXPIRED,
    3: JobState.CRASHED,
}


def _state_of(end: tuple[Any, ...] | None) -> JobState:
    if end is None:
        return JobState.RUNNING
    return _STATES.get(end[0], JobState.FAILED)


def _progress_of(jobs: WorkflowCounts) -> "Progress":
    from penstock._jobs.progress import Progress

    ended = jobs.succeeded + jobs.failed + jobs.cancelled
    counts = [f"{count} {what}" for count, what in [(jobs.running, "running"), (jobs.failed, "failed")] if count]
    return Progress(ended, ended + jobs.waiting + jobs.running + jobs.blocked, ", ".join(counts))


def _unpickled(
    app: tuple[str, str] | None,
    id: bytes,
    members: Sequence[bytes] | None,
    names: Sequence[str] | None = None,
    nothing: Any = None,
) -> Workflow[Any]:
    return Workflow(None if app is None else app_of(*app), id, members, names, nothing)
