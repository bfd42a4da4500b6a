"""`result()` that gives up says where the job is, which is what whoever waited needs to know."""

from __future__ import annotations

import re

import pytest
from project import Project, eventually

from penstock import App, Job, ResultTimeout

TASKS = """
    import time
    from pathlib import Path

    from penstock import App

    app = App("shop")
    here = Path(__file__).parent

    @app.task(queue="mail")
    def wait_here() -> None:
        while not (here / "go").exists():
            time.sleep(0.01)
"""


def why(job: Job[None]) -> str:
    with pytest.raises(ResultTimeout) as raised:
        job.result(timeout=0.2)
    before, after = (
        f"job {job.id}: it has not ended in time, and was not cancelled: ",
        ". Its result can be asked for again",
    )
    where = str(raised.value).removeprefix(before).removesuffix(after)
    assert f"{before}{where}{after}" == str(raised.value)
    return re.sub(r"[\d.]+ s\b", "N s", where)


async def test_a_job_that_is_late_is_where_the_error_says(project: Project) -> None:
    project.write("tasks.py", TASKS)
    task = project.tasks().wait_here
    first, second = task.delay(), task.delay()
    waits = f'for N s it has waited in queue "mail" of {project.url}'
    assert why(first) == f"{waits}, which no worker serves; start one with: penstock worker MODULE:APP -Q mail"
    project.worker("tasks:app", "-c", "1", "--name", "ant")
    eventually(lambda: first.info().state == "running", 30)
    assert why(first) == "it has run for N s on ant"
    assert why(second) == f"{waits}, which 1 worker serves"
    later = task.options(countdown=3600).delay()
    assert re.fullmatch(rf'it is delayed until [\d-]+ [\d:]+\+00:00 in queue "mail" of {project.url}', why(later))
    with pytest.raises(ResultTimeout, match="which 1 worker serves"):
        await second.aresult(timeout=0.1)
    (project.directory / "go").touch()
    first.result(timeout=30)


def test_a_job_that_only_workers_without_its_task_serve_says_so(project: Project) -> None:
    project.write("tasks.py", TASKS)
    project.write("other.py", TASKS.replace("wait_here", "something_else").replace('"shop"', '"other"'))
    late = project.tasks().wait_here.delay()
    project.worker("other:app", "-c", "1", "-Q", "mail")
    waits = f'for N s it has waited in queue "mail" of {project.url}'
    start = "start one that has: penstock worker MODULE:APP -Q mail"
    one = f"{waits}, and the one worker that serves it has no task tasks.wait_here; {start}"
    eventually(lambda: why(late) == one, 30)


def test_the_directory_of_a_local_broker_is_told_in_full(project: Project) -> None:
    """Two of them are easily mistaken: the worker serves the one next door."""
    project.write("tasks.py", TASKS)
    output = project.python(
        """
        import penstock
        import tasks

        for call in (
            lambda: tasks.wait_here.delay().result(timeout=0.1),
            lambda: tasks.app.job("0" * 32).result(timeout=0.1),
        ):
            try:
                call()
            except penstock.PenstockError as error:
                print(error)
        """,
        PENSTOCK_URL="local:.penstock",
    )
    late, unknown = output.splitlines()
    assert f'in queue "mail" of {project.url}, which no worker serves' in late
    assert f"the broker at {project.url} knows nothing of it" in unknown


def test_whoever_waits_without_a_worker_is_told_within_seconds(project: Project) -> None:
    project.write("tasks.py", TASKS)
    waiting = project.start_python("import tasks; tasks.wait_here.delay().result()")
    said = waiting.wait_for_output("no worker", timeout=20)
    notice = '1 job waits in queue "mail", which no worker has served for 3 s; start one with -Q mail'
    assert said.strip() == f"{project.url}: {notice}"


def test_no_worker_process_can_serve_a_broker_in_memory_so_none_is_advised() -> None:
    app = App("alone", url="memory:")

    @app.task
    def never() -> None:
        pass

    late = why(never.delay())
    assert "which lives in this process alone: run its jobs with penstock.testing.worker(app)" in late
    assert "penstock worker" not in late
