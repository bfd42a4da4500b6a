"""Interruptions of a running job, by a timeout or a cancellation, and how a job defers them."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Literal

from penstock._jobs.current import running
from penstock._public import public
from penstock.errors import SoftTimeout

if TYPE_CHECKING:
    from penstock._core import SlotLink

# Orders of a supervisor, with the numbers of `crates/penstock-worker/src/order.rs`.
SOFT, CANCEL, HARD = 1, 2, 3


@public
class JobInterrupt(BaseException):
    """Raised in a task to stop it, because it ran longer than its ``timeout`` or was cancelled.

    Not an ``Exception``, so ``except Exception`` does not catch it. Clean up in ``finally`` or a ``with`` block, and
    let it propagate. A task on an event loop gets ``asyncio.CancelledError`` at an ``await`` instead, as usual in
    asyncio.
    """


# Exception of each order: `EXCEPTIONS[order - 1]`.
EXCEPTIONS: tuple[type[BaseException], type[BaseException], type[BaseException]] = (
    SoftTimeout,
    JobInterrupt,
    JobInterrupt,
)

# Set in a worker's child: finds the slot that runs the job of an id in this process.
slot_of: Callable[[bytes], SlotLink | None] | None = None


@public
class shield:
    """Defers ``SoftTimeout`` and cancellation of the job until the end of a block: ``with shield(): ...``.

    An interruption that arrives within the block is raised at its end. The job's ``timeout`` and the end of its process
    are not deferred. Does nothing outside of a worker. In an ``async def``, the block may await.
    """

    def __init__(self) -> None:
        self._slot: SlotLink | None = None

    def __enter__(self) -> None:
        current = running.get()
        slot = None if current is None or slot_of is None else slot_of(current[0])
        if slot is not None:
            slot.shield()
            try:
                # An exception that was already sent to this thread arrives here at the latest, not in the block.
                self._slot = slot
            except BaseException:
                slot.unshield()
                raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> Literal[False]:
        slot, self._slot = self._slot, None
        if slot is not None:
            slot.unshield()
            # An error of the block takes precedence: the order will be repeated soon.
            order = 0 if error is not None else slot.take_order()
            if order:
                raise EXCEPTIONS[order - 1]()
        return False
