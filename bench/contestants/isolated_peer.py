"""Penstock with a heavy app, each job in its own process."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from penstock import App, _core

PENSTOCK = str(Path(sys.executable).with_name("penstock"))

app = App("heavy", defaults={"slot": "isolated"})
broker = _core.Client(os.environ["PENSTOCK_URL"])  # for the number of stored results


@app.on_worker_start
def load() -> None:
    # In the worker alone: the client only enqueues, and needs none of it.
    import contestants.heavy  # noqa: F401


@app.task
def work(number: int) -> int:
    from contestants import heavy

    return heavy.work(number)


def clear() -> None:
    """Do nothing: each measurement has its own broker and directory."""


def worker(slots: int) -> list[str]:
    return [PENSTOCK, "worker", "contestants.isolated_peer:app", "-c", "1", "--isolated", str(slots)]


def enqueue(count: int) -> None:
    work.map(range(count))


def run_to_last(count: int) -> None:
    """Enqueue jobs, and wait for the one that begins as the last."""
    work.map(range(count))[-1].result(timeout=60)


def unfinished(enqueued: int) -> int:
    status = broker.status(10)
    return enqueued - int(status["results"]) - int(status["evicted"])


def round_trips(count: int) -> list[float]:
    taken = []
    for number in range(count):
        begun = time.perf_counter()
        work.delay(number).result(timeout=60)
        taken.append(time.perf_counter() - begun)
    return taken
