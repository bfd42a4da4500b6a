"""A thread pool in the program itself: the cost of a fan-out without a queue. No worker, and nothing is kept."""

from __future__ import annotations

import sys
import time
from concurrent.futures import ThreadPoolExecutor

SLOTS = 40
pool = ThreadPoolExecutor(SLOTS)
done = 0


def clear() -> None:
    """Do nothing: nothing is kept."""


def worker(slots: int) -> list[str]:
    if slots != SLOTS:
        raise ValueError(f"the pool has {SLOTS} threads")
    # The harness needs a process to watch. This one waits for the end of the measurement.
    return [sys.executable, "-c", "import signal; signal.pause()"]


def enqueue(count: int) -> None:
    for _ in range(count):
        pool.submit(int).result()


def unfinished(_enqueued: int) -> int:
    return 0


def run_chord(count: int) -> None:
    assert len([result.result() for result in [pool.submit(int) for _ in range(count)]]) == count


def run_chain(count: int) -> None:
    for _ in range(count):
        pool.submit(int).result()


def run_group(count: int) -> float:
    begun = time.perf_counter()
    sent = [pool.submit(int) for _ in range(count)]
    sent_s = time.perf_counter() - begun
    for result in sent:
        result.result()
    return sent_s


def page(count: int) -> None:
    for result in [pool.submit(time.sleep, 0.005) for _ in range(count)]:
        result.result()
