"""Groups that are too large for one transaction: sent in parts, a few of which are on their way at a time.

    first part: the group's join, not sealed; what waits for it; 10,000 calls    →  its jobs start
    other parts: members                                                         →  theirs do
    seal: how many members there are                                             →  the group can end

If this program ends before the seal, the broker cancels the workflow. If a part can't be sent, this cancels it.
"""

from __future__ import annotations

import itertools
import select
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from penstock import _core
from penstock._connection import BLOCKING
from penstock._flows.build import Built, Part, Plan
from penstock._flows.results import MemberIds
from penstock.errors import DiskFull, PenstockError, QueueFull, TooLate

if TYPE_CHECKING:
    from penstock._tasks.app import App

# Parts that are on their way at a time.
_UNDER_WAY = 4
# Time after which a part that was refused for want of room is tried again: at first, and at most.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.02, 0.5

_REASON = "not all of it could be sent"


def send_all(app: App, plan: Plan) -> Built:
    """Send a workflow that begins with a large group. Raises what sending a job raises, and cancels it then."""
    sending = _Sending(app, plan)
    has_layers = app._enqueue_layers is not None
    part: Part
    try:
        built = sending.began(app._send_jobs(plan, sending.publish_first))

        def publish(jobs: Sequence[tuple[_core.Options, bytes]]) -> Built:
            part.with_jobs(jobs)
            sending.begin(part)
            # Middleware is told that the jobs were sent once they were.
            while sending.must_wait(0 if has_layers else _UNDER_WAY - 1):
                sending.wait()
            return sending.last

        while not sending.is_closed and (following := plan.next_part()) is not None:
            part = following
            app._send_jobs(plan, publish)
        while sending.must_wait(0):
            sending.wait()
        sending.seal()
    except BaseException as error:
        sending.give_up(error)
        raise
    finally:
        sending.close()
    return sending.whole(built)


async def asend_all(app: App, plan: Plan) -> Built:
    """Like ``send_all``, but awaitable. Cancelling it cancels the workflow."""
    import asyncio

    sending = _Sending(app, plan)
    ready, loop = asyncio.Event(), asyncio.get_running_loop()
    has_layers = app._enqueue_layers is not None

    async def until(left: int) -> None:
        while sending.must_wait(left):
            pause_s = sending.pause_s
            try:
                await asyncio.wait_for(ready.wait(), pause_s)
            except TimeoutError:
                pass
            ready.clear()
            sending.take_ends()

    async def submit_first(jobs: Sequence[tuple[_core.Options, bytes]]) -> Built:
        return await app._connected().submit_plan(plan, jobs, app.call_timeout)

    part: Part
    loop.add_reader(sending.port.fileno(), ready.set)
    try:
        built = sending.began(await app._asend_jobs(plan, submit_first))

        async def submit(jobs: Sequence[tuple[_core.Options, bytes]]) -> Built:
            part.with_jobs(jobs)
            sending.begin(part)
            await until(0 if has_layers else _UNDER_WAY - 1)
            return sending.last

        while not sending.is_closed and (following := plan.next_part()) is not None:
            part = following
            await app._asend_jobs(plan, submit)
        await until(0)
        await asyncio.to_thread(sending.seal)
    except BaseException as error:
        # Also when this await is cancelled: nobody would send the rest.
        await asyncio.shield(asyncio.to_thread(sending.give_up, error))
        raise
    finally:
        loop.remove_reader(sending.port.fileno())
        sending.close()
    return sending.whole(built)


