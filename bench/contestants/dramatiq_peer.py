"""dramatiq on Redis: messages are acknowledged after the job, so a dead worker's messages are kept."""

from __future__ import annotations

import os
import sys
import time

import dramatiq
from dramatiq.brokers.redis import RedisBroker
from dramatiq.results import Results
from dramatiq.results.backends import RedisBackend
from redis import Redis

from contestants import calls_in

RESULTS_URL = os.environ["BENCH_REDIS_URL"] + "/1"

broker = RedisBroker(url=os.environ["BENCH_REDIS_URL"] + "/0")
broker.add_middleware(Results(backend=RedisBackend(url=RESULTS_URL)))
dramatiq.set_broker(broker)


@dramatiq.actor(store_results=True)
def noop() -> None: ...


def clear() -> None:
    results.flushall()


def worker(slots: int) -> list[str]:
    # Eight threads per process are its default, and faster than one.
    return [sys.executable, "-m", "dramatiq", "contestants.dramatiq_peer", "--processes", str(slots), "--threads", "8"]


def enqueue(count: int) -> None:
    for _ in range(count):  # a group does the same
        noop.send()


def unfinished(enqueued: int) -> int:
    return enqueued - int(results.dbsize())


def enqueue_for(seconds: float, callers: int) -> int:
    return calls_in(seconds, callers, noop.send)


def round_trips(count: int) -> list[float]:
    taken = []
    for _ in range(count):
        begun = time.perf_counter()
        noop.send().get_result(block=True, timeout=10_000)
        taken.append(time.perf_counter() - begun)
    return taken


results = Redis.from_url(RESULTS_URL)
