"""Workers whose number of slots changes while they run jobs: no job is lost, interrupted or run twice."""

from __future__ import annotations

import os
import signal
from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest
from project import Process, Project, eventually

SOURCE = """
    import asyncio, os, time
    from pathlib import Path
    from penstock import App

    app = App("resized", defaults={{"slot": "{slot}"}})
    here = Path(__file__).parent

    def note(*words) -> None:
        with (here / "notes.txt").open("a") as file:
            file.write(" ".join(map(str, words)) + "\\n")

    @app.on_process_start
    def process_starts() -> None:
        note("start", os.getpid())

    @app.on_process_stop
    def process_stops() -> None:
        note("stop", os.getpid())

    @app.task
    {define} naps(number: int) -> int:
        note("run", number)
        {sleep}(0.004)
        return os.getpid()

    @app.task
    {define} stays(name: str, until: str) -> int:
        note("begun", name)
        while not (here / until).exists():
            {sleep}(0.005)
        note("ended", name)
        return os.getpid()
"""


@dataclass(frozen=True)
class Kind:
    name: str
    start: tuple[str, ...]
    """Worker options, up to the number of slots."""
    option: str
    """The option that changes the number of slots."""
    define: str = "def"
    sleep: str = "time.sleep"


PROCESS = Kind("process", ("-c",), "-c")
THREAD = Kind("thread", ("-c", "1", "--threads"), "--threads")
ASYNC = Kind("async", ("-c", "1", "--async"), "--async", "async def", "await asyncio.sleep")
ISOLATED = Kind("isolated", ("-c", "1", "--isolated"), "--isolated")
LASTING = pytest.mark.parametrize("kind", [PROCESS, THREAD, ASYNC], ids=lambda kind: kind.name)
KINDS = pytest.mark.parametrize("kind", [PROCESS, THREAD, ASYNC, ISOLATED], ids=lambda kind: kind.name)


class Resized:
    def __init__(self, project: Project) -> None:
        self.project = project
        self.tasks: Any = None

    def start(self, kind: Kind, slots: int, *options: str) -> Process:
        self.project.write("resized.py", SOURCE.format(slot=kind.name, define=kind.define, sleep=kind.sleep))
        self.tasks = self.project.tasks("resized.py")
        worker = self.project.worker("resized:app", *kind.start, str(slots), "--name", "mill", *options)
        self.tasks.naps.delay(-1).result(timeout=60)
        return worker

    def resize(self, *options: object, code: int = 0) -> str:
        run = self.project.penstock("workers", "resize", "mill", *map(str, options))
        assert run.returncode == code, run.output
        return run.output

    def stay(self, *names: str, until: str = "go") -> list[Any]:
        """Begin jobs that run until a file exists."""
        return [self.tasks.stays.delay(name, until) for name in names]

    def touch(self, name: str) -> None:
        (self.project.directory / name).touch()

    def named(self, word: str) -> list[str]:
        file = self.project.directory / "notes.txt"
        lines = [line.split() for line in file.read_text().splitlines()] if file.exists() else []
        return [name for kind, name in lines if kind == word]

    def have_begun(self, *names: str) -> None:
        eventually(lambda: set(names) <= set(self.named("begun")), 60, lambda: f"{self.named('begun')}")

    def alive(self) -> int:
        return len(self.named("start")) - len(self.named("stop"))


@pytest.fixture
def resized(project: Project) -> Resized:
    return Resized(project)


@KINDS
def test_more_slots_run_more_jobs_at_once_and_fewer_interrupt_none(resized: Resized, kind: Kind) -> None:
    worker = resized.start(kind, 2)
    first = resized.stay("a", "b")
    resized.have_begun("a", "b")
    more = resized.stay("c", "d", "e")
    assert "5 slots" in resized.resize(kind.option, 5)
    resized.have_begun("a", "b", "c", "d", "e")

    said = resized.resize(kind.option, 1)
    assert "mill: serving with 1 slot; 5 jobs still running" in said
    later = resized.stay("f", "g", until="end")
    # One slot remains, and it stays taken until all five running jobs have ended.
    resized.touch("go")
    pids = {job.result(timeout=60) for job in first + more}
    resized.have_begun("f")
    assert len(resized.named("begun")) == 6, "one at a time"
    assert Counter(resized.named("ended")) == dict.fromkeys("abcde", 1)
    resized.touch("end")
    assert {job.result(timeout=60) for job in later}
    # "g" began only after "f" had ended.
    words = (resized.project.directory / "notes.txt").read_text().splitlines()
    assert words.index("ended f") < words.index("begun g")
    if kind is PROCESS:
        assert len(pids) == 5
        eventually(lambda: resized.alive() == 1, 30, lambda: worker.output)
    worker.signal(signal.SIGTERM)
    assert worker.wait(60) == 0, worker.output
    assert "ERROR" not in worker.output, worker.output
    assert "WARNING" not in worker.output, worker.output


