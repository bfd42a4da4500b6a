"""Thousands of deaths and storms of signals: no job is lost, and nothing accumulates in a worker."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter

import pytest
from crash.cycles import Cycles
from project import eventually
from worker.odd_shop import Shop, parent_of
from worker.test_bad_tasks import resident_kb

from penstock.errors import WorkerCrashed

DEATHS = ["kill -9", "exit 3", "abort", "segfault"]


@pytest.mark.timeout(7200)
def test_no_zombies_no_descriptors_and_no_memory_are_left_by_deaths(shop: Shop, cycles: Cycles) -> None:
    worker = shop.ready_worker("-c", "2")
    zygote = shop.zygote_pid()

    def die(times: int) -> None:
        jobs = [shop.tasks.die.delay(DEATHS[number % 4]) for number in range(times)]
        for job in jobs:
            with pytest.raises(WorkerCrashed):
                job.result(timeout=300)
        # Both slots have a process again.
        eventually(lambda: held(worker.pid, zygote)[-1] == 2, 30)

    # One-time allocations have happened after a few deaths.
    die(20)
    before, memory_kb = held(worker.pid, zygote), (resident_kb(worker.pid), resident_kb(zygote))
    number = cycles.of(40, 10_000)
    for _ in range(0, number, 40):
        die(40)
    # (One more descriptor is a fork in progress.)
    eventually(lambda: all(now <= then for now, then in zip(held(worker.pid, zygote), before, strict=True)), 30)
    after, later_kb = held(worker.pid, zygote), (resident_kb(worker.pid), resident_kb(zygote))
    cycles.report(
        f"{number} deaths: descriptors of supervisor and zygote, and processes {before} -> {after};"
        f" memory in KB {memory_kb} -> {later_kb}"
    )
    assert all(later < first + 4 * 1024 for first, later in zip(memory_kb, later_kb, strict=True))


def held(supervisor: int, zygote: int) -> tuple[int, ...]:
    """Return the number of descriptors of both processes, and of the zygote's children, including dead ones."""
    children = 0
    for name in os.listdir("/proc"):
        try:
            children += name.isdecimal() and parent_of(int(name)) == zygote
        except (FileNotFoundError, ProcessLookupError):
            continue
    return len(os.listdir(f"/proc/{supervisor}/fd")), len(os.listdir(f"/proc/{zygote}/fd")), children


@pytest.mark.timeout(7200)
def test_storms_of_signals_end_a_worker_in_order_or_by_force_and_lose_nothing(shop: Shop, cycles: Cycles) -> None:
    chance = cycles.chance()
    ends: Counter[int] = Counter()
    number = cycles.of(2, 1000)
    for storm in range(number):
        labels = [f"{storm}/{index}" for index in range(300)]
        jobs = shop.tasks.run.map(labels)
        worker = shop.ready_worker("-c", "2")
        for _ in range(chance.randrange(1, 30)):
            if worker.returncode is None:
                worker.signal(chance.choice([signal.SIGTERM, signal.SIGINT, signal.SIGHUP]))
            time.sleep(chance.uniform(0, 0.002))
        ends[worker.wait(30)] += 1
        assert ends.keys() <= {0, 4}, worker.output
        # When forced, they die just after their parent.
        eventually(
            lambda: not [line for line in shop.project.processes().values() if "penstock._worker.zygote" in line]
        )
        assert shop.worker("-c", "2", "--burst").wait(60) == 0
        assert [job.result(timeout=30) for job in jobs] == labels
    cycles.report(f"{number} storms: {ends[0]} ended in order, {ends[4]} by force; every job has its result")


@pytest.mark.timeout(7200)
def test_an_end_in_order_runs_no_job_twice(shop: Shop, cycles: Cycles) -> None:
    """A signal at any moment: jobs that have begun end, and the others are handed back."""
    chance = cycles.chance()
    number = cycles.of(2, 500)
    for turn in range(number):
        labels = [f"{turn}/{index}" for index in range(300)]
        jobs = shop.tasks.run.map(labels)
        worker = shop.ready_worker("-c", "2")
        time.sleep(chance.uniform(0, 0.05))
        worker.signal(chance.choice([signal.SIGTERM, signal.SIGINT, signal.SIGHUP]))
        assert worker.wait(30) == 0, worker.output
        assert shop.worker("-c", "2", "--burst").wait(60) == 0
        assert [job.result(timeout=30) for job in jobs] == labels
    assert set(shop.times_run().values()) == {1}
    cycles.report(f"{number} ends in order, {300 * number} jobs, none ran twice")
