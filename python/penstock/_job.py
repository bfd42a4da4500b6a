"""A job, seen from whoever enqueued it."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from penstock import _envelope
from penstock._current import format_id
from penstock._durations import Seconds, timeout_s
from penstock._envelope import ErrorRecord, Success
from penstock._info import AttemptError, JobInfo, JobState
from penstock._public import public
from penstock._remote_errors import rebuild, shown_type
from penstock.errors import (
    CannotDecode,
    JobCancelled,
    JobExpired,
    PenstockError,
    ResultExpired,
    ResultTimeout,
    WorkerCrashed,
)

if TYPE_CHECKING:
    from penstock._app import App
    from penstock._connection import Ended, Run

R_co = TypeVar("R_co", covariant=True)


# By the status that the broker gives a job's end.
_END_STATES = (JobState.SUCCEEDED, JobState.FAILED, JobState.EXPIRED, JobState.CRASHED, JobState.CANCELLED)
_CRASHED = "penstock.WorkerCrashed"
_HELD_STATES = {
    "ready": JobState.WAITING,
    "delayed": JobState.DELAYED,
    "running": JobState.RUNNING,
    "held": JobState.HELD,
    # Whether or not its error was stored as its result.
    "failed": JobState.FAILED,
    "blocked": JobState.BLOCKED,
    # It runs until it notices.
    "cancelling": JobState.RUNNING,
    # Its run goes on once the jobs that it waits for have ended.
    "parked": JobState.RUNNING,
}


@public
class Job(Generic[R_co]):
    """One call of a task. Equal to any other ``Job`` of the same id.

    ``await job`` gives what ``result()`` gives, in an event loop and without a time limit.
    """

    __slots__ = ("_app", "_id")

    def __init__(self, app: App, job_id: bytes) -> None:
        self._app = app
        self._id = job_id

    @property
    def id(self) -> str:
        """A UUID (version 7), so ids sort by the time of enqueueing."""
        return format_id(self._id)

    def result(self, timeout: Seconds | None = None) -> R_co:
        """Wait for the job's end and return what the task returned.

        ``timeout``: seconds or a timedelta; 0 only asks whether it has ended. By default it waits as long as it takes,
        through restarts of the broker.
        Raises the task's own error if this process has imported its type, else ``TaskError``, in both
        cases from the remote traceback; ``WorkerCrashed``, ``JobExpired``, ``JobCancelled``;
        ``ResultExpired`` when there is no result and none will come; ``ResultTimeout`` when the time
        is up, and ``BrokerUnavailable`` or ``CallTimeout`` when it is up and no broker has answered.
        """
        connection, limit_s = self._app._connected(), timeout_s("timeout", timeout)
        end: Ended | tuple[int, bytes] | None
        try:
            if limit_s is not None and limit_s <= 0:
                end = connection.peek(self._id, self._app.call_timeout)
            else:
                end = connection.wait(self._id, limit_s)
        except PenstockError as error:
            self._name(error)
            raise
        return self._outcome(end)

    async def aresult(self, timeout: Seconds | None = None) -> R_co:
        """As ``result``, for an event loop. Cancelling it does not cancel the job."""
        connection, limit_s = self._app._connected(), timeout_s("timeout", timeout)
        end: Ended | tuple[int, bytes] | None
        try:
            if limit_s is not None and limit_s <= 0:
                end = await connection.peek_async(self._id, self._app.call_timeout)
            else:
                end = await connection.watch(self._id, limit_s)
        except PenstockError as error:
            self._name(error)
            raise
        return self._outcome(end)

    def __await__(self) -> Generator[Any, None, R_co]:
        return self.aresult().__await__()

    @property
    def state(self) -> JobState:
        """Ask the broker. Raises ``BrokerUnavailable`` or ``CallTimeout`` after ``app.call_timeout``."""
        return self.info().state

    def info(self) -> JobInfo:
        """Ask the broker for all that it knows.

        Raises ``BrokerUnavailable`` or ``CallTimeout`` after ``app.call_timeout``.
        """
        connection, limit_s = self._app._connected(), self._app.call_timeout
        try:
            try:
                end = connection.peek(self._id, limit_s)
            except ResultExpired:
                end = None
            if end is not None and _tells_all(end):
                return self._info_of_end(*end)
            return self._info_of_message(connection.message_info(self._id, limit_s), end)
        except PenstockError as error:
            self._name(error)
            raise

    async def ainfo(self) -> JobInfo:
        """As ``info``, for an event loop."""
        connection, limit_s = self._app._connected(), self._app.call_timeout
        try:
            try:
                end = await connection.peek_async(self._id, limit_s)
            except ResultExpired:
                end = None
            if end is not None and _tells_all(end):
                return self._info_of_end(*end)
            return self._info_of_message(await connection.message_info_async(self._id, limit_s), end)
        except PenstockError as error:
            self._name(error)
            raise

    def __eq__(self, other: object) -> bool:
        return self._id == other._id if isinstance(other, Job) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._id)

    def __repr__(self) -> str:
        return f"<Job {self.id}>"

    def _name(self, error: PenstockError) -> None:
        """Let the text of an error begin with the job that it is about."""
        text, *more = error.args
        error.args = (f"job {self.id}: {text}", *more)

    def _outcome(self, end: Ended | tuple[int, bytes] | None) -> R_co:
        if end is None:
            raise ResultTimeout(f"job {self.id}: it has not ended yet")
        status, body = end[:2]
        state = _end_state(status)
        if state is JobState.SUCCEEDED:
            success = _envelope.decode_success(body)
            return self._decoded(success)
        if state is JobState.FAILED:
            last = _envelope.decode_error(_envelope.decode_failure(body).notes[-1])
            raise rebuild(last, self._app._plain_codec)
        reason = body.decode(errors="replace")
        if state is JobState.CRASHED:
            raise WorkerCrashed(f"job {self.id}: {reason or 'its worker process died'}")
        if state is JobState.EXPIRED:
            raise JobExpired(f"job {self.id} was not started before it expired")
        raise JobCancelled(f"job {self.id}: {reason or 'it was cancelled'}")

    def _decoded(self, success: Success) -> R_co:
        try:
            return cast(R_co, self._app._codec_of(success.task).decode(success.result))
        except CannotDecode as error:
            known = success.task in self._app.tasks
            advice = "this version of it is another one" if known else "import the module that defines it"
            raise CannotDecode(
                f"job {self.id}: the result of {success.task} can't be read here: {error}; {advice}. The job succeeded,"
                " and its result is kept"
            ) from error

    def _info_of_end(self, status: int, body: bytes, run: Run | None) -> JobInfo:
        info = self._info_of_value(_end_state(status), body)
        if run is None:
            return info
        task, queue, _, generation, ended_at_ms = run
        finished_at = info.finished_at or _time(ended_at_ms)
        return replace(info, task=info.task or task, queue=queue, finished_at=finished_at, generation=generation)

    def _info_of_value(self, state: JobState, body: bytes) -> JobInfo:
        if state is JobState.SUCCEEDED:
            success = _envelope.decode_success(body)
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
            failure = _envelope.decode_failure(body)
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
        reason = body.decode(errors="replace") or None
        return JobInfo(id=self.id, state=state, enqueued_at=_time_of_id(self._id), error=reason)

    def _info_of_message(self, held: dict[str, Any] | None, end: Ended | None) -> JobInfo:
        """What the broker holds of a job, with how it has ended if that is known."""
        known = JobInfo(id=self.id, state=JobState.GONE) if end is None else self._info_of_end(*end)
        if held is None:
            return known
        errors = _errors(held["notes"])
        state = _HELD_STATES[held["state"]] if end is None else known.state
        # Of a job that waits, the attempts that have failed; of one that runs or has raised for the last time,
        # one more.
        crashed = bool(errors) and errors[-1].type_name == _CRASHED
        begun = state is JobState.RUNNING or (state is JobState.FAILED and not crashed)
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
        )


def _tells_all(end: Ended) -> bool:
    """Whether a job's end says itself what there is to say; of a crash the broker knows more."""
    return _end_state(end[0]) is not JobState.CRASHED


def _end_state(status: int) -> JobState:
    if status < len(_END_STATES):
        return _END_STATES[status]
    raise PenstockError(
        "the job has ended in a way that this client is too old for: install the broker's penstock here"
    )


def job_id_of(text: str) -> bytes:
    if not isinstance(text, str):
        raise TypeError(f"a job id is a text, as Job.id gives it, not {text!r}")
    digits = text.replace("-", "")
    try:
        job_id = bytes.fromhex(digits)
    except ValueError:
        job_id = b""
    if len(digits) != 32 or len(job_id) != 16:
        raise ValueError(f"a job id is 32 hexadecimal digits, with or without hyphens, not {text!r}")
    return job_id


def _errors(notes: list[bytes]) -> tuple[AttemptError, ...]:
    errors: list[AttemptError] = []
    attempt = 1
    for note in notes:
        found = _envelope.read_note(note)
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