@KINDS
def test_no_job_is_lost_or_run_twice_while_a_busy_worker_is_resized(resized: Resized, kind: Kind) -> None:
    worker = resized.start(kind, 2)
    jobs = resized.tasks.naps.map(list(range(600 if kind is ISOLATED else 3000)))
    for slots in (6, 1, 8, 3):
        resized.resize(kind.option, slots)
    for job in jobs:
        job.result(timeout=120)
    counted = Counter(resized.named("run"))
    assert counted == {**{str(number): 1 for number in range(len(jobs))}, "-1": 1}
    assert "ERROR" not in worker.output, worker.output
    worker.signal(signal.SIGTERM)
    assert worker.wait(60) == 0, worker.output


@LASTING
def test_a_worker_of_another_size_survives_its_children_and_its_zygote(resized: Resized, kind: Kind) -> None:
    """After a death, the worker starts as many processes as the last resize set, not as many as at the start."""
    worker = resized.start(kind, 1)
    resized.resize(kind.option, 3)
    # With threads, processes of the new size have replaced the first one.
    started = 3 if kind is PROCESS else 2
    eventually(lambda: len(resized.named("start")) == started, 60, lambda: worker.output)
    os.kill(int(resized.named("start")[-1]), signal.SIGKILL)
    worker.wait_for_output("an idle process was lost")
    staying = resized.stay("a", "b", "c")
    resized.have_begun("a", "b", "c")
    resized.resize(kind.option, 2)
    resized.touch("go")
    for job in staying:
        job.result(timeout=60)
    zygotes = [pid for pid, command in resized.project.processes().items() if "penstock._worker.zygote" in command]
    # The zygote's children have its command line too, and are killed with it.
    os.kill(min(zygotes), signal.SIGKILL)
    # A job that began before the zygote's death would count too, so wait for the report.
    worker.wait_for_output("the zygote, which forks")
    jobs = resized.stay("d", "e", "f", until="end")
    resized.have_begun("d", "e")
    assert "f" not in resized.named("begun"), worker.output
    resized.touch("end")
    for job in jobs:
        job.result(timeout=60)


def test_processes_with_threads_are_replaced_though_their_jobs_run_on(resized: Resized) -> None:
    worker = resized.start(Kind("thread", ("-c", "2", "--threads"), "--threads"), 1)
    staying = resized.stay("a", "b")
    resized.have_begun("a", "b")
    assert "6 slots" in resized.resize("--threads", 3)
    # Both processes have successors now, though neither has exited.
    names = ["c", "d", "e", "f", "g", "h"]
    staying += resized.stay(*names)
    resized.have_begun(*names)
    assert "3 slots" in resized.resize("-c", 1)
    resized.touch("go")
    for job in staying:
        job.result(timeout=60)
    eventually(lambda: resized.alive() == 1, 30, lambda: worker.output)


def test_beyond_what_it_was_started_for_a_worker_has_to_start_again(resized: Resized) -> None:
    worker = resized.start(PROCESS, 1)
    said = resized.resize("-c", 4000, code=1)
    assert "mill refused: that takes" in said
    assert "restart it" in said
    assert "Nothing was changed" in said
    assert "it has no threads: restart it with --threads" in resized.resize("--threads", 2, code=1)
    assert "-c sets the number" in resized.resize("--processes", 2, code=1)
    assert resized.resize("-c", 0, code=2)
    assert "20 slots" in resized.resize("-c", 20)
    # A paused worker can be resized too, and stays paused.
    assert resized.project.penstock("workers", "pause", "mill").returncode == 0
    assert "mill: paused, with 2 slots" in resized.resize("-c", 2)
    job = resized.tasks.naps.delay(1)
    assert resized.project.penstock("workers", "resume", "mill").returncode == 0
    assert job.result(timeout=60)
    assert "ERROR" not in worker.output, worker.output
