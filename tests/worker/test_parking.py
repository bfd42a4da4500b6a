"""Waiting inside a task, in slots of every kind: a waiting job lends its slot, and resumes when its wait is over."""

from __future__ import annotations

import json
import os
import signal
from typing import Any

import pytest
from project import Process, Project, eventually, within
from worker.kinds import Kind, named, notes

from penstock import JobCancelled, JobState, TooManyWaiting, WaitCycle

PROCESS = Kind("process", ("-c", "1"))
THREAD = Kind("thread", ("-c", "1", "--threads", "1"))
ASYNC = Kind("async", ("-c", "1", "--async", "1"))
ISOLATED = Kind("isolated", ("--isolated", "1"))
KINDS = [PROCESS, THREAD, ASYNC, ISOLATED]
TWO = [
    Kind("process", ("-c", "2")),
    Kind("thread", ("-c", "1", "--threads", "2")),
    Kind("async", ("-c", "1", "--async", "2")),
]

SOURCE = """
    import asyncio, os, time
    import penstock
    from penstock import App, JobInterrupt, current_job, group

    app = App("waits", defaults={"slot": "@KIND"})
    @NOTES

    @app.task
    @DEF down(depth: int) -> int:
        if depth == 0:
            return 0
        return 1 + (@AWAIT down.delay(depth - 1).@RESULT())

    @app.task
    @DEF fib(n: int) -> int:
        if n < 2:
            return n
        one, other = fib.delay(n - 1), fib.delay(n - 2)
        return (@AWAIT one.@RESULT()) + (@AWAIT other.@RESULT())

    @app.task
    @DEF double(number: int) -> int:
        return 2 * number

    @app.task
    @DEF sums(how: str) -> int:
        if how == "workflow":
            return sum(@AWAIT group(double.s(n) for n in range(5)).delay().@RESULT())
        jobs = [double.delay(n) for n in range(5)]
        if how == "results":
            return sum(@AWAIT penstock.@RESULTS(jobs))
        total = 0
        @FOR job in penstock.as_completed(jobs):
            total += @AWAIT job.@RESULT()
        return total

    @app.task
    @DEF opens(name: str) -> int:
        note("runs", name, os.getpid())
        while not (here / name).exists():
            @SLEEP(0.005)
        return os.getpid()

    @app.task(timeout=1)
    @DEF waits_in_time(name: str) -> str:
        @AWAIT opens.delay(name).@RESULT()
        return "in time"

    @app.task(timeout=0.3, retries=0)
    @DEF waits_and_loops(name: str) -> None:
        @AWAIT opens.delay(name).@RESULT()
        while True:
            @SLEEP(0.005)

    @app.task
    @DEF waits(name: str) -> int:
        try:
            job = opens.delay(name)
            note("parent", os.getpid())
            @AWAIT job.@RESULT()
        finally:
            note("ended", name)
        return os.getpid()

    @app.task
    @DEF is_impatient(name: str) -> str | None:
        try:
            @AWAIT opens.delay(name).@RESULT(0.2)
        except penstock.ResultTimeout:
            return "went on"

    @app.task
    @DEF waits_for_short_ones(count: int) -> int:
        return sum([@AWAIT double.delay(n).@RESULT() for n in range(count)])

    @app.task(slot="thread")
    def waits_elsewhere(number: int) -> int:
        return asyncio.run(asyncio.to_thread(double.delay(number).result))

    @app.task(retries=3, backoff=0.01)
    @DEF waits_for_itself() -> None:
        note("attempt", current_job().attempt)
        @AWAIT app.job(current_job().id).@RESULT()

    @app.task
    @DEF hoards(name: str) -> int:
        hoard = bytearray(b"x") * (150 << 20)
        # Memory is measured once a second.
        @SLEEP(2.5)
        @AWAIT opens.delay(name).@RESULT()
        return len(hoard)
"""


class Waits:
    """An app whose jobs wait for others, with its worker."""

    def __init__(self, project: Project) -> None:
        self.project = project

    def start(self, kind: Kind, *options: str) -> Process:
        is_async = kind.name == "async"
        source = SOURCE.replace("@RESULTS", "aresults" if is_async else "results")
        source = source.replace("@RESULT", "aresult" if is_async else "result")
        source = source.replace("@FOR", "async for" if is_async else "for")
        self.project.write("waits.py", kind.source(source))
        worker = self.project.worker("waits:app", *kind.options, *options)
        self.tasks: Any = self.project.tasks("waits.py")
        return worker

    def open(self, *names: str) -> None:
        for name in names:
            (self.project.directory / name).touch()

    def runs(self, name: str) -> bool:
        return any(note.split(" ")[0] == name for note in notes(self.project, "runs"))

    def begun(self, name: str) -> None:
        """Wait until the awaited job runs, in the slot of the job that waits for it."""
        eventually(lambda: self.runs(name))

    def processes(self, worker: Process) -> set[int]:
        """Return the processes that run jobs."""
        children = {pid: parents(pid) for pid in self.project.processes()}
        return {pid for pid, above in children.items() if worker.pid in above[1:2]}


