"""Penstock on its local broker: every job and every result on disk before anyone hears of it."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from contestants import calls_in
from penstock import App, _core

PENSTOCK = str(Path(sys.executable).with_name("penstock"))

app = App("bench")
broker = _core.Client(os.environ["PENSTOCK_URL"])  # asks how far it is


@app.task(durability=os.environ.get("BENCH_DURABILITY", "disk"))
def noop(number: int) -> None: ...


@app.task
def nap() -> None:
    time.sleep(0.02)


def clear() -> None:
    """Each measurement has a broker and a directory of its own."""


def worker(slots: int) -> list[str]:
    return [PENSTOCK, "worker", "contestants.penstock_peer:app", "-c", str(slots)]


def enqueue(count: int) -> None:
    noop.map(range(count))


def enqueue_naps(count: int) -> None:
    for _ in range(count):
        nap.delay()


def unfinished(enqueued: int) -> int:
    # The figures of `penstock status --json`: starting a program a hundred times a second would be in the way.
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
