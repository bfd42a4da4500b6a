"""The job that runs here."""

# No `from __future__ import annotations`: see `_public.py`.
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar, overload

from penstock._public import public

if TYPE_CHECKING:
    from penstock._flows.steps import Composed, Signature, Step
    from penstock._flows.workflow import Workflow
    from penstock._jobs.job import Job
    from penstock._tasks.task import AnyTask

R = TypeVar("R")


@public
@dataclass(frozen=True, slots=True)
class CurrentJob:
    """Running job that the calling code belongs to: see ``current_job``."""

    id: str
    task: str
    attempt: int
    """Number of this attempt, from 1. Each retry increments it."""
    crashes: int
    """Number of times that a worker process has died while running the job."""
    redelivered: bool
    """Whether this attempt may have begun before: its worker died or was stopped and returned it, or its broker died
    and cannot tell. False guarantees that it has not."""
    retries_left: int | None
    """Number of attempts that may follow if this one fails; None for no limit."""
    worker: str
    generation: int = 0
    """Number of times that somebody retried the job after it had failed for good. Each restarts the count of
    attempts."""
    headers: Mapping[str, str] = field(default_factory=dict[str, str], hash=False)
    """Headers that the job was enqueued with."""
    workflow: str | None = None
    """Id of the job's workflow, for ``app.workflow()``; None for a job without one."""
    deadline: datetime | None = None
    """Time in UTC at which the job's workflow is cancelled; None if it has no deadline, or continues after it."""

    @overload
    def spawn(self, step: "Signature[R]", *, now: bool = False) -> "Job[R]": ...
    @overload
    def spawn(self, step: "Composed[R]", *, now: bool = False) -> "Workflow[R]": ...
    @overload
    def spawn(self, step: "Step[Any]", *, into: Literal["group"]) -> None: ...
    def spawn(self, step: "Step[Any]", *, now: bool = False, into: str | None = None) -> Any:
        """Send a step when this job succeeds, in the same transaction as its result.

        Only the attempt that succeeds sends its steps: an attempt that fails, is retried or crashes sends nothing. The
        step joins the job's workflow, if it has one. The workflow ends only after the step, but its result and its
        later steps do not depend on it.

        Returns the handle of the step. The job cannot wait for it, because the step is sent when the job ends.

        ``now=True`` sends the step at once, so the job can wait for it, and the step stays sent if the job fails. When
        the job runs again, after a crash or as a retry, its first such call returns the handle of the step that its
        first call sent before, and so on: no step is sent twice. Raises like ``step.delay()``.

        ``into="group"`` makes the step one more member of the group that the job is a member of, again when the job
        succeeds. The group then ends only after the step, and its result is the next one in the group's list. Returns
        None. If the group's workflow was cancelled in the meantime, the step is not sent. A step without jobs adds
        nothing. Raises ``RuntimeError`` if the job is not a member of a group, or if the group was too large to be sent
        at once: more than 10,000 calls, without ``atomic=True``.
        """
        from penstock._flows.replacing import spawn, spawn_into_group, spawn_now

        self._check_runs()
        if into is None:
            return spawn_now(step) if now else spawn(step)
        if into != "group":
            raise ValueError(f'into must be "group", not {into!r}')
        if now:
            raise ValueError("a step joins the group when the job succeeds, so now=True does not fit")
        return spawn_into_group(step)

    @overload
    async def aspawn(self, step: "Signature[R]") -> "Job[R]": ...
    @overload
    async def aspawn(self, step: "Composed[R]") -> "Workflow[R]": ...
    async def aspawn(self, step: "Step[Any]") -> Any:
        """Like ``spawn(step, now=True)``, but awaitable. Cancelling the await does not withdraw the step."""
        from penstock._flows.replacing import aspawn_now

        self._check_runs()
        return await aspawn_now(step)

    def progress(self, done: float, total: float | None = None, message: str = "") -> None:
        """Report the job's progress: ``current_job().progress(3, 10, "fetching")``. ``Job.progress`` returns it.

        Call it as often as you like, from any thread or coroutine of the job: the latest report is passed on, at most
        ten times a second. Messages are cut at about 3,900 bytes. Progress is not stored: a retry starts without, and a
        restarted broker has forgotten it. Does nothing once the job has ended, and in processes that the job started.
        Raises ``ValueError`` for numbers that are not finite.
        """
        if tell_progress is not None:
            tell_progress(bytes.fromhex(self.id.replace("-", "")), done, total, message)

    def _check_runs(self) -> None:
        if running_job_id() is None or current_job() != self:
            raise RuntimeError("a job can spawn steps only while it runs, from its own process")


