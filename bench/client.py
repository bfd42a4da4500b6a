"""Run one measurement of one contestant: ``client.py MODULE MEASUREMENT key=value ...`` prints one line of JSON.

It runs in its own process, under the contestant's interpreter, and needs only the standard library. It starts and
stops the contestant's worker.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

from contestants import bare_fork_peer
from processes import descendants, proportional_set_size_bytes, running, tail

SAMPLE_S = 0.01
WARM_UP_JOBS = 200
STALL_S = 30
NAPS_EACH = 5
LONG_S = 6.0
PAUSE_S = 0.02
WORKER_GRACE_S = 1  # it has nothing left to do

Curve = list[tuple[float, int]]


class Measurement:
    """A contestant, the number of its enqueued jobs, and its worker."""

    def __init__(self, contestant: ModuleType, log: Path) -> None:
        self.contestant = contestant
        self.log = log
        self.enqueued = 0

    def enqueue(self, count: int) -> float:
        """Enqueue ``count`` jobs, and return the seconds that it took."""
        begun = time.perf_counter()
        self.contestant.enqueue(count)
        taken = time.perf_counter() - begun
        self.enqueued += count
        return taken

    @contextlib.contextmanager
    def worker(self, slots: int) -> Iterator[int]:
        """Run a worker for the length of the block; yield its process id."""
        env = {**os.environ, "BENCH_SLOTS": str(slots)}
        with running(
            self.contestant.worker(slots), log=self.log, env=env, cwd=Path(__file__).parent, grace_s=WORKER_GRACE_S
        ) as process:
            self.process = process
            yield process.pid

    def finished(self) -> int:
        return self.enqueued - int(self.contestant.unfinished(self.enqueued))

    def watch(self) -> Curve:
        """Sample (time, jobs with a stored result) until all jobs have one."""
        curve: Curve = []
        progressed = time.perf_counter()
        while not curve or curve[-1][1] < self.enqueued:
            finished, now = self.finished(), time.perf_counter()
            if not curve or finished > curve[-1][1]:
                progressed = now
            elif self.process.poll() is not None:
                raise RuntimeError(f"the worker exited with {self.enqueued - finished} jobs left:\n{tail(self.log)}")
            elif now - progressed > STALL_S:
                raise RuntimeError(
                    f"no progress for {STALL_S} s with {self.enqueued - finished} jobs left:\n{tail(self.log)}"
                )
            curve.append((now, finished))
            time.sleep(SAMPLE_S)
        return curve

    def warm_up(self) -> None:
        self.enqueue(WARM_UP_JOBS)
        self.watch()


def steady_rate(curve: Curve) -> float:
    """Return the jobs per second between 10 % and 90 % of the way: without the worker's start and the stragglers."""
    first, last = curve[0][1], curve[-1][1]
    low, high = first + (last - first) * 0.1, first + (last - first) * 0.9
    within = [sample for sample in curve if low <= sample[1] <= high]
    if len(within) < 3 or within[-1][0] - within[0][0] < 5 * SAMPLE_S:  # too quick to cut its ends off
        moving = [sample for sample in curve if sample[1] > first]
        within = [curve[max(0, curve.index(moving[0]) - 1)], curve[-1]]
    (begin, done_before), (finish, done_after) = within[0], within[-1]
    return (done_after - done_before) / (finish - begin)


def drain(measurement: Measurement, slots: int, count: int) -> dict[str, float]:
    """Enqueue jobs, then start a worker that drains them; then enqueue again with the worker warm and waiting."""
    enqueue_s = measurement.enqueue(count)
    started = time.perf_counter()
    with measurement.worker(slots):
        curve = measurement.watch()
        from_start_s = curve[-1][0] - started
        begun = time.perf_counter()
        measurement.enqueue(count)
        end_to_end_s = measurement.watch()[-1][0] - begun
    return {
        "enqueue_per_s": count / enqueue_s,
        "drain_per_s": steady_rate(curve),
        "from_worker_start_s": from_start_s,
        "end_to_end_per_s": count / end_to_end_s,
    }


