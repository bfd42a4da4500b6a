"""In-memory broker for the apps of one URL, and the code that runs their jobs in this process."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from penstock import _core
from penstock._connection import penstock_program
from penstock._jobs import current
from penstock._jobs.current import format_id
from penstock._jobs.job import Job
from penstock._values import envelope
from penstock._worker.runner import DEFERRED, REPLACED, RETRY, SPAWNED
from penstock.errors import PenstockError, RemoteTraceback
from penstock.testing._calls import Calls, call_of
from penstock.testing._clock import pass_time
from penstock.testing._threads import JobThreads, Runners, in_event_loop, surrounding

if TYPE_CHECKING:
    from collections.abc import Iterable

    from penstock._flows.build import Built, Plan
    from penstock._flows.replacing import Build
    from penstock._jobs.current import Leaving
    from penstock._tasks.app import App
    from penstock._tasks.schedules import Periodic
    from penstock._worker.runner import Delivered, Outcome

# The broker is private to this process and nearly idle, so only a stalled machine takes longer.
_ANSWERS_WITHIN_S = 60.0
# A job with unlimited retries would otherwise keep one delay() running forever.
_MOST_ATTEMPTS = 1000
# Time that running jobs get to finish at the end of the block.
_ENDS_WITHIN_S = 30.0
# Time that jobs of worker() get to finish before the clock moves to a schedule's next time.
_GOES_ON_AFTER_S = 5.0


# Benches whose jobs may report progress.
_benches: weakref.WeakSet[Bench] = weakref.WeakSet()


def _tell_progress(job_id: bytes, done: float, total: float | None, message: str) -> None:
    any(bench.tell_progress(job_id, done, total, message) for bench in [*_benches])


class Bench:
    """Records the jobs that its apps enqueue, and runs none until asked, as ``capture`` needs. Base of the others."""

    worker = "capture"
    why_nothing_runs = (
        "capture() runs no job before run_until_idle(), and delayed ones only once move_clock() reaches them"
    )

    def __init__(self, calls: Calls) -> None:
        # The name includes the process id, because a forked child must not use its parent's broker.
        self.client = _core.Client(f"memory:testing-{os.getpid()}", program=penstock_program(), name="penstock.testing")
        self.apps: list[App] = []
        self._calls = calls
        self._consumer = _core.Consumer(self.client, "penstock.testing")
        self._threads = JobThreads(self.worker)
        # Runners for the threads that enqueue. A plain task that returns a coroutine gets an event loop there.
        self._here = Runners(self.worker)
        # Held while jobs are sent and while one is taken, so that no job is taken before its app is known.
        self._lock = threading.Lock()
        self._is_used = False
        self._apps_of_jobs: dict[bytes, App] = {}
        self._queues: set[str] = set()
        self._served: tuple[set[str], set[str]] = (set(), set())
        # Schedules by app and name: those that code declares, and those set at the broker.
        self._declared: dict[tuple[str, str], Periodic] = {}
        self._set: dict[tuple[str, str], tuple[_core.Options, bytes]] = {}
        # Milliseconds by which the broker's clock is ahead.
        self._ahead_ms = 0
        # Jobs that a call runs itself, and those of them that another call has already taken.
        self._claimed: set[bytes] = set()
        self._set_aside: dict[bytes, Delivered] = {}
        # Jobs sent when other jobs ended, which no call runs yet.
        self._left_behind: dict[bytes, None] = {}
        # Number of calls that run jobs, and of running jobs.
        self._running_calls = 0
        self._running = 0
        self._settled = threading.Condition()
        _benches.add(self)
        current.tell_progress = _tell_progress

    # Calls of connections.

    def enqueue(
        self, app: App, jobs: Sequence[tuple[_core.Options, bytes]], timeout_s: float
    ) -> list[bytes | tuple[bytes]]:
        with self._lock:
            return self._send(app, jobs, jobs, timeout_s)

    def publish_plan(
        self, app: App, plan: Plan, jobs: Sequence[tuple[_core.Options, bytes]], timeout_s: float
    ) -> Built:
        with self._lock:
            return self._send_plan(app, plan, jobs, jobs, timeout_s)

    def build_plan(
        self, app: App, plan: Plan, jobs: Sequence[tuple[_core.Options, bytes]], build: Build, leaves: Leaving
    ) -> Built:
        """Build steps to send when a running job ends, and record them then."""
        built = build(self._to_send(jobs))
        leaves.accepted.append(lambda: self._left(app, plan, jobs, built))
        return built

    def _to_send(self, jobs: Sequence[tuple[_core.Options, bytes]]) -> Sequence[tuple[_core.Options, bytes]]:
        return jobs

    def _left(self, app: App, plan: Plan, jobs: Sequence[tuple[_core.Options, bytes]], built: Built) -> None:
        with self._lock:
            self._record(app, built.job_ids, jobs, plan)

    def tell_progress(self, job_id: bytes, done: float, total: float | None, message: str) -> bool:
        """Report the progress of a job if it runs here; return whether it does."""
        return self._consumer.progress(job_id, done, total, message)

    def may_end(self) -> bool:
        """Return whether another call, outside of the current call stack, runs jobs that may end an awaited job."""
        return self._running_calls > surrounding.get().count(self)

    def after_change(self) -> None:
        """Hook called after a change that may have made jobs ready."""

    def move_clock(self, forward_ms: int, timeout_s: float) -> int:
        now_ms = self._pass(forward_ms, timeout_s, self._after_time)
        self.after_change()
        return now_ms

    # Schedules are declared only once a test uses `App.schedules` or `Clock`, so that a schedule which happens to be
    # due does not disturb other tests.

    @property
    def has_schedules(self) -> bool:
        return bool(self._declared or self._set)

    def declare(self, timeout_s: float) -> None:
        """Declare the schedules of the apps to the broker, like a worker that starts."""
        for app in self.apps:
            for periodic in [*app._periodic.values()]:
                key = app.name, periodic.name
                if self._declared.get(key) is not periodic:
                    declaration = app._declaration(periodic, 0)
                    self._is_used = True
                    self.client.declare_schedule(declaration, max(timeout_s, _ANSWERS_WITHIN_S))
                    with self._lock:
                        self._declared[key] = periodic
                        self._queues.add(periodic.task._core_options.queue)
                        self._after_declaration()

    def order_schedule(
        self, app: str, name: str, order: str, call: tuple[_core.Timing, _core.Options, bytes] | None, timeout_s: float
    ) -> bytes | None:
        self.declare(timeout_s)
        job_id = self.client.order_schedule(app, name, order, call, timeout_s)
        if call is not None:
            _, options, body = call
            self._is_used = True
            with self._lock:
                self._set[app, name] = options, body
                self._queues.add(options.queue)
                self._after_declaration()
        self._note_scheduled()
        self.after_change()
        return job_id

    def _after_declaration(self) -> None:
        """Hook called with the lock held."""

    def _after_time(self) -> None:
        """Hook called when a schedule has created a job, before the clock moves on."""
        self._note_scheduled()

    def _note_scheduled(self) -> None:
        """Record the last job that each schedule has created."""
        with self._lock:
            for app in self.apps if self.has_schedules else ():
                after: str | None = ""
                while after is not None:
                    found, after = self.client.schedules(app.name, None, after or None, 0, _ANSWERS_WITHIN_S)
                    for text in found:
                        self._note_last_job(app, json.loads(text))

    def _note_last_job(self, app: App, schedule: dict[str, Any]) -> None:
        key = app.name, schedule["name"]
        job_id = None if schedule["last_job"] is None else uuid.UUID(schedule["last_job"]).bytes
        if job_id is None or job_id in self._apps_of_jobs:
            return
        if schedule["set"] and key in self._set:
            self._record(app, [job_id], [self._set[key]])
        elif key in self._declared and self._declared[key].task.app is app:
            self._record(app, [job_id], [self._declared[key].job()])

    def _pass(self, forward_ms: int, timeout_s: float, at_each: Callable[[], None] | None = None) -> int:
        """Advance the clock, stopping at the times of schedules."""
        if not self.has_schedules:
            now_ms = self.client.move_clock(forward_ms, timeout_s)
        else:
            now_ms = pass_time(self.client, forward_ms, timeout_s, at_each or self._note_scheduled)
        self._ahead_ms = now_ms - _now_ms()
        return now_ms

    def _at_once(self, jobs: Sequence[tuple[_core.Options, bytes]]) -> list[tuple[_core.Options, bytes]]:
        now_ms = _now_ms() + self._ahead_ms
        return [
            (options if _expires_before_it_is_due(options, now_ms) else options.at_once(), body)
            for options, body in jobs
        ]

    def run_until_idle(self) -> int:
        """Run ready jobs in this thread until none is left; return the number of attempts."""
        attempts = 0
        with self._runs_jobs():
            while (job := self._take(())) is not None:
                self._run(job)
                attempts += 1
        return attempts

    def close(self) -> None:
        """Stop the broker, which drops its jobs."""
        _benches.discard(self)
        if self._is_used:
            self._consumer.stop(_ANSWERS_WITHIN_S)
        if self._here.have_event_loop:
            # An event loop cannot be closed in a thread where another one runs.
            self._threads.call(lambda _: self._here.close())
        self._threads.close()
        self.client.close(_ANSWERS_WITHIN_S)

    # Internals.

    def _send(
        self,
        app: App,
        recorded: Sequence[tuple[_core.Options, bytes]],
        sent: Sequence[tuple[_core.Options, bytes]],
        timeout_s: float,
    ) -> list[bytes | tuple[bytes]]:
        self._is_used = True
        job_ids = self.client.publish_many(sent, max(timeout_s, _ANSWERS_WITHIN_S))
        made = [(job_id, job) for job_id, job in zip(job_ids, recorded, strict=True) if isinstance(job_id, bytes)]
        self._record(app, [job_id for job_id, _ in made], [job for _, job in made])
        return job_ids

    def _send_plan(
        self,
        app: App,
        plan: Plan,
        recorded: Sequence[tuple[_core.Options, bytes]],
        sent: Sequence[tuple[_core.Options, bytes]],
        timeout_s: float,
    ) -> Built:
        self._is_used = True
        built = plan.build(sent)
        if len(built.graph) and not self.client.publish_graph(
            built.graph, plan.named(built), max(timeout_s, _ANSWERS_WITHIN_S)
        ):
            return built._replace(is_new=False)
        self._record(app, built.job_ids, recorded, plan)
        return built

    def _record(
        self,
        app: App,
        job_ids: Sequence[bytes],
        jobs: Sequence[tuple[_core.Options, bytes]],
        plan: Plan | None = None,
    ) -> None:
        for number, (job_id, (options, body)) in enumerate(zip(job_ids, jobs, strict=True)):
            self._apps_of_jobs[job_id] = app
            self._queues.add(options.queue)
            arguments = None if plan is None else plan.arguments(number)
            self._calls.append(call_of(app, options, body, Job(app, job_id, True), arguments))

    @contextmanager
    def _runs_jobs(self) -> Generator[None, None, None]:
        with self._settled:
            self._running_calls += 1
        try:
            yield
        finally:
            with self._settled:
                self._running_calls -= 1

    def _take(self, wanted: Iterable[bytes]) -> Delivered | None:
        """Take one of the wanted jobs, or one that no call has claimed. Returns None when none is ready."""
        with self._lock:
            while True:
                for job_id in wanted:
                    if job_id in self._set_aside:
                        return self._set_aside.pop(job_id)
                if not self._serve():
                    return None
                job = self._consumer.take(False, _ANSWERS_WITHIN_S)
                if job is None or job[1] in wanted or job[1] not in self._claimed:
                    return job
                self._set_aside[job[1]] = job

    def _serve(self) -> bool:
        """Serve all queues and tasks that exist so far; return whether there are any."""
        tasks = {name for app in self.apps for name in app.tasks}
        if not self._queues or not tasks:
            return False
        if (self._queues, tasks) != self._served:
            self._consumer.serve(sorted(self._queues), sorted(tasks))
            self._served = (self._queues.copy(), tasks)
        return True

    def _app_of(self, job: Delivered) -> App:
        """Return the app to run a job: the app that enqueued it, or another one that has its task."""
        task, job_id, *_ = job
        app = self._apps_of_jobs.get(job_id)
        if app is not None and task in app.tasks:
            return app
        return next(app for app in self.apps if task in app.tasks)

    def _run(self, job: Delivered, runners: Runners | None = None) -> Outcome:
        """Run one attempt and settle it."""
        if job[1] not in self._apps_of_jobs:
            self._note_scheduled()
        app, inside = self._app_of(job), (*surrounding.get(), self)
        with self._settled:
            self._running += 1
        try:
            if runners is not None:
                outcome = runners.run(app, job, inside)
            elif app.tasks[job[0]].is_async or in_event_loop():
                outcome = self._threads.call(lambda of_thread: of_thread.run(app, job, inside))
            else:
                outcome = self._here.run(app, job, inside)
            self._consumer.finish(job[1], *outcome, _ANSWERS_WITHIN_S)
        finally:
            with self._settled:
                self._running -= 1
                self._settled.notify_all()
        interruption = _interruption_in(outcome)
        if interruption is not None:
            self._interrupted(interruption)
        return outcome

    def _interrupted(self, interruption: BaseException) -> None:
        raise interruption


class InlineBench(Bench):
    """Runs each job inside the call that enqueues it."""

    worker = "inline"
    why_nothing_runs = "inline() could not run it: no app of the block has its task, or it waits for another job"

    def enqueue(
        self, app: App, jobs: Sequence[tuple[_core.Options, bytes]], timeout_s: float
    ) -> list[bytes | tuple[bytes]]:
        now = self._at_once(jobs)
        with self._runs_jobs():
            with self._lock:
                job_ids = self._send(app, jobs, now, timeout_s)
                # A job that existed already is run by the call that created it.
                made = [job_id for job_id in job_ids if isinstance(job_id, bytes)]
                self._claimed.update(made)
            if made:
                self._run_claimed(made)
        self._pass_by(now)
        return job_ids

    def publish_plan(
        self, app: App, plan: Plan, jobs: Sequence[tuple[_core.Options, bytes]], timeout_s: float
    ) -> Built:
        now = self._at_once(jobs)
        with self._runs_jobs():
            with self._lock:
                built = self._send_plan(app, plan, jobs, now, timeout_s)
                if not built.is_new:
                    return built
                self._claimed.update(built.job_ids)
            self._run_claimed(built.job_ids)
        if self._pass_by(now):
            # Run jobs that the expired job held back.
            self.after_change()
        return built

    def _to_send(self, jobs: Sequence[tuple[_core.Options, bytes]]) -> Sequence[tuple[_core.Options, bytes]]:
        return self._at_once(jobs)

    def _left(self, app: App, plan: Plan, jobs: Sequence[tuple[_core.Options, bytes]], built: Built) -> None:
        super()._left(app, plan, jobs, built)
        with self._lock:
            self._left_behind.update(dict.fromkeys(built.job_ids))

    def _run_claimed(self, job_ids: Sequence[bytes]) -> None:
        try:
            self._run_to_their_ends(dict.fromkeys(job_ids))
        finally:
            self._claimed.difference_update(job_ids)

    def _pass_by(self, jobs: Sequence[tuple[_core.Options, bytes]]) -> bool:
        """Move the clock past jobs that expire without running; return whether there are any."""
        found = False
        for options in {id(options): options for options, _ in jobs}.values():
            details = options.details()
            if details["countdown_ms"] or details["eta_ms"]:
                found = True
                self._pass(_until_due_ms(details, _now_ms() + self._ahead_ms), _ANSWERS_WITHIN_S)
        return found

    def after_change(self) -> None:
        with self._runs_jobs():
            self._run_to_their_ends({})

    def _after_time(self) -> None:
        super()._after_time()
        self.after_change()

    def _run_to_their_ends(self, wanted: dict[bytes, None]) -> None:
        """Run these jobs until they have ended or none is ready. If ``wanted`` is empty, run all ready jobs."""
        only_wanted = bool(wanted)
        while (wanted or not only_wanted) and (job := self._take(wanted)) is not None:
            kind, delay_ms, *_ = self._run(job)
            if kind in (RETRY, DEFERRED):
                if job[2] + 1 >= _MOST_ATTEMPTS:
                    raise PenstockError(
                        f"job {format_id(job[1])}: {job[0]} has failed {_MOST_ATTEMPTS:,} times and would be retried"
                        " again: inline() would never return. Let it succeed in the test, limit its retries, or use"
                        " capture()"
                    )
                # Makes the retry due at once, without waiting.
                self._pass(delay_ms, _ANSWERS_WITHIN_S)
            else:
                wanted.pop(job[1], None)
            if self._left_behind and only_wanted:
                with self._lock:
                    wanted.update(self._left_behind)
                    self._left_behind.clear()


class WorkerBench(Bench):
    """Runs jobs in threads as they become ready."""

    worker = "worker"

    def __init__(self, calls: Calls, threads: int) -> None:
        super().__init__(calls)
        self._count = threads
        self._workers: list[threading.Thread] = []
        self._interruption: BaseException | None = None

    def enqueue(
        self, app: App, jobs: Sequence[tuple[_core.Options, bytes]], timeout_s: float
    ) -> list[bytes | tuple[bytes]]:
        with self._lock:
            job_ids = self._send(app, jobs, jobs, timeout_s)
            self._start_workers()
        return job_ids

    def publish_plan(
        self, app: App, plan: Plan, jobs: Sequence[tuple[_core.Options, bytes]], timeout_s: float
    ) -> Built:
        with self._lock:
            built = self._send_plan(app, plan, jobs, jobs, timeout_s)
            self._start_workers()
        return built

    def _after_declaration(self) -> None:
        self._start_workers()

    def _after_time(self) -> None:
        super()._after_time()
        with suppress(TimeoutError):
            self.wait_until_idle(time.monotonic() + _GOES_ON_AFTER_S)

    def _start_workers(self) -> None:
        self._serve()
        while self._served[1] and len(self._workers) < self._count:
            number = len(self._workers) + 1
            worker = threading.Thread(target=self._work, name=f"penstock worker {number}", daemon=True)
            self._workers.append(worker)
            worker.start()

    def may_end(self) -> bool:
        return True

    def wait_until_idle(self, until: float) -> None:
        """Wait until no job is ready and none runs. Raises ``TimeoutError``."""
        while self._workers:
            with self._lock:
                self._serve()
            ready, taken = self._consumer.left(_ANSWERS_WITHIN_S)
            with self._settled:
                if not ready and not taken and not self._running:
                    break
                if time.monotonic() >= until:
                    raise TimeoutError(
                        f"{ready} jobs are ready and {taken} run: the worker did not become idle in time, and continues"
                    )
                # A job that enqueued a ready one wakes this wait when it ends; other changes are noticed soon.
                self._settled.wait(0.01)
        if self._interruption is not None:
            interruption, self._interruption = self._interruption, None
            raise interruption

    def close(self) -> None:
        if self._is_used:
            self._consumer.stop(_ANSWERS_WITHIN_S)
        until = time.monotonic() + _ENDS_WITHIN_S
        for worker in self._workers:
            worker.join(max(0.0, until - time.monotonic()))
        running = [worker for worker in self._workers if worker.is_alive()]
        super().close()
        if running:
            raise PenstockError(
                f"{len(running)} jobs still run {_ENDS_WITHIN_S:.0f} s after the end of the test, in threads that can't"
                " be stopped: let them end, or wait for them in the test"
            )
        if self._interruption is not None:
            raise self._interruption

    def _work(self) -> None:
        runners = Runners(self.worker)
        try:
            while (job := self._consumer.take(True, _ANSWERS_WITHIN_S)) is not None:
                self._run(job, runners)
        finally:
            runners.close()

    def _interrupted(self, interruption: BaseException) -> None:
        self._interruption = self._interruption or interruption


def _expires_before_it_is_due(options: _core.Options, now_ms: int) -> bool:
    details = options.details()
    due_ms = _until_due_ms(details, now_ms)
    expires_ms = details["expires_after_ms"]
    if expires_ms is None and details["expires_at_ms"] is not None:
        expires_ms = details["expires_at_ms"] - now_ms
    return bool(due_ms and expires_ms is not None and expires_ms <= due_ms)


def _until_due_ms(details: dict[str, Any], now_ms: int) -> int:
    if details["eta_ms"] is not None:
        return max(0, int(details["eta_ms"]) - now_ms)
    return int(details["countdown_ms"] or 0)


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


def _interruption_in(outcome: Outcome) -> BaseException | None:
    """Return an error that must end the test rather than the job: Ctrl-C, or one of ``pytest.fail()`` and similar."""
    kind, _, _, note, _ = outcome
    if note is None or kind in (REPLACED, SPAWNED):
        return None
    record = envelope.decode_error(note)
    if record.module != "builtins":
        return None
    if record.qualname == "KeyboardInterrupt":
        return KeyboardInterrupt()
    outcomes: Any = sys.modules.get("_pytest.outcomes")
    makers: dict[str, Callable[[str], BaseException]] = {}
    if outcomes is not None:
        makers = {"Failed": outcomes.Failed, "Skipped": outcomes.Skipped, "Exit": outcomes.Exit}
    if record.qualname not in makers:
        return None
    interruption = makers[record.qualname](record.message)
    interruption.__cause__ = RemoteTraceback(record.traceback)
    return interruption
