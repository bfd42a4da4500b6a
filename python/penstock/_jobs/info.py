"""Details of a job: its state, its times, its errors."""

# No `from __future__ import annotations`: see `_public.py`.
import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime

from penstock._public import public


@public
class JobState(enum.StrEnum):
    WAITING = "waiting"
    """In its queue, ready for a worker."""
    DELAYED = "delayed"
    """Until its countdown, its eta or the next attempt after a failed one."""
    RUNNING = "running"
    CANCELLING = "cancelling"
    """Running, and asked to stop: it ends as cancelled, unless it succeeds before that."""
    HELD = "held"
    """Until other jobs, on which it depends, have ended."""
    BLOCKED = "blocked"
    """A job on which it depends has failed."""
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    """The last attempt raised an error. The broker keeps it for people to look into."""
    EXPIRED = "expired"
    """Not started in time."""
    CRASHED = "crashed"
    """The process that ran it died, once too often."""
    CANCELLED = "cancelled"
    REPLACED = "replaced"
    """Another call took its place while it waited, by ``unique`` or ``debounce``."""
    ENDED = "ended"
    """Enqueued and ended, and its result is not kept: ``store_result=False``, past its ``result_ttl``, or
    evicted."""
    UNKNOWN = "unknown"
    """The broker knows nothing of this id: no such job was ever enqueued, or it has ended and nothing is kept of it."""


@public
@dataclass(frozen=True, slots=True)
class AttemptError:
    """Why one attempt failed: it raised an error, or its worker process died."""

    attempt: int
    """Number from 1, as ``current_job().attempt``. An attempt that crashed is begun again under the same number."""
    type_name: str
    """Full name of the error's type; of a crash ``penstock.WorkerCrashed``."""
    message: str
    traceback: str = field(default="", repr=False)
    worker: str | None = None
    """None for a crash, as are the times."""
    started_at: datetime | None = None
    finished_at: datetime | None = None


@public
@dataclass(frozen=True, slots=True)
class JobInfo:
    """Details of a job. Times are in UTC; a field is None when it is not known, or not yet."""

    id: str
    state: JobState
    task: str | None = None
    queue: str | None = None
    attempts: int | None = None
    """Number of times that it was begun, crashes included."""
    crashes: int = 0
    """Crashes since it was last retried after it had failed for good."""
    enqueued_at: datetime | None = None
    due_at: datetime | None = None
    """Time at which a delayed job is next due."""
    started_at: datetime | None = None
    """Start of the last attempt."""
    finished_at: datetime | None = None
    worker: str | None = None
    """Worker of the last attempt."""
    errors: tuple[AttemptError, ...] = ()
    """An entry for each attempt that failed or crashed, oldest first. After some 256 KiB of tracebacks the
    first and the latest are kept."""
    error: str | None = None
    """Why the job failed, or the last attempt did."""
    generation: int = 0
    """Number of retries after it had failed for good."""
    headers: Mapping[str, str] | None = field(default=None, repr=False)
    """Headers that it was enqueued with. None when it has ended, unless it has failed: they go with the job."""

    @property
    def traceback(self) -> str | None:
        """Return the remote traceback of the last error; a crash has none."""
        return (self.errors[-1].traceback or None) if self.errors else None