def race(measurement: Measurement, slots: int, count: int) -> dict[str, float]:
    """Run the public test: the time to enqueue, then the time from the worker's start to the last result."""
    enqueue_s = measurement.enqueue(count)
    started = time.perf_counter()
    with measurement.worker(slots):
        curve = measurement.watch()
    return {"enqueue_s": enqueue_s, "finish_s": curve[-1][0] - started, "drain_per_s": steady_rate(curve)}


def bulk(measurement: Measurement, count: int) -> dict[str, float]:
    return {"enqueue_per_s": count / measurement.enqueue(count)}


def singly(measurement: Measurement, seconds: float, callers: int) -> dict[str, float]:
    measurement.contestant.enqueue_for(0.2, callers)  # connections
    begun = time.perf_counter()
    calls = measurement.contestant.enqueue_for(seconds, callers)
    return {"calls_per_s": calls / (time.perf_counter() - begun)}


def latency(measurement: Measurement, slots: int, count: int) -> dict[str, float]:
    with measurement.worker(slots):
        measurement.warm_up()
        measurement.contestant.round_trips(100)
        taken = sorted(measurement.contestant.round_trips(count))
    centiles = statistics.quantiles(taken, n=100, method="inclusive")
    return {"p50_ms": centiles[49] * 1e3, "p99_ms": centiles[98] * 1e3, "max_ms": taken[-1] * 1e3}


def isolated(measurement: Measurement, slots: int, count: int, trips: int) -> dict[str, float]:
    """Time single jobs, with pauses in which the next process can be forked; then time many jobs at once."""
    with measurement.worker(slots):
        measurement.enqueue(2 * slots)
        measurement.watch()
        taken = []
        for _ in range(trips):
            time.sleep(PAUSE_S)
            taken += measurement.contestant.round_trips(1)
        measurement.enqueued += trips
        measurement.watch()
        begun = time.perf_counter()
        measurement.enqueue(count)
        took_s = measurement.watch()[-1][0] - begun
    return {"jobs_per_s": count / took_s, "p50_ms": statistics.median(taken) * 1e3}


def in_turn(measurement: Measurement, slots: int, count: int, turns: int) -> dict[str, float]:
    """Time jobs and bare forks of the same heap alternately, so that both see the same changes of a shared machine."""

    def queue_s(jobs: int) -> float:
        begun = time.perf_counter()
        # The harness would ask for the number of results so often that it takes 1 % of the machine.
        measurement.contestant.run_to_last(jobs)
        measurement.enqueued += jobs
        return measurement.watch()[-1][0] - begun

    def bare_s(jobs: int) -> float:
        return bare_fork_peer.ask(f"loop {jobs} {slots}")[0]

    with measurement.worker(slots):
        queue_s(2 * slots)
        bare_s(2 * slots)
        ratios = []
        for turn in range(turns):
            both = (queue_s, bare_s) if turn % 2 == 0 else (bare_s, queue_s)
            seconds = {each: each(count) for each in both}
            ratios.append(seconds[bare_s] / seconds[queue_s])
    return {"of_bare": statistics.median(ratios)}


def memory(measurement: Measurement, slots: int) -> dict[str, float]:
    with measurement.worker(slots) as pid:
        measurement.warm_up()
        # Long enough to be spread over all processes, so that each runs some.
        measurement.contestant.enqueue_naps(NAPS_EACH * slots)
        measurement.enqueued += NAPS_EACH * slots
        measurement.watch()
        tree = [pid, *descendants(pid)]
        return {"pss_mb": proportional_set_size_bytes(tree) / 1e6, "processes": len(tree)}


def waits(measurement: Measurement, slots: int, waves: int) -> dict[str, float]:
    """Measure the share of time in which many slots have a job, with jobs that each wait a second.

    The span begins when as many jobs have ended as there are slots: by then all slots have begun. It ends when as many
    jobs are left, before the first slot runs out of work.
    """
    measurement.contestant.enqueue_waits(waves * slots)
    measurement.enqueued += waves * slots
    with measurement.worker(slots) as pid:
        curve = measurement.watch()
        tree = [pid, *descendants(pid)]
        pss_mb = proportional_set_size_bytes(tree) / 1e6
    reached = [next(now for now, done in curve if done >= wave * slots) for wave in (1, waves - 1)]
    rate = (waves - 2) * slots / (reached[1] - reached[0])
    return {
        "efficiency_percent": 100 * rate / slots,
        "jobs_per_s": rate,
        "pss_mb": pss_mb,
        "slots": slots,
    }