def parents(pid: int) -> list[int]:
    """Return the ids of a process's ancestors, nearest first."""
    above = []
    while pid > 1:
        try:
            with open(f"/proc/{pid}/stat") as stat:
                pid = int(stat.read().rsplit(")", 1)[1].split()[1])
        except OSError:
            break
        above.append(pid)
    return above


@pytest.fixture
def shop(project: Project) -> Waits:
    return Waits(project)


@named(KINDS)
def test_on_one_slot_jobs_wait_for_their_own_ten_deep(shop: Waits, kind: Kind) -> None:
    shop.start(kind)
    assert shop.tasks.down.delay(10).result(timeout=30) == 10


@named(TWO)
def test_a_tree_of_jobs_that_wait_for_each_other_ends_on_two_slots(shop: Waits, kind: Kind) -> None:
    shop.start(kind)
    assert shop.tasks.fib.delay(10).result(timeout=60) == 55


@named([PROCESS, THREAD, ASYNC])
def test_the_list_of_workers_says_how_many_jobs_are_parked(shop: Waits, kind: Kind) -> None:
    shop.start(kind)
    job = shop.tasks.waits.delay("here")

    def listed(*options: str) -> str:
        return shop.project.penstock("workers", "ls", *options).output

    def figures() -> list[int]:
        return [worker[figure] for worker in json.loads(listed("--json")) for figure in ("busy", "parked")]

    # The awaited job has the slot.
    eventually(lambda: figures() == [1, 1], 20, lambda: listed())
    assert "1 parked" in listed()
    shop.open("here")
    job.result(timeout=20)
    eventually(lambda: figures()[1] == 0, 20, lambda: listed())
    assert "parked" not in listed()


@pytest.mark.parametrize("how", ["results", "as_completed", "workflow"])
@named([PROCESS, THREAD, ASYNC])
def test_every_way_to_wait_lends_the_slot(shop: Waits, kind: Kind, how: str) -> None:
    shop.start(kind)
    assert shop.tasks.sums.delay(how).result(timeout=30) == 20


@named([PROCESS, THREAD, ASYNC])
def test_a_job_that_waits_and_is_cancelled_ends_at_once(shop: Waits, kind: Kind) -> None:
    shop.start(kind, "--kill-grace", "60")
    job = shop.tasks.waits.delay("never")
    shop.begun("never")
    assert job.cancel() is JobState.CANCELLING
    with pytest.raises(JobCancelled):
        job.result(timeout=10)
    assert notes(shop.project, "ended") == ["never"]
    shop.open("never")
    assert shop.tasks.down.delay(3).result(timeout=20) == 3


@named([PROCESS, THREAD, ASYNC])
def test_the_time_that_a_job_waits_does_not_count_against_its_timeout(shop: Waits, kind: Kind) -> None:
    shop.start(kind)
    job = shop.tasks.waits_in_time.delay("late")
    shop.begun("late")
    # The timeout is one second, and no event marks time that doesn't count.
    with pytest.raises(TimeoutError):
        job.result(timeout=1.5)
    shop.open("late")
    assert job.result(timeout=20) == "in time"


@named([PROCESS, THREAD, ASYNC])
def test_after_the_wait_the_time_of_a_job_counts_again(shop: Waits, kind: Kind) -> None:
    shop.start(kind)
    job = shop.tasks.waits_and_loops.delay("first")
    shop.begun("first")
    shop.open("first")
    with pytest.raises(TimeoutError, match="timeout of"):
        job.result(timeout=20)


def test_a_process_that_is_killed_while_its_job_waits_is_a_crash_and_leaves_none_too_many(shop: Waits) -> None:
    worker = shop.start(PROCESS)
    job = shop.tasks.waits.delay("opens")
    shop.begun("opens")
    [parent] = notes(shop.project, "parent")
    os.kill(int(parent), signal.SIGKILL)
    eventually(lambda: job.info().crashes == 1)
    # The job runs once more when a slot is free, and waits for another job.
    shop.open("opens")
    assert job.result(timeout=20) != int(parent)
    # Substitutes exit when they are no longer needed.
    eventually(lambda: len(shop.processes(worker)) == 1, timeout=30)
    assert shop.tasks.down.delay(3).result(timeout=20) == 3


