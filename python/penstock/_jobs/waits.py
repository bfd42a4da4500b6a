"""Waits for many jobs at once, with one query to their broker."""

# No `from __future__ import annotations`: see `_public.py`.
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Generic, Literal, NamedTuple, TypeVar, overload

from penstock._connection import warn_of_blocking
from penstock._durations import Seconds, is_a, timeout_s
from penstock._jobs.job import Job, in_thread
from penstock._public import public
from penstock.errors import ResultTimeout

if TYPE_CHECKING:
    from penstock._connection import Connection

R = TypeVar("R")

# Number of members of a large group to wait for at a time.
BLOCK = 10_000


@public
class Waited(NamedTuple, Generic[R]):
    """Result of ``wait``: the jobs that have ended, and the others, both in the given order."""

    done: list[Job[R]]
    pending: list[Job[R]]


@overload
def results(
    jobs: Iterable[Job[R]], timeout: Seconds | None = None, *, return_errors: Literal[False] = False
) -> list[R]: ...
@overload
def results(
    jobs: Iterable[Job[R]], timeout: Seconds | None = None, *, return_errors: bool
) -> list[R | BaseException]: ...
def results(jobs: Iterable[Job[Any]], timeout: Seconds | None = None, *, return_errors: bool = False) -> list[Any]:
    """Wait until all of these jobs have ended, and return their results in the same order.

    ``timeout``: seconds or a timedelta; with 0 it asks once without waiting. By default it waits forever.

    Raises the error that ``result()`` of the first unsuccessful job would raise. With ``return_errors``, each error is
    returned in place of its result instead. Raises ``ResultTimeout``, with the number of unfinished jobs, when the time
    is up. The jobs may belong to several apps, but only to one broker.
    """
    warn_of_blocking("penstock.results()", "penstock.aresults()")
    given, limit_s = _listed(jobs), timeout_s("timeout", timeout)
    if not given:
        return []
    if not only_asks(limit_s):
        try:
            ends = _connection_of(given).wait_all([job._id for job in given], limit_s)
        except ResultTimeout:
            pass  # the code below asks which of them have ended
        else:
            return _outcomes(given, ends, return_errors)
    pending = wait(given, 0).pending
    if pending:
        raise _time_is_up(given, pending, limit_s)
    return _outcomes(given, [job._end or _GONE for job in given], return_errors)


@overload
async def aresults(
    jobs: Iterable[Job[R]], timeout: Seconds | None = None, *, return_errors: Literal[False] = False
) -> list[R]: ...
@overload
async def aresults(
    jobs: Iterable[Job[R]], timeout: Seconds | None = None, *, return_errors: bool
) -> list[R | BaseException]: ...
async def aresults(
    jobs: Iterable[Job[Any]], timeout: Seconds | None = None, *, return_errors: bool = False
) -> list[Any]:
    """Like ``results``, but awaitable. Cancelling the await does not cancel the jobs."""
    given, limit_s = _listed(jobs), timeout_s("timeout", timeout)
    if not given:
        return []
    if not only_asks(limit_s):
        try:
            ends = await _connection_of(given).watch_all([job._id for job in given], limit_s)
        except ResultTimeout:
            pass
        else:
            return await _aoutcomes(given, ends, return_errors)
    pending = (await async_wait(given, 0)).pending
    if pending:
        raise await in_thread(_time_is_up, given, pending, limit_s)
    return await _aoutcomes(given, [job._end or _GONE for job in given], return_errors)


def wait(
    jobs: Iterable[Job[R]], timeout: Seconds | None = None, *, return_when: Literal["all", "first"] = "all"
) -> Waited[R]:
    """Wait until all of these jobs, or the first of them, have ended, or until the time is up.

    ``timeout``: seconds or a timedelta; with 0 it asks once without waiting. Returns ``(done, pending)``. A failed job
    counts as done: its ``result()`` raises its error. ``result()`` of a done job does not ask the broker. Raises
    ``BrokerUnavailable`` or ``CallTimeout`` when the time is up and no broker has answered.
    """
    warn_of_blocking("penstock.wait()", "penstock.async_wait()")
    given, limit_s = _given(jobs, return_when), timeout_s("timeout", timeout)
    ended: set[int] = set()
    if given:
        try:
            for place, end in _each(given, limit_s, any_of=return_when == "first"):
                if end is not None:
                    _keep(given[place], end)
                    ended.add(place)
                    if return_when == "first" and not only_asks(limit_s):
                        break
        except ResultTimeout:
            pass
    return _waited(given, ended)


