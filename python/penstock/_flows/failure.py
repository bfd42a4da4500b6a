"""Failed steps, as later steps and people see them."""

# No `from __future__ import annotations`: see `_public.py`.
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

import penstock.errors
from penstock._jobs.current import format_id
from penstock._public import public
from penstock._values import envelope
from penstock._values.codec import Codec
from penstock._values.remote_errors import rebuild, shown_type
from penstock.errors import CannotDecode, GroupError, PenstockError, TaskError

if TYPE_CHECKING:
    from penstock._jobs.job import Job

T = TypeVar("T")

# Generator that asks for the ends of jobs, each as (status, body), and finally returns a value.
Asking = Generator[Sequence[bytes], Sequence[tuple[int, bytes]], T]

# Status of a job's end, with the numbers of the core.
SUCCEEDED, FAILED, EXPIRED, CRASHED, CANCELLED, UPSTREAM, REPLACED, GATHERED = range(8)
GONE = -1

_GROUP_ERROR = "penstock.GroupError"
# Numbers of failures in an error and in its message.
_MOST_KEPT = 100
_NAMED = 3


@public
@dataclass(frozen=True, slots=True)
class Failure:
    """Step that did not succeed: an item in a list of results, or the argument of an errback."""

    job_id: str
    """Id of the failed job, which may be one of several in the step."""
    index: int | None
    """Index of the step in its group, from 0; None outside of a group."""
    type_name: str
    """Full name of the error's type. ``penstock.JobExpired``, ``penstock.JobCancelled`` and ``penstock.WorkerCrashed``
    stand for jobs that never completed, and ``penstock.GroupError`` for several failed jobs."""
    message: str
    traceback: str = field(default="", repr=False)
    task: str | None = None
    """Name of the task; None where it is not known."""
    _record: bytes = field(default=b"", repr=False, compare=False)

    def exception(self) -> BaseException:
        """Return the error as ``job.result()`` raises it: of its own type if this process has imported that."""
        if self._record:
            return rebuild(envelope.decode_error(self._record), _CODEC)
        home, _, name = self.type_name.rpartition(".")
        kind = getattr(penstock.errors, name, None) if home == "penstock" else None
        return TaskError(self.type_name, self.message) if kind is None else kind(self.message)

    def __str__(self) -> str:
        place = "" if self.index is None else f"member {self.index}, "
        task = "" if self.task is None else f" ({self.task})"
        error = f"{self.type_name}: {self.message}" if self.message else self.type_name
        return f"{place}job {self.job_id}{task}: {error}"


def _job_of(job_id: bytes) -> "Job[object]":
    raise CannotDecode("the error contains a job whose app is not known here")


_CODEC = Codec({}, {}, _job_of)


def failure_of(job_id: bytes, index: int | None, status: int, body: bytes) -> Asking[Failure]:
    """Describe an unsuccessful job by its end."""
    if status == UPSTREAM:
        causes = [body[at : at + 16] for at in range(0, len(body), 16)]
        return (yield from failure_of_causes(job_id, index, causes, is_group=len(causes) != 1))
    text = format_id(job_id)
    if status == FAILED:
        failed = envelope.decode_failure(body)
        record = envelope.decode_error(failed.notes[-1])
        error = shown_type(record)
        return Failure(text, index, error, record.message, record.traceback, failed.task, failed.notes[-1])
    reason = body.decode(errors="replace")
    if status == CRASHED:
        return Failure(text, index, "penstock.WorkerCrashed", reason or "its worker process died")
    if status == EXPIRED:
        return Failure(text, index, "penstock.JobExpired", "it was not started before it expired")
    if status == CANCELLED:
        return Failure(text, index, "penstock.JobCancelled", reason or "it was cancelled")
    if status in (GONE, SUCCEEDED, GATHERED):
        since = "" if status == GONE else ": it was retried since, and succeeded"
        return Failure(text, index, "penstock.JobError", f"it failed, and its error is not kept{since}")
    raise PenstockError(
        f"job {text} ended in a way that this version of penstock does not know: install the broker's version here"
    )


def failure_of_causes(job_id: bytes, index: int | None, causes: Sequence[bytes], *, is_group: bool) -> Asking[Failure]:
    """Describe a step that failed because of these jobs: as the single job, or as a group."""
    failures = yield from failures_of(causes, job_id if is_group else None)
    if len(failures) == 1 and not is_group:
        (only,) = failures
        return Failure(only.job_id, index, only.type_name, only.message, only.traceback, only.task, only._record)
    first = causes[0] if causes else job_id
    return Failure(format_id(first), index, _GROUP_ERROR, _summary(failures))


def failures_of(causes: Sequence[bytes], join: bytes | None = None) -> Asking[list[Failure]]:
    """Describe failed jobs. ``join``: the join of which some may be members."""
    if not causes:
        return []
    ends = yield causes
    failures: list[Failure] = []
    for job_id, (status, body) in zip(causes, ends, strict=True):
        index = None
        if join is not None and not _is_graph(join):
            index = _place_in(join, job_id)
        failures.append((yield from failure_of(job_id, index, status, body)))
    return failures


def places_of(body: bytes, join: bytes) -> list[int]:
    """Return the places of the members of the join among the jobs that an upstream failure names."""
    places = [_place_in(join, job_id) for job_id in _causes(body)]
    return [place for place in places if place is not None]


def _causes(body: bytes) -> list[bytes]:
    return [body[at : at + 16] for at in range(0, len(body), 16)]


def _place_in(join: bytes, job_id: bytes) -> int | None:
    return int.from_bytes(job_id[13:]) - 1 if job_id[:13] == join[:13] else None


def group_error(step_id: bytes, body: bytes) -> Asking[GroupError]:
    """Make the error of a step that can no longer succeed, because of jobs before it or in it."""
    causes = _causes(body)
    failures = yield from failures_of(causes, step_id if step_id[13:] == b"\0\0\0" else None)
    step = "job" if step_id[13:] != b"\0\0\0" else "graph" if _is_graph(step_id) else "group"
    error = GroupError(
        f"{step} {format_id(step_id)}: {_summary(failures)}", len(failures), tuple(failures[:_MOST_KEPT])
    )
    if failures:
        error.__cause__ = failures[0].exception()
    return error


def _is_graph(join: bytes) -> bool:
    # The same test as in `results.py`, which imports this module.
    return join[12] & 3 == 2


def _summary(failures: Sequence[Failure]) -> str:
    if not failures:
        return "a job on which it depends has failed, and is no longer known"
    named = "; ".join(map(str, failures[:_NAMED]))
    more = len(failures) - _NAMED
    failed = "a job has failed" if len(failures) == 1 else f"{len(failures)} jobs have failed"
    return f"{failed}: {named}{f'; and {more} more' if more > 0 else ''}"
