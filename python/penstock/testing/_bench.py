"""A broker in memory for the apps of one URL, and the code that runs their jobs in this process."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from penstock import _core
from penstock._connection import penstock_program
from penstock._jobs.current import format_id
from penstock._jobs.job import Job
from penstock._values import envelope
from penstock._worker.runner import DEFERRED, REPLACED, RETRY, SPAWNED
from penstock.errors import PenstockError, RemoteTraceback
from penstock.testing._calls import Calls, call_of
from penstock.testing._threads import JobThreads, Runners, in_event_loop, surrounding

if TYPE_CHECKING:
    from collections.abc import Iterable

    from penstock._flows.build import Built, Plan
    from penstock._flows.replacing import Build
    from penstock._jobs.current import Leaving
    from penstock._tasks.app import App
    from penstock._worker.runner import Delivered, Outcome

# The broker is this process's own and does next to nothing: what takes longer is a machine that stands still.
_ANSWERS_WITHIN_S = 60.0
# A job without a limit of retries would go on for ever inside one delay().
_MOST_ATTEMPTS = 1000
# How long jobs that run may go on when the block ends.
_ENDS_WITHIN_S = 30.0


class Bench:
    """Records the jobs that its apps enqueue, and runs none until asked: enough for `capture`. Others build on it."""

    worker = "capture"
    why_nothing_runs = (
        "capture() runs no job before run_until_idle(), and delayed ones only once move_clock() reaches them"
    )

    def __init__(self, calls: Calls) -> None:
        # The name is one for this process: what another one of a fork used would be refused here.
        self.client = _core.Client(f"memory:testing-{os.getpid()}", program=penstock_program(), name="penstock.testing")
        self.apps: list[App] = []
        self._calls = calls
        self._consumer = _core.Consumer(self.client, "penstock.testing")
        self._threads = JobThreads(self.worker)
        # For the threads that enqueue: a plain task which returns a coroutine gets an event loop there.
        self._here = Runners(self.worker)
        # Held while jobs are sent and while one is taken, so that nobody takes a job before it is known whose it is.
        self._lock = threading.Lock()
        self._is_used = False
        self._apps_of_jobs: dict[bytes, App] = {}
        self._queues: set[str] = set()
        self._served: tuple[set[str], set[str]] = (set(), set())
        # Jobs that a call is running, by itself, and those of them that another call has taken in passing.
        self._claimed: set[bytes] = set()
        self._set_aside: dict[bytes, Delivered] = {}
        # Jobs that came with the ends of others, and that nobody runs yet.
        self._left_behind: dict[bytes, None] = {}
        # Calls that run jobs, and jobs that run.
        self._running_calls = 0
        self._running = 0
        self._settled = threading.Condition()

    # Calls of connections.

    def enqueue(self, app: App, jobs: Sequence[tuple[_core.Options, bytes]], timeout_s: float) -> list[bytes]:
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
        """Build steps that are sent when a running job ends, and note them then."""
        built = build(self._to_send(jobs))
        leaves.accepted.append(lambda: self._left(app, plan, jobs, built))
        return built

    def _to_send(self, jobs: Sequence[tuple[_core.Options, bytes]]) -> Sequence[tuple[_core.Options, bytes]]:
        return jobs

    def _left(self, app: App, plan: Plan, jobs: Sequence[tuple[_core.Options, bytes]], built: Built) -> None:
        with self._lock:
            self._record(app, built.job_ids, jobs, plan)

    def may_end(self) -> bool:
        """Whether a call other than those that this code is in runs jobs, whose ends may be waited for."""
        return self._running_calls > surrounding.get().count(self)

    def after_change(self) -> None:
        """Called after a change that may have made jobs ready."""

    def move_clock(self, forward_ms: int, timeout_s: float) -> int:
        now_ms = self.client.move_clock(forward_ms, timeout_s)
        self.after_change()
        return now_ms

    def run_until_idle(self) -> int:
        """Run jobs in this thread until none is ready; return the number of attempts."""
        attempts = 0
        with self._runs_jobs():
            while (job := self._take(())) is not None:
                self._run(job)
                attempts += 1
        return attempts

    def close(self) -> None:
        """Stop the broker. Its jobs are gone with it."""
        if self._is_used:
            self._consumer.stop(_ANSWERS_WITHIN_S)
        if self._here.have_event_loop:
            # An event loop can't be closed in a thread where another one runs.
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
    ) -> list[bytes]:
        self._is_used = True
        job_ids = self.client.publish_many(sent, max(timeout_s, _ANSWERS_WITHIN_S))
        self._record(app, job_ids, recorded)
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
        """Take one of the wanted jobs, or one that no call has claimed; None when none is ready."""
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
        """Serve all queues and tasks that exist by now; return whether there are any."""
        tasks = {name for app in self.apps for name in app.tasks}
        if not self._queues or not tasks:
            return False
        if (self._queues, tasks) != self._served:
            self._consumer.serve(sorted(self._queues), sorted(tasks))
            self._served = (self._queues.copy(), tasks)
        return True

    def _app_of(self, job: Delivered) -> App:
        """Return the app that runs a job: the one that enqueued it, or another one that has its task."""
        task, job_id, *_ = job
        app = self._apps_of_jobs.get(job_id)
        if app is not None and task in app.tasks:
            return app
        return next(app for app in self.apps if task in app.tasks)

    def _run(self, job: Delivered, runners: Runners | None = None) -> Outcome:
        """Run one attempt and settle it."""
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

    def enqueue(self, app: App, jobs: Sequence[tuple[_core.Options, bytes]], timeout_s: float) -> list[bytes]:
        now = _at_once(jobs)
        with self._runs_jobs():
            with self._lock:
                job_ids = self._send(app, jobs, now, timeout_s)
                self._claimed.update(job_ids)
            self._run_claimed(job_ids)
        self._pass_by(now)
        return job_ids

    def publish_plan(
        self, app: App, plan: Plan, jobs: Sequence[tuple[_core.Options, bytes]], timeout_s: float
    ) -> Built:
        now = _at_once(jobs)
        with self._runs_jobs():
            with self._lock:
                built = self._send_plan(app, plan, jobs, now, timeout_s)
                if not built.is_new:
                    return built
                self._claimed.update(built.job_ids)
            self._run_claimed(built.job_ids)
        if self._pass_by(now):
            # What a job that has expired held back.
            self.after_change()
        return built

    def _to_send(self, jobs: Sequence[tuple[_core.Options, bytes]]) -> Sequence[tuple[_core.Options, bytes]]:
        return _at_once(jobs)

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
        """Move the clock past jobs that never run, and end as expired; return whether there are any."""
        found = False
        for options in {id(options): options for options, _ in jobs}.values():
            details = options.details()
            if details["countdown_ms"] or details["eta_ms"]:
                found = True
                self.client.move_clock(_until_due_ms(details), _ANSWERS_WITHIN_S)
        return found

    def after_change(self) -> None:
        with self._runs_jobs():
            self._run_to_their_ends({})

    def _run_to_their_ends(self, wanted: dict[bytes, None]) -> None:
        """Run these jobs until they have ended or none is ready; without any, run all ready jobs."""
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
                # The retry is due at once, and nobody waits.
                self.client.move_clock(delay_ms, _ANSWERS_WITHIN_S)
            else:
                wanted.pop(job[1], None)
            if self._left_behind and only_wanted:
                with self._lock:
                    wanted.update(self._left_behind)
                    self._left_behind.clear()


class WorkerBench(Bench):
    """Runs jobs in threads, as they become ready."""

    worker = "worker"

    def __init__(self, calls: Calls, threads: int) -> None:
        super().__init__(calls)
        self._count = threads
        self._workers: list[threading.Thread] = []
        self._interruption: BaseException | None = None

    def enqueue(self, app: App, jobs: Sequence[tuple[_core.Options, bytes]], timeout_s: float) -> list[bytes]:
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
                        f"{ready} jobs are ready and {taken} run: the worker has not become idle in time, and goes on"
                    )
                # The job that enqueued a ready one wakes this when it ends; others are noticed soon.
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


def _at_once(jobs: Sequence[tuple[_core.Options, bytes]]) -> list[tuple[_core.Options, bytes]]:
    return [(options if _expires_before_it_is_due(options) else options.at_once(), body) for options, body in jobs]


def _expires_before_it_is_due(options: _core.Options) -> bool:
    details = options.details()
    due_ms = _until_due_ms(details)
    expires_ms = details["expires_after_ms"]
    if expires_ms is None and details["expires_at_ms"] is not None:
        expires_ms = details["expires_at_ms"] - _now_ms()
    return bool(due_ms and expires_ms is not None and expires_ms <= due_ms)


def _until_due_ms(details: dict[str, Any]) -> int:
    if details["eta_ms"] is not None:
        return max(0, int(details["eta_ms"]) - _now_ms())
    return int(details["countdown_ms"] or 0)


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


def _interruption_in(outcome: Outcome) -> BaseException | None:
    """Return errors that must not stay in a job: Ctrl-C, and those of pytest.fail() and its like that end the test."""
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
