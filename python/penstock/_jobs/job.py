"""Handle of a job, for the program that enqueued it."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Generator
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar, cast

from penstock._durations import Seconds, is_a, timeout_s
from penstock._habits import answer_habits
from penstock._jobs.current import format_id, own_headers
from penstock._jobs.info import AttemptError, JobInfo, JobState
from penstock._public import public
from penstock._values import envelope
from penstock._values.codec import register_job
from penstock._values.envelope import ErrorRecord, Success
from penstock._values.remote_errors import rebuild, shown_type
from penstock.errors import (
    CannotDecode,
    JobCancelled,
    JobExpired,
    NoSuchJob,
    PenstockError,
    ResultExpired,
    ResultTimeout,
    TooManyWaiting,
    WaitCycle,
    WorkerCrashed,
)

if TYPE_CHECKING:
    from penstock._connection import Connection, Ended, Run
    from penstock._jobs.progress import Progress, ProgressUpdates
    from penstock._tasks.app import App

R_co = TypeVar("R_co", covariant=True)
T = TypeVar("T")


# State of a job by the status of its end.
_END_STATES = {
    0: JobState.SUCCEEDED,
    1: JobState.FAILED,
    2: JobState.EXPIRED,
    3: JobState.CRASHED,
    4: JobState.CANCELLED,
    5: JobState.BLOCKED,
    6: JobState.REPLACED,
    # A group, whose id may have been used as a job's.
    7: JobState.SUCCEEDED,
}
_BLOCKED, _REPLACED, _GATHERED = 5, 6, 7
_CRASHED = "penstock.WorkerCrashed"
_HELD_STATES = {
    "ready": JobState.WAITING,
    "delayed": JobState.DELAYED,
    "running": JobState.RUNNING,
    "held": JobState.HELD,
    # Whether or not the job's error was stored as its result.
    "failed": JobState.FAILED,
    "blocked": JobState.BLOCKED,
    "cancelling": JobState.CANCELLING,
    # The job continues once the jobs that it waits for have ended.
    "parked": JobState.RUNNING,
}


@public
class Job(Generic[R_co]):
    """Enqueued call of a task. Equal to any other ``Job`` of the same id.

    ``await job`` is ``await job.aresult()``. A job can be pickled, and can be an argument or a result of a task: it is
    sent as its id.
    """

    __slots__ = ("__weakref__", "_app", "_id", "_known")

    def __init__(self, app: App, job_id: bytes, accepted: bool = False) -> None:
        self._app = app
        self._id = job_id
        # The end of the job, if `wait` or `as_completed` has seen it; else whether a broker has certainly accepted it.
        # One field for both keeps jobs small, since a bulk enqueue creates many.
        self._known: bool | tuple[int, bytes] = accepted

    @property
    def _accepted(self) -> bool:
        """Whether a broker has certainly accepted the job. If it is then unknown to the broker, it has ended."""
        return self._known is not False

    @property
    def _end(self) -> tuple[int, bytes] | None:
        return self._known if isinstance(self._known, tuple) else None

    @property
    def id(self) -> str:
        """UUID of version 7 as text, so ids sort by the time of enqueueing."""
        return format_id(self._id)

    @property
    def created(self) -> bool:
        """Whether the call that returned this handle created the job; False if it existed before (``unique``)."""
        return True

    def result(self, timeout: Seconds | None = None) -> R_co:
        """Wait for the job's end and return what the task returned.

        ``timeout``: seconds or a timedelta; with 0 it asks once without waiting. By default it waits forever, through
        restarts of the broker.

        Raises the task's own error if this process has imported its type, else ``TaskError``; in both cases
        ``__cause__`` is the remote traceback. Raises ``WorkerCrashed``, ``JobExpired`` or ``JobCancelled`` for jobs
        that ended that way, and ``GroupError`` when a job on which it depends has failed. Raises ``ResultExpired`` when
        the job has ended and its result is not kept, and ``NoSuchJob`` when the broker does not know the id. When the
        time is up, raises ``ResultTimeout``, or ``BrokerUnavailable`` or ``CallTimeout`` if no broker answered. If
        another call replaced the job, returns the result of that call.
        """
        limit_s = timeout_s("timeout", timeout)
        begun = time.monotonic()
        end = self._wait_for_end(limit_s)
        if end is not None and end[0] == _REPLACED:
            return self._replacement(end).result(_left_s(limit_s, begun))
        return self._outcome(end)

    def _wait_for_end(self, limit_s: float | None) -> Ended | tuple[int, bytes] | None:
        if self._end is not None:
            return self._end
        connection = self._app._connected()
        end: Ended | tuple[int, bytes] | None
        try:
            if limit_s is not None and limit_s <= 0:
                end = connection.peek(self._id, self._app.call_timeout)
            else:
                end = connection.wait(self._id, limit_s)
        except ResultTimeout:
            raise self._late(connection) from None
        except PenstockError as error:
            raise self._named(error) from None
        return end

    async def aresult(self, timeout: Seconds | None = None) -> R_co:
        """Like ``result``, but awaitable. Cancelling the await does not cancel the job."""
        limit_s = timeout_s("timeout", timeout)
        begun = time.monotonic()
        end = await self._await_end(limit_s)
        if end is not None and end[0] == _REPLACED:
            return await self._replacement(end).aresult(_left_s(limit_s, begun))
        return await self._aoutcome(end)

    async def _await_end(self, limit_s: float | None) -> Ended | tuple[int, bytes] | None:
        if self._end is not None:
            return self._end
        connection = self._app._connected()
        end: Ended | tuple[int, bytes] | None
        try:
            if limit_s is not None and limit_s <= 0:
                end = await connection.peek_async(self._id, self._app.call_timeout)
            else:
                end = await connection.watch(self._id, limit_s)
        except ResultTimeout:
            raise await in_thread(self._late, connection) from None
        except PenstockError as error:
            raise self._named(error) from None
        return end

    def __await__(self) -> Generator[Any, None, R_co]:
        return self.aresult().__await__()

    def done(self) -> bool:
        """Ask the broker whether the job has ended, in whatever way.

        Raises ``NoSuchJob`` when the broker does not know the id, and ``BrokerUnavailable`` or ``CallTimeout`` after
        ``app.call_timeout``.
        """
        if self._end is not None and self._end[0] != _REPLACED:
            return True
        try:
            end = self._app._connected().peek(self._id, self._app.call_timeout)
            return end is not None and (end[0] != _REPLACED or self._replacement(end).done())
        except PenstockError as error:
            return self._is_over(error)

    async def adone(self) -> bool:
        """Like ``done``, but awaitable."""
        if self._end is not None and self._end[0] != _REPLACED:
            return True
        try:
            end = await self._app._connected().peek_async(self._id, self._app.call_timeout)
            return end is not None and (end[0] != _REPLACED or await self._replacement(end).adone())
        except PenstockError as error:
            return self._is_over(error)

    def wait(self, timeout: Seconds | None = None, *, progress: bool = False) -> JobState:
        """Wait for the job's end and return its final state. Does not raise the task's error.

        ``timeout`` is as for ``result``. ``progress=True`` shows the job's progress on stderr while waiting: as a bar
        on a terminal, otherwise as a line every ten seconds. See ``CurrentJob.progress``. Raises ``ResultTimeout`` when
        the time is up. The state is ``ENDED`` when the result is not kept.
        """
        limit_s = timeout_s("timeout", timeout)
        if progress and self._end is None:
            from penstock._jobs.progress import wait_drawing

            wait_drawing(self, limit_s)
            limit_s = self._app.call_timeout
        connection = self._app._connected()
        try:
            end = self._end or connection.wait(self._id, limit_s)
        except ResultTimeout:
            raise self._late(connection) from None
        except ResultExpired as error:
            self._is_over(error)
            return JobState.ENDED
        except PenstockError as error:
            raise self._named(error) from None
        return _end_state(end[0])

    async def async_wait(self, timeout: Seconds | None = None, *, progress: bool = False) -> JobState:
        """Like ``wait``, but awaitable."""
        connection, limit_s = self._app._connected(), timeout_s("timeout", timeout)
        if progress and self._end is None:
            from penstock._jobs.progress import await_drawing

            await await_drawing(self, limit_s)
            limit_s = self._app.call_timeout
        try:
            end = self._end or await connection.watch(self._id, limit_s)
        except ResultTimeout:
            raise await in_thread(self._late, connection) from None
        except ResultExpired as error:
            self._is_over(error)
            return JobState.ENDED
        except PenstockError as error:
            raise self._named(error) from None
        return _end_state(end[0])

    def progress(self) -> Progress | None:
        """Return the latest progress that the job's code has reported: see ``CurrentJob.progress``.

        Returns None if it has reported none in this attempt, or is not running. For ended jobs, the broker keeps the
        progress of the last 1,000 that reported any. Raises ``NotOffered`` when the broker keeps no progress, and
        ``BrokerUnavailable`` or ``CallTimeout`` after ``app.call_timeout``.
        """
        from penstock._jobs.progress import decode

        return decode(self._app._connected().progress(self._id, self._app.call_timeout))

    async def aprogress(self) -> Progress | None:
        """Like ``progress``, but awaitable."""
        return await in_thread(self.progress)

    def progress_updates(self, timeout: Seconds | None = None) -> ProgressUpdates:
        """Iterate over changes of the job's progress until its end.

        Iterate with ``for`` or ``async for``. It asks ten times a second, so reports in between are skipped, but never
        the last one. ``timeout``: seconds or a timedelta for the whole iteration, which then raises ``ResultTimeout``.
        """
        from penstock._jobs.progress import ProgressUpdates

        return ProgressUpdates(self, timeout)

    def info(self) -> JobInfo:
        """Ask the broker for all details of the job.

        Task and queue are known for as long as the job's result is kept. Raises ``BrokerUnavailable`` or
        ``CallTimeout`` after ``app.call_timeout``.
        """
        connection, limit_s = self._app._connected(), self._app.call_timeout
        try:
            end, is_pending = self._peek(connection)
            if end is not None and _is_complete(end):
                return self._info_of_end(*end)
            held = connection.message_info(self._id, limit_s)
            if held is None and is_pending:
                # The job ended between the two queries.
                end, _ = self._peek(connection)
            return self._info_of_message(held, end)
        except PenstockError as error:
            raise self._named(error) from None

    async def ainfo(self) -> JobInfo:
        """Like ``info``, but awaitable."""
        connection, limit_s = self._app._connected(), self._app.call_timeout
        try:
            end, is_pending = await self._apeek(connection)
            if end is not None and _is_complete(end):
                return self._info_of_end(*end)
            held = await connection.message_info_async(self._id, limit_s)
            if held is None and is_pending:
                end, _ = await self._apeek(connection)
            return self._info_of_message(held, end)
        except PenstockError as error:
            raise self._named(error) from None

    def cancel(self, reason: str = "", *, running: Literal["ask", "kill", "leave"] = "ask") -> JobState:
        """Cancel the job, and return the state in which it was found. A job that has ended does not change.

        A waiting job ends at once and never starts. A running job is asked to stop, and the state is ``CANCELLING``:
        ``JobInterrupt`` is raised in it. It ends when that propagates out of the task; if it does not, the worker kills
        the job's process after ``--kill-grace``. If the job succeeds before it stops, its result stays.
        ``running="kill"`` kills the process at once. ``running="leave"`` does not touch a running job, and returns
        ``RUNNING``.

        Clients that wait for the result get ``JobCancelled`` with the ``reason``, which has at most 200 bytes. If a
        group has replaced the job, the jobs of the group are cancelled, and the job fails with a ``GroupError``.

        Raises ``NoSuchJob`` when the broker does not know the id, ``NotOffered`` when the broker cannot stop running
        jobs, and ``BrokerUnavailable`` or ``CallTimeout`` after ``app.call_timeout``.
        """
        check_cancel(reason, running)
        connection, limit_s = self._app._connected(), self._app.call_timeout
        try:
            found = connection.cancel(self._id, reason, running, limit_s)
        except PenstockError as error:
            raise self._named(error) from None
        return self._state_of(self.info()) if found is None else _HELD_STATES[found]

    async def acancel(self, reason: str = "", *, running: Literal["ask", "kill", "leave"] = "ask") -> JobState:
        """Like ``cancel``, but awaitable."""
        check_cancel(reason, running)
        connection, limit_s = self._app._connected(), self._app.call_timeout
        try:
            found = await connection.cancel_async(self._id, reason, running, limit_s)
        except PenstockError as error:
            raise self._named(error) from None
        return self._state_of(await self.ainfo()) if found is None else _HELD_STATES[found]

    def __eq__(self, other: object) -> bool:
        return self._id == other._id if isinstance(other, Job) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._id)

    def __repr__(self) -> str:
        return f"<Job {self.id}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickled, (self._app.name, self._app.url, self._id, self._accepted)

    def _replacement(self, end: Ended | tuple[int, bytes]) -> Job[R_co]:
        """Return the job that replaced this one."""
        return Job(self._app, end[1], True)

    def _peek(self, connection: Connection) -> tuple[Ended | None, bool]:
        """Return the end of the job, if it has ended and that is kept, and whether its end is still to come."""
        try:
            end = connection.peek(self._id, self._app.call_timeout)
        except ResultExpired:
            return None, False
        return end, end is None

    async def _apeek(self, connection: Connection) -> tuple[Ended | None, bool]:
        try:
            end = await connection.peek_async(self._id, self._app.call_timeout)
        except ResultExpired:
            return None, False
        return end, end is None

    def _named(self, error: PenstockError) -> PenstockError:
        """Return the error with the job's id in front of its message."""
        if isinstance(error, ResultExpired):
            return self._expired()
        if isinstance(error, WaitCycle | TooManyWaiting):
            # The message names the waiting job already.
            return error
        text, *more = error.args
        error.args = (f"job {self.id}: {text}", *more)
        return error

    def _late(self, connection: Connection) -> ResultTimeout:
        """Make the error for a job that has not ended in time, with the job's whereabouts."""
        try:
            where = connection.whereabouts(self._id, self._broker(), self._app.call_timeout)
        except PenstockError as error:
            where = f"its broker does not say where it is ({error})"
        return ResultTimeout(
            f"job {self.id}: it did not end in time, and was not cancelled: {where}."
            " Ask for its result again to keep waiting"
        )

    def _expired(self) -> PenstockError:
        if self._accepted:
            return ResultExpired(
                f"job {self.id}: it has ended and its result is not kept: it was enqueued with store_result=False, has"
                " outlived its result_ttl, or was evicted"
            )
        return self._unknown()

    def _unknown(self) -> NoSuchJob:
        return NoSuchJob(
            f"job {self.id}: the broker at {self._broker()} does not know it: it never existed, or it has ended and its"
            " result is not kept"
        )

    def _broker(self) -> str:
        """Name the broker for messages, with its full directory where this process is connected to it."""
        connection = self._app._connection
        return self._app.url if connection is None else connection.broker

    def _is_over(self, error: PenstockError) -> bool:
        """Return whether the error means that the job has ended; raise it otherwise."""
        if isinstance(error, ResultExpired) and self._accepted:
            return True
        raise self._named(error) from None

    def _state_of(self, info: JobInfo) -> JobState:
        if info.state is JobState.UNKNOWN:
            raise self._unknown()
        return info.state

    def _outcome(self, end: Ended | tuple[int, bytes] | None) -> R_co:
        if end is None:
            raise ResultTimeout(f"job {self.id}: it has not ended yet")
        status, body = end[:2]
        state = _end_state(status)
        if status in (_BLOCKED, _GATHERED):
            # Imported here because programs without workflows do not need it.
            from penstock._flows.results import finish, outcome

            return cast(R_co, finish(self._app, outcome(self._app, self._id, status, body), self._app.call_timeout))
        if state is JobState.SUCCEEDED:
            success = envelope.decode_success(body)
            return self._decoded(success)
        if state is JobState.FAILED:
            last = envelope.decode_error(envelope.decode_failure(body).notes[-1])
            raise rebuild(last, self._app._plain_codec)
        reason = body.decode(errors="replace")
        if state is JobState.CRASHED:
            raise WorkerCrashed(f"job {self.id}: {reason or 'its worker process died'}")
        if state is JobState.EXPIRED:
            raise JobExpired(f"job {self.id} was not started before it expired")
        raise JobCancelled(f"job {self.id}: {reason or 'it was cancelled'}")

    async def _aoutcome(self, end: Ended | tuple[int, bytes] | None) -> R_co:
        """Like ``_outcome``, but awaitable: a group asks the broker for its jobs."""
        if end is None or end[0] not in (_BLOCKED, _GATHERED):
            return self._outcome(end)
        from penstock._flows.results import afinish, outcome

        status, body = end[:2]
        value = await afinish(self._app, outcome(self._app, self._id, status, body), self._app.call_timeout)
        return cast(R_co, value)

    def _decoded(self, success: Success) -> R_co:
        try:
            return cast(R_co, self._app._codec_of(success.task).decode(success.result))
        except CannotDecode as error:
            known = success.task in self._app.tasks
            advice = "this process has another version of the task" if known else "import the module that defines it"
            raise CannotDecode(
                f"job {self.id}: the result of {success.task} can't be read here: {error}; {advice}. The job succeeded,"
                " and its result is kept"
            ) from error

    def _info_of_end(self, status: int, body: bytes, run: Run | None) -> JobInfo:
        info = self._info_of_value(status, body)
        if run is None:
            return info
        task, queue, _, generation, ended_at_ms = run
        finished_at = info.finished_at or _time(ended_at_ms)
        return replace(info, task=info.task or task, queue=queue, finished_at=finished_at, generation=generation)

    def _info_of_value(self, status: int, body: bytes) -> JobInfo:
        state = _end_state(status)
        if status == _GATHERED:
            return JobInfo(id=self.id, state=state, enqueued_at=_time_of_id(self._id))
        if status == _BLOCKED:
            why = "a job on which it depends has failed"
            return JobInfo(id=self.id, state=state, enqueued_at=_time_of_id(self._id), error=why)
        if state is JobState.SUCCEEDED:
            success = envelope.decode_success(body)
            errors = _errors(success.notes)
            return JobInfo(
                id=self.id,
                state=state,
                task=success.task,
                attempts=success.attempt + success.crashes + 1,
                crashes=success.crashes,
                enqueued_at=_time(success.enqueued_ms),
                started_at=_time(success.started_ms),
                finished_at=_time(success.finished_ms),
                worker=success.worker,
                errors=errors,
                error=_summary(errors),
            )
        if state is JobState.FAILED:
            failure = envelope.decode_failure(body)
            errors = _errors(failure.notes)
            return JobInfo(
                id=self.id,
                state=state,
                task=failure.task,
                attempts=errors[-1].attempt + failure.crashes,
                crashes=failure.crashes,
                enqueued_at=_time(failure.enqueued_ms),
                started_at=errors[-1].started_at,
                finished_at=errors[-1].finished_at,
                worker=errors[-1].worker,
                errors=errors,
                error=_summary(errors),
            )
        if status == _REPLACED:
            why = f"job {format_id(body)} took its place"
            return JobInfo(id=self.id, state=state, enqueued_at=_time_of_id(self._id), error=why)
        reason = body.decode(errors="replace") or None
        return JobInfo(id=self.id, state=state, enqueued_at=_time_of_id(self._id), error=reason)

    def _info_of_message(self, held: dict[str, Any] | None, end: Ended | None) -> JobInfo:
        """Build the details of a job that the broker holds, with its end if that is known."""
        nothing = JobState.ENDED if self._accepted else JobState.UNKNOWN
        known = JobInfo(id=self.id, state=nothing) if end is None else self._info_of_end(*end)
        if held is None:
            return known
        errors = _errors(held["notes"])
        state = _HELD_STATES[held["state"]] if end is None else known.state
        # The number of failed attempts for a waiting job; one more for a job that runs or has failed for good.
        crashed = bool(errors) and errors[-1].type_name == _CRASHED
        begun = state in (JobState.RUNNING, JobState.CANCELLING) or (state is JobState.FAILED and not crashed)
        failed_at = _time(held["failed_at_ms"])
        return replace(
            known,
            state=state,
            task=held["task"],
            queue=held["queue"],
            attempts=held["attempt"] + held["crashes"] + begun,
            crashes=held["crashes"],
            enqueued_at=_time(held["enqueued_at_ms"]),
            due_at=_time(held["due_at_ms"]) if state is JobState.DELAYED else None,
            started_at=_time(held["started_at_ms"]) or (errors[-1].started_at if errors else None),
            finished_at=(errors[-1].finished_at if errors and state is JobState.FAILED else None) or failed_at,
            worker=held["worker"] or (errors[-1].worker if errors else None),
            errors=errors,
            error=known.error or _summary(errors) or held["failure"],
            generation=held["generation"],
            headers=own_headers(held["headers"]),
        )


