"""What comes to a running job from outside: the end of its time, or of the wish for it; and how it keeps that off."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Literal

from penstock._jobs.current import running
from penstock._public import public
from penstock.errors import SoftTimeout

if TYPE_CHECKING:
    from penstock._core import SlotLink

# The orders of a supervisor, by number; `crates/penstock-worker/src/order.rs` has them.
SOFT, CANCEL, HARD = 1, 2, 3


@public
class JobInterrupt(BaseException):
    """Raised in a task to end it: it ran longer than its ``timeout``, or it was cancelled.

    Not an ``Exception``, so that ``except Exception`` lets it pass. Clean up in ``finally`` or a ``with`` block, and
    let it go on. A task on an event loop gets ``asyncio.CancelledError`` where it awaits, as asyncio has it.
    """


# What an order is raised as: `EXCEPTIONS[order - 1]`.
EXCEPTIONS: tuple[type[BaseException], type[BaseException], type[BaseException]] = (
    SoftTimeout,
    JobInterrupt,
    JobInterrupt,
)

# In a worker's child: finds the slot that runs the job of an id here.
slot_of: Callable[[bytes], SlotLink | None] | None = None


@public
class shield:
    """Keep ``SoftTimeout`` and a cancellation of the job off a block: ``with shield(): ...``.

    What has come meanwhile is raised at the end of the block. The end of the job's time (``timeout``) gets through, and
    so does the end of its process. Does nothing outside of a worker. In an ``async def``, the block may await.
    """

    def __init__(self) -> None:
        self._slot: SlotLink | None = None

    def __enter__(self) -> None:
        current = running.get()
        slot = None if current is None or slot_of is None else slot_of(current[0])
        if slot is not None:
            slot.shield()
            try:
                # What was sent to this thread before arrives here at the latest, and not in the block.
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
            # An error of the block goes first: the order is repeated soon.
            order = 0 if error is not None else slot.take_order()
            if order:
                raise EXCEPTIONS[order - 1]()
        return False
