"""Slots that are threads of one process. The main thread runs no jobs: it supervises the others.

A slot outlives its thread. If a thread ends early, its job counts as crashed, and another thread takes over the slot;
the other jobs continue.

For each slot whose job is parked because it waits for other jobs, there may be one more slot. It is created when there
is a packet that no slot can take, and ends when it has not been needed for a while.
"""

from __future__ import annotations

import contextvars
import inspect
import logging
import os
import select
import signal
import socket
import sys
import threading
import time
from itertools import islice
from typing import TYPE_CHECKING

from penstock._jobs import interrupts, lending
from penstock._jobs.interrupts import EXCEPTIONS, JobInterrupt
from penstock._worker.child import UNSOUND, leave_fork, stop, wake
from penstock._worker.orders import is_within_task
from penstock._worker.runner import Delivered, Runner
from penstock.errors import SoftTimeout

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

    from penstock._core import ChildLink, SlotLink
    from penstock._tasks.app import App

logger = logging.getLogger("penstock")

NUMBER_BYTES = 4
# Sent instead of a slot's number when a job was parked or continues.
_PARKED = 0xFFFF_FFFF
# Largest number of additional slots whose fatal signals are reported.
_MOST_MORE = 1024
# Interval of checking whether the slot at the socket still takes packets, while another slot may be created.
_LOOK_EVERY_S = 0.02
# Time after which an unneeded slot ends.
_KEEP_SPARE_S = 5.0
# Delay after a failed `on_slot_start`. It doubles each time.
_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 60.0
# Interval of waking a thread at the socket, once there are no more jobs, until the thread has ended.
_NUDGE_EVERY_S = 0.05


class Threads:
    """All slots of this process."""

    def __init__(self, apps: list[App], worker: str, link: ChildLink, count: int, once: bool) -> None:
        self._apps = apps
        self._worker = worker
        self._link = link
        self._once = once
        # Context variables set so far by the main thread, which jobs see like jobs in separate processes.
        self._context = contextvars.copy_context()
        self._count = count
        self._slots = [_Slot(number, self) for number in range(count)]
        # Slots with a thread, and the times at which the others get one.
        self._left = {slot.number for slot in self._slots}
        self._starts = dict.fromkeys(self._left, 0.0)
        # Start of the period with too many slots, and the smallest surplus in it.
        self._spare: tuple[float, int] | None = None
        self._serving = count if once else None
        self._is_ending = False
        self._is_unsound = False
        # An unsound thread may report that while the main thread is about to report that all slots are ready.
        self._reporting = threading.Lock()

    def run(self) -> None:
        """Run jobs until all threads have ended in order."""
        ends = self._link.begin_threads(self._count + (0 if self._once else _MOST_MORE))
        work, left, starts = self._link.fileno(), self._left, self._starts
        interrupts.slot_of = lambda job_id: getattr(_own, "slot", None)
        # This signal interrupts a thread that waits at the socket. In this thread, it reports orders and requests of
        # the supervisor.
        signal.signal(signal.SIGURG, wake)
        bell, ringer = socket.socketpair()
        for each in (bell, ringer):
            each.setblocking(False)
        signal.set_wakeup_fd(ringer.fileno(), warn_on_full_buffer=False)
        while left:
            for number in [number for number, at in starts.items() if at <= time.monotonic()]:
                if self._slots[number].start():
                    del starts[number]
                else:
                    starts[number] = time.monotonic() + self._slots[number].pause_s
            if self._serving is None and not starts:
                # From now on this process takes jobs, so the one that it replaces may close.
                self._report_serving(self._count)
            sources: list[int | socket.socket] = [ends, bell]
            due = list(starts.values())
            if self._may_add:
                if self._link.has_head:
                    due.append(time.monotonic() + _LOOK_EVERY_S)
                else:
                    sources.append(work)
            self._end_spare()
            if self._spare is not None:
                due.append(self._spare[0] + _KEEP_SPARE_S)
            timeout = min(due) - time.monotonic() if due else None
            if self._is_ending and self._link.nudge():
                # That rings the bell, too, which is ignored while a thread has to be nudged.
                sources.remove(bell)
                timeout = _NUDGE_EVERY_S
            ready, _, _ = select.select(sources, [], [], None if timeout is None else max(0.0, timeout))
            if bell in ready:
                bell.recv(4096)
                lending.resume_turns()
                if self._link.heed() and not self._is_ending:
                    self._end()
            self._carry_out_orders()
            if work in ready and self._may_add and not self._link.has_head:
                self._add()
            ended = os.read(ends, 4096 * NUMBER_BYTES) if ends in ready else b""
            for at in range(0, len(ended), NUMBER_BYTES):
                number = int.from_bytes(ended[at : at + NUMBER_BYTES], "little")
                if number == _PARKED:
                    continue
                slot = self._slots[number]
                # A process for a single job gets no other thread.
                if slot.is_over or self._is_ending or self._once:
                    slot.abandon()
                    left.discard(slot.number)
                    starts.pop(slot.number, None)
                else:
                    slot.replace_thread()
                    starts[slot.number] = time.monotonic() + slot.pause_s
            if self._is_ending:
                left -= starts.keys()
                starts.clear()
                continue
            waiting = [number for number, at in starts.items() if at > time.monotonic()]
            self._report_serving(min(self._count, len(left) - len(waiting)))
        if self._is_unsound:
            raise RuntimeError(UNSOUND)

    @property
    def _may_add(self) -> bool:
        """Whether fewer slots than wanted have a job that is not parked."""
        parked = 0 if self._once or self._is_ending else self._link.parked
        return parked > 0 and len(self._left) - parked < self._count

    def _add(self) -> None:
        """Create another slot, or reuse one whose thread has ended."""
        slot = next((slot for slot in self._slots if slot.number not in self._left), None)
        if slot is None:
            slot = _Slot(len(self._slots), self)
            self._slots.append(slot)
        slot.is_over = False
        self._left.add(slot.number)
        self._starts[slot.number] = 0.0

    def _end_spare(self) -> None:
        """End replacement slots that have not been needed for a while."""
        spare = 0 if self._once or self._is_ending else len(self._left) - self._link.parked - self._count
        if spare <= 0:
            self._spare = None
            return
        since, least = self._spare or (time.monotonic(), spare)
        self._spare = since, min(least, spare)
        if time.monotonic() >= since + _KEEP_SPARE_S:
            self._link.dismiss(min(least, spare))
            self._spare = None

    def _carry_out_orders(self) -> None:
        """Carry out orders to jobs."""
        ordered = [slot for slot in self._slots if slot.has_order]
        if ordered:
            frames = sys._current_frames()
            for slot in ordered:
                slot.carry_out_order(frames)

    def _end(self) -> None:
        with self._reporting:
            self._is_ending = True
            self._link.serve(0)
        self._link.close()

    def _report_serving(self, slots: int) -> None:
        with self._reporting:
            if slots != self._serving and not self._is_ending:
                self._serving = slots
                self._link.serve(slots)

    def become_unsound(self) -> None:
        """Take no more jobs: this process will be replaced when its running jobs have ended."""
        self._is_unsound = True
        self._end()


