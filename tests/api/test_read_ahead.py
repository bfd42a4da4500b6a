"""Results that a thread reads one after another are fetched ahead of it."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from project import Project, eventually, within

from penstock import JobState, ResultTimeout

TASKS = """
import time
from pathlib import Path

from penstock import App

app = App("tasks")

@app.task
def echo(value: object, seconds: float = 0) -> object:
    time.sleep(seconds)
    return value

@app.task
def blob(size: int) -> bytes:
    return bytes(size)

@app.task
def repair(number: int) -> str:
    if number == 4 and not Path("repaired").exists():
        raise ValueError("not repaired yet")
    return f"fine {number}"

@app.task
def page(numbers: int) -> list[object]:
    jobs = [echo.delay(number) for number in range(numbers)]
    return [job.result() for job in jobs]
"""


class Meter:
    """Socket in front of a broker's, which counts what passes."""

    def __init__(self, path: Path, broker: Path) -> None:
        self.url = f"unix:{path}"
        self.requests = 0
        """Number of times that a client has sent something."""
        self.answered_bytes = 0
        self._broker = str(broker)
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            broker = socket.socket(socket.AF_UNIX)
            broker.connect(self._broker)
            for way in [(client, broker), (broker, client)]:
                threading.Thread(target=self._carry, args=(*way, way[0] is client), daemon=True).start()

    def _carry(self, source: socket.socket, target: socket.socket, is_request: bool) -> None:
        with source, contextlib.suppress(OSError):
            while data := source.recv(1 << 20):
                if is_request:
                    self.requests += 1
                else:
                    self.answered_bytes += len(data)
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)


@pytest.fixture
def tasks(project: Project) -> Iterator[ModuleType]:
    project.write("tasks.py", TASKS)
    project.worker("tasks:app", "-c", "2")
    tasks = project.tasks()
    yield tasks
    tasks.app.close()


@pytest.fixture
def meter(project: Project) -> Iterator[Meter]:
    """Let this process reach its broker through a meter; workers reach it directly."""
    broker = project.spare_socket()
    metered = broker.with_suffix(".meter")
    server = project.start("penstock", "server", "--listen", f"unix:{broker}", "--data", project.directory / "data")
    server.wait_for_output("listening")
    project.write("tasks.py", TASKS)
    project.worker("tasks:app", "-c", "2", PENSTOCK_URL=f"unix:{broker}")
    meter = Meter(metered, broker)
    yield meter
    meter.close()
    metered.unlink()


