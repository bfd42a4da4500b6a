"""Replaces each app's own broker with one in memory for the duration of a block."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncGenerator, Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar, cast

from penstock import _core
from penstock._connection import Connection, is_own
from penstock._durations import Seconds, timeout_s
from penstock._tasks.app import App
from penstock.errors import CallTimeout, ResultTimeout
from penstock.testing._bench import Bench, InlineBench, WorkerBench
from penstock.testing._calls import Calls, signature_in
from penstock.testing._places import connected

if TYPE_CHECKING:
    from penstock._flows.build import Built, Plan
    from penstock._flows.replacing import Build
    from penstock._jobs.current import Leaving

B = TypeVar("B", bound=Bench)
T = TypeVar("T")

# Interval at which a wait for a job of another thread checks whether that thread still runs jobs.
_LOOKS_EVERY_S = 0.05


class CapturedCalls(Calls):
    """Calls of ``capture`` so far, with a method to run them."""

    def __init__(self) -> None:
        super().__init__()
        self._benches: Callable[[], list[Bench]] = list

    def run_until_idle(self) -> int:
        """Run the ready jobs, and the jobs that they enqueue, until none is left; return the number of attempts.

        Jobs run in the order in which a worker would get them, highest priority first. A job that is delayed, or waits
        for a retry, becomes ready when ``move_clock`` reaches its time. Errors of tasks are not raised: their jobs
        fail, as in a worker.
        """
        attempts = 0
        while ran := sum(bench.run_until_idle() for bench in self._benches()):
            attempts += ran
        return attempts

    async def arun_until_idle(self) -> int:
        """Like ``run_until_idle``, but awaitable: the jobs run in another thread."""
        return await asyncio.to_thread(self.run_until_idle)


class WorkerCalls(Calls):
    """Calls of ``worker`` so far, with a method to wait for them."""

    def __init__(self) -> None:
        super().__init__()
        self._benches: Callable[[], list[WorkerBench]] = list

    def run_until_idle(self, timeout: Seconds = 30.0) -> None:
        """Wait until no job is ready or running.

        Does not wait for a job that is delayed or waits for a retry: ``move_clock`` makes it ready. ``timeout``:
        seconds or a timedelta, after which it raises ``TimeoutError``.
        """
        limit_s = timeout_s("timeout", timeout)
        until = float("inf") if limit_s is None else time.monotonic() + limit_s
        # Repeated if there were more calls in between, because jobs of one broker may enqueue at another.
        calls = -1
        while calls != len(self):
            calls = len(self)
            for bench in self._benches():
                bench.wait_until_idle(until)

    async def arun_until_idle(self, timeout: Seconds = 30.0) -> None:
        """Like ``run_until_idle``, but awaitable."""
        await asyncio.to_thread(self.run_until_idle, timeout)


@contextmanager
def inline(*apps: App) -> Generator[Calls, None, None]:
    """Within the block, run every job inside the call that enqueues it; returns the list of those calls.

    ``apps``: the apps whose jobs run. Default: all apps of this process, including those created within the block.

    Jobs go through a real broker in memory, and the code of a real worker runs them. So arguments and results are
    serialized, errors are retried, middleware is called, and ``result()`` behaves as in production. A job with a
    ``countdown`` or an ``eta``, which its ``Call`` shows, also runs at once, unless it expires before that: then it
    ends as expired. Retries run at once, too; the broker's clock advances by the backoff. To test when jobs are due,
    use ``capture``.

    A plain task runs in the thread that enqueues it, where it sees the test's own database transaction. An ``async
    def`` task runs in the event loop of another thread, and so does every job that code in an event loop enqueues. As
    in a worker, a job does not see context variables of the code that enqueued it. Functions registered with
    ``on_worker_start`` and similar hooks are not called.

    Blocks may be nested. If several blocks name an app, its jobs belong to the innermost.
    """
    calls = Calls()
    with _in_place_of(apps, calls, lambda: InlineBench(calls)):
        yield calls


@contextmanager
def capture(*apps: App) -> Generator[CapturedCalls, None, None]:
    """Within the block, record jobs without running them; returns the list of their calls.

    ``apps`` is as for ``inline``. The jobs wait in a real broker in memory: ``job.info()``, ``job.cancel()`` and
    ``app.failed()`` work, and ``result()`` raises ``ResultTimeout`` at once, because nothing would end the job.
    ``run_until_idle()`` of the returned list runs them. Delayed jobs become ready when ``move_clock(app, ...)`` reaches
    their time. Jobs that have not run are dropped at the end of the block.
    """
    calls = CapturedCalls()
    with _in_place_of(apps, calls, lambda: Bench(calls)) as benches:
        calls._benches = benches
        yield calls


@contextmanager
def worker(*apps: App, threads: int = 2) -> Generator[WorkerCalls, None, None]:
    """Within the block, run jobs in threads of this process as they are enqueued; returns the list of those calls.

    ``apps`` is as for ``inline``. Jobs go through a real broker in memory and run concurrently: ``result(timeout=...)``
    waits. Delays and retries follow the broker's clock, which ``move_clock(app, ...)`` advances. ``threads``: number of
    jobs that run at once, 2 by default. The end of the block waits for running jobs, and drops all others.
    """
    if threads < 1:
        raise ValueError(f"threads must be at least 1, not {threads!r}")
    calls = WorkerCalls()
    with _in_place_of(apps, calls, lambda: WorkerBench(calls, threads)) as benches:
        calls._benches = benches
        yield calls


class _Connection(Connection):
    """Connection of an app to a bench."""

    def __init__(self, bench: Bench, app: App) -> None:
        super().__init__(app.url, bench.client)
        self.bench = bench
        self._app = app
        # These override the client's methods, which `Connection` has stored in the instance.
        self.publish = self._publish
        self.publish_same = self._publish_same
        self.publish_many = self._publish_many
        self.order_failed = self._order_failed
        self.operation = self._operation

    def __eq__(self, other: object) -> bool:
        """Return whether both use the same bench: apps of one URL share a broker, so one call can wait for their
        jobs."""
        return isinstance(other, _Connection) and other.bench is self.bench

    def __hash__(self) -> int:
        return hash(self.bench)

    def _publish(self, options: _core.Options, body: bytes, timeout_s: float) -> bytes:
        return cast(bytes, self._publish_many([(options, body)], timeout_s)[0])

    def _publish_same(self, options: _core.Options, bodies: Sequence[bytes], timeout_s: float) -> list[bytes]:
        return cast("list[bytes]", self._publish_many([(options, body) for body in bodies], timeout_s))

    def _publish_many(
        self, jobs: Sequence[tuple[_core.Options, bytes]], timeout_s: float
    ) -> list[bytes | tuple[bytes]]:
        return self.bench.enqueue(self._app, jobs, timeout_s)

    # Tests always see a whole workflow at once.
    sends_parts = False

    def publish_plan(self, plan: Plan, jobs: Sequence[tuple[_core.Options, bytes]], timeout_s: float) -> Built:
        return self.bench.publish_plan(self._app, plan, jobs, timeout_s)

    def build_plan(
        self, plan: Plan, jobs: Sequence[tuple[_core.Options, bytes]], build: Build, leaves: Leaving
    ) -> Built:
        return self.bench.build_plan(self._app, plan, jobs, build, leaves)

    async def submit_plan(self, plan: Plan, jobs: Sequence[tuple[_core.Options, bytes]], timeout_s: float) -> Built:
        return await asyncio.to_thread(self.publish_plan, plan, jobs, timeout_s)

    def cancel_workflow(self, workflow: bytes, reason: str, running: str, timeout_s: float) -> int | None:
        operation = self._client.cancel_workflow(workflow, reason, running, timeout_s)
        self.bench.after_change()
        return operation

    async def submit(self, jobs: Sequence[tuple[_core.Options, bytes]], timeout_s: float) -> list[bytes | tuple[bytes]]:
        return await asyncio.to_thread(self._publish_many, jobs, timeout_s)

    def may_end(self) -> bool:
        return self.bench.may_end()

    def move_clock(self, forward_ms: int, timeout_s: float) -> int:
        return self.bench.move_clock(forward_ms, timeout_s)

    def order_schedule(
        self, app: str, name: str, order: str, call: tuple[_core.Timing, _core.Options, bytes] | None, timeout_s: float
    ) -> bytes | None:
        return self.bench.order_schedule(app, name, order, call, timeout_s)

    def schedules(
        self, app: str, name: str | None, after: str | None, times: int, timeout_s: float
    ) -> tuple[list[str], str | None]:
        self.bench.declare(timeout_s)
        return super().schedules(app, name, after, times, timeout_s)

    def _order_failed(
        self, order: str, job_id: bytes | None, filter: _core._Filter, queue: str | None, timeout_s: float
    ) -> int | None:
        operation = self._client.order_failed(order, job_id, filter, queue, timeout_s)
        self.bench.after_change()
        return operation

    def _operation(self, operation: int, timeout_s: float) -> tuple[int, int, bool] | None:
        status = self._client.operation(operation, timeout_s)
        if status is not None and status[2]:
            self.bench.after_change()
        return status

    def wait(self, job_id: bytes, timeout_s: float | None) -> tuple[int, bytes]:
        return self._until_nothing_runs(lambda slice_s: self._client.wait(job_id, slice_s), timeout_s)

    def wait_all(self, job_ids: Sequence[bytes], timeout_s: float | None) -> list[tuple[int, bytes]]:
        return self._until_nothing_runs(lambda slice_s: self._client.wait_all(job_ids, slice_s), timeout_s)

    async def watch(self, job_id: bytes, timeout_s: float | None) -> tuple[int, bytes]:
        return await asyncio.to_thread(self.wait, job_id, timeout_s)

    async def watch_all(self, job_ids: Sequence[bytes], timeout_s: float | None) -> list[tuple[int, bytes]]:
        return await asyncio.to_thread(self.wait_all, job_ids, timeout_s)

    def each(
        self, job_ids: Sequence[bytes], timeout_s: float | None, call_timeout_s: float, *, any_of: bool = False
    ) -> Iterator[tuple[int, tuple[int, bytes] | None]]:
        return super().each(job_ids, timeout_s if self.bench.may_end() else 0, call_timeout_s, any_of=any_of)

    def aeach(
        self, job_ids: Sequence[bytes], timeout_s: float | None, call_timeout_s: float, *, any_of: bool = False
    ) -> AsyncGenerator[tuple[int, tuple[int, bytes] | None], None]:
        return super().aeach(job_ids, timeout_s if self.bench.may_end() else 0, call_timeout_s, any_of=any_of)

    def whereabouts(self, job_id: bytes, url: str, call_timeout_s: float) -> str:
        if self.bench.may_end():
            return super().whereabouts(job_id, url, call_timeout_s)
        held = self._client.message_info(job_id, call_timeout_s)
        state = "has just ended" if held is None else f"is {held['state']}"
        return f"it {state}, and nothing runs that could end it. {self.bench.why_nothing_runs}"

    def whereabouts_of_one(
        self, job_ids: Sequence[bytes], url: str, call_timeout_s: float, *, only_stuck: bool = False
    ) -> str:
        if self.bench.may_end():
            return super().whereabouts_of_one(job_ids, url, call_timeout_s, only_stuck=only_stuck)
        return f"nothing runs that could end them. {self.bench.why_nothing_runs}"

    def log_notices(self, blocking: tuple[str, str] | None = None) -> bool:
        # Queues without workers and blocking calls are expected here.
        return False

    def _until_nothing_runs(self, wait: Callable[[float], T], timeout_s: float | None) -> T:
        """Wait for the ends of jobs while any running job may cause them."""
        begun = time.monotonic()
        until = None if timeout_s is None else begun + timeout_s
        answered_by = begun + self._app.call_timeout
        while True:
            # Asked before the wait: a job that ends during it may have ended the awaited one.
            may_end = self.bench.may_end()
            left_s = math.inf if until is None else max(0.0, until - time.monotonic())
            try:
                # The last slice must not be short, or a healthy broker would seem silent in it.
                return wait(left_s if left_s < 2 * _LOOKS_EVERY_S else _LOOKS_EVERY_S)
            except ResultTimeout:
                if not may_end or (until is not None and time.monotonic() >= until):
                    raise
            except CallTimeout:
                # On a busy machine, a broker may take longer than a slice to say whether the job has ended.
                if time.monotonic() >= (answered_by if until is None else until):
                    raise


@contextmanager
def _in_place_of(
    apps: Sequence[App], calls: Calls, new_bench: Callable[[], B]
) -> Generator[Callable[[], list[B]], None, None]:
    """Use benches as the brokers of these apps, or of all. Apps of one URL share a bench, as they would a broker."""
    benches: dict[object, B] = {}

    def connect(app: App) -> Connection:
        key = app if is_own(app.url) else app.url
        bench = benches.get(key)
        if bench is None:
            bench = benches[key] = new_bench()
        bench.apps.append(app)
        return _Connection(bench, app)

    calls._signature_of = lambda task: signature_in([app for bench in benches.values() for app in bench.apps], task)
    try:
        with connected(apps, connect):
            yield lambda: list(benches.values())
    finally:
        _close(list(benches.values()))


def _close(benches: Sequence[Bench]) -> None:
    """Close all benches, even if one of them raises."""
    if benches:
        try:
            benches[0].close()
        finally:
            _close(benches[1:])
