"""Progress of running jobs, from slots of every kind."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from typing import Any

import pytest
from project import Process, Project, eventually, is_quick
from worker.kinds import Kind, named, notes

from penstock import JobState, Progress, ResultTimeout

SOURCE = """
    import asyncio, os, threading, time
    from contextvars import copy_context
    from penstock import App, current_job

    app = App("far", defaults={"slot": "@KIND"})
    @NOTES

    @app.task
    @DEF stays(steps: int) -> None:
        job = current_job()
        for step in range(steps):
            job.progress(step + 1, 2 * steps, f"step {step + 1}")
        note("stays", os.getpid())
        while not (here / "go").exists():
            @SLEEP(0.005)
        job.progress(2 * steps, 2 * steps, "all")

    @app.task(retries=1, backoff=0)
    @DEF tells_in_its_first_attempt() -> None:
        if current_job().attempt == 1:
            current_job().progress(1)
            raise ValueError
        note("second")
        while not (here / "go").exists():
            @SLEEP(0.005)

    @app.task
    @DEF tells_from_a_thread() -> None:
        def tells() -> None:
            current_job().progress(7, message="from a thread")
        thread = threading.Thread(target=copy_context().run, args=[tells])
        thread.start()
        thread.join()

    @app.task
    @DEF forks() -> int:
        child = os.fork()
        if child == 0:
            current_job().progress(8)
            os._exit(0)
        current_job().progress(9)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    @app.task
    @DEF counts(steps: int, pause_s: float) -> int:
        for step in range(steps):
            current_job().progress(step + 1, steps)
            if pause_s:
                @SLEEP(pause_s)
        return steps

    @app.task
    @DEF wrong() -> None:
        current_job().progress(float("nan"))

    @app.task
    @DEF tells_100_000_times() -> float:
        job, begun = current_job(), time.thread_time()
        for step in range(100_000):
            job.progress(step, 100_000, "a step")
        return time.thread_time() - begun