def fan_out(measurement: Measurement, slots: int, count: int, clients: int, rounds: int) -> dict[str, float]:
    """Load a page in each of the client threads. A page fans out into jobs of 5 ms and waits for all of them."""
    taken: list[float] = []

    def load() -> None:
        begun = time.perf_counter()
        measurement.contestant.page(count)
        taken.append(time.perf_counter() - begun)

    all_loaded = []
    with measurement.worker(slots):
        measurement.warm_up()
        measurement.contestant.page(count)
        for _ in range(rounds):
            taken.clear()
            threads = [threading.Thread(target=load) for _ in range(clients)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            # A first-in-first-out pool loads one page after another, others load all at once, so the last one counts.
            all_loaded.append(max(taken))
    return {"page_ms": statistics.median(all_loaded) * 1e3, "slowest_ms": max(all_loaded) * 1e3}


def workflow(measurement: Measurement, shape: str, slots: int, count: int, rounds: int) -> dict[str, float]:
    """Return the median seconds from the call to the end and, where a contestant tells it, of enqueueing alone."""
    run = getattr(measurement.contestant, f"run_{shape}")
    taken, sent = [], []
    with measurement.worker(slots):
        measurement.warm_up()
        run(min(count, WARM_UP_JOBS))
        for _ in range(rounds):
            begun = time.perf_counter()
            sent.append(run(count) or 0.0)
            taken.append(time.perf_counter() - begun)
    end_to_end_s = statistics.median(taken)
    return {"end_to_end_s": end_to_end_s, "end_to_end_per_s": count / end_to_end_s, "send_s": statistics.median(sent)}


def chord(measurement: Measurement, slots: int, count: int, rounds: int) -> dict[str, float]:
    return workflow(measurement, "chord", slots, count, rounds)


def chain(measurement: Measurement, slots: int, count: int, rounds: int) -> dict[str, float]:
    return workflow(measurement, "chain", slots, count, rounds)


def group(measurement: Measurement, slots: int, count: int, rounds: int) -> dict[str, float]:
    return workflow(measurement, "group", slots, count, rounds)


def mixed(measurement: Measurement, slots: int, count: int) -> dict[str, float]:
    """Measure how long jobs of 1 ms wait to begin, while jobs of 6 s occupy all slots of two workers but two."""
    contestant = measurement.contestant
    with measurement.worker(slots), measurement.worker(slots):
        measurement.warm_up()
        for short in [contestant.short() for _ in range(WARM_UP_JOBS)]:
            contestant.begin_s(short)
        contestant.hold(2 * slots - 2, LONG_S)
        # Time for the long jobs to begin.
        time.sleep(0.3)
        began = time.monotonic()
        sent = []
        for number in range(count):
            ahead_s = began + number * (LONG_S - 1) / count - time.monotonic()
            time.sleep(max(0.0, ahead_s))
            sent.append((time.monotonic(), contestant.short()))
        waited = sorted(contestant.begin_s(short) - at for at, short in sent)
    return {
        "p50_ms": waited[len(waited) // 2] * 1e3,
        "p99_ms": waited[len(waited) * 99 // 100] * 1e3,
        "p999_ms": waited[len(waited) * 999 // 1000] * 1e3,
    }


MEASUREMENTS: dict[str, Callable[..., dict[str, float]]] = {
    measurement.__name__: measurement
    for measurement in (
        drain,
        race,
        bulk,
        singly,
        latency,
        memory,
        waits,
        fan_out,
        mixed,
        isolated,
        in_turn,
        chord,
        chain,
        group,
    )
}


def main() -> None:
    module, name, *pairs = sys.argv[1:]
    parameters = {key: json.loads(value) for key, value in (pair.split("=") for pair in pairs)}
    # Contestants may print. The last line of standard output is the answer.
    sys.path.insert(0, str(Path(__file__).parent))
    contestant = importlib.import_module(f"contestants.{module}")
    contestant.clear()
    measurement = Measurement(contestant, Path(os.environ["BENCH_LOG"]))
    print(json.dumps(MEASUREMENTS[name](measurement, **parameters)), flush=True)


if __name__ == "__main__":
    main()
