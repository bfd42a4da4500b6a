"""Penstock on its local broker: every job and every result is on disk before anyone can see it."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from pathlib import Path

from contestants import calls_in
from penstock import App, Job, _core, chain, group

PENSTOCK = str(Path(sys.executable).with_name("penstock"))
PAGE_IS_GROUP = os.environ.get("BENCH_PAGE") == "group"
KIND = os.environ.get("BENCH_KIND", "process")
THREADS = 190  # per process, when there are many

app = App("bench")
broker = _core.Client(os.environ["PENSTOCK_URL"])  # for the number of stored results


@app.task(durability=os.environ.get("BENCH_DURABILITY", "disk"))
def noop(number: int) -> None: ...


@app.task
def how_many(results: list[None]) -> int:
    return len(results)


@app.task
def nap() -> None:
    time.sleep(0.02)


if KIND == "async":

    @app.task
    async def sleep(seconds: float) -> float:
        begun = time.monotonic()
        await asyncio.sleep(seconds)
        return begun

else:

    @app.task
    def sleep(seconds: float) -> float:
        begun = time.monotonic()
        time.sleep(seconds)
        return begun


def clear() -> None:
    """Do nothing: each measurement has its own broker and directory."""


def worker(slots: int) -> list[str]:
    processes = max(2, slots // THREADS)
    options = {
        "process": ["-c", str(slots)],
        "thread": ["-c", str(processes), "--threads", str(slots // processes)],
        # The one process runs the warm-up jobs.
        "async": ["-c", "1", "--async", str(slots)],
    }
    return [PENSTOCK, "worker", "contestants.penstock_peer:app", *options[KIND]]


def enqueue(count: int) -> None:
    noop.map(range(count))


def enqueue_naps(count: int) -> None:
    for _ in range(count):
        nap.delay()


def unfinished(enqueued: int) -> int:
    # The figures of `penstock status --json`, without starting a program a hundred times a second.
    status = broker.status(10)
    return enqueued - int(status["results"]) - int(status["evicted"])


def enqueue_for(seconds: float, callers: int) -> int:
    return calls_in(seconds, callers, lambda: noop.delay(1))


def round_trips(count: int) -> list[float]:
    taken = []
    for number in range(count):
        begun = time.perf_counter()
        noop.delay(number).result(timeout=10)
        taken.append(time.perf_counter() - begun)
    return taken


def enqueue_waits(count: int) -> None:
    sleep.map([1.0] * count)


def page(count: int) -> None:
    if PAGE_IS_GROUP:
        for begun in group(sleep.s(0.005) for _ in range(count)).delay().results(timeout=60):
            assert isinstance(begun, float), begun
        return
    for job in [sleep.delay(0.005) for _ in range(count)]:
        job.result(timeout=60)


def hold(count: int, seconds: float) -> None:
    sleep.map([seconds] * count)


def short() -> Job[float]:
    return sleep.delay(0.001)


def begin_s(job: Job[float]) -> float:
    return job.result(timeout=60)


def run_chord(count: int) -> None:
    found = (group(noop.s(number) for number in range(count)) | how_many.s()).delay().result(timeout=250)
    assert found == count, found


def run_chain(count: int) -> None:
    chain(*(noop.si(number) for number in range(count))).delay().result(timeout=250)


def run_group(count: int) -> float:
    begun = time.perf_counter()
    sent = group(noop.s(number) for number in range(count)).delay()
    sent_s = time.perf_counter() - begun
    found = sum(1 for result in sent.results(timeout=250) if result is None)
    assert found == count, found
    return sent_s
