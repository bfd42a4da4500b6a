"""Worker memory: how much each process keeps, which processes the kernel kills, and which jobs wait for memory."""

from __future__ import annotations

import os
import re
import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from project import Process, Project, eventually, pidfd
from worker.kinds import lines, source
from worker.memory_groups import MemoryGroup, memory_group

from penstock.errors import WorkerCrashed

MB = 1 << 20

SOURCE = """
    import os, time
    from penstock import App

    app = App("memory")
    kept = []

    @NOTES

    def fill(megabytes: int) -> bytearray:
        data = bytearray(megabytes << 20)
        for at in range(0, len(data), 4096):
            data[at] = 1
        return data

    @app.task
    def pid() -> int:
        return os.getpid()

    @app.task
    def number(number: int) -> int:
        return number

    @app.task
    def keeps(megabytes: int) -> int:
        kept.append(fill(megabytes))
        return os.getpid()

    @app.task
    async def keeps_on_a_loop(megabytes: int) -> int:
        kept.append(fill(megabytes))
        return os.getpid()

    @app.task
    def frees(megabytes: int) -> int:
        # Many small blocks, and a last one that stays, so the allocator keeps the memory before it.
        blocks = [bytes(2000) for _ in range(megabytes * 500)]
        kept.append(bytes(2000))
        del blocks
        return os.getpid()

    @app.task(max_crashes=1)
    def holds(megabytes: int, until: str) -> int:
        data = fill(megabytes)
        note("begun", megabytes, os.getpid())
        while not (here / until).exists():
            time.sleep(0.005)
        # Long enough for the supervisor to measure it.
        time.sleep(0.05)
        note("ended", megabytes, os.getpid())
        return data[0]

    @app.task(max_crashes=2)
    def takes_all() -> None:
        note("begun", "all", os.getpid())
        for _ in range(10_000):
            kept.append(fill(10))

    @app.task
    def stays(until: str) -> int:
        note("begun", "stays", os.getpid())
        while not (here / until).exists():
            time.sleep(0.005)
        return os.getpid()
"""


class Memory:
    def __init__(self, project: Project) -> None:
        self.project = project
        project.write("memory.py", source(SOURCE))
        self.tasks: Any = project.tasks("memory.py")

    def worker(self, *options: str) -> Process:
        return self.project.worker("memory:app", *options)

    def touch(self, name: str) -> None:
        (self.project.directory / name).touch()

    def notes(self, word: str) -> list[tuple[str, int]]:
        return [(what, int(pid)) for first, what, pid in lines(self.project) if first == word]

    def most_at_once(self) -> int:
        now = most = 0
        for word, *_ in lines(self.project):
            now += 1 if word == "begun" else -1
            most = max(most, now)
        return most


@pytest.fixture
def memory(project: Project) -> Memory:
    return Memory(project)


@pytest.fixture
def group() -> Iterator[MemoryGroup]:
    with memory_group(300 * MB) as group:
        yield group


def anonymous(pid: int) -> int:
    """Return the bytes of a process's own pages."""
    text = Path(f"/proc/{pid}/status").read_text()
    found = re.search(r"RssAnon:\s+(\d+) kB", text)
    assert found is not None
    return int(found[1]) << 10


@pytest.mark.parametrize(
    ("options", "task"),
    [(["-c", "1"], "keeps"), (["-c", "1", "--threads", "3"], "keeps"), (["-c", "1"], "keeps_on_a_loop")],
    ids=["process", "thread", "async"],
)
def test_a_process_that_keeps_too_much_is_replaced_between_jobs(memory: Memory, options: list[str], task: str) -> None:
    worker = memory.worker(*options, "--max-memory-per-child", "40M")
    keeps = getattr(memory.tasks, task)
    first = keeps.delay(10).result(timeout=60)
    assert keeps.delay(60).result(timeout=60) == first
    eventually(lambda: keeps.delay(0).result(timeout=30) != first, 60, lambda: worker.output)
    said = worker.wait_for_output("a process is replaced: it has")
    assert re.search(r"it has [67]\d MiB of its own, and the limit is 40 MiB \(--max-memory-per-child\)", said), said
    assert "ERROR" not in said
    # Until the old process has stopped taking jobs, either may take one.
    eventually(lambda: not Path(f"/proc/{first}").exists(), 60, lambda: worker.output)
    # The successor has less memory, and stays.
    second = keeps.delay(0).result(timeout=30)
    assert keeps.delay(10).result(timeout=30) == second, worker.output