@pytest.fixture
def metered(project: Project, meter: Meter, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.setenv("PENSTOCK_URL", meter.url)
    tasks = project.tasks()
    yield tasks
    tasks.app.close()


def test_a_page_of_results_takes_few_requests(metered: ModuleType, meter: Meter) -> None:
    jobs = [metered.echo.delay(number) for number in range(155)]
    assert jobs[-1].result(timeout=60) == 154
    before = meter.requests
    assert [job.result(timeout=60) for job in jobs] == list(range(155))
    assert meter.requests - before <= 20


def test_jobs_that_were_enqueued_together_are_read_like_that_too(metered: ModuleType, meter: Meter) -> None:
    jobs = metered.echo.map(range(100))
    assert jobs[-1].result(timeout=60) == 99
    before = meter.requests
    assert [job.result(timeout=60) for job in jobs] == list(range(100))
    assert meter.requests - before <= 15


def test_who_reads_a_single_result_fetches_no_other(metered: ModuleType, meter: Meter) -> None:
    jobs = metered.blob.map([100_000] * 50)
    assert len(jobs[-1].result(timeout=60)) == 100_000
    assert len(jobs[10].result(timeout=60)) == 100_000
    before = meter.answered_bytes
    assert len(jobs[30].result(timeout=60)) == 100_000
    assert len(jobs[20].result(timeout=60)) == 100_000
    assert meter.answered_bytes - before < 300_000


def test_large_results_are_not_fetched_far_ahead(metered: ModuleType, meter: Meter) -> None:
    jobs = metered.blob.map([1 << 20] * 30)
    assert len(jobs[-1].result(timeout=60)) == 1 << 20
    before = meter.answered_bytes
    for job in jobs[:4]:
        assert len(job.result(timeout=60)) == 1 << 20
    assert meter.answered_bytes - before < 9 << 20
    assert [len(job.result(timeout=60)) for job in jobs] == [1 << 20] * 30


def test_each_thread_reads_the_results_of_its_own_jobs(tasks: ModuleType) -> None:
    found: dict[int, list[object]] = {}

    def read(thread: int) -> None:
        jobs = [tasks.echo.delay([thread, number], 0.001) for number in range(40)]
        found[thread] = [job.result(timeout=60) for job in jobs]

    threads = [threading.Thread(target=read, args=(thread,)) for thread in range(8)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert found == {thread: [[thread, number] for number in range(40)] for thread in range(8)}


def test_results_can_be_read_in_any_order_and_twice(tasks: ModuleType) -> None:
    jobs = tasks.echo.map(range(40))
    for order in (range(40), range(39, -1, -1), [*range(0, 40, 2), *range(1, 40, 2)], [*range(20), *range(40)]):
        assert [jobs[number].result(timeout=60) for number in order] == list(order)


def test_results_can_be_read_after_many_other_jobs(tasks: ModuleType) -> None:
    jobs = tasks.echo.map(range(20))
    assert [job.result(timeout=60) for job in jobs[:3]] == [0, 1, 2]
    others = tasks.echo.map(range(5000))
    assert [job.result(timeout=60) for job in jobs[3:]] == list(range(3, 20))
    assert [job.result(timeout=60) for job in others[-30:]] == list(range(4970, 5000))


def test_a_failure_that_was_retried_in_the_meantime_is_not_remembered(tasks: ModuleType, project: Project) -> None:
    jobs = [tasks.repair.delay(number) for number in range(10)]
    eventually(lambda: all(job.info().state in {JobState.SUCCEEDED, JobState.FAILED} for job in jobs))
    assert [job.result(timeout=60) for job in jobs[:3]] == ["fine 0", "fine 1", "fine 2"]
    Path(project.directory, "repaired").touch()
    assert tasks.app.failed(task=tasks.repair).retry() == 1
    assert [job.result(timeout=60) for job in jobs[3:]] == [f"fine {number}" for number in range(3, 10)]


def test_a_wait_for_a_job_that_runs_ends_in_time(tasks: ModuleType) -> None:
    jobs = [tasks.echo.delay(number, 3 if number == 4 else 0) for number in range(8)]
    assert [job.result(timeout=60) for job in jobs[:4]] == [0, 1, 2, 3]
    for timeout in (0, 0.1, 1.2):
        with within(timeout + 1), pytest.raises(ResultTimeout):
            jobs[4].result(timeout=timeout)
    assert [job.result(timeout=60) for job in jobs[4:]] == [4, 5, 6, 7]


def test_the_broker_may_be_killed_between_two_results(tasks: ModuleType, project: Project) -> None:
    jobs = [tasks.echo.delay(number, 0.01) for number in range(60)]
    assert [job.result(timeout=60) for job in jobs[:20]] == list(range(20))
    project.kill_broker()
    assert [job.result(timeout=60) for job in jobs[20:]] == list(range(20, 60))


def test_a_job_reads_the_results_of_its_own_jobs_while_its_slot_is_lent(tasks: ModuleType) -> None:
    pages = [tasks.page.delay(30) for _ in range(4)]
    assert [page.result(timeout=60) for page in pages] == [list(range(30))] * 4


def test_a_forked_process_asks_for_itself(tasks: ModuleType, project: Project) -> None:
    source = """
        import os, tasks
        jobs = [tasks.echo.delay(number) for number in range(30)]
        assert [job.result(timeout=60) for job in jobs[:3]] == [0, 1, 2]
        if os.fork() == 0:
            read = [job.result(timeout=60) for job in jobs[3:]]
            os._exit(0 if read == list(range(3, 30)) else 1)
        assert [job.result(timeout=60) for job in jobs[3:]] == list(range(3, 30))
        print(os.wait()[1])
        """
    assert project.python(source).strip() == "0"
