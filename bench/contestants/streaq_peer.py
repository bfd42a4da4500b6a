"""streaQ on Redis streams: entries are acknowledged with the result, and reclaimed from a dead worker."""

from __future__ import annotations

import asyncio
import os
import sys
import time

from redis import Redis
from streaq import Worker

from contestants import async_calls_in

AT_ONCE = 32  # the number in its own comparison
CHUNK = 10_000  # jobs in one pipeline

app = Worker(redis_url=os.environ["BENCH_REDIS_URL"] + "/0", concurrency=AT_ONCE)
loop = asyncio.Runner()


@app.task(silent=True)
async def noop() -> None: ...


def clear() -> None:
    server.flushall()


def worker(slots: int) -> list[str]:
    return [sys.executable, "-m", "streaq", "run", "contestants.streaq_peer:app", "--workers", str(slots)]


def enqueue(count: int) -> None:
    async def enqueue_all() -> None:
        async with app:
            for begin in range(0, count, CHUNK):
                await app.enqueue_many([noop.enqueue() for _ in range(begin, min(begin + CHUNK, count))])

    loop.run(enqueue_all())


def unfinished(enqueued: int) -> int:
    return enqueued - int(server.zcard("streaq:default:index:results"))


def enqueue_for(seconds: float, callers: int) -> int:
    async def measure() -> int:
        async with app:
            return await async_calls_in(seconds, callers, lambda: noop.enqueue().start())

    return loop.run(measure())


def round_trips(count: int) -> list[float]:
    async def measure() -> list[float]:
        taken = []
        async with app:
            for _ in range(count):
                begun = time.perf_counter()
                task = await noop.enqueue()
                await task.result(timeout=10)
                taken.append(time.perf_counter() - begun)
        return taken

    return loop.run(measure())


server = Redis.from_url(os.environ["BENCH_REDIS_URL"] + "/0")
