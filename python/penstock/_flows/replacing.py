"""Steps that a running job sends: the step that replaces it, and the steps that it spawns.

They are planned and encoded while the job runs, and sent together with its outcome, in one transaction. So a job that
fails, or that runs again after a crash, has sent nothing.

Steps that are sent immediately get ids derived from the job's id and their number, and come with a note that they were
sent. The broker refuses them while it has that note, so a job that runs again sends nothing twice:

    lifetime of the note: while the job may run again (as long as a failed job is kept), then one more hour
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, TypeAlias

from penstock import _core
from penstock._flows.build import Plan, Spawned
from penstock._flows.steps import Partial, check_step
from penstock._jobs import interrupts
from penstock._jobs.current import DEPTH, NO_EXTRAS, Leaving, Replacement, leaving, running

if TYPE_CHECKING:
    from penstock._flows.build import Built
    from penstock._flows.workflow import Workflow
    from penstock._jobs.job import Job
    from penstock._tasks.app import App

Build: TypeAlias = "Callable[[Sequence[tuple[_core.Options, bytes]]], Built]"

# Largest number of successive replacements. A replacement that ever finishes needs fewer.
_MOST = 256

# Failed jobs are kept for 30 days, and may be retried until then.
_NOTE_KEPT_MS = 31 * 24 * 60 * 60 * 1000
# A process that has lost its job to another process may still run it for a while.
_NOTE_KEPT_AFTER_END_MS = 60 * 60 * 1000


def replacement(app: App, step: Partial[Any, Any]) -> Replacement:
    """Plan a step that replaces the running job."""
    current = running.get()
    if current is None:
        raise RuntimeError("app.replace() works only inside a running job, and no job runs here")
    job_id, _, extras, *_ = current
    plan = Plan(check_step("app.replace()", step), atomic=True, wanted=True)
    if plan.has_jobs and plan.app is not app:
        raise ValueError(f"app.replace() takes steps of {app!r}, not of {plan.app!r}")
    _, _, _, headers, _, (_, workflow, *_) = extras or NO_EXTRAS
    depth = int(headers.get(DEPTH, "0")) + 1
    if depth > _MOST:
        raise RuntimeError(f"this job was replaced {_MOST} times in a row: does each replacement replace itself again?")
    # A job without a workflow becomes one, under its own id.
    opens = workflow is None and not plan.is_lone
    within = job_id if opens else workflow

    def build(jobs: Sequence[tuple[_core.Options, bytes]]) -> Built:
        return plan.build_in_place(jobs, job_id, depth, opens=opens)

    leaves = _steps_of(job_id)
    leaves.has_replacement = True
    if not plan.has_jobs:
        return Replacement(job_id, None)
    built = _planned(plan, leaves, build)
    encoded = built.graph.encode(within)
    if plan.is_nothing:
        # An empty group with callbacks.
        leaves.steps.append(encoded)
        return Replacement(job_id, None)
    return Replacement(job_id, encoded)


def spawn(step: Partial[Any, Any]) -> Job[Any] | Workflow[Any]:
    """Plan a step to send with the outcome of the running job if it succeeds."""
    current = running.get()
    assert current is not None
    job_id, _, extras, *_ = current
    plan = Plan(check_step("spawn()", step), atomic=True)
    _check_broker(plan)
    workflow = (extras or NO_EXTRAS)[5][1]
    if not plan.has_jobs:
        return plan.sent(None).workflow
    leaves = _steps_of(job_id)
    built = _planned(plan, leaves, lambda jobs: plan.build(jobs, opens=workflow is None))
    own = None if plan.is_lone else built.workflow_id
    leaves.steps.append(built.graph.encode(own if workflow is None else workflow))
    return _handle(plan, built)


def spawn_into_group(step: Partial[Any, Any]) -> None:
    """Plan a step to send as a new member of the running job's group, with the outcome of the job if it succeeds."""
    current = running.get()
    assert current is not None
    job_id, _, extras, *_ = current
    _, workflow, _, outer = (extras or NO_EXTRAS)[5]
    if outer is None:
        raise RuntimeError(
            'spawn(into="group") needs a job that is itself a member of a group, and the group must have been sent at'
            " once: with more than 10,000 calls, by delay(atomic=True)"
        )
    # The group's own outcome may be read: nothing here says whether it is.
    plan = Plan(check_step("spawn()", step), atomic=True, wanted=True)
    _check_broker(plan)
    if not plan.has_jobs:
        return
    leaves = _steps_of(job_id)
    built = _planned(plan, leaves, lambda jobs: plan.build_as_member(jobs, job_id, outer=outer))
    leaves.steps.append(built.graph.encode(workflow))


def spawn_now(step: Partial[Any, Any]) -> Job[Any] | Workflow[Any]:
    """Send a step of the running job, unless an earlier run of the job has sent it."""
    plan = _plan_now(step)
    return _handle(plan, plan.app._send_plan(plan, _BLOCKING) if plan.has_jobs else None)


async def aspawn_now(step: Partial[Any, Any]) -> Job[Any] | Workflow[Any]:
    """Like ``spawn_now``, but awaitable. Cancelling the await does not withdraw the step."""
    import asyncio

    plan = _plan_now(step)
    return _handle(plan, await asyncio.to_thread(plan.app._send_plan, plan) if plan.has_jobs else None)


_BLOCKING = ("spawn(now=True)", "aspawn()")


def _plan_now(step: Partial[Any, Any]) -> Plan:
    current = running.get()
    assert current is not None
    job_id, _, extras, *_ = current
    _, _, _, headers, _, (_, workflow, *_) = extras or NO_EXTRAS
    leaves = _steps_of(job_id)
    # A replacement has the id of the job that it replaced.
    name = f"{job_id.hex()}/{headers.get(DEPTH, '0')}/{leaves.sent}"
    seed = blake2b(name.encode(), digest_size=32, person=b"penstock.spawn").digest()
    key = f"penstock.sent/{name}".encode()
    plan = Plan(check_step("spawn()", step), atomic=True, spawned=Spawned(job_id, workflow, seed, key, _NOTE_KEPT_MS))
    if plan.has_jobs:
        _check_broker(plan)
        leaves.sent += 1
        last = _core.Graph()
        last.note(key, _NOTE_KEPT_AFTER_END_MS, False)
        leaves.steps.append(last.encode(None))
    return plan


def _handle(plan: Plan, built: Built | None) -> Job[Any] | Workflow[Any]:
    sent = plan.sent(built)
    return sent.workflow if sent.job is None else sent.job


def _check_broker(plan: Plan) -> None:
    current = running.get()
    assert current is not None
    if plan.has_jobs and plan.app.url != current[5].app.url:
        raise ValueError(f"spawn() takes steps whose broker is the job's own, not those of {plan.app!r}")


def _steps_of(job_id: bytes) -> Leaving:
    leaves = leaving.get(job_id)
    if leaves is None:
        leaves = leaving[job_id] = Leaving()
    return leaves


def _planned(plan: Plan, leaves: Leaving, build: Build) -> Built:
    """Build a plan with the headers of the context, through the middleware."""
    app = plan.app
    if interrupts.slot_of is not None:
        # In a worker, the supervisor sends the steps, so no connection is needed.
        return app._send_jobs(plan, build)
    connection = app._connected()
    return app._send_jobs(plan, lambda jobs: connection.build_plan(plan, jobs, build, leaves))