async def async_wait(
    jobs: Iterable[Job[R]], timeout: Seconds | None = None, *, return_when: Literal["all", "first"] = "all"
) -> Waited[R]:
    """Like ``wait``, but awaitable. Cancelling the await does not cancel the jobs."""
    given, limit_s = _given(jobs, return_when), timeout_s("timeout", timeout)
    ended: set[int] = set()
    if given:
        ends = _aeach(given, limit_s, any_of=return_when == "first")
        try:
            async for place, end in ends:
                if end is not None:
                    _keep(given[place], end)
                    ended.add(place)
                    if return_when == "first" and not only_asks(limit_s):
                        break
        except ResultTimeout:
            pass
        finally:
            await ends.aclose()
    return _waited(given, ended)


@public
class AsCompleted(Generic[R]):
    """Iterator of ``as_completed`` for ``for`` and ``async for``."""

    def __init__(self, jobs: Iterable[Job[R]], timeout: Seconds | None) -> None:
        self._jobs = _listed(jobs)
        self._timeout_s = timeout_s("timeout", timeout)

    def __iter__(self) -> Iterator[Job[R]]:
        warn_of_blocking("for job in as_completed()", "async for")
        given, left = self._jobs, set(range(len(self._jobs)))
        if not given:
            return
        try:
            for place, end in _each(given, self._timeout_s):
                if end is not None:
                    left.discard(place)
                    yield _keep(given[place], end)
        except ResultTimeout:
            pass
        if left:
            raise _time_is_up(given, [given[place] for place in sorted(left)], self._timeout_s)

    async def __aiter__(self) -> AsyncIterator[Job[R]]:
        given, left = self._jobs, set(range(len(self._jobs)))
        if not given:
            return
        ends = _aeach(given, self._timeout_s)
        try:
            async for place, end in ends:
                if end is not None:
                    left.discard(place)
                    yield _keep(given[place], end)
        except ResultTimeout:
            pass
        finally:
            await ends.aclose()
        if left:
            raise await in_thread(_time_is_up, given, [given[place] for place in sorted(left)], self._timeout_s)


class InBlocks(AsCompleted[R]):
    """Iterator over the jobs of a large group, in blocks of 10,000 so that no more are in memory."""

    def __init__(self, jobs: Sequence[Job[R]], timeout: Seconds | None) -> None:
        super().__init__((), timeout)
        self._members = jobs

    def __iter__(self) -> Iterator[Job[R]]:
        for block in self._blocks():
            yield from block

    async def __aiter__(self) -> AsyncIterator[Job[R]]:
        for block in self._blocks():
            async for job in block:
                yield job

    def _blocks(self) -> Iterator[AsCompleted[R]]:
        limit_s = self._timeout_s
        ends_at = None if limit_s is None else time.monotonic() + limit_s
        for first in range(0, len(self._members), BLOCK):
            jobs = [self._members[place] for place in range(first, min(first + BLOCK, len(self._members)))]
            yield AsCompleted(jobs, None if ends_at is None else max(0.0, ends_at - time.monotonic()))


def as_completed(jobs: Iterable[Job[R]], timeout: Seconds | None = None) -> AsCompleted[R]:
    """Iterate over these jobs in the order in which they end, with ``for`` or ``async for``.

    ``timeout``: seconds or a timedelta for the whole iteration, from the start of the loop; with 0 it asks once without
    waiting. ``result()`` of a yielded job does not ask the broker. Raises ``ResultTimeout`` when the time is up.
    """
    return AsCompleted(jobs, timeout)


