"""One attempt of a job in a worker: from the bytes of its body to what shall become of it."""

from __future__ import annotations

import asyncio
import contextvars
import difflib
import logging
import time
from types import CoroutineType
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec

from penstock import _envelope
from penstock._current import format_id, running
from penstock._envelope import ErrorRecord, Failure, Success
from penstock._failures import Listing, listing_of
from penstock._remote_errors import below, record_of
from penstock._retries import Retry
from penstock.errors import PayloadTooLarge, UnknownTask

if TYPE_CHECKING:
    from penstock._app import App
    from penstock._task import AnyTask

logger = logging.getLogger("penstock.job")

SUCCEEDED, RETRY, FAILED, GIVEN_BACK = range(4)

Outcome: TypeAlias = tuple[int, int, bytes | None, bytes | None, Listing | None]
"""(kind, delay_ms, value, note, listing): the value is for the result, the note is the record of this attempt's
error, and the listing is what a failed job is found by."""


class GiveBack(BaseException):
    """Raised in the middle of a job, by a signal handler, to stop it without burning an attempt."""


class Runner:
    """Runs jobs of one app, one at a time. ``worker``: what people know this process by."""

    def __init__(self, app: App, worker: str) -> None:
        self._app = app
        self._worker = worker
        self._loop: asyncio.Runner | None = None

    def run(
        self,
        task: str,
        job_id: bytes,
        attempt: int,
        crashes: int,
        redelivered: bool,
        wants_result: bool,
        enqueued_at_ms: int,
        body: bytes,
        notes: list[bytes],
        retried: tuple[int, int] | None,
    ) -> Outcome:
        """Run one attempt. Whatever the task does, this returns: nothing that it raises gets out.

        ``attempt`` counts from 0. ``notes``: the records of the attempts before. ``retried``: how often the job
        was retried after it had failed for good, and the attempts made until then.
        """
        started_ms = _now_ms()
        attempt_of_job = _Attempt(
            self, task, job_id, attempt, retried, crashes, wants_result, enqueued_at_ms, notes, started_ms
        )
        known = self._app.tasks.get(task)
        if known is None:
            return attempt_of_job.fail(self._unknown(task))
        try:
            args, kwargs = known.arguments.decode(body)
        except Exception as error:
            return attempt_of_job.fail(error)
        context = contextvars.copy_context()
        try:
            value = context.run(
                self._call,
                known,
                args,
                kwargs,
                (job_id, attempt, retried, crashes, redelivered, known, self._worker),
            )
            if type(value) is CoroutineType:
                value = self._event_loop().run(value, context=context)
        except GiveBack:
            return GIVEN_BACK, 0, None, None, None
        except BaseException as error:
            return attempt_of_job.retry_or_fail(error, known)
        try:
            return attempt_of_job.succeed(value, known)
        except Exception as error:
            # Not tried again: the task did its work, only what it returned cannot be told.
            return attempt_of_job.fail(error)

    def close(self) -> None:
        """End the event loop, if there was an ``async def`` task that needed one."""
        if self._loop is not None:
            self._loop.close()
            self._loop = None

    def _call(self, task: AnyTask[..., Any], args: list[Any], kwargs: dict[str, Any], current: Any) -> Any:
        running.set(current)
        return task.function(*args, **kwargs)

    def _event_loop(self) -> asyncio.Runner:
        # Kept between jobs, as are the connection pools that tasks leave in it.
        if self._loop is None:
            self._loop = asyncio.Runner()
        return self._loop

    def _unknown(self, task: str) -> UnknownTask:
        close = difflib.get_close_matches(task, self._app.tasks, n=3)
        hint = f"did you mean {' or '.join(close)}?" if close else "is its module imported where the app is made?"
        return UnknownTask(f"the app {self._app.name!r} has no task {task!r}; {hint}")


class _Attempt:
    """What is known of the attempt that runs, and the ways it can end."""

    __slots__ = (
        "_attempt", "_crashes", "_enqueued_ms", "_job_id", "_notes", "_retried", "_runner", "_started_ms", "_task",
        "_wants_result",
    )  # fmt: skip

    def __init__(
        self,
        runner: Runner,
        task: str,
        job_id: bytes,
        attempt: int,
        retried: tuple[int, int] | None,
        crashes: int,
        wants_result: bool,
        enqueued_ms: int,
        notes: list[bytes],
        started_ms: int,
    ) -> None:
        self._runner = runner
        self._task = task
        self._job_id = job_id
        self._attempt = attempt
        self._retried = retried
        self._crashes = crashes
        self._wants_result = wants_result
        self._enqueued_ms = enqueued_ms
        self._notes = notes
        self._started_ms = started_ms

    def succeed(self, value: object, task: AnyTask[..., Any]) -> Outcome:
        encoded = None
        finished_ms = _now_ms()
        if self._wants_result:
            result = task.arguments.encode_result(value)
            limit = task.app.max_payload_bytes
            if len(result) > limit:
                raise PayloadTooLarge(
                    f"{self._task}(): the result takes {len(result):,} bytes, and {limit:,} are allowed;"
                    " store large data elsewhere and return its place, or raise App(max_payload_bytes=...)"
                )
            encoded = _envelope.encode(
                Success(
                    self._task,
                    self._attempt,
                    self._crashes,
                    self._enqueued_ms,
                    self._started_ms,
                    finished_ms,
                    self._runner._worker,
                    self._notes,
                    msgspec.Raw(result),
                )
            )
        if logger.isEnabledFor(logging.INFO):
            took_ms = finished_ms - self._started_ms
            logger.info("%s %s succeeded in %d ms", self._task, format_id(self._job_id), took_ms)
        return SUCCEEDED, 0, encoded, None, None

    def retry_or_fail(self, error: BaseException, task: AnyTask[..., Any]) -> Outcome:
        # A job that was retried after it had failed for good has all of its task's retries again.
        retries = self._attempt - (self._retried[1] if self._retried else 0)
        delay_ms = task.retry_policy.delay_ms(error, retries)
        if isinstance(error, Retry):
            # What made the task ask for another attempt says more than that it asked.
            error = error.__cause__ or error.__context__ or error
        if delay_ms is None:
            return self.fail(error)
        record = self._record(error)
        logger.warning(
            "%s %s failed (%s); retry %d of %d in %.1f s",
            self._task,
            format_id(self._job_id),
            _summary(record),
            retries + 1,
            task.retry_policy.retries,
            delay_ms / 1000,
        )
        return RETRY, delay_ms, None, _envelope.encode(record), None

    def fail(self, error: BaseException) -> Outcome:
        record = self._record(error)
        logger.error(
            "%s %s failed (%s)",
            self._task,
            format_id(self._job_id),
            _summary(record),
            exc_info=(type(error), error, below(error.__traceback__, __file__)),
        )
        note = _envelope.encode(record)
        value = None
        if self._wants_result:
            value = _envelope.encode(Failure(self._task, self._crashes, self._enqueued_ms, [*self._notes, note]))
        return FAILED, 0, value, note, listing_of(error)

    def _record(self, error: BaseException) -> ErrorRecord:
        return record_of(
            error,
            self._runner._app._plain_codec,
            skip=__file__,
            attempt=self._attempt,
            worker=self._runner._worker,
            started_ms=self._started_ms,
            finished_ms=_now_ms(),
        )


def _summary(record: ErrorRecord) -> str:
    return f"{record.qualname}: {record.message}" if record.message else record.qualname


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
