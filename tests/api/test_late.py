"""The error of a `result()` that gives up says where the job is."""

from __future__ import annotations

import re

import pytest
from project import Project, eventually

import penstock
from penstock import App, Job, ResultTimeout, Workflow, chain, group

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
        f"job {job.id}: it did not end in time, and was not cancelled: ",
        ". Ask for its result again to keep waiting",
    )
    where = str(raised.value).removeprefix(before).removesuffix(after)
    assert f"{before}{where}{after}" == str(raised.value)
    return re.sub(r"[\d.]+ s\b", "N s", where)


async def test_a_job_that_is_late_is_where_the_error_says(project: Project) -> None:
    project.write("tasks.py", TASKS)
    task = project.tasks().wait_here
    first, second = task.delay(), task.delay()
    waits = f'it has waited for N s in queue "mail" of {project.url}'
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


def test_a_worker_with_slots_of_two_kinds_is_not_taken_for_two(project: Project) -> None:
    project.write("tasks.py", TASKS + '\n    @app.task(queue="mail")\n    async def other() -> None: ...\n')
    task = project.tasks().wait_here
    first, second = task.delay(), task.delay()
    project.worker("tasks:app", "-c", "1")
    eventually(lambda: first.info().state == "running", 30)
    waits = f'it has waited for N s in queue "mail" of {project.url}'
    assert why(second) == f"{waits}, which 2 consumers serve: a worker has one for each kind of slot"
    (project.directory / "go").touch()


def test_a_job_that_only_workers_without_its_task_serve_says_so(project: Project) -> None:
    project.write("tasks.py", TASKS)
    project.write("other.py", TASKS.replace("wait_here", "something_else").replace('"shop"', '"other"'))
    late = project.tasks().wait_here.delay()
    project.worker("other:app", "-c", "1", "-Q", "mail")
    waits = f'it has waited for N s in queue "mail" of {project.url}'
    why_not = "if the task is new (a worker loads code once)"
    start = "or start one that has the task: penstock worker MODULE:APP -Q mail"
    one = f"{waits}, and the one worker that serves it has no task tasks.wait_here; restart it, {why_not}, {start}"
    eventually(lambda: why(late) == one, 30)
    project.worker("other:app", "-c", "1", "-Q", "mail")
    none = f"{waits}, and no worker that serves it has the task tasks.wait_here; restart one, {why_not}, {start}"
    eventually(lambda: why(late) == none, 30)


def test_the_directory_of_a_local_broker_is_told_in_full(project: Project) -> None:
    """Two local brokers are easily confused: the worker may serve the other one."""
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
    assert f"the broker at {project.url} does not know it" in unknown


def test_whoever_waits_without_a_worker_is_told_within_seconds(project: Project) -> None:
    project.write("tasks.py", TASKS)
    waiting = project.start_python("import tasks; tasks.wait_here.delay().result()")
    said = waiting.wait_for_output("no worker", timeout=20)
    notice = '1 job waits in queue "mail", which no worker has served for 3 s; start one with -Q mail'
    assert said.strip() == f"{project.url}: {notice}"
    # The broker says so once, to the clients that are connected at that moment.
    later = project.start_python("import tasks; tasks.wait_here.delay().result()")
    said = later.wait_for_output("no worker", timeout=20)
    assert re.search(
        r'^job \S+ of tasks.wait_here: it has waited for [\d.]+ s in queue "mail" of .*, which no worker', said
    )


def test_no_worker_process_can_serve_a_broker_in_memory_so_none_is_advised() -> None:
    app = App("alone", url="memory:")

    @app.task
    def never() -> None:
        pass

    late = why(never.delay())
    assert "which exists only in this process: run its jobs with penstock.testing.worker(app)" in late
    assert "penstock worker" not in late


def test_an_error_about_many_jobs_says_where_one_is_that_nothing_runs(project: Project) -> None:
    project.write("tasks.py", TASKS)
    project.worker("tasks:app", "-c", "1", "--name", "ant")
    task = project.tasks().wait_here
    first = task.delay()
    eventually(lambda: first.info().state == "running", 30)
    second, stuck = task.delay(), task.options(queue="attic").delay()
    where = f'; job {stuck.id} of tasks.wait_here: it has waited for N s in queue "attic" of {project.url}'
    where += ", which no worker serves; start one with: penstock worker MODULE:APP -Q attic"
    for wait in (penstock.results, lambda *given, timeout: list(penstock.as_completed(*given, timeout=timeout))):
        with pytest.raises(ResultTimeout) as raised:
            wait([first, second, stuck], timeout=0.2)
        assert (
            without_times(raised)
            == f"3 of 3 jobs have not ended in time, {first!r} among them; none was cancelled{where}"
        )
        with pytest.raises(ResultTimeout) as raised:
            wait([second], timeout=0.2)
        assert without_times(raised).endswith(f"; job {second.id} of tasks.wait_here: {served(project)}")
    with pytest.raises(ResultTimeout, match=r"none was cancelled$"):
        penstock.results([stuck], timeout=0)
    (project.directory / "go").touch()


async def test_a_workflow_that_is_late_says_which_job_keeps_it(project: Project) -> None:
    project.write("tasks.py", TASKS)
    task = project.tasks().wait_here
    nobody = "which no worker serves; start one with: penstock worker MODULE:APP -Q mail"
    waits = f'of tasks.wait_here: it has waited for N s in queue "mail" of {project.url}, {nobody}'

    line = chain(task.si(), task.si()).delay()
    said = f"workflow {line.id}: it did not end in time, and was not cancelled"
    again = "Ask for its result again to keep waiting"
    assert late(line) == f"{said}: 0 of 2 members have ended; job {line[0].id} {waits}. {again}"
    with pytest.raises(ResultTimeout) as raised:
        await line.aresult(timeout=0.2)
    assert without_times(raised) == late(line)
    with pytest.raises(ResultTimeout) as raised:
        line.result(timeout=0)
    assert str(raised.value) == f"{said}: 0 of 2 members have ended. {again}"

    inside = group(group(task.si(), task.si()), chain(task.si(), group(task.si()))).delay()
    assert f"job {inside[0].id}" not in late(inside)
    assert f" {waits}. {again}" in late(inside)

    # Another program does not know its members.
    elsewhere = task.app.workflow(group(task.si(), task.si()).delay().id)
    assert f"was not cancelled: job {elsewhere[0].id} {waits}" in late(elsewhere)


def late(workflow: Workflow[object]) -> str:
    with pytest.raises(ResultTimeout) as raised:
        workflow.result(timeout=0.2)
    return without_times(raised)


def served(project: Project) -> str:
    return f'it has waited for N s in queue "mail" of {project.url}, which 1 worker serves'


def without_times(raised: pytest.ExceptionInfo[ResultTimeout]) -> str:
    return re.sub(r"[\d.]+ s\b", "N s", str(raised.value))