"""


PROCESS = Kind("process", ("-c", "2"))
THREAD = Kind("thread", ("-c", "1", "--threads", "4"))
ASYNC = Kind("async", ("-c", "1", "--async", "4"))
ISOLATED = Kind("isolated", ("-c", "1", "--isolated", "2"))
KINDS = [PROCESS, THREAD, ASYNC, ISOLATED]


class Shop:
    def __init__(self, project: Project) -> None:
        self.project = project
        self.tasks: Any = None

    def start(self, kind: Kind, *options: str) -> Process:
        self.project.write("far.py", kind.source(SOURCE))
        self.tasks = self.project.tasks("far.py")
        return self.project.worker("far:app", *kind.options, *options)

    def go(self) -> None:
        self.project.write("go", "")

    def stays(self, steps: int = 1) -> Any:
        before = len(self.notes("stays"))
        job = self.tasks.stays.delay(steps)
        eventually(lambda: len(self.notes("stays")) > before)
        return job

    def notes(self, word: str) -> list[str]:
        return notes(self.project, word)


@pytest.fixture
def shop(project: Project) -> Shop:
    return Shop(project)


@named(KINDS)
def test_the_latest_is_told_while_a_job_runs_and_the_last_when_it_has_ended(shop: Shop, kind: Kind) -> None:
    shop.start(kind)
    job = shop.tasks.stays.delay(1000)
    # The task reports nothing more, but the last of its rapid reports still arrives.
    eventually(lambda: job.progress() == Progress(1000, 2000, "step 1000"))
    assert str(job.progress()) == "1,000 of 2,000 (50 %): step 1000"
    assert job.progress().fraction == 0.5
    updates = iter(job.progress_updates(timeout=60))
    assert next(updates) == Progress(1000, 2000, "step 1000")
    shop.go()
    assert list(updates) == [Progress(2000, 2000, "all")]
    assert job.wait() is JobState.SUCCEEDED
    assert job.progress() == Progress(2000, 2000, "all")


@named(KINDS)
def test_it_is_told_to_async_for_and_with_a_line_now_and_then(
    shop: Shop, kind: Kind, capsys: pytest.CaptureFixture[str]
) -> None:
    shop.start(kind)

    async def watch(job: Any) -> list[Progress]:
        return [progress async for progress in job.progress_updates(timeout=60)]

    told = asyncio.run(watch(shop.tasks.counts.delay(30, 0.02)))
    assert told[-1] == Progress(30, 30, "") and len(told) > 2
    assert [progress.done for progress in told] == sorted({progress.done for progress in told})
    for wait in (lambda job: job.wait(60, progress=True), lambda job: asyncio.run(job.async_wait(60, progress=True))):
        job = shop.tasks.counts.delay(30, 0.02)
        assert wait(job) is JobState.SUCCEEDED
        first, *_, last = capsys.readouterr().err.splitlines()
        assert first.startswith(f"job {job.id}: ") and " of 30 (" in first
        assert last.startswith(f"job {job.id}: succeeded after ")


@named([PROCESS, ASYNC])
def test_each_attempt_begins_without(shop: Shop, kind: Kind) -> None:
    shop.start(kind)
    job = shop.tasks.tells_in_its_first_attempt.delay()
    eventually(lambda: shop.notes("second"))
    assert job.progress() is None
    shop.go()
    assert job.wait(60) is JobState.SUCCEEDED
    assert job.progress() is None


@named([PROCESS, THREAD])
def test_a_restart_of_the_broker_forgets_it_until_there_is_more(shop: Shop, kind: Kind) -> None:
    shop.start(kind)
    job = shop.stays()
    eventually(lambda: job.progress() == Progress(1, 2, "step 1"))
    shop.project.kill_broker()
    assert job.progress() is None
    shop.go()
    assert [progress.message for progress in job.progress_updates(timeout=60)][-1:] == ["all"]


@named([PROCESS, THREAD, ASYNC])
def test_nothing_is_left_of_the_progress_of_a_process_that_was_killed(shop: Shop, kind: Kind) -> None:
    shop.start(kind)
    job = shop.stays()
    eventually(lambda: job.progress() is not None)
    os.kill(int(shop.notes("stays")[0]), signal.SIGKILL)
    shop.go()
    assert job.wait(60) is JobState.SUCCEEDED
    assert job.info().crashes == 1 and len(shop.notes("stays")) == 2
    assert job.progress() == Progress(2, 2, "all")


@named(KINDS)
def test_threads_of_a_job_tell_it_and_processes_that_it_starts_do_not(shop: Shop, kind: Kind) -> None:
    shop.start(kind)
    job = shop.tasks.tells_from_a_thread.delay()
    assert job.wait(60) is JobState.SUCCEEDED
    assert job.progress() == Progress(7, None, "from a thread")
    assert str(job.progress()) == "7: from a thread"
    job = shop.tasks.forks.delay()
    assert job.result(60) == 0
    assert job.progress().done == 9


def test_numbers_that_are_none_are_refused(shop: Shop) -> None:
    shop.start(PROCESS)
    with pytest.raises(ValueError, match="a finite number, not NaN"):
        shop.tasks.wrong.delay().result(60)


def test_operators_see_it(shop: Shop) -> None:
    shop.start(PROCESS)
    job = shop.stays(4)
    eventually(lambda: job.progress() == Progress(4, 8, "step 4"))
    shown = shop.project.penstock("job", "show", job.id).output
    assert "progress   4 of 8 (50 %): step 4\n" in shown
    shown = json.loads(shop.project.penstock("job", "show", job.id, "--json").output)
    assert shown["progress"] == {"done": 4, "total": 8, "message": "step 4"}
    with pytest.raises(ResultTimeout, match="it did not end in time"):
        list(job.progress_updates(timeout=0.3))
    shop.go()
    job.result(60)
    shown = json.loads(shop.project.penstock("job", "show", job.id, "--json").output)
    assert shown["progress"] is None


def test_a_workflow_counts_its_jobs(shop: Shop, capsys: pytest.CaptureFixture[str]) -> None:
    from penstock import group

    shop.start(PROCESS)
    for wait in (
        lambda workflow: workflow.wait(60, progress=True),
        lambda workflow: asyncio.run(workflow.async_wait(60, progress=True)),
    ):
        workflow = group(shop.tasks.counts.s(1, 0) for _ in range(5)).delay()
        assert wait(workflow) is JobState.SUCCEEDED
        first, *_, last = capsys.readouterr().err.splitlines()
        assert first.startswith(f"workflow {workflow.id}: ") and " of 5 (" in first
        assert last.startswith(f"workflow {workflow.id}: succeeded after ")
        workflow = group(shop.tasks.stays.s(1) for _ in range(3)).delay()
        with pytest.raises(ResultTimeout):
            workflow.wait(0.2, progress=True)
        workflow.cancel(running="kill")
        capsys.readouterr()


@pytest.mark.alone
@named([PROCESS, THREAD, ASYNC])
def test_telling_it_100_000_times_takes_no_second(shop: Shop, kind: Kind) -> None:
    shop.start(kind)
    took_s = shop.tasks.tells_100_000_times.delay().result(60)
    print(f"{took_s * 10:.2f} µs a call")
    is_quick(took_s, 0.5, "telling progress")