_GONE = (-1, b"")


def _listed(jobs: Iterable[Job[R]]) -> list[Job[R]]:
    if not is_a(jobs, Iterable):
        raise TypeError(f"jobs must be a list or another iterable, not {jobs!r}")
    return list(jobs)


def _given(jobs: Iterable[Job[R]], return_when: str) -> list[Job[R]]:
    if return_when not in ("all", "first"):
        raise ValueError(f'return_when must be "all" or "first", not {return_when!r}')
    return _listed(jobs)


def only_asks(limit_s: float | None) -> bool:
    return limit_s is not None and limit_s <= 0


def _each(
    jobs: list[Job[Any]], limit_s: float | None, *, any_of: bool = False
) -> Iterator[tuple[int, tuple[int, bytes] | None]]:
    # First, since this checks the types of the jobs.
    connection = _connection_of(jobs)
    return connection.each([job._id for job in jobs], limit_s, jobs[0]._app.call_timeout, any_of=any_of)


def _aeach(
    jobs: list[Job[Any]], limit_s: float | None, *, any_of: bool = False
) -> AsyncGenerator[tuple[int, tuple[int, bytes] | None], None]:
    # First, since this checks the types of the jobs.
    connection = _connection_of(jobs)
    return connection.aeach([job._id for job in jobs], limit_s, jobs[0]._app.call_timeout, any_of=any_of)


def _connection_of(jobs: list[Job[R]]) -> "Connection":
    for job in jobs:
        if not is_a(job, Job):
            whole = hasattr(job, "as_completed")
            hint = "; wait for a workflow by its own methods, or pass list(workflow), its jobs" if whole else ""
            raise TypeError(f"jobs must be handles that delay() or app.job() returned, not {job!r}{hint}")
    connection = jobs[0]._app._connected()
    for job in jobs:
        if job._app is not jobs[0]._app and job._app._connected() != connection:
            raise ValueError(
                f"{jobs[0]!r} is at {jobs[0]._app.url} and {job!r} at {job._app.url}:"
                " wait for the jobs of each broker separately"
            )
    return connection


def _keep(job: Job[R], end: tuple[int, bytes]) -> Job[R]:
    """Store the end of a job in its handle, so that the broker is not asked again."""
    if end != _GONE:
        job._known = end
    return job


def _outcomes(jobs: list[Job[R]], ends: list[tuple[int, bytes]], return_errors: bool) -> list[Any]:
    outcomes: list[Any] = []
    for job, end in zip(jobs, ends, strict=True):
        try:
            if end == _GONE:
                raise job._expired()
            outcomes.append(job._outcome(end))
        except BaseException as error:
            if not return_errors:
                raise
            outcomes.append(error)
    return outcomes


async def _aoutcomes(jobs: list[Job[Any]], ends: list[tuple[int, bytes]], return_errors: bool) -> list[Any]:
    outcomes: list[Any] = []
    for job, end in zip(jobs, ends, strict=True):
        try:
            if end == _GONE:
                raise job._expired()
            outcomes.append(await job._aoutcome(end))
        except Exception as error:
            if not return_errors:
                raise
            outcomes.append(error)
    return outcomes


def _waited(jobs: list[Job[R]], ended: set[int]) -> Waited[R]:
    done = [job for place, job in enumerate(jobs) if place in ended]
    return Waited(done, [job for place, job in enumerate(jobs) if place not in ended])


def _time_is_up(jobs: list[Job[Any]], pending: list[Job[Any]], limit_s: float | None) -> ResultTimeout:
    where = ""
    if not only_asks(limit_s):
        connection, app = _connection_of(pending), pending[0]._app
        where = connection.whereabouts_of_one([job._id for job in pending], connection.broker, app.call_timeout)
    number = f"{len(pending)} of {len(jobs)} jobs {'has' if len(pending) == 1 else 'have'}"
    return ResultTimeout(
        f"{number} not ended in time, {pending[0]!r} among them; none was cancelled{where and f'; {where}'}"
    )