@named([PROCESS, THREAD, ASYNC])
def test_a_worker_that_stops_lets_jobs_that_wait_end(shop: Waits, kind: Kind) -> None:
    worker = shop.start(kind)
    job = shop.tasks.waits.delay("last")
    shop.begun("last")
    worker.signal(signal.SIGTERM)
    eventually(lambda: "stopping" in worker.output)
    shop.open("last")
    assert worker.wait() == 0
    assert job.result(timeout=5) > 0


@named([PROCESS, THREAD, ASYNC])
def test_a_worker_that_must_stop_at_once_hands_back_jobs_that_wait(shop: Waits, kind: Kind) -> None:
    worker = shop.start(kind)
    job = shop.tasks.waits.delay("again")
    shop.begun("again")
    worker.signal(signal.SIGTERM)
    eventually(lambda: "stopping" in worker.output)
    worker.signal(signal.SIGTERM)
    assert worker.wait() == 4
    assert job.info().state is JobState.WAITING
    assert job.info().crashes == 0


def test_processes_are_replaced_while_jobs_wait_in_them(shop: Waits) -> None:
    shop.start(PROCESS, "--max-jobs-per-child", "2")
    jobs = [shop.tasks.down.delay(5) for _ in range(4)]
    assert [job.result(timeout=60) for job in jobs] == [5] * 4


def test_a_short_wait_starts_no_process(shop: Waits) -> None:
    worker = shop.start(Kind("process", ("-c", "2")))
    assert shop.tasks.waits_for_short_ones.delay(3).result(timeout=30) == 6
    before = shop.processes(worker)
    assert shop.tasks.waits_for_short_ones.delay(50).result(timeout=30) == 2450
    assert shop.processes(worker) == before


@named([PROCESS, THREAD, ASYNC])
def test_a_wait_that_is_over_goes_before_jobs_that_have_not_begun(shop: Waits, kind: Kind) -> None:
    shop.start(kind)
    job = shop.tasks.is_impatient.delay("first")
    shop.begun("first")
    others = [shop.tasks.opens.delay(f"other-{number}") for number in range(3)]
    # The awaited job has the slot, and no event reports that the impatient one now waits for that slot.
    with pytest.raises(TimeoutError):
        job.result(timeout=1)
    shop.open("first")
    assert job.result(timeout=20) == "went on"
    shop.open(*[f"other-{number}" for number in range(3)])
    for other in others:
        other.result(timeout=20)


@named([PROCESS, THREAD, ASYNC, ISOLATED])
def test_where_too_many_jobs_wait_the_deepest_fails_and_none_waits_for_ever(shop: Waits, kind: Kind) -> None:
    worker = shop.start(kind, "--max-parked", "4")
    assert shop.tasks.down.delay(3).result(timeout=20) == 3
    with within(1), pytest.raises(TooManyWaiting, match="--max-parked"):
        shop.tasks.down.delay(10).result(timeout=20)
    assert "keeps its slot" in worker.output
    assert shop.tasks.down.delay(3).result(timeout=20) == 3


def test_a_task_that_keeps_its_slot_as_it_waits_in_a_thread_of_its_own_is_warned_of_once(shop: Waits) -> None:
    worker = shop.start(Kind("thread", ("-c", "1", "--threads", "2")))
    assert [shop.tasks.waits_elsewhere.delay(number).result(timeout=20) for number in range(3)] == [0, 2, 4]
    worker.end()
    said = "the task waits.waits_elsewhere waits for other jobs in a thread that it started"
    assert worker.output.count(said) == 1


def test_a_wait_that_would_never_end_is_not_tried_again(shop: Waits) -> None:
    shop.start(PROCESS)
    with pytest.raises(WaitCycle):
        shop.tasks.waits_for_itself.delay().result(timeout=20)
    assert notes(shop.project, "attempt") == ["1"]


def test_a_process_for_which_there_is_no_memory_is_not_forked(shop: Waits) -> None:
    worker = shop.start(Kind("process", ("-c", "2")), "--memory-limit", "300M")
    job = shop.tasks.hoards.delay("lean")
    shop.begun("lean")
    eventually(
        lambda: "keeps its slot: another process would raise its memory above" in worker.output,
        10,
        lambda: worker.output,
    )
    shop.open("lean")
    assert job.result(timeout=20) == 150 << 20


def test_only_one_line_tells_of_jobs_that_keep_their_slots(shop: Waits) -> None:
    worker = shop.start(Kind("process", ("-c", "2")), "--max-parked", "0")
    jobs = [shop.tasks.waits.delay("shared")]
    shop.begun("shared")
    eventually(lambda: worker.output.count("keeps its slot") == 1)
    assert "--max-parked" in worker.output
    shop.open("shared")
    assert jobs[0].result(timeout=20) > 0
