"""Failed jobs: filter, inspect, retry and remove them."""

# No `from __future__ import annotations`: see `_public.py`.
import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from penstock._durations import Seconds, duration_ms
from penstock._jobs.job import Job, job_id_of
from penstock._jobs.listing import type_name_of
from penstock._public import public
from penstock.errors import PenstockError

if TYPE_CHECKING:
    from penstock._connection import Connection
    from penstock._tasks.app import App

# Interval of asking a broker for the progress of an order: at first, and at most.
_FIRST_LOOK_S = 0.002
_LONGEST_LOOK_S = 0.25
# Type name of the error of a job that crashed: none of its attempts raised it.
_CRASHED = "WorkerCrashed"


@public
@dataclass(frozen=True, slots=True)
class FailedJob:
    """Job that failed for good. Times are in UTC."""

    id: str
    task: str
    queue: str | None
    """Queue of the job. None for a job that failed under a broker of format 1, which did not keep it."""
    error: str
    """Full class name of its last error, or just the name of a built-in one: ``"shop.Gone"``, ``"ValueError"``.
    ``"WorkerCrashed"`` when its worker process died too often."""
    message: str
    """First line of that error; at most 200 bytes."""
    fingerprint: str
    """16 hexadecimal digits, equal for errors of the same class from the same place in the code."""
    arguments: str | None
    """Preview of the arguments with secrets masked, at most 1 KiB: ``to='ada', code=***``. None where no worker could
    write one."""
    argument_bytes: int
    """Encoded size of the arguments in bytes."""
    attempts: int
    """Number of times that the job was begun, including crashes."""
    crashes: int
    generation: int
    """Number of times that somebody retried the job after it had failed for good."""
    enqueued_at: datetime
    failed_at: datetime
    _app: Any = field(repr=False, compare=False)

    @property
    def job(self) -> Job[Any]:
        return Job(self._app, job_id_of(self.id))

    def retry(self, *, queue: str | None = None) -> None:
        """Put the job back into its queue, or into ``queue``, with all of its retries.

        Jobs that its failure blocked wait for it again. Raises ``NoSuchJob`` or ``TooLate`` when the job is no longer a
        failed job, and ``BrokerUnavailable``.
        """
        self._app.failed(id=self.id).retry(queue=queue)

    async def aretry(self, *, queue: str | None = None) -> None:
        """Like ``retry``, but awaitable."""
        await self._app.failed(id=self.id).aretry(queue=queue)

    def remove(self) -> None:
        """Remove the job; its result stays for its ``result_ttl``. Raises like ``retry``."""
        self._app.failed(id=self.id).remove()

    async def aremove(self) -> None:
        """Like ``remove``, but awaitable."""
        await self._app.failed(id=self.id).aremove()


