"""Cancelled running jobs, in slots of every kind: they stop, end once, and never start again."""

from __future__ import annotations

import signal
import threading
from collections import Counter
from typing import Any

import pytest
from project import Process, Project, eventually, within
from worker.kinds import Kind, named, notes

from penstock import JobCancelled, JobState

SOURCE = """
    import asyncio, os, subprocess, time
    from penstock import App

    app = App("cancels", defaults={"slot": "@KIND"})
    @NOTES

    @app.task
    @DEF works() -> None:
        note("works", os.getpid())
        while True:
            @SLEEP(0.005)

    @app.task(retries=5, backoff=0)
    @DEF fails_when_it_is_stopped() -> None:
        note("fails")
        try:
            while True:
                @SLEEP(0.005)
        except BaseException as error:
            raise ValueError("while it cleaned up") from error

    @app.task
    @DEF returns_all_the_same() -> str:
        note("returns")
        try:
            while True:
                @SLEEP(0.005)
        except BaseException:
            return "done"

    @app.task
    @DEF ignores() -> None:
        note("ignores", os.getpid())
        while True:
            try:
                while True:
                    time.sleep(0.005)
            except BaseException:
                pass

    @app.task
    @DEF waits_for_another() -> None:
        note("waits")
        never.delay().result()

    @app.task(queue="nobody")
    def never() -> None:
        pass

    @app.task
    @DEF starts_a_program() -> None:
        program = subprocess.Popen(["sleep", "600"])
        note("program", program.pid)
        while True:
            @SLEEP(0.005)

    @app.task
    @DEF add(a: int, b: int) -> int:
        return a + b

    @app.task
    @DEF short(number: int) -> int:
        note("short", number)
        @SLEEP(0.002)
        return number
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
        self.project.write("cancels.py", kind.source(SOURCE))
        self.tasks = self.project.tasks("cancels.py")
        return self.project.worker("cancels:app", *kind.options, *options)

    def notes(self, word: str) -> list[str]:
        return notes(self.project, word)

    def begun(self, task: Any, word: str) -> Any:
        job = task.delay()
        eventually(lambda: self.notes(word))
        return job

    def serves_on(self) -> None:
        assert [job.result(timeout=60) for job in self.tasks.add.starmap([(n, n) for n in range(20)])] == [
            2 * n for n in range(20)
        ]


@pytest.fixture
def shop(project: Project) -> Shop:
    return Shop(project)


def is_gone(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] == "Z"
    # The second one if it is reaped between the opening and the reading.
    except (FileNotFoundError, ProcessLookupError):
        return True


@named(KINDS)
def test_a_running_job_stops_and_ends_as_cancelled(shop: Shop, kind: Kind) -> None:
    shop.start(kind)
    job = shop.begun(shop.tasks.works, "works")
    with within(10, "to stop it"):
        assert job.cancel("no longer wanted") is JobState.CANCELLING
        with pytest.raises(JobCancelled, match=f"^job {job.id}: no longer wanted$"):
            job.result(timeout=60)
    info = job.info()
    assert (info.state, info.error, info.task) == (JobState.CANCELLED, "no longer wanted", "cancels.works")
    # A second cancel changes nothing.
    assert job.cancel("another reason") is JobState.CANCELLED
    shop.serves_on()
    assert len(shop.notes("works")) == 1


@named(KINDS)
def test_no_retry_starts_a_cancelled_job_again_and_a_success_is_kept(shop: Shop, kind: Kind) -> None:
    shop.start(kind)
    fails = shop.begun(shop.tasks.fails_when_it_is_stopped, "fails")
    returns = shop.begun(shop.tasks.returns_all_the_same, "returns")
    fails.cancel("enough")
    returns.cancel("enough")
    with pytest.raises(JobCancelled, match="enough"):
        fails.result(timeout=60)
    assert returns.result(timeout=60) == "done"
    assert (fails.info().state, returns.info().state) == (JobState.CANCELLED, JobState.SUCCEEDED)
    shop.serves_on()
    assert (len(shop.notes("fails")), len(shop.notes("returns"))) == (1, 1)


@named(KINDS)
@pytest.mark.parametrize("running", ["ask", "kill"])
def test_a_job_that_does_not_stop_is_killed(shop: Shop, kind: Kind, running: Any) -> None:
    # An order to kill doesn't wait for the grace period.
    shop.start(kind, "--kill-grace", {"ask": "0.5", "kill": "600"}[running], "--grace", "2")
    job = shop.begun(shop.tasks.ignores, "ignores")
    (pid,) = map(int, shop.notes("ignores"))
    with within(15, "to kill it"):
        assert job.cancel("enough", running=running) is JobState.CANCELLING
        with pytest.raises(JobCancelled, match="enough"):
            job.result(timeout=60)
    eventually(lambda: is_gone(pid))
    shop.serves_on()
    assert len(shop.notes("ignores")) == 1 and job.info().crashes == 0


@named(KINDS)
def test_a_job_that_was_asked_may_still_be_killed(shop: Shop, kind: Kind) -> None:
    shop.start(kind, "--kill-grace", "600", "--grace", "2")
    job = shop.begun(shop.tasks.ignores, "ignores")
    assert job.cancel("first") is JobState.CANCELLING
    assert job.info().state is JobState.CANCELLING
    assert job.cancel("second", running="leave") is JobState.CANCELLING
    assert job.cancel("third", running="kill") is JobState.CANCELLING
    with pytest.raises(JobCancelled, match="first"):
        job.result(timeout=60)


@named([PROCESS, ISOLATED])
def test_the_programs_of_a_killed_job_die_with_it(shop: Shop, kind: Kind) -> None:
    shop.start(kind)
    job = shop.begun(shop.tasks.starts_a_program, "program")
    (program,) = map(int, shop.notes("program"))
    assert not is_gone(program)
    job.cancel(running="kill")
    with pytest.raises(JobCancelled):
        job.result(timeout=60)
    eventually(lambda: is_gone(program))


@named([PROCESS, THREAD, ISOLATED])
def test_a_job_that_waits_for_another_is_woken(shop: Shop, kind: Kind) -> None:
    shop.start(kind, "-Q", "default")
    job = shop.begun(shop.tasks.waits_for_another, "waits")
    with within(10, "to wake it"):
        job.cancel("enough")
        with pytest.raises(JobCancelled, match="enough"):
            job.result(timeout=60)


@named([PROCESS, ASYNC])
def test_an_order_survives_the_death_of_the_broker(shop: Shop, kind: Kind) -> None:
    worker = shop.start(kind)
    job = shop.begun(shop.tasks.works, "works")
    # The worker receives nothing until the broker that got the order is dead.
    worker.signal(signal.SIGSTOP)
    assert job.cancel("enough") is JobState.CANCELLING
    shop.project.kill_broker()
    worker.signal(signal.SIGCONT)
    with pytest.raises(JobCancelled, match="enough"):
        job.result(timeout=60)
    shop.serves_on()
    assert len(shop.notes("works")) == 1


def test_the_job_of_a_worker_that_dies_has_ended(shop: Shop) -> None:
    worker = shop.start(PROCESS, "--heartbeat", "2")
    job = shop.begun(shop.tasks.works, "works")
    worker.signal(signal.SIGSTOP)
    assert job.cancel("enough") is JobState.CANCELLING
    worker.signal(signal.SIGKILL)
    worker.wait()
    shop.project.worker("cancels:app", "-c", "1")
    # The job ends once its lease is lost.
    with pytest.raises(JobCancelled, match="enough"):
        job.result(timeout=120)
    shop.serves_on()
    assert len(shop.notes("works")) == 1


def test_a_worker_that_stops_hears_of_cancelled_jobs(shop: Shop) -> None:
    worker = shop.start(PROCESS, "--grace", "600")
    job = shop.begun(shop.tasks.works, "works")
    worker.signal(signal.SIGTERM)
    worker.wait_for_output("stopping")
    job.cancel("enough")
    with pytest.raises(JobCancelled, match="enough"):
        job.result(timeout=60)
    assert worker.wait() == 0


def test_many_races_of_cancels_and_settlements_have_one_end_each(shop: Shop) -> None:
    """A success that was settled first is kept, and a cancelled job has no other result."""
    count = 2_000
    shop.start(THREAD)
    shop.serves_on()
    jobs = shop.tasks.short.map(range(count))
    answers: dict[int, JobState] = {}

    def cancel(numbers: range) -> None:
        for number in numbers:
            answers[number] = jobs[number].cancel()

    # Cancel from both ends, so that some jobs have ended, some run, and some wait.
    ranges = [range(count // 4), range(count // 4, count // 2), range(count - 1, count // 2 - 1, -1)]
    threads = [threading.Thread(target=cancel, args=(numbers,)) for numbers in ranges]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    ends: Counter[tuple[JobState, JobState]] = Counter()
    for number, job in enumerate(jobs):
        try:
            assert job.result(timeout=60) == number
            end = JobState.SUCCEEDED
        except JobCancelled:
            end = JobState.CANCELLED
        ends[answers[number], end] += 1
        assert job.info().state is end
    # No client learns one outcome and then sees another.
    for told, end in ends:
        assert told not in (JobState.SUCCEEDED, JobState.CANCELLED) or told is end
        assert told is not JobState.WAITING or end is JobState.CANCELLED
    runs = Counter(map(int, shop.notes("short")))
    assert set(runs.values()) <= {1}
    for number, job in enumerate(jobs):
        if job.info().state is JobState.SUCCEEDED:
            assert runs[number] == 1
    assert sum(ends.values()) == count and len({end for _, end in ends}) == 2, ends