def test_memory_that_was_freed_is_given_back_before_a_process_is_replaced(memory: Memory) -> None:
    worker = memory.worker("-c", "1", "--max-memory-per-child", "40M")
    first = memory.tasks.pid.delay().result(timeout=60)
    before = anonymous(first)
    assert memory.tasks.frees.delay(120).result(timeout=60) == first
    # The process is idle, and is woken to give memory back.
    eventually(lambda: anonymous(first) < before + 20 * MB, 60, lambda: worker.output)
    assert memory.tasks.pid.delay().result(timeout=30) == first
    assert "is replaced" not in worker.output


def test_the_kernel_is_offered_the_processes_that_run_jobs_first(memory: Memory) -> None:
    worker = memory.worker("-c", "1")
    child = memory.tasks.pid.delay().result(timeout=60)

    def score(pid: int) -> int:
        return int(Path(f"/proc/{pid}/oom_score_adj").read_text())

    zygote = int(Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[1])
    own = score(worker.pid)
    assert (score(zygote), score(child)) == (min(own + 100, 1000), min(own + 300, 1000))


def test_a_death_by_memory_is_named_with_the_limit_and_the_process_s_and_the_task_s_figures(
    group: MemoryGroup, memory: Memory
) -> None:
    worker = group.worker(memory.project, "memory:app", "-c", "1")
    # A worker's default limit is 90 % of the container's.
    worker.wait_for_output("jobs start while this worker's memory is below 270 MiB")
    memory.touch("at once")
    assert memory.tasks.holds.delay(60, "at once").result(timeout=60) == 1
    with pytest.raises(WorkerCrashed) as raised:
        memory.tasks.holds.delay(1000, "at once").result(timeout=60)
    found = re.search(
        r"out of memory: the kernel killed it at the container's limit of 300 MiB; this process had (\d+) MiB of its"
        r" own, (\d\.\d) times the usual peak of memory.holds \((\d+) MiB\)",
        str(raised.value),
    )
    assert found is not None, raised.value
    had, times, usual = int(found[1]), float(found[2]), int(found[3])
    assert 200 <= had <= 300 and 50 <= usual <= 70
    # Each of the three is rounded.
    assert (had - 1) / (usual + 1) - 0.1 < times < (had + 1) / (usual - 1) + 0.1
    assert found[0] in worker.wait_for_output("was lost: out of memory")
    # The log names a kill that didn't come from the kernel.
    child = memory.tasks.pid.delay().result(timeout=60)
    with pidfd(child) as ended:
        os.kill(child, signal.SIGKILL)
        ended.wait(30)
    assert memory.tasks.pid.delay().result(timeout=30) != child
    worker.wait_for_output(
        "an idle process was lost: killed by signal 9 (SIGKILL), but not by the kernel: there was enough memory"
    )


def test_a_job_that_takes_all_is_charged_and_its_neighbours_are_not_once_it_is_known(
    group: MemoryGroup, memory: Memory
) -> None:
    worker = group.worker(memory.project, "memory:app", "-c", "1", "--threads", "8", "--memory-limit", "0")
    neighbours = [memory.tasks.stays.delay("go") for _ in range(5)]
    eventually(lambda: len(memory.notes("begun")) == 5, 30, lambda: worker.output)
    first = memory.tasks.takes_all.delay()
    # Neither task's memory is known yet, so all jobs are suspects and run alone.
    eventually(lambda: "each is handed back, and runs alone next" in worker.output, 60, lambda: worker.output)
    memory.touch("go")
    with pytest.raises(WorkerCrashed, match="out of memory"):
        first.result(timeout=60)
    for job in neighbours:
        job.result(timeout=60)
    seen = len(memory.notes("begun"))
    neighbours = [memory.tasks.stays.delay("later") for _ in range(5)]
    eventually(lambda: len(memory.notes("begun")) == seen + 5, 30, lambda: worker.output)
    second = memory.tasks.takes_all.delay()
    with pytest.raises(WorkerCrashed, match="out of memory"):
        second.result(timeout=60)
    assert "the other jobs of its process were interrupted and handed back" in worker.output
    # The second job died once with its neighbours, and once alone.
    assert Counter(what for what, _ in memory.notes("begun")[seen:])["all"] == 2

    def run_together_again() -> bool:
        stays = [pid for what, pid in memory.notes("begun")[seen + 5 :] if what == "stays"]
        return len(stays) >= 5 and len(set(stays[-5:])) == 1 and stays[-1] in memory.project.processes()

    # The kernel may have killed the neighbours once more, together with a process that used far more memory.
    eventually(run_together_again, 30, lambda: worker.output)
    memory.touch("later")
    for job in neighbours:
        job.result(timeout=60)
    assert {job.info().crashes for job in neighbours} == {0}


