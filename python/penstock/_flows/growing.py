"""Groups that are too large for one transaction: sent in parts, with a few parts in flight at a time.

    first part: the unsealed join, the steps that wait for it, 10,000 calls    →  its jobs start
    other parts: more members                                                  →  their jobs start
    seal: the number of members                                                →  the group can end

If this program exits before the seal, the broker cancels the workflow. If a part cannot be sent, this module does.
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

# Number of parts in flight at a time.
_UNDER_WAY = 4
# Delay before retrying a part that was refused for lack of room: at first, and at most.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.02, 0.5

_REASON = "not all of the workflow could be sent"


def send_all(app: App, plan: Plan) -> Built:
    """Send a workflow that begins with a large group. On an error, which is one of ``delay()``, cancels it."""
    sending = _Sending(app, plan)
    has_layers = app._enqueue_layers is not None
    part: Part
    try:
        built = sending.began(app._send_jobs(plan, sending.publish_first))

        def publish(jobs: Sequence[tuple[_core.Options, bytes]]) -> Built:
            part.with_jobs(jobs)
            sending.begin(part)
            # Middleware learns that jobs were sent only after they were.
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
    """Like ``send_all``, but awaitable. Cancelling the await cancels the workflow."""
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
        # Also when this await is cancelled, since then nobody would send the rest.
        await asyncio.shield(asyncio.to_thread(sending.give_up, error))
        raise
    finally:
        loop.remove_reader(sending.port.fileno())
        sending.close()
    return sending.whole(built)


class _Sending:
    """Parts in flight, and the outcome of the others."""

    def __init__(self, app: App, plan: Plan) -> None:
        self._app = app
        self._plan = plan
        self._connection = app._connected()
        self.port = _core.Port()
        self._poll = select.poll()
        self._poll.register(self.port.fileno(), select.POLLIN)
        self._tokens = itertools.count(1)
        self._under_way: dict[int, Part] = {}
        # Parts that were refused for lack of room, and when to give up on them.
        self._refused: dict[Part, tuple[float, Exception]] = {}
        self._pause_s = _FIRST_PAUSE_S
        self._tried_at = 0.0
        # Numbers of accepted jobs and members.
        self._accepted = 0
        self._members = 0
        self.last = Built(_core.Graph(), None, [], ())
        self.is_closed = False
        """Whether no more members are accepted, because the group has failed or was cancelled."""

    def publish_first(self, jobs: Sequence[tuple[_core.Options, bytes]]) -> Built:
        built = self._connection.publish_plan(self._plan, jobs, self._app.call_timeout)
        self._connection.log_notices(BLOCKING)
        return built

    def began(self, built: Built) -> Built:
        self._accepted = len(built.job_ids)
        self._members = self._plan.planned_members
        return built

    def begin(self, part: Part) -> None:
        """Send a part without waiting for its end."""
        token = next(self._tokens)
        self._under_way[token] = part
        self.last = part.build()
        self._connection.begin_graph(self.last.graph, self._plan.id, self._app.call_timeout, self.port, token)

    def must_wait(self, left: int) -> bool:
        """Whether more than ``left`` parts are in flight, or a refused part has to be tried again."""
        return bool(self._refused) or len(self._under_way) > left

    @property
    def pause_s(self) -> float | None:
        """Time to wait before retrying a refused part; None to wait for a part in flight."""
        if self._under_way or not self._refused:
            return None
        return max(0.0, self._tried_at + self._pause_s - time.monotonic())

    def wait(self) -> None:
        pause_s = self.pause_s
        self._poll.poll(1000.0 if pause_s is None else pause_s * 1000.0)
        self._connection.log_notices()
        self.take_ends()

    def take_ends(self) -> None:
        """Collect the outcomes of parts, and retry those refused for lack of room. Raises other errors."""
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
            # The group failed after the last part arrived.
            self.is_closed = True

    def whole(self, built: Built) -> Built:
        """Return the workflow with all accepted members."""
        members = built.members
        if isinstance(members, MemberIds) and members.join == self._plan.join:
            members = MemberIds(members.join, self._members)
        return built._replace(members=members)

    def give_up(self, error: BaseException) -> None:
        """Cancel the workflow, and say so in the error."""
        if not self._plan.id or (self._accepted == 0 and not getattr(error, "maybe_accepted", False)):
            return
        text = f"{self._in_words(self._cancel())} Sending it again would run those a second time"
        if isinstance(error, PenstockError):
            error.args = (f"{str(error).rstrip('.')}. {text}", *error.args[1:])
            error.maybe_accepted = True
        else:
            error.add_note(text)

    def _cancel(self) -> int | None:
        """Cancel the accepted jobs; return the number that had begun, or None if that is not known."""
        limit_s = self._app.call_timeout
        deadline = time.monotonic() + limit_s
        try:
            operation = self._connection.cancel_workflow(self._plan.id, _REASON, "ask", limit_s)
            # Parts that were in flight arrived before the cancellation.
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
            return f"{sent}. It was cancelled, but some of them may have run."
        return f"{sent}. It was cancelled after {began:,} of them had begun or ended."

    def close(self) -> None:
        self.port.close()