answer_habits(Job)


class _Existing(Job[R_co]):
    """Job that existed before the call that returned it."""

    __slots__ = ()

    @property
    def created(self) -> bool:
        return False


def job_of(app: App, given: bytes | tuple[bytes]) -> Job[Any]:
    """Return the job of a call: a new one, or the existing one that holds the call's key."""
    return Job(app, given, True) if isinstance(given, bytes) else _Existing(app, given[0], True)


def _left_s(limit_s: float | None, begun: float) -> float | None:
    return None if limit_s is None else max(0.0, limit_s - (time.monotonic() - begun))


async def in_thread(function: Callable[..., T], *args: object) -> T:
    import asyncio

    return await asyncio.to_thread(function, *args)


register_job(Job, lambda job: job._id)
register_job(_Existing, lambda job: job._id)

# Apps by their original name and URL, for unpickling jobs.
_apps: weakref.WeakValueDictionary[tuple[str, str], App] = weakref.WeakValueDictionary()


def remember_app(app: App) -> None:
    _apps[app.name, app.url] = app


def app_of(name: str, url: str) -> App:
    """Return this process's app of this name and broker, or else a new one, for unpickling."""
    app = _apps.get((name, url))
    if app is None:
        from penstock._tasks.app import App

        app = App(name, url)
    return app