@public
class FailedJobs:
    """Failed jobs that match a filter: see ``App.failed``. Every use asks the broker again.

    Iterating, with ``for`` or ``async for``, yields a ``FailedJob`` for each, oldest first or, with ``newest_first``,
    newest first. It reads one page at a time.
    """

    def __init__(
        self,
        app: "App",
        *,
        id: str | Job[Any] | None,
        task: str | None,
        queue: str | None,
        workflow: bytes | None,
        error: str | type[BaseException] | None,
        fingerprint: str | None,
        since: datetime | Seconds | None,
        newest_first: bool,
    ) -> None:
        self._app = app
        self._id = None if id is None else job_id_of(id.id if isinstance(id, Job) else id)
        self._filter = (
            queue,
            task,
            type_name_of(error) if isinstance(error, type) else error,
            None if fingerprint is None else _number_of(fingerprint),
            None if since is None else _moment(since),
            None,
            workflow,
        )
        self._newest_first = newest_first
        if self._id is not None and any(part is not None for part in self._filter):
            raise ValueError("an id selects one job: give no other condition with it")

    def __iter__(self) -> Iterator[FailedJob]:
        after: int | None = 0
        while after is not None:
            jobs, after = self._page(after)
            yield from jobs

    async def __aiter__(self) -> AsyncIterator[FailedJob]:
        after: int | None = 0
        while after is not None:
            jobs, after = await asyncio.to_thread(self._page, after)
            for job in jobs:
                yield job

    def count(self) -> int:
        """Return the number of failed jobs. Raises ``BrokerUnavailable``."""
        return sum(1 for _ in self)

    async def acount(self) -> int:
        """Like ``count``, but awaitable."""
        return await asyncio.to_thread(self.count)

    def retry(self, *, queue: str | None = None) -> int:
        """Put all jobs back into their queues, or into ``queue``, with all of their retries; return their number.

        Workflows that they failed continue: see ``Workflow.retry_failed``. Returns when that is done, which takes about
        a second per hundred thousand jobs. Skips jobs that fail while it runs, and jobs whose unique key another job
        has taken. For a single job, given by ``id``, raises ``NoSuchJob``, ``TooLate`` or ``NotOffered`` when the job
        cannot be retried. Raises ``BrokerUnavailable``.
        """
        return self._order("retry", queue)

    async def aretry(self, *, queue: str | None = None) -> int:
        """Like ``retry``, but awaitable. Cancelling the await does not withdraw the order."""
        return await asyncio.to_thread(self.retry, queue=queue)

    def remove(self) -> int:
        """Remove all jobs and return their number. Stored results stay for their ``result_ttl``.

        Raises like ``retry``.
        """
        return self._order("remove", None)

    async def aremove(self) -> int:
        """Like ``remove``, but awaitable. Cancelling the await does not withdraw the order."""
        return await asyncio.to_thread(self.remove)

    def _page(self, after: int) -> tuple[list[FailedJob], int | None]:
        connection, timeout_s = self._connected()
        page, following = connection.failed(self._filter, self._newest_first, after, timeout_s)
        jobs = [_failed_job(self._app, job) for job in page]
        if self._id is not None:
            wanted = Job[Any](self._app, self._id).id
            jobs = [job for job in jobs if job.id == wanted]
        return jobs, None if self._id is not None and jobs else following

    def _order(self, order: str, queue: str | None) -> int:
        connection, timeout_s = self._connected()
        operation = connection.order_failed(order, self._id, self._filter, queue, timeout_s)
        if self._id is not None:
            return 1
        if operation is None:
            # No job matched.
            return 0
        look_s = _FIRST_LOOK_S
        while True:
            status = connection.operation(operation, timeout_s)
            if status is None:
                raise PenstockError(
                    "the broker no longer reports the order's progress; the order was accepted, and continues"
                )
            done, _, is_over = status
            if is_over:
                return done
            time.sleep(look_s)
            look_s = min(2 * look_s, _LONGEST_LOOK_S)

    def _connected(self) -> "tuple[Connection, float]":
        return self._app._connected(), self._app.call_timeout


def _failed_job(app: "App", held: dict[str, Any]) -> FailedJob:
    raised = held["error"] != _CRASHED
    return FailedJob(
        id=held["id"],
        task=held["task"],
        queue=held["queue"],
        error=held["error"],
        message=held["message"],
        fingerprint=f"{held['fingerprint']:016x}",
        arguments=held["preview"] or None,
        argument_bytes=held["body_bytes"],
        attempts=held["attempt"] + held["crashes"] + raised,
        crashes=held["crashes"],
        generation=held["generation"],
        enqueued_at=_time(held["enqueued_at_ms"]),
        failed_at=_time(held["failed_at_ms"]),
        _app=app,
    )


def _time(epoch_ms: int) -> datetime:
    return datetime.fromtimestamp(epoch_ms / 1000, UTC)


def _number_of(fingerprint: str) -> int:
    try:
        return int(fingerprint, 16)
    except ValueError:
        raise ValueError(f"a fingerprint is 16 hexadecimal digits, not {fingerprint!r}") from None


def _moment(since: datetime | Seconds) -> int:
    if not isinstance(since, datetime):
        return time.time_ns() // 1_000_000 - duration_ms("since", since)
    if since.tzinfo is None:
        raise ValueError("since must have a time zone: datetime.now(timezone.utc) instead of datetime.now()")
    return int(since.timestamp() * 1000)
