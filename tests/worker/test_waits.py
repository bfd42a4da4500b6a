"""Jobs that wait for each other in a cycle get an error that names all of them, and no job waits forever."""

from __future__ import annotations

import asyncio

import pytest
from project import Project

import penstock
from penstock import WaitCycle

TASKS = """
    import asyncio

    import penstock
    from penstock import App, current_job

    app = App("shop")

    @app.task
    def wait_for(job_id: str) -> str:
        try:
            return str(app.job(job_id).result(timeout=30))
        except penstock.WaitCycle as error:
            return f"refused: {error}"

    @app.task
    def wait_for_child() -> str:
        try:
            return wait_for.delay(current_job().id).result(timeout=30)
        except penstock.WaitCycle as error:
            return f"refused: {error}"

    @app.task
    def wait_for_itself(how: str) -> str:
        own = app.job(current_job().id)
        try:
            match how:
                case "result":
                    own.result(timeout=30)
                case "results":
                    penstock.results([own], timeout=30)
                case "as_completed":
                    list(penstock.as_completed([own], timeout=30))
                case "await":
                    asyncio.run(own.aresult(timeout=30))
        except penstock.WaitCycle as error:
            return f"refused: {error}"

    @app.task
    def wait_for_own_workflow() -> str:
        workflow = app.workflow(current_job().workflow)
        try:
            return str(workflow.result(timeout=30))
        except penstock.WaitCycle as error:
            return f"refused: {error}"

    @app.task
    def first_of(other: str) -> int:
        jobs = [app.job(current_job().id), app.job(other)]
        return len(penstock.wait(jobs, timeout=30, return_when="first").done)

    @app.task
    def end() -> None: ...

    @app.task
    def wrap(text: str) -> str:
        return text
"""


@pytest.mark.parametrize("how", ["result", "results", "as_completed", "await"])
def test_a_job_that_waits_for_itself_is_told_at_once(project: Project, how: str) -> None:
    project.write("tasks.py", TASKS)
    project.worker("tasks:app", "-c", "1")
    job = project.tasks().wait_for_itself.delay(how)
    told = job.result(timeout=20)
    assert told.startswith(f"refused: job {job.id} (tasks.wait_for_itself) waits for itself. None of these jobs"), told


def test_the_wait_that_closes_a_circle_is_refused_and_the_others_go_on(project: Project) -> None:
    project.write("tasks.py", TASKS)
    tasks = project.tasks()
    project.worker("tasks:app", "-c", "2")
    first = tasks.wait_for_child.delay()
    told = first.result(timeout=20)
    # Parent and child wait for each other, and the second one to wait gets the error.
    assert told.startswith("refused: job ") and ", which waits for " in told, told
    assert f"job {first.id} (tasks.wait_for_child)" in told and "(tasks.wait_for)" in told


def test_a_step_that_waits_for_its_own_workflow_is_refused_through_the_group(project: Project) -> None:
    project.write("tasks.py", TASKS)
    project.worker("tasks:app", "-c", "1")
    tasks = project.tasks()
    workflow = (tasks.wait_for_own_workflow.s() | tasks.wrap.s()).delay()
    told = workflow.result(timeout=20)
    assert told.startswith("refused: job ") and "(tasks.wait_for_own_workflow) waits for " in told
    assert "(tasks.wrap), which waits for" in told, told


def test_a_job_that_waits_for_the_first_of_several_is_in_no_circle_while_another_may_end(project: Project) -> None:
    project.write("tasks.py", TASKS)
    project.worker("tasks:app", "-c", "2")
    tasks = project.tasks()
    other = tasks.end.options(countdown=0.5).delay()
    sent = tasks.first_of.delay(other.id)
    assert sent.result(timeout=20) == 1


def test_nobody_outside_of_jobs_is_refused(project: Project) -> None:
    project.write("tasks.py", TASKS)
    job = project.tasks().end.options(countdown=0.5).delay()
    project.worker("tasks:app", "-c", "1")
    assert asyncio.run(job.aresult(timeout=20)) is None
    assert issubclass(WaitCycle, penstock.PenstockError) and not issubclass(WaitCycle, penstock.JobError)
