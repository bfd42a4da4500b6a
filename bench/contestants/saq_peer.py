"""SAQ on Redis: a job's record holds its result, and a sweep later recovers the jobs of a dead worker."""

from __future__ import annotations

import asyncio
import os
import sys
import time

from redis import Redis
from saq import Queue

from contestants import async_calls_in

AT_ONCE = 32  # the number in streaQ's comparison

queue = Queue.from_url(os.environ["BENCH_REDIS_URL"] + "/0", max_concurrent_ops=AT_ONCE)
loop = asyncio.Runner()


async def noop(context: dict[str, object]) -> None: ...


settings = {"queue": queue, "functions": [noop], "concurrency": AT_ONCE}


def clear() -> None:
    server.flushall()


def worker(slots: int) -> list[str]:
    return [sys.executable, "-m", "saq", "contestants.saq_peer.settings", "--workers", str(slots), "--quiet"]


def enqueue(count: int) -> None:
    async def enqueue_share(share: int) -> None:
        for _ in range(share):
            await queue.enqueue("noop")

    async def enqueue_all() -> None:
        await queue.connect()
        await asyncio.gather(*(enqueue_share(len(range(caller, count, AT_ONCE))) for caller in range(AT_ONCE)))

    loop.run(enqueue_all())


def unfinished(enqueued: int) -> int:
    return int(server.zcard("saq:default:incomplete"))


def enqueue_for(seconds: float, callers: int) -> int:
    loop.run(queue.connect())
    return loop.run(async_calls_in(seconds, callers, lambda: queue.enqueue("noop")))


def round_trips(count: int) -> list[float]:
    async def measure() -> list[float]:
        await queue.connect()
        taken = []
        for _ in range(count):
            begun = time.perf_counter()
            # It polls, and its default of 500 ms would dominate the figure.
            await queue.apply("noop", timeout=10, poll_interval=0.0005)
            taken.append(time.perf_counter() - begun)
        return taken

    return loop.run(measure())


server = Redis.from_url(os.environ["BENCH_REDIS_URL"] + "/0")
