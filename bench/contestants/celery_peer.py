"""Celery on RabbitMQ, or on Redis with ``BENCH_BROKER=redis``; results in Redis.

``BENCH_SAFE=1`` adds publisher confirms and late acknowledgement, which are off by default.
"""

from __future__ import annotations

import os
import sys
import time

from celery import Celery, chain, chord, group
from celery.result import AsyncResult
from redis import Redis

from contestants import calls_in

SAFE = os.environ.get("BENCH_SAFE") == "1"
POOL = {"process": "prefork", "thread": "threads", "async": "gevent"}[os.environ.get("BENCH_KIND", "process")]
RESULTS_URL = os.environ["BENCH_REDIS_URL"] + "/1"

ON_REDIS = os.environ.get("BENCH_BROKER") == "redis"
BROKER_URL = os.environ["BENCH_REDIS_URL"] + "/0" if ON_REDIS else os.environ["BENCH_AMQP_URL"]
PAGE_IS_GROUP = os.environ.get("BENCH_PAGE") == "group"

app = Celery("bench", broker=BROKER_URL, backend=RESULTS_URL)
if SAFE:
    app.conf.broker_transport_options = {"confirm_publish": True}
    app.conf.task_acks_late = True
    app.conf.task_reject_on_worker_lost = True


@app.task
def noop() -> None: ...


@app.task
def how_many(results: list[None]) -> int:
    return len(results)


@app.task
def nap() -> None:
    time.sleep(0.02)


@app.task
def sleep(seconds: float) -> float:
    begun = time.monotonic()
    time.sleep(seconds)  # in the gevent pool, this is gevent's
    return begun


def clear() -> None:
    app.control.purge()
    results.flushall()


def worker(slots: int) -> list[str]:
    # Gossip, mingle and heartbeats are off, as most advice on Celery's speed recommends.
    options = ["--loglevel=WARNING", "--without-gossip", "--without-mingle", "--without-heartbeat"]
    return [
        sys.executable,
        "-m",
        "celery",
        "-A",
        "contestants.celery_peer",
        "worker",
        f"--pool={POOL}",
        f"--concurrency={slots}",
        *options,
    ]


def enqueue(count: int) -> None:
    with app.producer_pool.acquire(block=True) as producer:  # one channel for all jobs is the fastest way
        for _ in range(count):
            noop.apply_async(producer=producer)


def enqueue_naps(count: int) -> None:
    for _ in range(count):
        nap.delay()


def unfinished(enqueued: int) -> int:
    return enqueued - int(results.dbsize())


def enqueue_for(seconds: float, callers: int) -> int:
    return calls_in(seconds, callers, noop.delay)


def round_trips(count: int) -> list[float]:
    taken = []
    for _ in range(count):
        begun = time.perf_counter()
        noop.delay().get(timeout=10)
        taken.append(time.perf_counter() - begun)
    return taken


def enqueue_sleeps(count: int, seconds: float) -> None:
    with app.producer_pool.acquire(block=True) as producer:
        for _ in range(count):
            sleep.apply_async((seconds,), producer=producer)


def enqueue_waits(count: int) -> None:
    enqueue_sleeps(count, 1.0)


def page(count: int) -> None:
    if PAGE_IS_GROUP:
        group(sleep.s(0.005) for _ in range(count))().get(timeout=60)
        return
    for result in [sleep.delay(0.005) for _ in range(count)]:
        result.get(timeout=60)


def hold(count: int, seconds: float) -> None:
    enqueue_sleeps(count, seconds)


def short() -> AsyncResult:
    return sleep.delay(0.001)


def begin_s(result: AsyncResult) -> float:
    return float(result.get(timeout=60))


def run_chord(count: int) -> None:
    found = chord(noop.si() for _ in range(count))(how_many.s()).get(timeout=250)
    assert found == count, found


def run_chain(count: int) -> None:
    chain(*(noop.si() for _ in range(count)))().get(timeout=250)


def run_group(count: int) -> float:
    begun = time.perf_counter()
    sent = group(noop.si() for _ in range(count))()
    sent_s = time.perf_counter() - begun
    found = len(sent.get(timeout=250))
    assert found == count, found
    return sent_s


results = Redis.from_url(RESULTS_URL)
