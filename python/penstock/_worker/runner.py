"""Runs attempts of jobs in a worker: from the bytes of a job's body to its outcome."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import difflib
import logging
import random
import time
import traceback
from collections.abc import Coroutine, Mapping, Sequence
from types import CoroutineType, TracebackType
from typing import TYPE_CHECKING, Any, TypeAlias

from penstock._flows.results import afinish, finish
from penstock._jobs.current import (
    DEPTH,
    MARK,
    NO_EXTRAS,
    Extras,
    Replacement,
    current_job,
    format_id,
    leaving,
    own_headers,
    running,
)
from penstock._jobs.interrupts import CANCEL, HARD, JobInterrupt
from penstock._jobs.listing import Listing, listing_of
from penstock._tasks.headers import inherit
from penstock._tasks.retries import Retry
from penstock._values import envelope
from penstock._values.envelope import ErrorRecord, Failure
from penstock._values.masking import NOTHING_SECRET, Masking, masking_of
from penstock._values.preview import preview_of
from penstock._values.remote_errors import below, message_of, record_of, traceback_of
from penstock._worker.steps import arguments_of, begin, is_step
from penstock.errors import ArgumentMismatch, SoftTimeout, TaskTimeout, UnknownTask, WaitCycle

if TYPE_CHECKING:
    from penstock._core import SlotLink
    from penstock._tasks.app import App
    from penstock._tasks.task import AnyTask

logger = logging.getLogger("penstock.job")

# Looked up once, because each lookup costs 2 % of a short job, and a task that breaks a module must not break these.
_is_logged, _time_ns, _copy_context = logger.isEnabledFor, time.time_ns, contextvars.copy_context

# Typed explicitly, because type checkers see unknown type arguments in the bare class.
_COROUTINE: type[Any] = CoroutineType

SUCCEEDED, RETRY, FAILED, GIVEN_BACK, DEFERRED = range(5)
CANCELLED, REPLACED, SPAWNED = 6, 7, 8

# Header of a job that must not run again, because its time was over and its process had to be killed. Its value is the
# message. Only this worker's supervisor sets it (crates/penstock-worker/src/supervisor/orders.rs).
_OVER = "penstock.over"

# First delay before retrying a job of another version. It doubles each time, plus up to a fifth at random.
_DEFERRED_FOR_S = 30.0
_DEFERRED_AT_MOST_S = 120.0

Delivered: TypeAlias = tuple[str, bytes, int, int, bool, bool, int, bytes, list[bytes], Extras | None]
"""(task, job id, attempt, crashes, redelivered, wants_result, enqueued_at_ms, body, notes, extras): an attempt of a job
from the supervisor. ``attempt`` counts from 0; ``notes`` are the records of earlier attempts; ``extras`` is None for
most jobs."""

Outcome: TypeAlias = tuple[int, int, bytes | None, bytes | None, Listing | None]
"""(kind, delay_ms, value, note, listing): the value is the result, the note is the record of this attempt's error, and
the listing describes a failed job in lists."""


class GiveBack(BaseException):
    """Raised by a signal handler in the middle of a job, to stop it without using up an attempt."""


class _Over(JobInterrupt):
    """Raised instead of running a task whose time was over in a process that was killed."""


class Runner:
    """Runs jobs of some apps: one at a time with ``run``, or any number with ``run_on_loop``. ``worker``: name of the
    worker, for people."""

    def __init__(self, apps: Sequence[App], worker: str) -> None:
        self._apps = apps
        # For a single app this is its own dictionary, which may still grow. Tasks of several apps have distinct names.
        self._tasks: Mapping[str, AnyTask[..., Any]]
        self._tasks = apps[0].tasks if len(apps) == 1 else {k: task for app in apps for k, task in app.tasks.items()}
        self._worker = worker
        self._loop: asyncio.Runner | None = None
        # The coroutine that runs on that loop.
        self.awaited: Coroutine[Any, Any, Any] | None = None
        # Slot with the orders to the job that `run` runs; None where there are no orders.
        self.slot: SlotLink | None = None
        # Set when even an error could not be recorded, for example after a task replaced a built-in function.
        self.is_unsound = False

    def run(self, job: Delivered) -> Outcome:
        """Run one attempt. Never raises, whatever the task, its error or the app's logging raises."""
        # The path of a successful job is inlined here, without an `_Attempt` and with one pass over its result. That
        # saves two fifths of the cost.
        task, job_id, attempt, crashes, redelivered, _, _, body, _, extras = job
        started_ms = _time_ns() // 1_000_000
        try:
            known: Any = self._tasks.get(task)
            if known is None:
                return _Attempt(self, job, started_ms, self.slot).fail(self._unknown(task))
            try:
                if extras is None or not is_step(extras):
                    args, kwargs = known.arguments.decode(body)
                else:
                    known, args, kwargs = finish(known.app, begin(known, body, extras), None)
            except ArgumentMismatch as error:
                return _Attempt(self, job, started_ms, self.slot).defer_or_fail(error, known)
            context = _copy_context()
            try:
                value = context.run(
                    _call if known.app._run_layers is None else _call_within,
                    known,
                    args,
                    kwargs,
                    (job_id, attempt, extras, crashes, redelivered, known, self._worker),
                )
                if type(value) is _COROUTINE:
                    value = self._await(value, extras, context)
            except GiveBack:
                raise
            except Replacement as replacement:
                value = replacement
            except BaseException as error:
                return _Attempt(self, job, started_ms, self.slot).retry_or_fail(error, known)
            return self._succeed(job, known, value, started_ms, self.slot)
        except GiveBack:
            leaving.pop(job_id, None)
            return GIVEN_BACK, 0, None, None, None
        except BaseException as error:
            return _Attempt(self, job, started_ms, self.slot).fail(error)

    async def run_on_loop(self, job: Delivered, slot: SlotLink | None = None) -> Outcome:
        """Like ``run``, on the running event loop, in the context of an asyncio task that belongs to this job alone.

        Orders to the job come through ``slot``.
        """
        task, job_id, attempt, crashes, redelivered, _, _, body, _, extras = job
        started_ms = _time_ns() // 1_000_000
        try:
            known: Any = self._tasks.get(task)
            if known is None:
                return _Attempt(self, job, started_ms, slot).fail(self._unknown(task))
            try:
                if extras is None or not is_step(extras):
                    args, kwargs = known.arguments.decode(body)
                else:
                    known, args, kwargs = await afinish(known.app, begin(known, body, extras), None)
            except ArgumentMismatch as error:
                return _Attempt(self, job, started_ms, slot).defer_or_fail(error, known)
            current = (job_id, attempt, extras, crashes, redelivered, known, self._worker)
            try:
                value = (_call if known.app._run_layers is None else _call_within)(known, args, kwargs, current)
                if type(value) is _COROUTINE:
                    value = await (value if extras is None or extras[4][1] is None else Steps(value))
            except GiveBack:
                raise
            except Replacement as replacement:
                value = replacement
            except BaseException as error:
                return _Attempt(self, job, started_ms, slot).retry_or_fail(error, known)
            return self._succeed(job, known, value, started_ms, slot)
        except GiveBack:
            leaving.pop(job_id, None)
            return GIVEN_BACK, 0, None, None, None
        except BaseException as error:
            return _Attempt(self, job, started_ms, slot).fail(error)

    def _succeed(
        self, job: Delivered, known: AnyTask[..., Any], value: object, started_ms: int, slot: SlotLink | None
    ) -> Outcome:
        # The rest is duplicated in both ways to run, because each additional call costs a job about 4 % of `run`.
        task, job_id, attempt, crashes, _, wants_result, enqueued_ms, _, notes, _ = job
        finished_ms = _time_ns() // 1_000_000
        encoded, steps = None, b""
        if leaving:
            value, steps = _steps_of(task, job_id, value)
            if type(value) is Replacement:
                _log(logging.INFO, "%s %s was replaced after %d ms", task, job_id, finished_ms - started_ms)
                return REPLACED, 0, None, steps, None
        if wants_result:
            before = (task, attempt, crashes, enqueued_ms, started_ms, finished_ms, self._worker, notes)
            try:
                encoded = known.arguments.encode_success(before, value, known.app.max_payload_bytes)
            except GiveBack:
                raise
            except BaseException as error:
                # Not tried again: the task did its work, only its result can't be sent.
                return _Attempt(self, job, started_ms, slot).fail(error)
        if _is_logged(logging.INFO):
            _log(logging.INFO, "%s %s succeeded in %d ms", task, job_id, finished_ms - started_ms)
        return (SPAWNED, 0, encoded, steps, None) if steps else (SUCCEEDED, 0, encoded, None, None)

    def fail(self, job: Delivered, error: BaseException, slot: SlotLink | None) -> Outcome:
        """Record an attempt that failed outside of ``run``."""
        return _Attempt(self, job, _time_ns() // 1_000_000, slot).fail(error)

    def overrule(self, job: Delivered, slot: SlotLink) -> Outcome:
        """Record an attempt as failed because its time was over, although its task returned."""
        timeout_ms = (job[9] or NO_EXTRAS)[4][0] or 0
        attempt = _Attempt(self, job, _time_ns() // 1_000_000 - timeout_ms, slot)
        try:
            return attempt.retry_or_fail(JobInterrupt(), self._tasks[job[0]])
        except GiveBack:
            return GIVEN_BACK, 0, None, None, None

    @property
    def has_event_loop(self) -> bool:
        return self._loop is not None

    def close(self) -> None:
        """Close the event loop, if an ``async def`` task needed one."""
        if self._loop is not None:
            self._loop.close()
            self._loop = None

    @property
    def running_loop(self) -> asyncio.AbstractEventLoop | None:
        """Loop on which ``run`` waits for an ``async def``."""
        return None if self.awaited is None or self._loop is None else self._loop.get_loop()

    def _await(self, coroutine: Any, extras: Extras | None, context: contextvars.Context) -> Any:
        awaited = _awaited(coroutine, extras is not None and extras[4][1] is not None)
        self.awaited = awaited
        try:
            return self._event_loop().run(awaited, context=context)
        finally:
            self.awaited = None

    def _event_loop(self) -> asyncio.Runner:
        # Kept between jobs, with the connection pools that tasks leave in it.
        if self._loop is None:
            self._loop = asyncio.Runner()
        return self._loop

    def _unknown(self, task: str) -> UnknownTask:
        close = difflib.get_close_matches(task, self._tasks, n=3)
        hint = f"did you mean {' or '.join(close)}?" if close else "is its module imported where the app is made?"
        apps = " and ".join(repr(app.name) for app in self._apps)
        return UnknownTask(f"the app {apps} has no task {task!r}; {hint}")


class _Attempt:
    """Running attempt, with the ways in which it can end."""

    __slots__ = (
        "_attempt", "_body", "_crashes", "_enqueued_ms", "_extras", "_job_id", "_notes", "_runner", "_slot",
        "_started_ms", "_task", "_wants_result",
    )  # fmt: skip

    def __init__(self, runner: Runner, job: Delivered, started_ms: int, slot: SlotLink | None) -> None:
        self._runner = runner
        self._slot = slot
        self._started_ms = started_ms
        self._task, self._job_id, self._attempt, self._crashes, _, wants_result, enqueued_ms, body, notes, extras = job
        self._wants_result, self._enqueued_ms, self._body, self._notes = wants_result, enqueued_ms, body, notes
        self._extras = extras or NO_EXTRAS
        # A failed job sends no steps.
        leaving.pop(self._job_id, None)

    def retry_or_fail(self, error: BaseException, task: AnyTask[..., Any]) -> Outcome:
        if self._was_cancelled(error):
            return self._cancel()
        error = self._meant(error)
        try:
            outcome = self._retry(error, task)
        except GiveBack:
            raise
        except BaseException as internal:
            # The job still fails with its own error, which its users can act on.
            _note(error, f"penstock could not decide whether to retry it: {_summary_of(internal)}")
            return self.fail(error)
        return outcome or self.fail(self._without_retry(error, task))

    def _was_cancelled(self, error: BaseException) -> bool:
        return self._slot is not None and self._slot.heard == CANCEL and not isinstance(error, Exception)

    def _cancel(self) -> Outcome:
        _log(logging.WARNING, "%s %s was cancelled while it ran", self._task, self._job_id)
        return CANCELLED, 0, None, b"it was cancelled while it ran", None

    def _meant(self, error: BaseException) -> BaseException:
        """Return the error of the attempt. If its time was over, that is a timeout, whatever the task raised."""
        if isinstance(error, _OwnTimeout):
            return error
        if isinstance(error, _Over):
            return _timeout(str(error), None)
        if self._slot is None or self._slot.heard != HARD:
            return error
        timeout_s = (self._extras[4][0] or 0) / 1000
        return _timeout(f"{self._task} ran longer than its timeout of {timeout_s:g} s", error)

    def _retry(self, error: BaseException, task: AnyTask[..., Any]) -> Outcome | None:
        # A job that was retried after it failed for good has all of its task's retries again.
        _, attempts_before, of_call, *_ = self._extras
        retries = self._attempt - attempts_before
        policy = task.retry_policy
        if isinstance(error, _OwnTimeout) and not policy.names(TaskTimeout):
            return None
        if isinstance(error, WaitCycle) and not policy.names(WaitCycle):
            return None  # another attempt would wait in the same cycle
        delay_ms = policy.delay_ms(error, retries, of_call)
        if delay_ms is None:
            return None
        limit = task.retry_policy.limit(of_call)
        record = self._record(_behind(error))
        which = f"retry {retries + 1}" if limit is None else f"retry {retries + 1} of {limit}"
        _log(
            logging.WARNING,
            f"%s %s failed (%s); {which} in {delay_ms / 1000:.1f} s",
            self._task,
            self._job_id,
            _summary(record),
        )
        return RETRY, delay_ms, None, envelope.encode(record), None

    def _without_retry(self, error: BaseException, task: AnyTask[..., Any]) -> BaseException:
        """Return the error to fail with. A ``Retry`` without an error behind it then says that no retries are left."""
        behind = _behind(error)
        if not isinstance(behind, Retry):
            return behind
        of_call, limit = self._extras[2], task.retry_policy.limit(self._extras[2])
        reason = str(behind)
        text = f"no retries left: {task.name} {'has' if of_call is None else 'was enqueued with'} retries={limit}"
        return Retry(f"{text} ({reason})" if reason else text).with_traceback(error.__traceback__)

    def defer_or_fail(self, error: ArgumentMismatch, task: AnyTask[..., Any]) -> Outcome:
        is_of_another_version = task.arguments.is_of_another_version(self._body)
        return (self._defer(error, task.app) if is_of_another_version else None) or self.fail(error)

    def _defer(self, error: ArgumentMismatch, app: App) -> Outcome | None:
        """Have the job tried later by a worker of the version that enqueued it, without using up an attempt.

        Returns None once the app's ``version_grace`` since the first such try is over.
        """
        mismatches = [note for note in map(envelope.decode_error, self._notes) if self._is_mismatch(note)]
        first_ms = mismatches[0].finished_ms if mismatches else self._started_ms
        if self._started_ms - first_ms >= app._version_grace_ms:
            return None
        delay_s = min(_DEFERRED_FOR_S * 2 ** len(mismatches), _DEFERRED_AT_MOST_S) * random.uniform(1, 1.2)
        record = self._record(error)
        _log(
            logging.WARNING,
            f"%s %s was enqueued by another version of the task (%s); it is retried in {delay_s:.0f} s,"
            " by a worker of that version if there is one",
            self._task,
            self._job_id,
            _summary(record),
        )
        return DEFERRED, round(delay_s * 1000), None, envelope.encode(record), None

    def _is_mismatch(self, note: ErrorRecord) -> bool:
        """Whether ``_defer`` recorded this note after the job last failed in another way."""
        return note.attempt == self._attempt and note.qualname == ArgumentMismatch.__qualname__

    def fail(self, error: BaseException) -> Outcome:
        if self._was_cancelled(error):
            return self._cancel()
        error = self._meant(error)
        masking = self._masking()
        try:
            record, listing = self._record(error, masking), listing_of(error, self._preview(), masking)
        except GiveBack:
            raise
        except BaseException as internal:
            record, listing = self._bare_record(error, internal)
        text = traceback_of(error, __file__) if masking.is_needed else ""
        masked = masking.text(text)
        if masked != text:
            # Logged as text, because anything that a handler makes of the error itself would contain a secret.
            _log(logging.ERROR, "%s %s failed (%s)\n%s", self._task, self._job_id, _summary(record), masked)
        else:
            exc_info = (type(error), error, below(error.__traceback__, __file__))
            _log(logging.ERROR, "%s %s failed (%s)", self._task, self._job_id, _summary(record), exc_info=exc_info)
        note = envelope.encode(record)
        value = None
        if self._wants_result:
            value = envelope.encode(Failure(self._task, self._crashes, self._enqueued_ms, [*self._notes, note]))
        return FAILED, 0, value, note, listing

    def _bare_record(self, error: BaseException, internal: BaseException) -> tuple[ErrorRecord, Listing]:
        """Record as much as possible of an error that cannot be inspected."""
        self._runner.is_unsound = True
        message = self._masking().text(f"<it could not be recorded: {_summary_of(internal)}>")
        name = type.__getattribute__(type(error), "__name__")
        record = ErrorRecord(
            "builtins", name, message, None, "", self._attempt, self._runner._worker, self._started_ms, _now_ms()
        )
        return record, (name[:100], message[:100], 0, self._preview())

    def _preview(self) -> bytes:
        """Return a preview of the arguments; empty where they cannot be decoded."""
        task = self._runner._tasks.get(self._task)
        if task is None:
            return b""
        try:
            return preview_of(arguments_of(task, self._extras), self._body)
        except GiveBack:
            raise
        except BaseException:
            # The arguments may be the reason why the job failed, and decoding them may run the user's own code.
            return b""

    def _masking(self) -> Masking:
        """Return a masking of the secret arguments; an empty one where they cannot be decoded."""
        task = self._runner._tasks.get(self._task)
        if task is None:
            return NOTHING_SECRET
        try:
            return masking_of(arguments_of(task, self._extras), self._body)
        except GiveBack:
            raise
        except BaseException:
            return NOTHING_SECRET

    def _record(self, error: BaseException, masking: Masking | None = None) -> ErrorRecord:
        task = self._runner._tasks.get(self._task)
        app = self._runner._apps[0] if task is None else task.app
        return record_of(
            error,
            app._plain_codec,
            skip=__file__,
            attempt=self._attempt,
            worker=self._runner._worker,
            started_ms=self._started_ms,
            finished_ms=_now_ms(),
            masking=self._masking() if masking is None else masking,
        )


class _OwnTimeout(TaskTimeout):
    """Timeout of this attempt itself, rather than of a job that it waited for."""


# Recorded under this name.
_OwnTimeout.__module__, _OwnTimeout.__qualname__ = TaskTimeout.__module__, TaskTimeout.__qualname__


def _timeout(text: str, error: BaseException | None) -> BaseException:
    """Make the error of an attempt whose time was over. ``error`` provides the traceback."""
    timeout = _OwnTimeout(text)
    if error is not None:
        timeout.__traceback__ = _without_handler(error.__traceback__)
        if not isinstance(error, (JobInterrupt, asyncio.CancelledError)):
            timeout.__context__ = error
    return timeout


def _without_handler(frames: TracebackType | None) -> TracebackType | None:
    """Drop the last frame if it is the signal handler that raised the error."""
    frame = frames
    while frame is not None and frame.tb_next is not None:
        if frame.tb_next.tb_next is None and frame.tb_next.tb_frame.f_code.co_name == HANDLER:
            frame.tb_next = None
        else:
            frame = frame.tb_next
    return frames


# Name of the signal handlers that raise in a task.
HANDLER = "_on_signal"


class Steps:
    """Awaits a task's coroutine. A soft limit reaches a job that waits as a cancellation, which becomes ``SoftTimeout``
    here."""

    __slots__ = ("_coroutine", "is_due")

    def __init__(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        self._coroutine = coroutine
        self.is_due = False

    def __await__(self) -> Any:
        return self

    def __iter__(self) -> Steps:
        return self

    def __next__(self) -> Any:
        return self.send(None)

    def send(self, value: Any) -> Any:
        # The awaited object swallowed the cancellation.
        return self._raise_soft_timeout() if self.is_due else self._coroutine.send(value)

    def throw(self, error: Any, *rest: Any) -> Any:
        if self.is_due and isinstance(error, asyncio.CancelledError):
            return self._raise_soft_timeout()
        return self._coroutine.throw(error, *rest)

    def close(self) -> None:
        self._coroutine.close()

    def _raise_soft_timeout(self) -> Any:
        self.is_due = False
        task = asyncio.current_task()
        if task is not None:
            task.uncancel()
        return self._coroutine.throw(SoftTimeout())


async def _awaited(coroutine: Coroutine[Any, Any, Any], has_soft_limit: bool) -> Any:
    return await (Steps(coroutine) if has_soft_limit else coroutine)


def _inherit(headers: dict[str, str]) -> None:
    if _OVER in headers:
        raise _Over(headers[_OVER])
    inherit(own_headers(headers) if MARK in headers or DEPTH in headers else headers)


def _call(task: AnyTask[..., Any], args: list[Any], kwargs: dict[str, Any], current: Any) -> Any:
    running.set(current)
    if current[2] is not None:
        _inherit(current[2][3])
    return task.function(*args, **kwargs)


def _call_within(task: AnyTask[..., Any], args: list[Any], kwargs: dict[str, Any], current: Any) -> Any:
    """Call the task as the innermost of its app's middleware."""
    running.set(current)
    if current[2] is not None:
        _inherit(current[2][3])
    job, layers = current_job(), task.app._run_layers
    assert job is not None
    assert layers is not None
    return layers.run(task, job, args, kwargs)


def _steps_of(task: str, job_id: bytes, value: object) -> tuple[object, bytes]:
    """Return a job's return value, and the steps that it sends."""
    leaves = leaving.pop(job_id, None)
    if leaves is None:
        return value, b""
    steps = b"".join(leaves.steps)
    if type(value) is Replacement:
        if value.job_id != job_id:
            raise RuntimeError("a task returns what app.replace() has returned to it, and to no other job")
        if value.steps is None:
            value = []
        else:
            steps += value.steps
    elif leaves.has_replacement:
        text = "%s %s called app.replace() and returned something else; that is its result, and nothing took its place"
        _log(logging.WARNING, f"{text}: return what app.replace() returns", task, job_id)
    for accept in leaves.accepted:
        accept()
    return value, steps


def _behind(error: BaseException) -> BaseException:
    """Return the error that made a task raise ``Retry``, which is more informative."""
    if not isinstance(error, Retry):
        return error
    behind = error.__cause__
    if behind is None and not error.__suppress_context__:
        behind = error.__context__
    return error if behind is None else behind


def _note(error: BaseException, text: str) -> None:
    try:
        error.add_note(text)
    except BaseException:
        pass  # its class does not allow notes, and the error itself matters more


def _log(level: int, text: str, task: str, job_id: bytes, *details: object, exc_info: Any = None) -> None:
    """Log a line about a job if the level is enabled.

    A filter or handler that raises is reported the way logging does, and does not affect the job.
    """
    try:
        if _is_logged(level):
            logger.log(level, text, task, format_id(job_id), *details, exc_info=exc_info, stacklevel=2)
    except BaseException:
        with contextlib.suppress(BaseException):
            if logging.raiseExceptions:
                traceback.print_exc()


def _summary(record: ErrorRecord) -> str:
    return f"{record.qualname}: {record.message}" if record.message else record.qualname


def _summary_of(error: BaseException) -> str:
    return f"{type(error).__name__}: {message_of(error)}"


def _now_ms() -> int:
    return _time_ns() // 1_000_000
