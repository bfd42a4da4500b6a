"""The job that runs here."""

# No `from __future__ import annotations`: see `_public.py`.
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, overload

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
    deadline: datetime | None = None
    """Time at which its workflow is cancelled, in UTC; None: it has no deadline, or goes on after it."""

    @overload
    def spawn(self, step: "Signature[R]", *, now: bool = False) -> "Job[R]": ...
    @overload
    def spawn(self, step: "Composed[R]", *, now: bool = False) -> "Workflow[R]": ...
    def spawn(self, step: "Step[Any]", *, now: bool = False) -> Any:
        """Have a step sent when this job succeeds, in the same transaction as its result.

        A job that fails or is retried sends nothing, and neither does one that runs again after a crash: only the
        attempt that succeeds does. The step belongs to the job's workflow, if it has one: that ends after the step,
        while later steps and bodies do not wait for it, and its result does not depend on it.

        Returns the handle of the step. Its result can't be waited for here, as it is only sent when this job ends.

        ``now=True`` sends the step at once, so it can be waited for, and stays sent if the job fails. When the job runs
        again, after a crash or as a retry, its first such call returns the handle of the step that its first call has
        sent before, and so on: no step is sent twice. Raises what ``step.delay()`` raises.
        """
        from penstock._flows.replacing import spawn, spawn_now

        self._check_runs()
        return spawn_now(step) if now else spawn(step)

    @overload
    async def aspawn(self, step: "Signature[R]") -> "Job[R]": ...
    @overload
    async def aspawn(self, step: "Composed[R]") -> "Workflow[R]": ...
    async def aspawn(self, step: "Step[Any]") -> Any:
        """Like ``spawn(step, now=True)``, but awaitable. Cancelling the await does not take the step back."""
        from penstock._flows.replacing import aspawn_now

        self._check_runs()
        return await aspawn_now(step)

    def progress(self, done: float, total: float | None = None, message: str = "") -> None:
        """Tell how far the job has come: ``current_job().progress(3, 10, "fetching")``. ``Job.progress`` returns it.

        Call it as often as you like, from any thread or coroutine of the job: the latest is passed on, ten times a
        second at most. Of a message of more than some 3,900 bytes the rest is left out. Nothing is stored: a retry
        begins without, and a broker that starts again has forgotten it. Does nothing once the job has ended, and in
        processes that it has started. Raises ``ValueError`` for numbers that are not finite.
        """
        if tell_progress is not None:
            tell_progress(bytes.fromhex(self.id.replace("-", "")), done, total, message)

    def _check_runs(self) -> None:
        if running_job_id() is None or current_job() != self:
            raise RuntimeError("a job can spawn steps while it runs, and where it runs")


Extras: TypeAlias = tuple[
    int,
    int,
    int | tuple[int, ...] | None,
    dict[str, str],
    tuple[int | None, int | None],
    tuple[tuple[int, Any] | None, bytes | None, int | None],
]
"""Rarely set fields of a job: (generation, attempts of earlier ones, retries of the call, headers, its timeout and soft
timeout in milliseconds, (values of the step before with their shape, workflow, its deadline in milliseconds))."""

NO_EXTRAS: Extras = (0, 0, None, {}, (None, None), (None, None, None))

# The header of a step whose arguments are not those of its body alone: "chunk", "errback" or "spread". Users can give
# no header a name that begins so, and see none of these.
MARK = "penstock.step"

# The header of a job that has taken another one's place: how many have done so, one after another.
DEPTH = "penstock.replaced"


class Leaving:
    """What a running job leaves behind if it succeeds."""

    __slots__ = ("accepted", "has_replacement", "sent", "steps")

    def __init__(self) -> None:
        self.steps: list[bytes] = []
        # Called when it is about to be sent.
        self.accepted: list[Callable[[], object]] = []
        # Number of steps that it has sent at once, so far.
        self.sent = 0
        # Whether it has called app.replace(), and is to return what that returned.
        self.has_replacement = False


# What running jobs have left behind so far, by their ids: mostly nothing, for none has.
leaving: dict[bytes, Leaving] = {}


class Replacement(BaseException):
    """Returned or raised by a task in whose place its steps come.

    Not an ``Exception``, so that ``except Exception`` lets it pass. ``steps``: None for an empty group.
    """

    def __init__(self, job_id: bytes, steps: bytes | None) -> None:
        super().__init__("another step takes the place of this job: return it from the task")
        self.job_id = job_id
        self.steps = steps


# Where jobs run: passes on the progress of the one of an id.
tell_progress: Callable[[bytes, float, float | None, str], object] | None = None

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
    generation, attempts_before, retries, headers, _, (_, workflow, deadline_ms) = extras or NO_EXTRAS
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
    """Return the headers that a job's client has given it, without those that are Penstock's own."""
    return {name: value for name, value in headers.items() if not name.startswith("penstock.")}


def format_id(job_id: bytes) -> str:
    """Format sixteen bytes as people see them: a UUID."""
    text = job_id.hex()
    return f"{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"
