"""Processes replaced while their worker serves: the successor starts first, and no job is lost or run twice."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from contextlib import suppress
from typing import Any

import pytest
from project import Process, Project, TooSlow, eventually, is_quick, pidfd
from worker.kinds import Kind, lines, named, notes

SOURCE = """
    import asyncio, os, threading, time
    from penstock import App

    app = App("recycled", defaults={"slot": "@KIND"})
    @NOTES

    @app.on_process_start
    def process_starts() -> None:
        note("start", os.getpid())
        if (here / "broken").exists():
            os._exit(7)

    @app.on_process_stop
    def process_stops() -> None:
        note("stop", os.getpid())

    @app.task
    @DEF naps(number: int, seconds: float = 0.002) -> int:
        note("run", number)
        @SLEEP(seconds)
        return os.getpid()

    @app.task
    @DEF quick(number: int) -> int:
        note("run", number)
        return os.getpid()

    @app.task
    @DEF stays(name: str) -> int:
        note("begun", name)
        while not (here / name).exists():
            @SLEEP(0.005)
        return os.getpid()

    @app.task
    @DEF leaves_a_thread() -> int:
        threading.Thread(target=threading.Event().wait).start()
        return os.getpid()
"""


PROCESS = Kind("process", ("-c", "2"))
THREAD = Kind("thread", ("-c", "2", "--threads", "4"))
ASYNC = Kind("async", ("-c", "1", "--async", "4"))
KINDS = named([PROCESS, THREAD, ASYNC])


class Recycled:
    def __init__(self, project: Project) -> None:
        self.project = project
        self.tasks: Any = None

    def start(self, kind: Kind, *options: str) -> Process:
        self.project.write("recycled.py", kind.source(SOURCE))
        self.tasks = self.project.tasks("recycled.py")
        given = kind.options[2:] if "-c" in options else kind.options
        return self.project.worker("recycled:app", *given, *options)

    def touch(self, name: str) -> None:
        (self.project.directory / name).touch()

    def notes(self) -> list[tuple[str, str]]:
        return [(word, name) for word, name in lines(self.project)]

    def named(self, word: str) -> list[str]:
        return notes(self.project, word)

    def assert_none_was_missing_and_one_too_many(self, processes: int) -> None:
        """Check that the pool always had the wanted number of processes, and never two more."""
        there, least, most = 0, None, 0
        for word, _ in self.notes():
            if word == "start":
                there += 1
                most = max(most, there)
            elif word == "stop":
                least = there if least is None else min(least, there)
                there -= 1
        assert most <= processes + 1, self.notes()
        # A successor exists before the process that it replaces stops.
        assert least is not None and least >= processes + 1, self.notes()


@pytest.fixture
def recycled(project: Project) -> Recycled:
    return Recycled(project)


@KINDS
def test_processes_are_replaced_one_by_one_and_each_job_runs_once(recycled: Recycled, kind: Kind) -> None:
    worker = recycled.start(kind, "--max-jobs-per-child", "20")
    pids: Counter[int] = Counter()
    jobs = 0
    began = time.monotonic()
    while len(pids) < 10 and time.monotonic() - began < 60:
        for job in recycled.tasks.naps.map(list(range(jobs, jobs + 200))):
            pids[job.result(timeout=60)] += 1
        jobs += 200
    # On two processors the pause between them is a hundred times the quickest fork so far: 60 s if that took 0.6 s.
    if len(pids) < 10:
        starts, stops = recycled.named("start"), recycled.named("stop")
        raise TooSlow(f"{pids} in 60 s; started: {starts}, stopped: {stops}\n{worker.output}")
    assert Counter(recycled.named("run")) == {str(number): 1 for number in range(jobs)}
    recycled.assert_none_was_missing_and_one_too_many(kind.processes)
    worker.signal(signal.SIGTERM)
    assert worker.wait(30) == 0, worker.output
    assert "ERROR" not in worker.output and "WARNING" not in worker.output, worker.output
    assert Counter(recycled.named("start")) == Counter(recycled.named("stop"))


@KINDS
def test_packets_of_quick_jobs_are_taken_back_from_processes_that_are_replaced(recycled: Recycled, kind: Kind) -> None:
    worker = recycled.start(kind, "--max-jobs-per-child", "1")
    began = time.monotonic()
    jobs, pids = 0, set()
    while len(pids) < 8 and time.monotonic() - began < 60:
        pids |= {job.result(timeout=60) for job in recycled.tasks.quick.map(list(range(jobs, jobs + 3000)))}
        jobs += 3000
    # Where forking is slow, processes are replaced less often.
    if len(pids) < 8:
        raise TooSlow(f"{len(pids)} processes were replaced in 60 s: {worker.output}")
    assert Counter(recycled.named("run")) == {str(number): 1 for number in range(jobs)}
    assert "ERROR" not in worker.output, worker.output


@KINDS
def test_a_process_that_is_replaced_ends_what_it_has_begun(recycled: Recycled, kind: Kind) -> None:
    worker = recycled.start(kind, "-c", "1", "--max-age", "1s")
    staying = recycled.tasks.stays.delay("go")
    eventually(lambda: recycled.named("begun") == ["go"], 30, lambda: worker.output)
    [old] = map(int, recycled.named("start"))

    def runs_elsewhere() -> bool:
        return recycled.tasks.quick.delay(1).result(timeout=30) != old

    # Its slot is served elsewhere while it waits for its job to end.
    eventually(runs_elsewhere, 30, lambda: worker.output)
    assert not recycled.named("stop")
    assert staying.info().state == "running"
    recycled.touch("go")
    assert staying.result(timeout=30) == old
    eventually(lambda: str(old) in recycled.named("stop"), 30, lambda: worker.output)
    assert recycled.named("begun") == ["go"]


def test_while_one_is_replaced_no_other_is(recycled: Recycled) -> None:
    worker = recycled.start(Kind("thread", ("-c", "3", "--threads", "2")), "--max-age", "500ms")
    staying = [recycled.tasks.stays.delay("go") for _ in range(6)]
    eventually(lambda: len(recycled.named("begun")) == 6, 30, lambda: worker.output)
    # One process is closing and waits for its jobs to end; the others are over age as well.
    eventually(lambda: len(recycled.named("start")) >= 4, 30, lambda: worker.output)
    # Only the successor has free slots, and these jobs keep it busy for longer than the others take to reach their age.
    for job in recycled.tasks.naps.starmap([(number, 0.02) for number in range(150)]):
        job.result(timeout=60)
    assert len(recycled.named("start")) == 4
    recycled.touch("go")
    for job in staying:
        job.result(timeout=30)
    eventually(lambda: len(recycled.named("stop")) >= 3, 30, lambda: worker.output)


@KINDS
def test_idle_processes_grow_old_too(recycled: Recycled, kind: Kind) -> None:
    worker = recycled.start(kind, "--max-age", "300ms")
    first = recycled.tasks.quick.delay(1).result(timeout=60)
    eventually(lambda: len(recycled.named("stop")) >= 4, 60, lambda: worker.output)
    recycled.assert_none_was_missing_and_one_too_many(kind.processes)
    assert recycled.tasks.quick.delay(2).result(timeout=30) != first
    assert "lost" not in worker.output
    eventually(lambda: len(alive(recycled.project, worker)) <= kind.processes + 1, 30)


def alive(project: Project, worker: Process) -> list[int]:
    """Return the processes below the worker's zygote, including zombies."""
    parents = {}
    for pid in os.listdir("/proc"):
        if pid.isdecimal():
            try:
                with open(f"/proc/{pid}/stat") as file:
                    parents[int(pid)] = int(file.read().rpartition(")")[2].split()[1])
            except OSError:
                continue
    zygotes = {pid for pid, parent in parents.items() if parent == worker.pid}
    return [pid for pid, parent in parents.items() if parent in zygotes]


