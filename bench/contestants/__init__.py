"""One file a contestant, each as its own documentation would have it: an app, a no-op task, and what the harness asks.

Every module has the same functions:

    clear()                        forget all jobs and results: every measurement begins empty
    worker(slots)                  the command that starts a worker with so many processes
    enqueue(count)                 hand in so many jobs by the fastest documented way
    unfinished(enqueued)           of so many jobs handed in, how many have no stored result yet
    enqueue_for(seconds, callers)  one call at a time from each of so many callers; how many calls came back
    enqueue_naps(count)            hand in so many jobs that wait 20 ms; only where memory is measured
    round_trips(count)             seconds from the call to the result in hand, one job after the other

and those that are measured with slots of several kinds have these as well:

    enqueue_waits(count)           hand in so many jobs that wait a second
    page(count)                    hand in so many jobs that wait 5 ms, by a call each, and wait for all results
    hold(count, seconds)           hand in so many jobs that wait so long
    short()                        hand in a job that waits 1 ms; what `begin_s` wants
    begin_s(short)                 when it began, by the monotonic clock

and those that have workflows have these, which hand in no-op jobs and wait for the end:

    run_chord(count)               a group of so many, and a body that gets their results
    run_chain(count)               so many, one after another
    run_group(count)               a group of so many, with all results; gives the seconds that handing in has taken

The module is imported by the worker too. ``BENCH_SLOTS`` says how many slots that has, ``BENCH_KIND`` of which kind
they are, and ``BENCH_PAGE=group`` that a page is a group and not a call for each job.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Awaitable, Callable


def calls_in(seconds: float, callers: int, call: Callable[[], object]) -> int:
    """How many calls come back in the time, from so many threads."""
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
    """The same for an asyncio library: so many tasks on one loop."""
    import asyncio

    until = time.perf_counter() + seconds

    async def keep_calling() -> int:
        done = 0
        while time.perf_counter() < until:
            await call()
            done += 1
        return done

    return sum(await asyncio.gather(*(keep_calling() for _ in range(callers))))
