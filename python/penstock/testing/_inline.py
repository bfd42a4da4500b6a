"""Running each job inside the call that enqueues it, over a dictionary of results."""

from __future__ import annotations

import asyncio
import contextvars
import os
import time
from collections.abc import AsyncGenerator, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from penstock import _core
from penstock._connection import Ended
from penstock._tasks.app import App
from penstock._tasks.headers import inherit
from penstock._worker import runner
from penstock.errors import NotOffered, ResultExpired


@dataclass(frozen=True, slots=True)
class Call:
    """A job that was enqueued and has run. ``args`` and ``kwargs`` are as the task received them."""

    task: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    queue: str


@contextmanager
def inline(app: App) -> Generator[list[Call]]:
    """Within the ``with``, run every job of ``app`` inside the call that enqueues it; gives the list of those calls."""
    connection = _InlineConnection(app)
    # In the instance, so that it hides the method: tests pay for this, not every delay().
    vars(app)["_connected"] = lambda: connection
    try:
        yield connection.calls
    finally:
        del vars(app)["_connected"]
        connection.runner.close()


class _InlineConnection:
    """What a `Connection` offers, over a dictionary of results."""

    def __init__(self, app: App) -> None:
        self.app = app
        self.calls: list[Call] = []
        self.runner = runner.Runner([app], "inline")
        self._ends: dict[bytes, tuple[int, bytes]] = {}

    def publish(self, options: _core.Options, body: bytes, timeout_s: float) -> bytes:
        enqueued_ms = time.time_ns() // 1_000_000
        job_id = enqueued_ms.to_bytes(6) + os.urandom(10)
        task = self.app.tasks[options.task]
        args, kwargs = task.arguments.decode(body)
        self.calls.append(Call(options.task, tuple(args), kwargs, options.queue))
        notes: list[bytes] = []
        retries, headers = options.retries, dict(options.headers)
        extras = (0, 0, retries, headers) if retries is not None or headers else None
        while True:
            # As in a worker, where a job inherits nothing of what surrounds the call that enqueued it.
            context = contextvars.copy_context()
            context.run(inherit, {})
            kind, _, value, note, _ = context.run(
                self.runner.run,
                (options.task, job_id, len(notes), 0, False, True, enqueued_ms, body, notes, extras),
            )
            if kind != runner.RETRY:
                break
            assert note is not None
            notes.append(note)
        assert value is not None
        self._ends[job_id] = (0 if kind == runner.SUCCEEDED else 1, value)
        return job_id

    def publish_same(self, options: _core.Options, bodies: Sequence[bytes], timeout_s: float) -> list[bytes]:
        return [self.publish(options, body, timeout_s) for body in bodies]

    def publish_many(self, jobs: Sequence[tuple[_core.Options, bytes]], timeout_s: float) -> list[bytes]:
        return [self.publish(options, body, timeout_s) for options, body in jobs]

    def wait(self, job_id: bytes, timeout_s: float | None) -> tuple[int, bytes]:
        try:
            return self._ends[job_id]
        except KeyError:
            raise ResultExpired("no job of this id was run inline") from None

    def peek(self, job_id: bytes, timeout_s: float) -> Ended:
        return *self.wait(job_id, timeout_s), None

    def message_info(self, job_id: bytes, timeout_s: float) -> None:
        return None

    def move_clock(self, forward_ms: int, timeout_s: float) -> int:
        raise NotOffered("inline has no clock: it runs each job at once; use an App with the URL memory:")

    async def submit(self, jobs: Sequence[tuple[_core.Options, bytes]], timeout_s: float) -> list[bytes]:
        # In a thread: this loop runs already, and an `async def` task needs one of its own.
        return await asyncio.to_thread(self.publish_many, jobs, timeout_s)

    async def watch(self, job_id: bytes, timeout_s: float | None) -> tuple[int, bytes]:
        return self.wait(job_id, timeout_s)

    async def peek_async(self, job_id: bytes, timeout_s: float) -> Ended:
        return self.peek(job_id, timeout_s)

    async def message_info_async(self, job_id: bytes, timeout_s: float) -> None:
        return None

    def cancel(self, job_id: bytes, reason: str, timeout_s: float) -> tuple[bool, str | None]:
        return False, None

    async def cancel_async(self, job_id: bytes, reason: str, timeout_s: float) -> tuple[bool, str | None]:
        return False, None

    def wait_all(self, job_ids: Sequence[bytes], timeout_s: float | None) -> list[tuple[int, bytes]]:
        return [self._ends.get(job_id, (-1, b"")) for job_id in job_ids]

    async def watch_all(self, job_ids: Sequence[bytes], timeout_s: float | None) -> list[tuple[int, bytes]]:
        return self.wait_all(job_ids, timeout_s)

    def each(
        self, job_ids: Sequence[bytes], timeout_s: float | None, call_timeout_s: float
    ) -> Iterator[tuple[int, tuple[int, bytes]]]:
        yield from enumerate(self.wait_all(job_ids, timeout_s))

    async def aeach(
        self, job_ids: Sequence[bytes], timeout_s: float | None, call_timeout_s: float
    ) -> AsyncGenerator[tuple[int, tuple[int, bytes]], None]:
        for end in self.each(job_ids, timeout_s, call_timeout_s):
            yield end

    def log_notices(self, blocking: object = None) -> None:
        pass
