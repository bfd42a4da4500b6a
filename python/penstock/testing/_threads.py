"""Threads for jobs that cannot run in the test's own thread."""

from __future__ import annotations

import asyncio
import contextvars
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeVar

from penstock._worker.runner import Runner

if TYPE_CHECKING:
    from penstock._tasks.app import App
    from penstock._worker.runner import Delivered, Outcome

T = TypeVar("T")

surrounding: contextvars.ContextVar[tuple[object, ...]]
surrounding = contextvars.ContextVar("penstock_testing_surrounding", default=())
"""Benches of the jobs around this code, each enqueued by the previous one."""


class Runners:
    """Runners of a thread, one for each app. Each creates an event loop for its first ``async def`` task."""

    def __init__(self, worker: str) -> None:
        self._worker = worker
        self._of: dict[App, Runner] = {}

    def run(self, app: App, job: Delivered, inside: tuple[object, ...]) -> Outcome:
        """Run one attempt of a job. ``inside``: value of ``surrounding`` for it."""
        runner = self._of.get(app)
        if runner is None:
            runner = self._of[app] = Runner([app], self._worker)
        # An empty context, as in a worker's process: a job does not see the context of the call that enqueued it.
        context = contextvars.Context()
        context.run(surrounding.set, inside)
        return context.run(runner.run, job)

    @property
    def have_event_loop(self) -> bool:
        return any(runner.has_event_loop for runner in self._of.values())

    def close(self) -> None:
        for runner in self._of.values():
            runner.close()
        self._of.clear()


class _JobThread(threading.Thread):
    """Thread that does one call at a time. It has its own runners, since an event loop belongs to a thread."""

    def __init__(self, worker: str) -> None:
        super().__init__(name=f"penstock {worker}", daemon=True)
        self._work: queue.SimpleQueue[tuple[Callable[[Runners], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._runners = Runners(worker)
        self.start()

    def do(self, work: Callable[[Runners], T]) -> Future[T]:
        future: Future[T] = Future()
        self._work.put((work, future))
        return future

    def end(self) -> None:
        self._work.put(None)

    def run(self) -> None:
        while (item := self._work.get()) is not None:
            work, future = item
            try:
                future.set_result(work(self._runners))
            except BaseException as error:
                future.set_exception(error)
        self._runners.close()


class JobThreads:
    """Pool with a thread for each level of nested jobs."""

    def __init__(self, worker: str) -> None:
        self._worker = worker
        self._lock = threading.Lock()
        self._all: list[_JobThread] = []
        self._idle: list[_JobThread] = []

    def call(self, work: Callable[[Runners], T]) -> T:
        """Do the work in an idle thread, and wait for it."""
        with self._lock:
            if not self._idle:
                thread = _JobThread(self._worker)
                self._all.append(thread)
                self._idle.append(thread)
            thread = self._idle.pop()
        future = thread.do(work)
        try:
            return future.result()
        finally:
            # After Ctrl-C the call may not be done.
            if future.done():
                with self._lock:
                    self._idle.append(thread)

    def close(self) -> None:
        for thread in self._all:
            thread.end()
        for thread in self._all:
            if thread in self._idle:
                thread.join()
        self._all.clear()
        self._idle.clear()


def in_event_loop() -> bool:
    """Whether this thread runs an event loop, in which case code that may start another one can't run in it."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
