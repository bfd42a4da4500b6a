"""The job that runs here."""

# No `from __future__ import annotations`: see `_public.py`.
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from penstock._public import public

if TYPE_CHECKING:
    from penstock._tasks.task import AnyTask


@public
@dataclass(frozen=True, slots=True)
class CurrentJob:
    """The job that the code asking for it belongs to."""

    id: str
    task: str
    attempt: int
    """Number of this attempt, from 1; rises with each retry."""
    crashes: int
    """Number of times that a worker process has died running it."""
    redelivered: bool
    """Whether this attempt may have begun before: its worker died, or was stopped and handed it back, or its broker
    died and cannot tell. False is a promise that it has not."""
    retries_left: int | None
    """Number of attempts that may follow if this one fails; None: no limit."""
    worker: str
    generation: int = 0
    """Number of retries after it had failed for good; its task's retries begin anew each time."""
    headers: Mapping[str, str] = field(default_factory=dict[str, str], hash=False)
    """Headers that it was enqueued with."""
    workflow: str | None = None
    """Id of the workflow that it belongs to; ``app.workflow()`` finds that."""


Extras: TypeAlias = tuple[
    int,
    int,
    int | tuple[int, ...] | None,
    dict[str, str],
    tuple[int | None, int | None],
    tuple[tuple[int, Any] | None, bytes | None],
]
"""Rarely set fields of a job: (generation, attempts of earlier ones, retries of the call, headers, its timeout and soft
timeout in milliseconds, (values of the step before with their shape, workflow))."""

NO_EXTRAS: Extras = (0, 0, None, {}, (None, None), (None, None))

# The header of a step whose arguments are not those of its body alone: "chunk", "errback" or "spread". Users can give
# no header a name that begins so, and see none of these.
MARK = "penstock.step"

# (job id, attempt from 0, extras or None, crashes, redelivered, task, worker), as the runner has them: most jobs never
# ask.
running: "ContextVar[tuple[bytes, int, Extras | None, int, bool, AnyTask[..., Any], str] | None]"
running = ContextVar("penstock_current_job", default=None)


def current_job() -> CurrentJob | None:
    """Return the job that runs here; None outside of one, as when a task is called directly."""
    current = running.get()
    if current is None:
        return None
    job_id, attempt, extras, crashes, redelivered, task, worker = current
    generation, attempts_before, retries, headers, _, (_, workflow) = extras or NO_EXTRAS
    limit = task.retry_policy.limit(retries)
    return CurrentJob(
        id=format_id(job_id),
        task=task.name,
        attempt=attempt + 1,
        crashes=crashes,
        redelivered=redelivered,
        retries_left=None if limit is None else max(0, limit - (attempt - attempts_before)),
        worker=worker,
        generation=generation,
        headers=own_headers(headers),
        workflow=None if workflow is None else format_id(workflow),
    )


def running_job_id() -> bytes | None:
    """Return the id of the job that runs here, if any does."""
    current = running.get()
    return None if current is None else current[0]


def own_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """Return the headers that a job's client has given it, without those that are Penstock's own."""
    return {name: value for name, value in headers.items() if not name.startswith("penstock.")}


def format_id(job_id: bytes) -> str:
    """Format sixteen bytes as people see them: a UUID."""
    text = job_id.hex()
    return f"{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"
