"""Schedules: jobs that the broker creates automatically, at set times."""

# No `from __future__ import annotations`: see `_public.py`.
import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar

from penstock import _core
from penstock._durations import Seconds, duration_ms, epoch_ms, is_a
from penstock._flows.steps import Signature
from penstock._jobs.job import Job
from penstock._public import public
from penstock._tasks.task import AnyTask, may_replace

if TYPE_CHECKING:
    from penstock._tasks.app import App

Overlap: TypeAlias = Literal["skip", "queue", "cancel_previous", "allow"]
CatchUp: TypeAlias = Literal["once", "skip", "all"]

T = TypeVar("T", bound=AnyTask[..., Any])

# Number of upcoming times to ask the broker for.
_TIMES = 5


@dataclass(frozen=True, slots=True)
class Periodic:
    """Schedule that code declares."""

    name: str
    task: AnyTask[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    timing: _core.Timing

    def declaration(self, app: "App", started_ms: int) -> str:
        """Return the declaration that a starting worker sends to the broker. Raises ``TypeError`` for bad arguments."""
        options, body = self.job()
        return _core.declare_schedule(app.name, self.name, self.timing, options, body, app.version, started_ms)

    def job(self) -> tuple[_core.Options, bytes]:
        """Return the options and the body of the schedule's jobs."""
        return self.task._core_options, self.task._encode(self.args, dict(self.kwargs))


def timing_of(
    app: "App",
    cron: str | None,
    every: Seconds | None,
    at: datetime | None,
    tz: str | None,
    jitter: Seconds,
    overlap: str,
    catchup: str,
    window: Seconds,
) -> _core.Timing:
    """Check the times of a schedule. Raises ``TypeError`` or ``ValueError``."""
    for what, text in (("the line of cron", cron), ("tz", tz)):
        if text is not None and not is_a(text, str):
            raise TypeError(f"{what} must be a string, not {text!r}")
    return _core.Timing(
        cron=cron,
        every_ms=None if every is None else duration_ms("every", every),
        at_ms=None if at is None else epoch_ms("at", at),
        zone=app.tz if tz is None else tz,
        jitter_ms=duration_ms("jitter", jitter),
        overlap=str(overlap),
        catchup=str(catchup),
        window_ms=duration_ms("window", window),
    )


def declaring(
    app: "App", name: str | None, args: Iterable[Any], kwargs: Mapping[str, Any] | None, timing: _core.Timing
) -> Callable[[T], T]:
    """Return the decorator of ``App.periodic``."""

    def declare(task: T) -> T:
        if not is_a(task, AnyTask):
            raise TypeError(f"@app.periodic(...) goes above @app.task(...): it takes a task, not {task!r}")
        if task.app is not app:
            raise ValueError(f"{task.name} belongs to {task.app!r}: schedule it with that app")
        given = task.name if name is None else name
        other = app._periodic.get(given)
        is_reloaded = other is not None and other.task is not task and may_replace(task.function, other.task.function)
        if other is not None and not is_reloaded:
            raise ValueError(f"two schedules are called {given!r}: rename one of them with @app.periodic(name=...)")
        app._periodic[given] = Periodic(given, task, (*args,), dict(kwargs or {}), timing)
        return task

    if name is not None and (not is_a(name, str) or not name):
        raise TypeError(f"the name of a schedule must be a string, not {name!r}")
    return declare


@public
@dataclass(frozen=True, slots=True)
class ScheduleInfo:
    """Schedule as the broker has it: see ``App.schedules``. Times are in UTC."""

    name: str
    task: str
    queue: str
    cron: str | None
    """Cron line; None for an interval and for a single time."""
    every: timedelta | None
    at: datetime | None
    tz: str
    """Time zone of the cron line."""
    jitter: timedelta
    overlap: str
    catchup: str
    window: timedelta
    paused: bool
    is_set: bool
    """Whether a person or a program has set the schedule. That overrides a declaration in code."""
    is_declared: bool
    """Whether code declares the schedule."""
    next: tuple[datetime, ...]
    """Next five times; empty while the schedule is paused."""
    last_at: datetime | None
    """Last time at which a job was created."""
    last_job: str | None
    """Id of that job."""
    running: bool
    """Whether that job has yet to end."""
    queued: bool
    """Whether the next job waits for the end of that one."""
    skipped_at: datetime | None
    """Last time at which no job was created."""
    skipped_why: str | None
    """Reason why it had no job: ``"overlap"`` (an earlier job had not ended), ``"queue_full"``, or ``"missed"`` (no
    broker ran)."""
    fired: int
    """Number of times at which jobs were created."""
    skipped: int
    """Number of times without a job because of an earlier job or a full queue."""
    missed: int
    """Number of times that passed while no broker ran, and got no job afterwards."""


@public
class Schedules:
    """Schedules of an app in the broker: see ``App.schedules``.

    Every use asks the broker again. Iterating, with ``for`` or ``async for``, yields a ``ScheduleInfo`` for each,
    sorted by name.
    """

    def __init__(self, app: "App") -> None:
        self._app = app

    def __iter__(self) -> Iterator[ScheduleInfo]:
        found, after = self._page(None)
        yield from found
        while after is not None:
            found, after = self._page(after)
            yield from found

    async def __aiter__(self) -> AsyncIterator[ScheduleInfo]:
        for schedule in await asyncio.to_thread(list, self):
            yield schedule

    def get(self, name: str) -> ScheduleInfo | None:
        """Return the schedule of this name, or None."""
        found, _ = self._page(None, name)
        return found[0] if found else None

    async def aget(self, name: str) -> ScheduleInfo | None:
        """Like ``get``, but awaitable."""
        return await asyncio.to_thread(self.get, name)

    def set(
        self,
        name: str,
        call: Signature[Any],
        cron: str | None = None,
        *,
        every: Seconds | None = None,
        at: datetime | None = None,
        tz: str | None = None,
        overlap: Overlap = "skip",
        catchup: CatchUp = "once",
        window: Seconds = 3600.0,
        jitter: Seconds = 0.0,
    ) -> None:
        """Create or change a schedule: ``app.schedules.set("nightly", report.s("all"), "30 2 * * *")``.

        ``call``: the call that each job runs, with its options. The other arguments are as for ``App.periodic``. If
        code declares a schedule of this name, this one overrides it until ``reset``. Changed times apply from now on.
        """
        if not is_a(call, Signature) or call.task.app is not self._app:
            raise TypeError(f"schedules.set takes a call of a task of this app, such as send.s(1), not {call!r}")
        if call._links:
            raise TypeError(f"{call!r} has callbacks, but a schedule enqueues single calls")
        timing = timing_of(self._app, cron, every, at, tz, jitter, overlap, catchup, window)
        options, body = call._prepare()
        self._order(name, "set", (timing, options, body))

    async def aset(
        self,
        name: str,
        call: Signature[Any],
        cron: str | None = None,
        *,
        every: Seconds | None = None,
        at: datetime | None = None,
        tz: str | None = None,
        overlap: Overlap = "skip",
        catchup: CatchUp = "once",
        window: Seconds = 3600.0,
        jitter: Seconds = 0.0,
    ) -> None:
        """Like ``set``, but awaitable."""
        await asyncio.to_thread(
            self.set,
            name,
            call,
            cron,
            every=every,
            at=at,
            tz=tz,
            overlap=overlap,
            catchup=catchup,
            window=window,
            jitter=jitter,
        )

    def pause(self, name: str) -> None:
        """Create no more jobs until ``resume``. Times in between do not count as missed."""
        self._order(name, "pause")

    async def apause(self, name: str) -> None:
        """Like ``pause``, but awaitable."""
        await asyncio.to_thread(self.pause, name)

    def resume(self, name: str) -> None:
        """Continue with the next time after now."""
        self._order(name, "resume")

    async def aresume(self, name: str) -> None:
        """Like ``resume``, but awaitable."""
        await asyncio.to_thread(self.resume, name)

    def run(self, name: str) -> Job[Any] | None:
        """Create a job at once and return it, without changing the schedule's times.

        Returns None when the new job has to wait for the end of the last one, as with ``overlap="queue"``. Raises
        ``ValueError`` while the last job has not ended when ``overlap`` is ``"skip"``.
        """
        job_id = self._order(name, "run")
        return None if job_id is None else Job(self._app, job_id, True)

    async def arun(self, name: str) -> Job[Any] | None:
        """Like ``run``, but awaitable."""
        return await asyncio.to_thread(self.run, name)

    def reset(self, name: str) -> None:
        """Restore the schedule that code declares, and undo ``pause`` and ``set``."""
        self._order(name, "reset")

    async def areset(self, name: str) -> None:
        """Like ``reset``, but awaitable."""
        await asyncio.to_thread(self.reset, name)

    def remove(self, name: str) -> None:
        """Remove a schedule but not its jobs. A worker whose code declares it adds it again when it starts."""
        self._order(name, "remove")

    async def aremove(self, name: str) -> None:
        """Like ``remove``, but awaitable."""
        await asyncio.to_thread(self.remove, name)

    def _order(
        self, name: str, order: str, call: tuple[_core.Timing, _core.Options, bytes] | None = None
    ) -> bytes | None:
        if not is_a(name, str) or not name:
            raise TypeError(f"the name of a schedule must be a string, not {name!r}")
        app = self._app
        return app._connected().order_schedule(app.name, name, order, call, app.call_timeout)

    def _page(self, after: str | None, name: str | None = None) -> tuple[list[ScheduleInfo], str | None]:
        app = self._app
        found, following = app._connected().schedules(app.name, name, after, _TIMES, app.call_timeout)
        return [_info(json.loads(text)) for text in found], following

    def __repr__(self) -> str:
        return f"<Schedules of {self._app!r}>"


def _info(given: Mapping[str, Any]) -> ScheduleInfo:
    every = given["every_ms"]
    return ScheduleInfo(
        name=given["name"],
        task=given["task"],
        queue=given["queue"],
        cron=given["cron"],
        every=None if every is None else timedelta(milliseconds=every),
        at=_moment(given["at_ms"]),
        tz=given["zone"],
        jitter=timedelta(milliseconds=given["jitter_ms"]),
        overlap=given["overlap"],
        catchup=given["catchup"],
        window=timedelta(milliseconds=given["window_ms"]),
        paused=given["paused"],
        is_set=given["set"],
        is_declared=given["declared"],
        next=tuple(datetime.fromtimestamp(ms / 1000, UTC) for ms in given["next_ms"]),
        last_at=_moment(given["last_ms"]),
        last_job=given["last_job"],
        running=given["running"],
        queued=given["queued"],
        skipped_at=_moment(given["skipped_ms"]),
        skipped_why=given["skipped_why"],
        fired=given["fired"],
        skipped=given["skipped"],
        missed=given["missed"],
    )


def _moment(ms: int | None) -> datetime | None:
    return None if ms is None else datetime.fromtimestamp(ms / 1000, UTC)