class _Sending:
    """The parts that are on their way, and what became of the others."""

    def __init__(self, app: App, plan: Plan) -> None:
        self._app = app
        self._plan = plan
        self._connection = app._connected()
        self.port = _core.Port()
        self._poll = select.poll()
        self._poll.register(self.port.fileno(), select.POLLIN)
        self._tokens = itertools.count(1)
        self._under_way: dict[int, Part] = {}
        # Parts that were refused for want of room, and when they are given up.
        self._refused: dict[Part, tuple[float, Exception]] = {}
        self._pause_s = _FIRST_PAUSE_S
        self._tried_at = 0.0
        # Jobs and members that were accepted.
        self._accepted = 0
        self._members = 0
        self.last = Built(_core.Graph(), None, [], ())
        self.is_closed = False
        """Whether nothing more may come: the group has failed, or was cancelled."""

    def publish_first(self, jobs: Sequence[tuple[_core.Options, bytes]]) -> Built:
        built = self._connection.publish_plan(self._plan, jobs, self._app.call_timeout)
        self._connection.log_notices(BLOCKING)
        return built

    def began(self, built: Built) -> Built:
        self._accepted = len(built.job_ids)
        self._members = self._plan.planned_members
        return built

    def begin(self, part: Part) -> None:
        """Send a part, without waiting for its end."""
        token = next(self._tokens)
        self._under_way[token] = part
        self.last = part.build()
        self._connection.begin_graph(self.last.graph, self._plan.id, self._app.call_timeout, self.port, token)

    def must_wait(self, left: int) -> bool:
        """Whether more parts than this are on their way, or one was refused and is to be tried again."""
        return bool(self._refused) or len(self._under_way) > left

    @property
    def pause_s(self) -> float | None:
        """Time to wait until a refused part is tried again; None: until a part that is on its way has ended."""
        if self._under_way or not self._refused:
            return None
        return max(0.0, self._tried_at + self._pause_s - time.monotonic())

    def wait(self) -> None:
        pause_s = self.pause_s
        self._poll.poll(1000.0 if pause_s is None else pause_s * 1000.0)
        self._connection.log_notices()
        self.take_ends()

    def take_ends(self) -> None:
        """Note what became of parts, and try those again that were refused for want of room. Raises for others."""
        for token, end in self.port.drain():
            part = self._under_way.pop(token)
            if isinstance(end, (QueueFull, DiskFull)):
                deadline = time.monotonic() + self._app.call_timeout
                self._refused[part] = (self._refused.get(part, (deadline, end))[0], end)
                self._tried_at = time.monotonic()
            elif isinstance(end, TooLate):
                self.is_closed = True
                self._refused.pop(part, None)
            elif isinstance(end, BaseException):
                raise end
            else:
                self._refused.pop(part, None)
                self._pause_s = _FIRST_PAUSE_S
                self._accepted += len(part)
                self._members = max(self._members, part.end)
        if self._refused and not self._under_way and (self.is_closed or self.pause_s == 0.0):
            self._try_again()

    def _try_again(self) -> None:
        if self.is_closed:
            self._refused.clear()
            return
        part, (deadline, error) = next(iter(self._refused.items()))
        if time.monotonic() >= deadline:
            raise error
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
        self.begin(part)

    def seal(self) -> None:
        if self.is_closed:
            return
        try:
            self._connection.seal(self._plan.join, self._members, self._plan.id, self._app.call_timeout)
        except TooLate:
            # It has failed since the last part came.
            self.is_closed = True

    def whole(self, built: Built) -> Built:
        """Return the workflow with all members that have come."""
        members = built.members
        if isinstance(members, MemberIds) and members.join == self._plan.join:
            members = MemberIds(members.join, self._members)
        return built._replace(members=members)

    def give_up(self, error: BaseException) -> None:
        """Cancel the workflow, and have the error say so."""
        if not self._plan.id or (self._accepted == 0 and not getattr(error, "maybe_accepted", False)):
            return
        text = f"{self._in_words(self._cancel())} Sending it again would run those a second time"
        if isinstance(error, PenstockError):
            error.args = (f"{str(error).rstrip('.')}. {text}", *error.args[1:])
            error.maybe_accepted = True
        else:
            error.add_note(text)

    def _cancel(self) -> int | None:
        """Cancel what was accepted; return the number of jobs that had begun, and None when that is not known."""
        limit_s = self._app.call_timeout
        deadline = time.monotonic() + limit_s
        try:
            operation = self._connection.cancel_workflow(self._plan.id, _REASON, "ask", limit_s)
            # Parts that were on their way came before that.
            for token, end in self.port.drain():
                part = self._under_way.pop(token, None)
                if part is not None and not isinstance(end, BaseException):
                    self._accepted += len(part)
            while operation is not None and time.monotonic() < deadline:
                status = self._connection.operation(operation, limit_s)
                if status is None:
                    return None
                ended, _, is_over = status
                if is_over:
                    return max(0, self._accepted - ended)
                time.sleep(_FIRST_PAUSE_S)
        except PenstockError:
            pass
        return None

    def _in_words(self, began: int | None) -> str:
        sent = f"{self._accepted:,} jobs of workflow {self._plan.id_text} had been accepted"
        if began is None:
            return f"{sent}. It is cancelled; some of them may have run."
        return f"{sent}. It was cancelled, and {began:,} of them had begun or ended before."

    def close(self) -> None:
        self.port.close()
