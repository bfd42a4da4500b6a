"""Lends the slot of a job that waits for other jobs.

A short wait costs nothing. During a longer one, the slot is lent to another job. After it, the job gets a slot before
any job that has not begun. No other job runs in the waiting thread.
"""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING

from penstock._jobs import interrupts
from penstock._jobs.current import running
from penstock.errors import SoftTimeout

if TYPE_CHECKING:
    # Imported on use, since programs without an event loop need not load it.
    import asyncio
    from collections.abc import Callable

    from penstock._core import Loan

# The same value as in crates/penstock-python/src/loan.rs.
SHORT_S = 0.001

# Set in a worker's child with an event loop: takes packets for slots that are lent.
on_lend: Callable[[], None] | None = None

# Jobs on an event loop that have finished waiting for other jobs, and now wait for their turns.
_turns: dict[Loan, asyncio.Future[None]] = {}


def loan() -> Loan | None:
    """Return a loan of the slot that runs the current job; None outside of a worker's jobs."""
    current = running.get()
    if current is None or interrupts.slot_of is None:
        return None
    slot = interrupts.slot_of(current[0])
    return None if slot is None else slot.loan(current[0])


def _is_interrupt(error: BaseException | None) -> bool:
    """Whether a wait was interrupted, usually by an order to its job, which then must not wait for a slot."""
    return error is not None and (not isinstance(error, Exception) or isinstance(error, SoftTimeout))


class lending:
    """Lends the slot of the running job during the wait in a block: ``with lending() as loan`` (a loan or None)."""

    __slots__ = ("_loan",)

    def __enter__(self) -> Loan | None:
        self._loan = loan()
        return self._loan

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._loan is None:
            return
        if _is_interrupt(error):
            self._loan.drop()
        else:
            self._loan.take_back()


class alending:
    """Like ``lending``, for a wait on an event loop. A long wait is reported automatically."""

    __slots__ = ("_loan", "_timer")

    async def __aenter__(self) -> Loan | None:
        self._loan = loan()
        if self._loan is not None:
            import asyncio

            self._timer = asyncio.get_running_loop().call_later(SHORT_S, _begin, self._loan)
        return self._loan

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        loan = self._loan
        if loan is None:
            return
        self._timer.cancel()
        if _is_interrupt(error):
            loan.drop()
        elif loan.ask_back():
            import asyncio

            turn = _turns[loan] = asyncio.get_running_loop().create_future()
            # The turn may have come before this line.
            resume_turns()
            try:
                await turn
            except BaseException:
                loan.drop()
                raise
            finally:
                del _turns[loan]


def _begin(loan: Loan) -> None:
    loan.begin()
    # Another coroutine of the same job may be waiting for its turn: let it continue.
    resume_turns()
    if on_lend is not None:
        on_lend()


def resume_turns() -> None:
    """Resume the jobs whose turn has come. Called after each signal, in any thread."""
    for loan, turn in list(_turns.items()):
        if not turn.done() and loan.has_turn:
            # The loop may belong to a job.
            turn.get_loop().call_soon_threadsafe(_resume, turn)


def _resume(turn: asyncio.Future[None]) -> None:
    if not turn.done():
        turn.set_result(None)