def test_nothing_is_left_of_processes_that_were_replaced(recycled: Recycled) -> None:
    worker = recycled.start(PROCESS, "--max-jobs-per-child", "5")

    def descriptors() -> int:
        return len(os.listdir(f"/proc/{worker.pid}/fd"))

    for job in recycled.tasks.naps.map(list(range(200))):
        job.result(timeout=60)
    before = descriptors()
    seen = len(recycled.named("stop"))
    numbers = iter(range(200, 100_000))

    def many_more() -> bool:
        for job in recycled.tasks.naps.map([next(numbers) for _ in range(50)]):
            job.result(timeout=60)
        return len(recycled.named("stop")) >= seen + 15

    eventually(many_more, 60, lambda: worker.output)
    # One may still be exiting while its successor has started.
    eventually(lambda: len(alive(recycled.project, worker)) <= 3, 30, lambda: str(recycled.project.processes()))
    assert descriptors() <= before + 2


def test_a_process_whose_successor_can_not_start_serves_on(recycled: Recycled) -> None:
    worker = recycled.start(Kind("process", ("-c", "1")), "--max-jobs-per-child", "3")
    first = recycled.tasks.naps.delay(0).result(timeout=60)
    recycled.touch("broken")
    pids = {recycled.tasks.naps.delay(number).result(timeout=30) for number in range(1, 10)}
    eventually(lambda: len(recycled.named("start")) >= 3, 30, lambda: worker.output)
    pids |= {recycled.tasks.naps.delay(number).result(timeout=30) for number in range(10, 20)}
    assert pids == {first}
    (recycled.project.directory / "broken").unlink()
    numbers = iter(range(20, 100_000))
    eventually(lambda: recycled.tasks.naps.delay(next(numbers)).result(timeout=30) != first, 60, lambda: worker.output)