def _unpickled(name: str, url: str, job_id: bytes, accepted: bool) -> Job[Any]:
    return Job(app_of(name, url), job_id, accepted)


def check_cancel(reason: str, running: str) -> None:
    if not is_a(reason, str):
        raise TypeError(f"the reason of a cancellation must be a string, not {reason!r}")
    if len(reason.encode(errors="replace")) > _LONGEST_REASON:
        raise ValueError(
            f"the reason of a cancellation may have at most {_LONGEST_REASON} bytes, not {len(reason.encode())}"
        )
    if running not in ("ask", "kill", "leave"):
        raise ValueError(f'running must be "ask", "kill" or "leave", not {running!r}')


_LONGEST_REASON = 200


def _is_complete(end: Ended) -> bool:
    """Whether a job's end includes all of its details. For a failed job, the broker knows more."""
    return _end_state(end[0]) not in (JobState.FAILED, JobState.CRASHED, JobState.BLOCKED)


def _end_state(status: int) -> JobState:
    state = _END_STATES.get(status)
    if state is not None:
        return state
    raise PenstockError(
        "the job ended in a way that this version of penstock does not know: install the broker's version here"
    )


def job_id_of(text: str) -> bytes:
    if not is_a(text, str):
        raise TypeError(f"a job id must be a string such as Job.id, not {text!r}")
    digits = text.replace("-", "")
    try:
        job_id = bytes.fromhex(digits)
    except ValueError:
        job_id = b""
    if len(digits) != 32 or len(job_id) != 16:
        raise ValueError(f"a job id must have 32 hexadecimal digits, with or without hyphens, not {text!r}")
    return job_id


