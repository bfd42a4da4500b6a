"""Steps that a running job leaves behind: one that takes its place, and those that it spawns.

They are planned and encoded while the job runs, and sent with its outcome, in one transaction. So a job that fails, or
that runs again after a crash, has left nothing behind.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from penstock._flows.build import Plan
from penstock._flows.steps import Partial, Signature, check_step
from penstock._jobs import interrupts
from penstock._jobs.current import DEPTH, NO_EXTRAS, Leaving, Replacement, leaving, running

if TYPE_CHECKING:
    from penstock import _core
    from penstock._flows.build import Built
    from penstock._flows.workflow import Workflow
    from penstock._jobs.job import Job
    from penstock._tasks.app import App

Build: TypeAlias = "Callable[[Sequence[tuple[_core.Options, bytes]]], Built]"

# Jobs in one place, one after another. Nothing that ends needs so many.
_MOST = 256


def replacement(app: App, step: Partial[Any, Any]) -> Replacement:
    """Plan a step that takes the place of the running job."""
    current = running.get()
    if current is None:
        raise RuntimeError("app.replace() is for a task that runs as a job: no job runs here")
    job_id, _, extras, *_ = current
    plan = Plan(check_step("app.replace()", step), atomic=True, wanted=True)
    if plan.has_jobs and plan.app is not app:
        raise ValueError(f"app.replace() takes steps of {app!r}, and not of {plan.app!r}")
    _, _, _, headers, _, (_, workflow, _) = extras or NO_EXTRAS
    depth = int(headers.get(DEPTH, "0")) + 1
    if depth > _MOST:
        raise RuntimeError(
            f"this job is the {_MOST}th in its place, one after another: does the last of them ever end?"
        )
    # A job of no workflow becomes one, by its own id.
    opens = workflow is None and not _is_lone(step)
    within = job_id if opens else workflow

    def build(jobs: Sequence[tuple[_core.Options, bytes]]) -> Built:
        return plan.build_in_place(jobs, job_id, depth, opens=opens)

    leaves = _leaves_of(job_id)
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
    """Plan a step that is sent with the outcome of the running job, if that succeeds."""
    current = running.get()
    assert current is not None
    job_id, _, extras, *_ = current
    plan = Plan(check_step("spawn()", step), atomic=True)
    workflow = (extras or NO_EXTRAS)[5][1]
    if not plan.has_jobs:
        return plan.sent(None).workflow
    leaves = _leaves_of(job_id)
    built = _planned(plan, leaves, lambda jobs: plan.build(jobs, opens=workflow is None))
    own = None if _is_lone(step) else built.workflow_id
    leaves.steps.append(built.graph.encode(own if workflow is None else workflow))
    sent = plan.sent(built)
    return sent.workflow if sent.job is None else sent.job


def _is_lone(step: Partial[Any, Any]) -> bool:
    return isinstance(step, Signature) and not step._links


def _leaves_of(job_id: bytes) -> Leaving:
    leaves = leaving.get(job_id)
    if leaves is None:
        leaves = leaving[job_id] = Leaving()
    return leaves


def _planned(plan: Plan, leaves: Leaving, build: Build) -> Built:
    """Build a plan with the headers of the context, through the middleware."""
    app = plan.app
    if interrupts.slot_of is not None:
        # In a worker, whose supervisor sends it: no connection is needed.
        return app._send_jobs(plan, build)
    connection = app._connected()
    return app._send_jobs(plan, lambda jobs: connection.build_plan(plan, jobs, build, leaves))