def test_a_process_that_dies_while_it_is_replaced_is_replaced_once(recycled: Recycled) -> None:
    worker = recycled.start(PROCESS, "--max-age", "1s")
    staying = recycled.tasks.stays.delay("go")
    eventually(lambda: recycled.named("begun") == ["go"], 30, lambda: worker.output)
    # Both get a successor; one of them closes and waits for its job to end.
    eventually(lambda: len(recycled.named("start")) >= 3, 30, lambda: worker.output)
    children = [pid for pid in alive(recycled.project, worker) if pid in map(int, recycled.named("start"))]
    for pid in children:
        # A replaced process without a job exits automatically.
        with suppress(ProcessLookupError), pidfd(pid) as ended:
            os.kill(pid, signal.SIGKILL)
            ended.wait(30)
    recycled.touch("go")
    assert staying.result(timeout=60)
    for number in range(50):
        assert recycled.tasks.naps.delay(number).result(timeout=30)
    eventually(lambda: 2 <= len(alive(recycled.project, worker)) <= 3, 30, lambda: worker.output)


def test_a_replaced_process_that_a_thread_keeps_is_killed(recycled: Recycled) -> None:
    worker = recycled.start(Kind("process", ("-c", "1")), "--max-jobs-per-child", "1", "--grace", "3")
    first = recycled.tasks.leaves_a_thread.delay().result(timeout=60)
    worker.wait_for_output("a replaced process did not exit within 3 s after its last job, and is killed")
    assert recycled.tasks.quick.delay(1).result(timeout=30) != first
    eventually(lambda: first not in alive(recycled.project, worker), 30)
    assert "was lost" not in worker.output


def test_a_worker_stops_in_the_midst_of_it(recycled: Recycled) -> None:
    worker = recycled.start(THREAD, "--max-jobs-per-child", "5", "--burst")
    jobs = recycled.tasks.naps.map(list(range(600)))
    assert worker.wait(60) == 0, worker.output
    assert Counter(recycled.named("run")) == {str(number): 1 for number in range(600)}
    assert {job.info().state for job in jobs} == {"succeeded"}


def test_it_costs_little(recycled: Recycled) -> None:
    """The bound is wide enough for a machine that may be busy with other tests."""

    def seconds(*options: str) -> float:
        worker = recycled.start(PROCESS, *options)
        for job in recycled.tasks.quick.map(list(range(20))):
            job.result(timeout=60)
        began = time.monotonic()
        for job in recycled.tasks.naps.starmap([(number, 0.01) for number in range(300)]):
            job.result(timeout=60)
        took = time.monotonic() - began
        worker.signal(signal.SIGTERM)
        worker.wait(30)
        return took

    plain = seconds()
    is_quick(seconds("--max-jobs-per-child", "50"), 1.3 * plain, "the same jobs with recycling")