def _errors(notes: list[bytes]) -> tuple[AttemptError, ...]:
    errors: list[AttemptError] = []
    attempt = 1
    for note in notes:
        found = envelope.read_note(note)
        if isinstance(found, str):
            errors.append(AttemptError(attempt, _CRASHED, found))
        else:
            errors.append(_attempt_error(found))
            attempt = found.attempt + 2
    return tuple(errors)


def _attempt_error(record: ErrorRecord) -> AttemptError:
    return AttemptError(
        attempt=record.attempt + 1,
        type_name=shown_type(record),
        message=record.message,
        traceback=record.traceback,
        worker=record.worker,
        started_at=_utc(record.started_ms),
        finished_at=_utc(record.finished_ms),
    )


def _summary(errors: tuple[AttemptError, ...]) -> str | None:
    if not errors:
        return None
    last = errors[-1]
    return f"{last.type_name}: {last.message}" if last.message else last.type_name


def _utc(epoch_ms: int) -> datetime:
    return datetime.fromtimestamp(epoch_ms / 1000, UTC)


def _time(epoch_ms: int | None) -> datetime | None:
    return _utc(epoch_ms) if epoch_ms else None


def _time_of_id(job_id: bytes) -> datetime:
    return _utc(int.from_bytes(job_id[:6]))