Extras: TypeAlias = tuple[
    int,
    int,
    int | tuple[int, ...] | None,
    dict[str, str],
    tuple[int | None, int | None],
    tuple[tuple[int, Any] | None, bytes | None, int | None, bool | None],
]
"""Rarely set fields of a job: (generation, attempts in earlier generations, retries of the call, headers, timeout and
soft timeout in milliseconds, (values of the previous step with their shape, workflow, its deadline in
milliseconds, whether its group is the one around its own join, or None if it can add no members))."""

NO_EXTRAS: Extras = (0, 0, None, {}, (None, None), (None, None, None, None))

# Header of a step whose arguments are not only those in its body: "chunk", "errback" or "spread". Users can neither set
# nor see headers with this prefix.
MARK = "penstock.step"

# Header of a job that replaced another one: the number of replacements, one after another.
DEPTH = "penstock.replaced"


class Leaving:
    """Steps that a running job sends if it succeeds."""

    __slots__ = ("accepted", "has_replacement", "sent", "steps")

    def __init__(self) -> None:
        self.steps: list[bytes] = []
        # Called when the steps are about to be sent.
        self.accepted: list[Callable[[], object]] = []
        # Number of steps sent immediately so far.
        self.sent = 0
        # Whether the job has called app.replace(), and so must return its return value.
        self.has_replacement = False


# Steps of running jobs, by job id. Most jobs have none.
leaving: dict[bytes, Leaving] = {}


class Replacement(BaseException):
    """Returned or raised by a task to be replaced by steps.

    Not an ``Exception``, so ``except Exception`` does not catch it. ``steps``: None for an empty group.
    """

    def __init__(self, job_id: bytes, steps: bytes | None) -> None:
        super().__init__("another step replaces this job: return it from the task")
        self.job_id = job_id
        self.steps = steps


# Set in processes that run jobs: passes on the progress of the job of an id.
tell_progress: Callable[[bytes, float, float | None, str], object] | None = None

# (job id, attempt from 0, extras or None, crashes, redelivered, task, worker), in the runner's form, since most jobs
# never ask for it.
running: "ContextVar[tuple[bytes, int, Extras | None, int, bool, AnyTask[..., Any], str] | None]"
running = ContextVar("penstock_current_job", default=None)


def current_job() -> CurrentJob | None:
    """Return the job that runs here; None outside of a job, for example when a task is called directly."""
    current = running.get()
    if current is None:
        return None
    job_id, attempt, extras, crashes, redelivered, task, worker = current
    generation, attempts_before, retries, headers, _, (_, workflow, deadline_ms, _) = extras or NO_EXTRAS
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
        deadline=None if deadline_ms is None else datetime.fromtimestamp(deadline_ms / 1000, UTC),
    )


def running_job_id() -> bytes | None:
    """Return the id of the job that runs here, if any does."""
    current = running.get()
    return None if current is None else current[0]


def own_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """Return the headers that a job's client set, without Penstock's own."""
    return {name: value for name, value in headers.items() if not name.startswith("penstock.")}


def format_id(job_id: bytes) -> str:
    """Format sixteen bytes as a UUID."""
    text = job_id.hex()
    return f"{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"