class _Slot:
    def __init__(self, number: int, threads: Threads) -> None:
        self.number = number
        # Whether it ended normally, because there are no more jobs.
        self.is_over = False
        # Delay before the next thread, because this one could not start.
        self.pause_s = 0.0
        self._threads = threads
        self._link = threads._link.slot()
        self._thread: threading.Thread | None = None
        self._why: str | None = None

    def start(self) -> bool:
        """Start a thread for the slot; return False if the system cannot create one now."""
        context = self._threads._context.copy()
        name = f"penstock-slot-{self.number}"
        # A daemon thread, because the interpreter would wait in vain for one that C code ended without its knowledge.
        self._thread = threading.Thread(target=context.run, args=(self._run,), name=name, daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:
            self._pause()
            log = "slot %d of process %d takes no jobs, as it has no thread (%s); it tries again in %d s"
            logger.error(log, self.number, os.getpid(), error, self.pause_s)
            return False
        return True

    def _run(self) -> None:
        try:
            if self._begin():
                self._work()
        except (BrokenPipeError, ConnectionResetError):
            self.is_over = True  # the supervisor is gone, and this process with it
        except BaseException as error:
            if self._threads._link.is_abandoned:
                leave_fork()
            # An exception sent by another thread or raised by a signal handler; errors of jobs do not get here.
            self._why = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__

    def _begin(self) -> bool:
        try:
            self._link.tell_end_of_thread(self.number)
            for hook in [hook for app in self._threads._apps for hook in app._slot_start_hooks]:
                if not inspect.iscoroutinefunction(hook):
                    hook()
        except BaseException:
            self._pause()
            log = "on_slot_start failed in slot %d of process %d, which takes no jobs; it tries again in %d s"
            logger.exception(log, self.number, os.getpid(), self.pause_s)
            return False
        self.pause_s = 0.0
        return True

    def _pause(self) -> None:
        self.pause_s = min(2 * self.pause_s, _LONGEST_PAUSE_S) or _FIRST_PAUSE_S

    def _work(self) -> None:
        runner = Runner(self._threads._apps, self._threads._worker)
        runner.slot = _own.slot = slot = self._link
        jobs: Iterator[Delivered] = islice(slot, 1) if self._threads._once else slot
        while self._work_on(jobs, runner, slot):
            pass
        self._threads._link.flush()
        self.is_over = True
        stop([hook for app in self._threads._apps for hook in app._slot_stop_hooks], "on_slot_stop")
        runner.close()

    def _work_on(self, jobs: Iterator[Delivered], runner: Runner, slot: SlotLink) -> bool:
        """Run jobs until there are no more. Returns True if an order arrived just after a task returned."""
        run, finish, job = runner.run, slot.finish, None
        try:
            for job in jobs:
                outcome = run(job)
                if runner.is_unsound:
                    # Done first, because a client that sees the outcome may send a job at once, which must not begin
                    # here.
                    self._threads.become_unsound()
                if finish(*outcome):
                    finish(*runner.overrule(job, slot))
                    if runner.is_unsound:
                        self._threads.become_unsound()
        except (JobInterrupt, SoftTimeout) as error:
            if job is not None and slot.is_running:
                finish(*runner.fail(job, error, slot))
            return True
        return False

    @property
    def has_order(self) -> bool:
        return self._link.order() != 0

    def carry_out_order(self, frames: dict[int, FrameType]) -> None:
        """Carry out the order to the running job, if it is in its task's own code."""
        thread = self._thread
        if thread is not None and thread.ident is not None and is_within_task(frames.get(thread.ident)):
            self._link.strike(thread.ident, EXCEPTIONS)

    def abandon(self) -> None:
        """Abandon the slot for good. If its thread left a job, the job has crashed."""
        self._link.lose(self._reason())

    def replace_thread(self) -> None:
        """Handle the early end of the slot's thread. Its job, if any, has crashed, and another thread takes over."""
        reason = self._reason()
        if not self._link.lose(reason) and not self.pause_s:
            logger.error("the idle slot %d of process %d: %s", self.number, os.getpid(), reason)
        self._why = None

    def _reason(self) -> str:
        return f"the thread that ran it was lost: {self._why or 'C code has ended it (pthread_exit?)'}"


# Slot of the current thread.
_own = threading.local()
