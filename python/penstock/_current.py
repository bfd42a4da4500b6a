"""Which job runs here."""

# No `from __future__ import annotations`: see `_public.py`.
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from penstock._public import public

if TYPE_CHECKING:
    from penstock._task import AnyTask


@public
@dataclass(frozen=True, slots=True)
class CurrentJob:
    """The job that the code asking for it belongs to."""

    id: str
    task: str
    attempt: int
    """From 1; rises with each retry."""
    crashes: int
    """How often a worker process has died running it."""
    redelivered: bool
    """Whether this attempt may have begun before: its worker died, or was stopped and handed it back, or its broker
    died and cannot tell. False is a promise that it has not."""
    retries_left: int
    """How many more attempts follow if this one fails."""
    worker: str
    generation: int = 0
    """How often it was retried after it had failed for good; its task's retries begin anew each time."""


# (job id, attempt from 0, (generation, attempts of earlier ones) or None, crashes, redelivered, task, worker), as the
# runner has them: most jobs never ask.
running: "ContextVar[tuple[bytes, int, tuple[int, int] | None, int, bool, AnyTask[..., Any], str] | None]"
running = ContextVar("penstock_current_job", default=None)


def current_job() -> CurrentJob | None:
    """The job that runs here; None outside of one, as when a task is called directly."""
    current = running.get()
    if current is None:
        return None
    job_id, attempt, retried, crashes, redelivered, task, worker = current
    generation, attempts_before = retried or (0, 0)
    return CurrentJob(
        id=format_id(job_id),
        task=task.name,
        attempt=attempt + 1,
        crashes=crashes,
        redelivered=redelivered,
        retries_left=max(0, task.retry_policy.retries - (attempt - attempts_before)),
        worker=worker,
        generation=generation,
    )


def format_id(job_id: bytes) -> str:
    """Sixteen bytes as people see them: a UUID."""
    text = job_id.hex()
    return f"{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"
