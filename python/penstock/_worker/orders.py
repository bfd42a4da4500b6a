"""Orders of the supervisor to running jobs, whose time is over or which were cancelled.

Orders come as a signal, which the main thread handles between two steps of any code. The handler may raise only in the
task's own code: not in Penstock's, which reports the job's outcome, and not in an import, which would leave half a
module. Where it may not raise, the order stays, and the supervisor repeats its signal.
"""

from __future__ import annotations

import asyncio
import signal
from types import FrameType
from typing import TYPE_CHECKING, Any

from penstock._jobs import lending
from penstock._jobs.interrupts import EXCEPTIONS, SOFT
from penstock._worker import runner
from penstock._worker.runner import Steps

if TYPE_CHECKING:
    from penstock._core import SlotLink
    from penstock._worker.runner import Runner

# Code objects inside which a task's own code runs: as a function, or in a step of a loop.
_CALLS = frozenset({runner._call.__code__, runner._call_within.__code__})
_AWAITS = frozenset({runner.Runner.run_on_loop.__code__, runner._awaited.__code__})
_STEPS = frozenset({Steps.send.__code__, Steps.throw.__code__, Steps._raise_soft_timeout.__code__})
_OWN_FILE = runner.__file__
_IMPORTS = "<frozen importlib._bootstrap>"


def is_within_task(frame: FrameType | None) -> bool:
    """Whether this frame is in a task's own code, and not in an import."""
    inner = None
    while frame is not None:
        code = frame.f_code
        if code in _CALLS:
            return True
        if code in _AWAITS:
            # Only steps made by the task's coroutine count.
            return inner is not None and inner.co_filename != _OWN_FILE
        if code in _STEPS:
            return inner is not None and inner not in _STEPS
        if code.co_filename == _IMPORTS:
            return False
        inner, frame = code, frame.f_back
    return False


def interrupt(task: asyncio.Task[Any], slot: SlotLink) -> None:
    """Carry out the order to a job suspended on the running loop, but not before the job has begun."""
    awaited: Any = task.get_coro()
    # Descend to the frame that awaits the task's own coroutine.
    while awaited is not None and getattr(awaited, "cr_code", None) not in _AWAITS:
        awaited = getattr(awaited, "cr_await", None)
    steps = None if awaited is None else awaited.cr_await
    if steps is None:
        return
    order = slot.take_order()
    if order == SOFT and isinstance(steps, Steps):
        steps.is_due = True
    if order:
        task.cancel()


class OrdersOfProcess:
    """Receives orders for the only slot of a process, in its main thread.

    Made in the zygote, whose children inherit the handler. The slot has no orders until a child opens it.
    """

    def __init__(self, jobs: Runner, slot: SlotLink) -> None:
        self.slot = slot
        self._runner = jobs
        signal.signal(signal.SIGURG, self._on_signal)

    def slot_of(self, job_id: bytes) -> SlotLink | None:
        return self.slot

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        slot = self.slot
        lending.resume_turns()
        if not slot.order():
            return
        if is_within_task(frame):
            order = slot.take_order()
            if order:
                raise EXCEPTIONS[order - 1]()
        elif (loop := self._runner.running_loop) is not None:
            # The job is suspended in an `async def`.
            loop.call_soon_threadsafe(self._interrupt, loop)

    def _interrupt(self, loop: asyncio.AbstractEventLoop) -> None:
        task = next((task for task in asyncio.all_tasks(loop) if task.get_coro() is self._runner.awaited), None)
        if task is not None:
            interrupt(task, self.slot)
