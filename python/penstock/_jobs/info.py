"""Details of a job: its state, times and errors."""

# No `from __future__ import annotations`: see `_public.py`.
import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime

from penstock._public import public


@public
class JobState(enum.StrEnum):
    WAITING = "waiting"
    """Waiting in its queue, ready for a worker."""
    DELAYED = "delayed"
    """Waiting for its countdown, its eta, or its next attempt."""
    RUNNING = "running"
    CANCELLING = "cancelling"
    """Running, and asked to stop. The job ends as cancelled unless it succeeds first."""
    HELD = "held"
    """Waiting for jobs on which it depends."""
    BLOCKED = "blocked"
    """Not started, because a job on which it depends has failed."""
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    """Failed for good: the last attempt raised an error. The broker keeps the job for inspection."""
    EXPIRED = "expired"
    """Not started before it expired."""
    CRASHED = "crashed"
    """Failed for good: the process that ran it died too often."""
    CANCELLED = "cancelled"
    REPLACED = "replaced"
    """Replaced by another call while it waited, through ``unique`` or ``debounce``."""
    ENDED = "ended"
    """Ended, and its result is not kept: ``store_result=False``, past its ``result_ttl``, or evicted."""
    UNKNOWN = "unknown"
    """Unknown to the broker: no such job was ever enqueued, or it has ended and was forgotten."""


@public
@dataclass(frozen=True, slots=True)
class AttemptError:
    """Failure of one attempt: the error that it raised, or the crash of its worker process."""

    attempt: int
    """Number of the attempt, from 1, as ``current_job().attempt``. An attempt that crashed runs again under the same
    number."""
    type_name: str
    """Full name of the error's type; ``penstock.WorkerCrashed`` for a crash."""
    message: str
    traceback: str = field(default="", repr=False)
    worker: str | None = None
    """Remote traceback. None for a crash, whose times are None as well."""
    started_at: datetime | None = None
    finished_at: datetime | None = None


@public
@dataclass(frozen=True, slots=True)
class JobInfo:
    """Details of a job. Times are in UTC; a field is None when it is not known (yet)."""

    id: str
    state: JobState
    task: str | None = None
    queue: str | None = None
    attempts: int | None = None
    """Number of times that the job was begun, including crashes."""
    crashes: int = 0
    """Number of crashes since somebody last retried the job after it had failed for good."""
    enqueued_at: datetime | None = None
    due_at: datetime | None = None
    """Time at which a delayed job is due."""
    started_at: datetime | None = None
    """Start of the latest attempt."""
    finished_at: datetime | None = None
    worker: str | None = None
    """Name of the worker that ran the latest attempt."""
    errors: tuple[AttemptError, ...] = ()
    """Errors of the attempts that failed or crashed, oldest first. Beyond about 256 KiB of tracebacks only the first
    and the latest ones are kept."""
    error: str | None = None
    """Reason why the job, or its latest attempt, failed."""
    generation: int = 0
    """Number of times that somebody retried the job after it had failed for good."""
    headers: Mapping[str, str] | None = field(default=None, repr=False)
    """Headers that the job was enqueued with. None once it has ended, unless it has failed: they are removed with the
    job."""

    @property
    def traceback(self) -> str | None:
        """Return the remote traceback of the latest error; None for a crash."""
        return (self.errors[-1].traceback or None) if self.errors else None
