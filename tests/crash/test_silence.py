"""A worker or a broker that is silent for longer than a heartbeat, and then continues as if nothing had happened."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from crash import books, checker
from crash.cycles import Cycles
from project import Process, Project, eventually, suspend
from worker.odd_shop import parent_of

HERE = Path(__file__).parent
# Long enough that a busy machine does not delay a running process this much.
HEARTBEAT_S = 2

TASKS = """
    import os
    import time
    from pathlib import Path

    import books
    from penstock import App

    app = App("silence", call_timeout=30)

    @app.task(max_crashes=255)
    def work(label: str) -> str:
        run = books.begin(label)
        Path(run.replace("/", ".")).write_text(str(os.getpid()))
        while not Path(f"release-{label.replace('/', '.')}").exists():
            time.sleep(0.005)
        return run
"""


class Stage:
    """Workers with one slot each, and jobs that run until they are released."""

    def __init__(self, project: Project, workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.project = project
        self.jobs: dict[str, Any] = {}
        self.books = project.directory / "books"
        self.books.touch()
        project.write("tasks.py", TASKS)
        path = os.pathsep.join([str(project.directory), str(HERE)])
        project.environment.update(BOOKS=str(self.books), PYTHONPATH=path)
        monkeypatch.syspath_prepend(HERE)
        monkeypatch.setenv("BOOKS", str(self.books))
        self.tasks = project.tasks()
        self.workers = [project.worker("tasks:app", "-c1", "--heartbeat", str(HEARTBEAT_S)) for _ in range(workers)]
        for worker in self.workers:
            worker.wait_for_output("slot")

    def enqueue(self, label: str) -> None:
        books.write("attempt", label, 0, label)
        self.jobs[label] = self.tasks.work.delay(label)
        books.write("confirmed", label, self.jobs[label].id)

    def runs(self, label: str) -> list[str]:
        lines = [line.split() for line in self.books.read_text().splitlines()]
        return [words[-1] for words in lines if words[:2] == ["begin", label]]

    def pid_of(self, run: str) -> int:
        """Wait until the job has begun, and return the process that runs it."""
        file = self.project.directory / run.replace("/", ".")
        eventually(lambda: file.exists() and file.read_text(), 30)
        return int(file.read_text())

    def worker_of(self, run: str) -> tuple[Process, list[int]]:
        """Return the worker that runs the job, and all processes of that worker."""
        child = self.pid_of(run)
        zygote = parent_of(child)
        supervisor = parent_of(zygote)
        worker = next(worker for worker in self.workers if worker.pid == supervisor)
        return worker, [supervisor, zygote, child]

    def wait_for_runs(self, label: str, count: int) -> str:
        eventually(lambda: len(self.runs(label)) >= count, 60, lambda: self.said())
        return self.runs(label)[count - 1]

    def said(self) -> str:
        return "\n".join(worker.output for worker in self.workers)

    def release(self, label: str) -> None:
        (self.project.directory / f"release-{label.replace('/', '.')}").touch()

    def judge(self) -> checker.Verdict:
        every = self.project.run(sys.executable, HERE / "reader.py", "all", timeout=120)
        assert every.returncode == 0, every.output
        return checker.judge_file(self.books)


@pytest.mark.timeout(7200)
def test_a_worker_that_was_stopped_beyond_its_heartbeat_is_fenced_off(
    project: Project, cycles: Cycles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another worker has run its job: there is one result, of the run that held the lease."""
    stage = Stage(project, 2, monkeypatch)
    chance = cycles.chance()
    number = cycles.of(5, 500)
    for cycle in range(1, number + 1):
        label = f"zombie/{cycle}"
        stage.enqueue(label)
        first = stage.wait_for_runs(label, 1)
        worker, processes = stage.worker_of(first)
        # Stop only the supervisor, so that the job ends while nothing can report it; or the whole worker.
        stopped = chance.choice([processes[:1], processes])
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        second = stage.wait_for_runs(label, 2)
        told = worker.output.count("were given to other workers")
        if chance.random() < 0.5:
            # The other worker finishes the job before the zombie wakes up ...
            stage.release(label)
            assert stage.jobs[label].result(timeout=30) == second
        for pid in stopped:
            os.kill(pid, signal.SIGCONT)
        # ... or both at once.
        eventually(lambda: worker.output.count("were given to other workers") > told, 30, stage.said)  # noqa: B023
        stage.release(label)
        seen = stage.jobs[label].result(timeout=30)
        assert seen == second, f"{first} or {second}: {seen}"
    verdict = stage.judge()
    assert verdict.delivered == 2 * number
    assert [worker.returncode for worker in stage.workers] == [None, None], stage.said()
    cycles.report(f"{number} workers stopped beyond their heartbeat; {verdict}")


@pytest.mark.timeout(7200)
def test_nobody_loses_a_lease_by_the_silence_of_the_broker(
    project: Project, cycles: Cycles, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = Stage(project, 2, monkeypatch)
    chance = cycles.chance()
    number = cycles.of(3, 100)
    for cycle in range(1, number + 1):
        label = f"steady/{cycle}"
        stage.enqueue(label)
        run = stage.wait_for_runs(label, 1)
        broker = project.broker_pid()
        assert broker is not None
        suspend(broker)
        # Meanwhile its worker considers it dead, and tries to reach another broker.
        time.sleep(chance.uniform(1.1, 2) * HEARTBEAT_S)
        os.kill(broker, signal.SIGCONT)
        stage.release(label)
        seen = stage.jobs[label].result(timeout=30)
        assert seen == run
    verdict = stage.judge()
    assert verdict.delivered == number, "a job was run again"
    cycles.report(f"{number} brokers stopped beyond the heartbeat; {verdict}")
