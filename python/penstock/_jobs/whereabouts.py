"""Describes where an unfinished job is, for the error of a caller that waited for it."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from penstock._jobs.current import format_id
from penstock.errors import PenstockError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock._connection import Connection

# Time limit of each of two queries, short because the caller has waited long enough.
_ASKED_FOR_S = 1.0
# Number of jobs to look at.
_LOOKED_AT = 16
# States of a job that depends on no other.
_ON_THEIR_WAY = ("ready", "delayed", "running", "cancelling", "parked")


def whereabouts(connection: Connection, job_id: bytes, url: str, call_timeout_s: float) -> str:
    """Ask the broker where a job is, and describe it. Raises ``PenstockError`` when it does not answer soon."""
    timeout_s = min(_ASKED_FOR_S, call_timeout_s)
    held: dict[str, Any] | None = connection.message_info(job_id, timeout_s)
    if held is None:
        return "it has just ended"
    consumers = connection.consumers(held["queue"], timeout_s) if held["state"] == "ready" else 0
    return _in_words(held, consumers, url)


def whereabouts_of_one(
    connection: Connection, job_ids: Sequence[bytes], url: str, call_timeout_s: float, *, only_stuck: bool = False
) -> str:
    """Describe one of these jobs: preferably one that nothing will run, otherwise any that waits in a queue or runs.

    Empty when there is no such job among the first ones, or when the broker does not answer soon.
    """
    until = time.monotonic() + min(_ASKED_FOR_S, call_timeout_s)
    found = ""
    for job_id in job_ids[:_LOOKED_AT]:
        left_s = until - time.monotonic()
        if left_s <= 0:
            break
        try:
            held: dict[str, Any] | None = connection.message_info(job_id, left_s)
            if held is None or held["state"] not in _ON_THEIR_WAY:
                continue
            consumers = connection.consumers(held["queue"], left_s) if held["state"] == "ready" else 0
        except PenstockError:
            break
        is_stuck = held["state"] == "ready" and (not consumers or held["task_unknown"])
        if is_stuck or not (found or only_stuck):
            found = f"job {format_id(job_id)} of {held['task']}: {_in_words(held, consumers, url)}"
        if is_stuck:
            break
    return found


def _in_words(held: dict[str, Any], consumers: int, url: str) -> str:
    state, queue = held["state"], held["queue"]
    if state == "ready":
        waits = f'it has waited for {_since(held["enqueued_at_ms"])} in queue "{queue}" of {url}'
        if not consumers:
            if url.startswith("memory:"):
                return f"{waits}, which exists only in this process: run its jobs with penstock.testing.worker(app)"
            return f"{waits}, which no worker serves; start one with: penstock worker MODULE:APP -Q {queue}"
        if held["task_unknown"]:
            problem, which = (
                ("the one worker that serves it has no task", "it")
                if consumers == 1
                else ("no worker that serves it has the task", "one")
            )
            return (
                f"{waits}, and {problem} {held['task']}; restart {which}, if the task is new (a worker loads code"
                f" once), or start one that has the task: penstock worker MODULE:APP -Q {queue}"
            )
        if consumers == 1:
            return f"{waits}, which 1 worker serves"
        return f"{waits}, which {consumers} consumers serve: a worker has one for each kind of slot"
    if state in ("running", "cancelling", "parked"):
        started = held["started_at_ms"]
        return f"it has run{f' for {_since(started)}' if started else ''} on {held['worker'] or 'a worker'}"
    if state == "delayed":
        due = datetime.fromtimestamp(held["due_at_ms"] / 1000, UTC).isoformat(" ", "seconds")
        why = ", after its process died" if _has_crashed(held) else ""
        return f'it is delayed until {due} in queue "{queue}" of {url}{why}'
    if state == "held":
        return "it waits for other jobs to end"
    return f"it is {state}"


def _has_crashed(held: dict[str, Any]) -> bool:
    """Whether the job's latest attempt crashed. Its note is then plain text instead of an error record."""
    from penstock._values.envelope import read_note

    notes = held["notes"]
    return bool(held["crashes"] and notes) and isinstance(read_note(notes[-1]), str)


def _since(moment_ms: int) -> str:
    seconds = max(0.0, time.time() - moment_ms / 1000)
    return f"{seconds:.1f} s" if seconds < 100 else f"{seconds / 60:.0f} min"
