"""Contestants, one per file, written as their own documentation recommends: an app, a no-op task, and hooks.

Every module has the same functions:

    clear()                        forgets all jobs and results, so that every measurement begins empty
    worker(slots)                  returns the command that starts a worker with that many processes
    enqueue(count)                 enqueues jobs in the fastest documented way
    unfinished(enqueued)           returns how many of the enqueued jobs have no stored result yet
    enqueue_for(seconds, callers)  calls from each caller, one call at a time; returns the number of calls that returned
    enqueue_naps(count)            enqueues jobs that wait 20 ms; only where memory is measured
    round_trips(count)             returns the seconds from each call to its result, one job after another

Contestants that are measured with slots of several kinds also have these:

    enqueue_waits(count)           enqueues jobs that wait a second
    page(count)                    enqueues jobs that wait 5 ms, with a call for each, and waits for all results
    hold(count, seconds)           enqueues jobs that wait that long
    short()                        enqueues a job that waits 1 ms; returns the argument of `begin_s`
    begin_s(short)                 returns when that job began, by the monotonic clock

Contestants with workflows also have these, which enqueue no-op jobs and wait for the end:

    run_chord(count)               a group, and a body that receives its results
    run_chain(count)               jobs one after another
    run_group(count)               a group with all its results; returns the seconds that enqueueing took

The worker imports the module too. ``BENCH_SLOTS`` is its number of slots, and ``BENCH_KIND`` their kind. With
``BENCH_PAGE=group``, a page is a group instead of a call for each job.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Awaitable, Callable


def calls_in(seconds: float, callers: int, call: Callable[[], object]) -> int:
    """Return how many calls of that many threads return within the time."""
    counts = [0] * callers
    until = time.perf_counter() + seconds

    def keep_calling(caller: int) -> None:
        done = 0
        while time.perf_counter() < until:
            call()
            done += 1
        counts[caller] = done

    threads = [threading.Thread(target=keep_calling, args=(caller,)) for caller in range(callers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(counts)


async def async_calls_in(seconds: float, callers: int, call: Callable[[], Awaitable[object]]) -> int:
    """Do the same for an asyncio library, with tasks on one event loop."""
    import asyncio

    until = time.perf_counter() + seconds

    async def keep_calling() -> int:
        done = 0
        while time.perf_counter() < until:
            await call()
            done += 1
        return done

    return sum(await asyncio.gather(*(keep_calling() for _ in range(callers))))
