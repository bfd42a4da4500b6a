"""Slots on one event loop: each job of an ``async def`` task is a separate asyncio task.

The loop watches the socket only while a slot is idle, and takes available jobs without waiting. While a job blocks the
loop it takes no jobs, and leaves them to other workers.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import inspect
import logging
import os
import signal
from types import FrameType
from typing import TYPE_CHECKING

from penstock._jobs import interrupts, lending
from penstock._jobs.current import running
from penstock._jobs.interrupts import EXCEPTIONS
from penstock._worker.child import UNSOUND, leave_fork
from penstock._worker.orders import interrupt, is_within_task
from penstock._worker.runner import Delivered, Outcome, Runner
from penstock._worker.watch import Watch

if TYPE_CHECKING:
    from penstock._core import ChildLink, SlotLink
    from penstock._tasks.app import App

logger = logging.getLogger("penstock")

# Largest number of packets taken in one pass of the loop, so that running jobs get their turn.
_PULLS = 32


class Loop:
    """All slots of this process."""

    def __init__(self, apps: list[App], worker: str, link: ChildLink, count: int, once: bool) -> None:
        self._apps = apps
        self._runner = Runner(apps, worker)
        self._link = link
        # Slots are created on demand, so that unused ones take no memory.
        self._count = count
        self._made = 0
        self._once = once
        self._idle: list[SlotLink] = []
        # The loop holds only weak references to its tasks.
        self._jobs: dict[asyncio.Task[None], tuple[SlotLink, Delivered]] = {}
        # The job of each slot whose outcome is not reported yet, and the slots by job id.
        self._running: dict[SlotLink, Delivered] = {}
        self._slots: dict[bytes, SlotLink] = {}
        self._is_reading = False
        self._is_closing = False
        self._will_flush = False

    def run(self) -> None:
        """Run jobs until there are no more and the running ones have ended."""
        with asyncio.Runner() as runner:
            self._loop = loop = runner.get_loop()
            # Like a job in a separate process, each job sees the context variables set so far by the main thread.
            self._context = contextvars.copy_context()
            self._over = loop.create_future()
            self._all_ended = loop.create_future()
            interrupts.slot_of = self._slots.get
            if not self._once:
                lending.on_lend = self._read
            self._serve(loop.create_task(self._start()))
            signal.signal(signal.SIGURG, self._on_signal)
            if not self._once:
                # From now on this process takes jobs, so the one that it replaces may close.
                self._link.serve(self._count)
            watch = Watch(loop, Runner.run_on_loop)
            self._read()
            self._serve(self._over)
            self._stop_reading()
            if self._jobs:
                self._serve(self._all_ended)
            watch.stop()
            if self._runner.is_unsound:
                raise RuntimeError(UNSOUND)
            self._serve(loop.create_task(self._stop()))

    def _serve(self, until: asyncio.Future[None]) -> None:
        """Run the loop until the future is done, even if other code stops the loop."""
        loop = self._loop
        until.add_done_callback(lambda _: loop.stop())
        while not until.done():
            try:
                loop.run_forever()
            except (SystemExit, KeyboardInterrupt) as error:
                if self._link.is_abandoned:
                    leave_fork()
                # An error of a job is its failure. This one is from a callback, or an asyncio task that a job left.
                logger.error("%r escaped from the event loop of process %d, which continues", error, os.getpid())
        until.result()

    async def _start(self) -> None:
        for hook in [hook for app in self._apps for hook in app._slot_start_hooks]:
            ended = hook()
            if inspect.isawaitable(ended):
                await ended

    async def _stop(self) -> None:
        for hook in [hook for app in self._apps for hook in app._slot_stop_hooks]:
            try:
                ended = hook()
                if inspect.isawaitable(ended):
                    await ended
            except Exception:
                logger.exception("a function of on_slot_stop failed in process %d; the others still run", os.getpid())

    def _read(self) -> None:
        if not self._is_reading and not self._is_closing:
            self._is_reading = True
            self._loop.add_reader(self._link.fileno(), self._pull)

    def _stop_reading(self) -> None:
        if self._is_reading:
            self._is_reading = False
            self._loop.remove_reader(self._link.fileno())

    def _pull(self) -> None:
        """Take packets for the idle slots."""
        while self._idle and self._made > self._most:
            self._idle.pop()
            self._made -= 1
        for _ in range(_PULLS):
            if self._idle:
                slot = self._idle.pop()
            elif self._made < self._most:
                self._made += 1
                slot = self._link.slot()
            else:
                return self._stop_reading()
            try:
                pulled = slot.try_pull()
            except (BrokenPipeError, ConnectionResetError):
                pulled = None
            if pulled:
                self._continue(slot)
                continue
            self._idle.append(slot)
            if pulled is None:
                self._close()
            return None
        return None

    @property
    def _most(self) -> int:
        """Return the largest number of slots for now: each lent slot may be replaced by another."""
        return self._count + (0 if self._once else self._link.parked)

    def _follow_orders(self) -> None:
        """Close if the supervisor asks for it, and carry out orders to suspended jobs."""
        lending.resume_turns()
        if self._link.heed() and not self._is_closing:
            self._link.serve(0)
            self._close()
        for task, (slot, job) in list(self._jobs.items()):
            if slot.order() and self._running.get(slot) is job:
                interrupt(task, slot)

    def _close(self) -> None:
        self._is_closing = True
        self._stop_reading()
        if not self._over.done():
            self._over.set_result(None)

    def _continue(self, slot: SlotLink) -> None:
        """Begin the next job of the slot's packet; without one the slot is idle."""
        job = slot.begin()
        if job is not None:
            task = self._loop.create_task(self._run(slot, job), context=self._context.copy())
            self._jobs[task] = slot, job
            self._running[slot] = job
            self._slots[job[1]] = slot
            task.add_done_callback(self._ended)
            return
        if self._made > self._most:
            # The slot replaced a lent one.
            self._made -= 1
            return
        self._idle.append(slot)
        if self._once:
            self._close()
        else:
            self._read()

    async def _run(self, slot: SlotLink, job: Delivered) -> None:
        self._finish(slot, await self._runner.run_on_loop(job, slot))

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """Carry out orders, as a signal handler: the loop may be inside a job's step that never ends."""
        if self._link.is_abandoned:
            return
        # The loop may be closed already.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._follow_orders)
        current = running.get()
        slot = None if current is None else self._slots.get(current[0])
        if slot is not None and is_within_task(frame):
            order = slot.take_order()
            if order:
                raise EXCEPTIONS[order - 1]()

    def _finish(self, slot: SlotLink, outcome: Outcome) -> None:
        job = self._running.pop(slot)
        if self._slots.get(job[1]) is slot:
            del self._slots[job[1]]
        if slot.finish(*outcome):
            slot.finish(*self._runner.overrule(job, slot))
        if not self._will_flush:
            # Once for all jobs that end in one pass of the loop.
            self._will_flush = True
            self._loop.call_soon(self._flush)
        if self._runner.is_unsound and not self._is_closing:
            # Its jobs would fail one after another, with errors that are not theirs.
            self._link.serve(0)
            self._link.close()
            self._close()
        self._continue(slot)

    def _flush(self) -> None:
        self._will_flush = False
        try:
            self._link.flush()
        except (BrokenPipeError, ConnectionResetError):
            self._close()

    def _ended(self, task: asyncio.Task[None]) -> None:
        slot, job = self._jobs.pop(task)
        if task.cancelled():
            # The job cancelled itself in its last step, or another job cancelled it before its first, so it has no
            # outcome yet.
            if self._running.get(slot) is job:
                self._finish(slot, self._runner.fail(job, asyncio.CancelledError(), slot))
        elif (error := task.exception()) is not None and not self._over.done():
            # Not an error of a job: the link to the supervisor is broken.
            self._over.set_exception(error)
        if self._is_closing and not self._jobs and not self._all_ended.done():
            self._all_ended.set_result(None)