def test_jobs_that_would_not_fit_wait_and_others_go_on(memory: Memory) -> None:
    worker = memory.worker("-c", "4", "--memory-limit", "300M")
    memory.touch("at once")
    assert memory.tasks.holds.delay(100, "at once").result(timeout=60) == 1
    (memory.project.directory / "notes.txt").unlink()
    jobs = [memory.tasks.holds.delay(100, "go") for _ in range(6)]
    eventually(lambda: len(memory.notes("begun")) >= 2, 60, lambda: worker.output)
    said = worker.wait_for_output("memory.holds waits for memory")
    assert re.search(r"it usually needs (9|1\d)\d MiB, and this worker uses \d+ MiB of 300 MiB", said), said
    # Two slots are free for other jobs.
    pids = {job.result(timeout=30) for job in [memory.tasks.pid.delay() for _ in range(50)]}
    assert not pids & {pid for _, pid in memory.notes("begun")}
    assert len(memory.notes("begun")) == 2
    assert Counter(job.info().state for job in jobs) == {"running": 2, "waiting": 4}
    # The broker knows that a worker has the task.
    [queue] = memory.project.status()["queues"]
    assert queue["unknown"] == 0
    memory.touch("go")
    assert [job.result(timeout=60) for job in jobs] == [1] * 6
    assert memory.most_at_once() == 2
    assert len(memory.notes("begun")) == 6, "each ran once"
    assert {job.info().crashes for job in jobs} == {0}


def test_a_job_that_needs_more_than_the_limit_runs_when_nothing_else_does(memory: Memory) -> None:
    worker = memory.worker("-c", "2", "--memory-limit", "150M", "--burst")
    memory.touch("at once")
    jobs = [memory.tasks.holds.delay(200, "at once") for _ in range(4)]
    assert worker.wait(60) == 0, worker.output
    assert [job.result(timeout=30) for job in jobs] == [1] * 4
    # Nothing was known about the first two.
    assert memory.most_at_once() <= 2
    assert len(memory.notes("begun")) == 4


def test_a_limit_below_the_loaded_app_is_refused(memory: Memory) -> None:
    job = memory.tasks.pid.delay()
    worker = memory.worker("--memory-limit", "4M")
    assert worker.wait(60) == 5, worker.output
    assert re.search(
        r"the worker's memory limit is 4.0 MiB, but the loaded app takes \d+ MiB before the first job: no job was"
        r" taken from the broker. Raise --memory-limit, or make the app load less",
        worker.output,
    ), worker.output
    assert job.info().state == "waiting"


def test_a_supervisor_needs_no_more_memory_after_many_jobs(memory: Memory) -> None:
    """The test is sensitive enough to notice a leak of 23 bytes per job."""
    worker = memory.worker("-c", "2")

    def run(jobs: int) -> None:
        for _ in range(jobs // 2000):
            for job in memory.tasks.number.map(list(range(2000))):
                job.result(timeout=60)

    def idle() -> int:
        """Return the memory once it is unchanged for two seconds: an idle worker gives memory back."""
        last, since = 0, 0.0

        def is_still() -> bool:
            nonlocal last, since
            now, time_s = anonymous(worker.pid), time.monotonic()
            if now != last:
                last, since = now, time_s
            return time_s - since > 2

        eventually(is_still, 30)
        return last

    run(10_000)
    before = idle()
    run(90_000)
    # 23 bytes per job: less than any record that the supervisor keeps of one.
    assert idle() <= before + 2 * MB
