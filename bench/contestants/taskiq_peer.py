"""taskiq on a Redis stream, or with ``BENCH_SAFE=0`` on a list, which loses the jobs of a dead worker."""

from __future__ import annotations

import asyncio
import os
import sys
import time

from redis import Redis
from taskiq_redis import ListQueueBroker, RedisAsyncResultBackend, RedisStreamBroker

from contestants import async_calls_in

QUEUE_URL = os.environ["BENCH_REDIS_URL"] + "/0"
RESULTS_URL = os.environ["BENCH_REDIS_URL"] + "/1"
AT_ONCE = 32  # the number in streaQ's comparison

Broker = ListQueueBroker if os.environ.get("BENCH_SAFE") == "0" else RedisStreamBroker
broker = Broker(QUEUE_URL).with_result_backend(RedisAsyncResultBackend(RESULTS_URL))
loop = asyncio.Runner()


@broker.task
async def noop() -> None: ...


def clear() -> None:
    results.flushall()


def worker(slots: int) -> list[str]:
    options = ["--log-level", "WARNING", "--max-async-tasks", str(AT_ONCE), "--max-prefetch", str(AT_ONCE)]
    return [
        sys.executable,
        "-m",
        "taskiq",
        "worker",
        "contestants.taskiq_peer:broker",
        "--workers",
        str(slots),
        *options,
    ]


def enqueue(count: int) -> None:
    async def enqueue_share(share: int) -> None:
        for _ in range(share):
            await noop.kiq()

    async def enqueue_all() -> None:
        await broker.startup()
        await asyncio.gather(*(enqueue_share(len(range(caller, count, AT_ONCE))) for caller in range(AT_ONCE)))

    loop.run(enqueue_all())


def unfinished(enqueued: int) -> int:
    return enqueued - int(results.dbsize())


def enqueue_for(seconds: float, callers: int) -> int:
    loop.run(broker.startup())
    return loop.run(async_calls_in(seconds, callers, noop.kiq))


def round_trips(count: int) -> list[float]:
    async def measure() -> list[float]:
        await broker.startup()
        taken = []
        for _ in range(count):
            begun = time.perf_counter()
            task = await noop.kiq()
            # It polls, and its default of 200 ms would dominate the figure.
            await task.wait_result(check_interval=0.0005, timeout=10)
            taken.append(time.perf_counter() - begun)
        return taken

    return loop.run(measure())


results = Redis.from_url(RESULTS_URL)
