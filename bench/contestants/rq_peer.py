"""RQ with a heavy app: its worker forks a process for each job, and there is a worker for each slot."""

from __future__ import annotations

import os
import signal
import sys
import time

from redis import Redis
from rq import Queue, Worker
from rq.registry import FinishedJobRegistry

redis = Redis.from_url(os.environ["BENCH_REDIS_URL"])
queue = Queue("bench", connection=redis)
WORK = "contestants.heavy.work"


def clear() -> None:
    redis.flushall()


def worker(slots: int) -> list[str]:
    return [sys.executable, "-m", "contestants.rq_peer", str(slots)]


def enqueue(count: int) -> None:
    queue.enqueue_many([Queue.prepare_data(WORK, (number,)) for number in range(count)])


def unfinished(enqueued: int) -> int:
    return enqueued - FinishedJobRegistry(queue=queue).get_job_count(cleanup=False)


def round_trips(count: int) -> list[float]:
    taken = []
    for number in range(count):
        begun = time.perf_counter()
        job = queue.enqueue(WORK, number)
        if (result := job.latest_result(timeout=60)) is None or result.return_value is None:
            raise RuntimeError("no result")
        taken.append(time.perf_counter() - begun)
    return taken


def run_workers(slots: int) -> None:
    if os.environ.get("BENCH_IMPORTED"):
        # Imported before the fork and not in each process, as RQ's documentation advises.
        import contestants.heavy  # noqa: F401
    pids = []
    for _ in range(slots):
        if (pid := os.fork()) == 0:
            connection = Redis.from_url(os.environ["BENCH_REDIS_URL"])
            Worker([Queue("bench", connection=connection)], connection=connection).work(logging_level="WARNING")
            os._exit(0)
        pids.append(pid)

    def stop(*_: object) -> None:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)

    signal.signal(signal.SIGTERM, stop)
    for pid in pids:
        os.waitpid(pid, 0)


if __name__ == "__main__":
    run_workers(int(sys.argv[1]))
