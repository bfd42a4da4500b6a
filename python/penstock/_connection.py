"""Connection of a process to a broker: blocking for threads, awaitable for event loops.

Nothing is opened before the first call. A process has one connection per URL, shared by all apps and threads; a forked
child starts with none. With ``memory:`` each app has its own broker, and so its own connection.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import logging
import math
import os
import select
import sys
import threading
import time
import weakref
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeAlias, TypeVar, cast

from penstock import _core, _guard
from penstock._jobs.current import running
from penstock._jobs.lending import SHORT_S, alending, lending
from penstock.errors import BrokerUnavailable, CallTimeout, ResultTimeout

if TYPE_CHECKING:
    import asyncio

    from penstock._flows.build import Built, Plan
    from penstock._flows.replacing import Build
    from penstock._jobs.current import Leaving
    from penstock._tasks.app import App

logger = logging.getLogger("penstock")

T = TypeVar("T")

# Interval at which a long wait logs the broker's notices, so that a waiting caller learns when no worker serves the
# queue.
_WAIT_SLICE_S = 4.0
# Interval at which a job that waits in a thread checks whether it has to stop.
_ORDERS_SLICE_S = 0.25

# Blocking call and its replacement in an event loop, for calls that enqueue.
BLOCKING = ("delay()", "adelay()")

Run: TypeAlias = tuple[str, str, int, int, int]
"""(task, queue, attempt, generation, ended_at_ms) of the run that produced a value."""
Ended: TypeAlias = tuple[int, bytes, Run | None]
"""(status, body, run) of a job that has ended; ``run`` is None where the broker does not know it."""


class Connection:
    """Client with both blocking and awaitable calls. Use ``connect`` to get a shared one."""

    def __init__(self, url: str, client: _core.Client) -> None:
        self.url = url
        self._client = client
        self._ports = _Ports(self.log_notices)
        self._notices_due = 0.0
        # Bound once: these are on the path of every delay().
        self.publish = client.publish
        self.publish_same = client.publish_same
        self.publish_many = client.publish_many
        self.peek = client.peek
        self.message_info = client.message_info
        self.progress = client.progress
        self.consumers = client.consumers
        self.failed = client.failed
        self.order_failed = client.order_failed
        self.operation = client.operation

    def wait(self, job_id: bytes, timeout_s: float | None) -> tuple[int, bytes]:
        """Wait for a job's end. Without a timeout this also waits for an unreachable broker."""
        warn_of_blocking("result()", "aresult()")
        with lending() as loan:
            if loan is None:
                _warn_of_waiting_job()
            waiter = _waiter()
            return self._in_slices(
                lambda slice_s: self._client.wait(job_id, slice_s, waiter=waiter, loan=loan),
                timeout_s,
                job_id if waiter is None else None,
            )

    def _in_slices(self, wait: Callable[[float], T], timeout_s: float | None, job_id: bytes | None = None) -> T:
        """Wait in slices and log the broker's notices in between. ``job_id``: also log when nothing will run that
        job."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            left_s = math.inf if deadline is None else max(0.0, deadline - time.monotonic())
            # The last slice must not be short, or a healthy broker would seem unreachable in it.
            slice_s = left_s if left_s < 2 * _WAIT_SLICE_S else _WAIT_SLICE_S
            try:
                return wait(slice_s)
            except (ResultTimeout, CallTimeout, BrokerUnavailable):
                has_logged = self.log_notices()
                if deadline is not None and time.monotonic() >= deadline:
                    raise
                if job_id is not None and not has_logged:
                    self._log_that_nothing_runs(job_id)
                job_id = None

    def _log_that_nothing_runs(self, job_id: bytes) -> None:
        """Log where a job is that no worker will run. The broker may have sent its notice to another client."""
        where = self.whereabouts_of_one([job_id], self.broker, _WAIT_SLICE_S, only_stuck=True)
        if where:
            logger.warning("%s", where)

    async def submit(self, jobs: Sequence[tuple[_core.Options, bytes]], timeout_s: float) -> list[bytes | tuple[bytes]]:
        """Commit the jobs in one transaction, like ``publish_many``. Cancelling the await does not withdraw them."""
        ids: list[bytes | tuple[bytes]] = []

        def start(port: _core.Port, token: int) -> None:
            ids.extend(self._client.submit(jobs, timeout_s, port, token))

        owners = await self._call(start)
        for place, owner in cast("list[tuple[int, bytes]]", owners):
            ids[place] = (owner,)
        return ids

    def publish_plan(self, plan: Plan, jobs: Sequence[tuple[_core.Options, bytes]], timeout_s: float) -> Built:
        """Commit a workflow in one transaction. ``jobs``: the plan's jobs with their final headers."""
        built = plan.build(jobs)
        if len(built.graph):
            is_new = self._client.publish_graph(built.graph, plan.named(built), timeout_s)
            return built if is_new else built._replace(is_new=False)
        return built

    def build_plan(
        self, plan: Plan, jobs: Sequence[tuple[_core.Options, bytes]], build: Build, leaves: Leaving
    ) -> Built:
        """Build steps to send when the running job ends."""
        return build(jobs)

    async def submit_plan(self, plan: Plan, jobs: Sequence[tuple[_core.Options, bytes]], timeout_s: float) -> Built:
        """Like ``publish_plan``, but awaitable. Cancelling the await does not withdraw the workflow."""
        built = plan.build(jobs)
        if len(built.graph):
            await self._call(
                lambda port, token: self._client.submit_graph(built.graph, built.workflow_id, timeout_s, port, token)
            )
        return built

    def workflows(
        self, state: str | None, name: str | None, after: bytes | None, timeout_s: float
    ) -> tuple[list[str], bytes | None]:
        """Return a page of workflows as JSON, and where to continue."""
        return self._client.workflows(state, name, after, timeout_s)

    def workflow_status(self, workflow: bytes, timeout_s: float) -> tuple[str, list[bytes]] | None:
        """Return a workflow with its steps as JSON, and its first failed jobs; None if the broker does not list it."""
        return self._client.workflow_status(workflow, timeout_s)

    def may_end(self) -> bool:
        """Whether anything may end a job that a caller waits for."""
        return True

    def move_clock(self, forward_ms: int, timeout_s: float) -> int:
        """Advance the clock of a broker in memory, and return its time."""
        return self._client.move_clock(forward_ms, timeout_s)

    def order_schedule(
        self, app: str, name: str, order: str, call: tuple[_core.Timing, _core.Options, bytes] | None, timeout_s: float
    ) -> bytes | None:
        """Change a schedule; return the id of the job that this created, if any."""
        return self._client.order_schedule(app, name, order, call, timeout_s)

    def schedules(
        self, app: str, name: str | None, after: str | None, times: int, timeout_s: float
    ) -> tuple[list[str], str | None]:
        """Return a page of an app's schedules as JSON, and where to continue."""
        return self._client.schedules(app, name, after, times, timeout_s)

    # Whether large groups may be sent in several transactions.
    sends_parts = True

    def begin_graph(self, graph: _core.Graph, workflow: bytes, timeout_s: float, port: _core.Port, token: int) -> None:
        """Commit a part of a workflow; the port reports when that is done."""
        self._client.submit_graph(graph, workflow, timeout_s, port, token)

    def seal(self, join: bytes, count: int, workflow: bytes, timeout_s: float) -> None:
        """Declare that all members of a group that was sent in parts have arrived."""
        graph = _core.Graph()
        graph.seal(join, count)
        self._client.publish_graph(graph, workflow, timeout_s)

    def cancel_workflow(self, workflow: bytes, reason: str, running: str, timeout_s: float) -> int | None:
        """Cancel all jobs of a workflow, and return the number of the operation."""
        return self._client.cancel_workflow(workflow, reason, running, timeout_s)

    async def acancel_workflow(self, workflow: bytes, reason: str, running: str, timeout_s: float) -> int | None:
        import asyncio

        return await asyncio.to_thread(self.cancel_workflow, workflow, reason, running, timeout_s)

    async def watch(self, job_id: bytes, timeout_s: float | None) -> tuple[int, bytes]:
        async with alending() as loan:
            if loan is None:
                _warn_of_waiting_job()
            end = await self._call(
                lambda port, token: self._client.watch(job_id, timeout_s, port, token, waiter=_waiter())
            )
        return cast(tuple[int, bytes], end)

    async def peek_async(self, job_id: bytes, timeout_s: float) -> Ended | None:
        end = await self._call(lambda port, token: self._client.peek_async(job_id, timeout_s, port, token))
        return cast(Ended | None, end)

    async def message_info_async(self, job_id: bytes, timeout_s: float) -> dict[str, object] | None:
        end = await self._call(lambda port, token: self._client.message_info_async(job_id, timeout_s, port, token))
        return cast(dict[str, object] | None, end)

    def cancel(self, job_id: bytes, reason: str, running: str, timeout_s: float) -> str | None:
        """Cancel a job that is not running, or ask a running one to stop; return the state it was found in."""
        return self._client.cancel(job_id, reason, running, timeout_s)

    async def cancel_async(self, job_id: bytes, reason: str, running: str, timeout_s: float) -> str | None:
        end = await self._call(
            lambda port, token: self._client.cancel_async(job_id, reason, running, timeout_s, port, token)
        )
        return cast(str | None, end)

    def wait_all(self, job_ids: Sequence[bytes], timeout_s: float | None) -> list[tuple[int, bytes]]:
        """Wait for the end of each job; a value that is no longer kept is (-1, b"")."""
        with lending() as loan:
            if loan is None:
                _warn_of_waiting_job()
            waiter = _waiter()
            return self._in_slices(
                lambda slice_s: self._client.wait_all(job_ids, slice_s, waiter=waiter, loan=loan), timeout_s
            )

    def read_all(self, job_ids: Sequence[bytes], timeout_s: float | None) -> list[tuple[int, bytes]]:
        """Like ``wait_all``, for jobs that have all ended."""
        return self._in_slices(lambda slice_s: self._client.wait_all(job_ids, slice_s), timeout_s)

    async def aread_all(self, job_ids: Sequence[bytes], timeout_s: float | None) -> list[tuple[int, bytes]]:
        end = await self._call(lambda port, token: self._client.watch_all(job_ids, timeout_s, port, token))
        return cast(list[tuple[int, bytes]], end)

    async def watch_all(self, job_ids: Sequence[bytes], timeout_s: float | None) -> list[tuple[int, bytes]]:
        async with alending() as loan:
            if loan is None:
                _warn_of_waiting_job()
            end = await self._call(
                lambda port, token: self._client.watch_all(job_ids, timeout_s, port, token, waiter=_waiter())
            )
        return cast(list[tuple[int, bytes]], end)

    def each(
        self, job_ids: Sequence[bytes], timeout_s: float | None, call_timeout_s: float, *, any_of: bool = False
    ) -> Iterator[tuple[int, tuple[int, bytes] | None]]:
        """Yield (index, end) of each job as it ends. ``any_of``: the caller waits for only one of them.

        With a timeout of 0 or less each is yielded at once, with None for a job that has not ended. The broker must
        then answer within ``call_timeout_s``.
        """
        port, poll = _core.Port(), select.poll()
        poll.register(port.fileno(), select.POLLIN)
        left = len(job_ids)
        self._begin_each(job_ids, timeout_s, call_timeout_s, port, any_of)
        try:
            while left:
                self._poll(poll, only_ask=timeout_s is not None and timeout_s <= 0)
                self.log_notices()
                for _, outcome in port.drain():
                    if isinstance(outcome, BaseException):
                        raise outcome
                    left -= 1
                    yield cast(tuple[int, tuple[int, bytes] | None], outcome)
        finally:
            self._client.forget(port, 0)
            port.close()

    def _poll(self, poll: select.poll, only_ask: bool) -> None:
        """Wait for news. Inside a job, lend its slot meanwhile."""
        if only_ask:
            poll.poll(_WAIT_SLICE_S * 1000)
            return
        with lending() as loan:
            if loan is None:
                _warn_of_waiting_job()
                poll.poll(_WAIT_SLICE_S * 1000)
            elif not poll.poll(SHORT_S * 1000):
                loan.begin()
                until = time.monotonic() + _WAIT_SLICE_S
                # A job in a thread receives orders between two polls.
                while not poll.poll(_ORDERS_SLICE_S * 1000) and time.monotonic() < until:
                    pass

    async def aeach(
        self, job_ids: Sequence[bytes], timeout_s: float | None, call_timeout_s: float, *, any_of: bool = False
    ) -> AsyncGenerator[tuple[int, tuple[int, bytes] | None], None]:
        """Like ``each``, but awaitable."""
        import asyncio

        port, ready, loop = _core.Port(), asyncio.Event(), asyncio.get_running_loop()
        left, only_ask = len(job_ids), timeout_s is not None and timeout_s <= 0
        loop.add_reader(port.fileno(), ready.set)
        try:
            self._begin_each(job_ids, timeout_s, call_timeout_s, port, any_of)
            while left:
                async with contextlib.nullcontext() if only_ask else alending() as loan:
                    if loan is None and not only_ask:
                        _warn_of_waiting_job()
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(ready.wait(), _WAIT_SLICE_S)
                self.log_notices()
                ready.clear()
                for _, outcome in port.drain():
                    if isinstance(outcome, BaseException):
                        raise outcome
                    left -= 1
                    yield cast(tuple[int, tuple[int, bytes] | None], outcome)
        finally:
            loop.remove_reader(port.fileno())
            self._client.forget(port, 0)
            port.close()

    def _begin_each(
        self,
        job_ids: Sequence[bytes],
        timeout_s: float | None,
        call_timeout_s: float,
        port: _core.Port,
        any_of: bool,
    ) -> None:
        only_ask = timeout_s is not None and timeout_s <= 0
        # A caller that waits for any one of several jobs is in no cycle while another of them may end.
        waiter = _waiter() if not any_of or len(job_ids) == 1 else None
        limit_s = call_timeout_s if only_ask else timeout_s
        self._client.watch_each(job_ids, limit_s, only_ask, port, 0, waiter=waiter)

    async def _call(self, start: Callable[[_core.Port, int], None]) -> object:
        self.log_notices()
        loop = _running_loop()
        port = self._ports.of(loop)
        token, future = port.expect(loop)
        try:
            start(port.core, token)
            return await future
        finally:
            # Ended, refused or cancelled; cancelling affects only this wait.
            if port.forget(token):
                self._client.forget(port.core, token)

    def whereabouts(self, job_id: bytes, url: str, call_timeout_s: float) -> str:
        """Describe where an unfinished job is. Raises ``PenstockError`` when the broker does not answer."""
        from penstock._jobs.whereabouts import whereabouts

        return whereabouts(self, job_id, url, call_timeout_s)

    def whereabouts_of_one(
        self, job_ids: Sequence[bytes], url: str, call_timeout_s: float, *, only_stuck: bool = False
    ) -> str:
        """Describe an unfinished job that keeps the others waiting; empty when none is found."""
        from penstock._jobs.whereabouts import whereabouts_of_one

        return whereabouts_of_one(self, job_ids, url, call_timeout_s, only_stuck=only_stuck)

    def log_notices(self, blocking: tuple[str, str] | None = None) -> bool:
        """Log the broker's notices, at most once a second. Return whether there were any.

        ``blocking``: the call just made, and the call that code in an event loop should make instead.
        """
        now = time.monotonic()
        if now < self._notices_due:
            return False
        self._notices_due = now + 1.0
        if blocking is not None:
            warn_of_blocking(*blocking)
        notices = self._client.take_notices()
        for notice in notices:
            logger.warning("%s: %s", self.broker, notice)
        return bool(notices)

    @property
    def broker(self) -> str:
        """Broker's URL, with the full directory of a local one, since two local brokers are easily confused."""
        return self._client.broker()

    def rest(self, timeout_s: float) -> None:
        """Disconnect for now; the next call opens a new connection."""
        self._client.rest(timeout_s)

    def close(self, timeout_s: float) -> None:
        self._client.close(timeout_s)
        self._ports.close()


class _LoopPort:
    """Port of one event loop's calls. Holds no reference to the loop, which may be collected."""

    def __init__(self, log_notices: Callable[[], object]) -> None:
        self.core = _core.Port()
        self._log_notices = log_notices
        self._pending: dict[int, asyncio.Future[object]] = {}
        self._watches_for_notices = False
        self._retiring = False

    def expect(self, loop: asyncio.AbstractEventLoop) -> tuple[int, asyncio.Future[object]]:
        token, future = next(_tokens), loop.create_future()
        self._pending[token] = future
        if not self._watches_for_notices:
            self._watches_for_notices = True
            loop.call_later(_WAIT_SLICE_S, self._show_notices)
        return token, future

    def forget(self, token: int) -> bool:
        return self._pending.pop(token, None) is not None

    def drain(self) -> None:
        for token, end in self.core.drain():
            future = self._pending.pop(token, None)
            if future is None or future.done():
                continue
            if isinstance(end, BaseException):
                future.set_exception(end)
            else:
                future.set_result(end)
        if self._retiring and not self._pending:
            _running_loop().remove_reader(self.core.fileno())

    def retire(self) -> None:
        """Detach from the loop once the calls that ``close`` interrupted have received their errors."""
        self._retiring = True
        self.drain()

    def _show_notices(self) -> None:
        self._watches_for_notices = bool(self._pending)
        if self._pending:
            self._log_notices()
            _running_loop().call_later(_WAIT_SLICE_S, self._show_notices)


_tokens = itertools.count(1)


_warned_of: set[str] = set()


def warn_of_blocking(call: str, instead: str) -> None:
    """Warn once per process that a call blocks an event loop."""
    asyncio = sys.modules.get("asyncio")
    if asyncio is None or call in _warned_of or asyncio._get_running_loop() is None:
        return
    _warned_of.add(call)
    logger.warning("%s was called in an event loop, which it blocks; use %s instead", call, instead)


def _waiter() -> bytes | None:
    """Return the id of the running job in which the caller is about to wait, if any."""
    current = running.get()
    return None if current is None else current[0]


def _warn_of_waiting_job() -> None:
    """Warn once per task whose jobs wait in threads that are not slots, and so keep their slots while they wait."""
    current = running.get()
    if current is None or current[5].name in _warned_of:
        return
    task = current[5].name
    _warned_of.add(task)
    logger.warning(
        "the task %s waits for other jobs in a thread that it started, so it keeps its slot while it waits: if all"
        " slots of a worker wait like this, none is left for the awaited jobs. Wait in the task's own thread instead",
        task,
    )


def _running_loop() -> asyncio.AbstractEventLoop:
    # Imported here because it would take a third of the time of `import penstock`.
    import asyncio

    return asyncio.get_running_loop()


class _Ports:
    """A port for each event loop that has made a call."""

    def __init__(self, log_notices: Callable[[], object]) -> None:
        self._log_notices = log_notices
        self._of_loop: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _LoopPort] = weakref.WeakKeyDictionary()

    def of(self, loop: asyncio.AbstractEventLoop) -> _LoopPort:
        port = self._of_loop.get(loop)
        if port is None:
            port = self._of_loop[loop] = _LoopPort(self._log_notices)
            loop.add_reader(port.core.fileno(), port.drain)
            # A loop does not report that it was closed, so the descriptor is closed when the loop is collected.
            weakref.finalize(loop, port.core.close)
        return port

    def close(self) -> None:
        for loop, port in list(self._of_loop.items()):
            if not loop.is_closed():
                loop.call_soon_threadsafe(port.retire)
        self._of_loop.clear()


_connections: dict[tuple[str, str | None], Connection] = {}
# Connections of apps with their own broker; each is dropped with its owner. None: there has been no such app.
_owned: weakref.WeakKeyDictionary[object, Connection] | None = None
_lock = threading.Lock()
# Connections that a forked child inherited belong to its parent. They are kept because dropping one would run the
# shutdown of a connection whose threads do not exist here.
_inherited: list[object] = []
_generation = 0


def generation() -> int:
    """Return a number that changes on fork and on ``close``. A connection kept under an older number is stale."""
    return _generation


def is_own(url: str) -> bool:
    """Whether each app has its own broker at this URL, as a test double."""
    return url.startswith("memory:")


def connect(url: str, name: str, owner: App) -> Connection:
    """Return the owner's own connection if it has one, else this process's connection to ``url``. Opens nothing."""
    global _owned
    if _guard.may_connect is not None:
        _guard.may_connect(owner)
    token = os.environ.get("PENSTOCK_TOKEN")
    with _lock:
        if is_own(url):
            if _owned is None:
                _owned = weakref.WeakKeyDictionary()
            connection = _owned.get(owner)
            if connection is None:
                connection = _owned[owner] = new_connection(url, token, name)
            return connection
        connection = _connections.get((url, token))
        if connection is None:
            connection = _connections[url, token] = new_connection(url, token, name)
        return connection


def new_connection(url: str, token: str | None, name: str) -> Connection:
    """Make an unshared connection. Opens nothing."""
    return Connection(url, _core.Client(url, token=token, program=penstock_program(), name=name))


def start_over() -> None:
    """Make every app look up its broker, and whether it may use it, again. Closes no connection."""
    global _generation
    with _lock:
        _generation += 1


def disconnect(connection: Connection, timeout_s: float) -> None:
    """Close the connection for all apps that share it; their next call opens a new one."""
    global _generation
    with _lock:
        for key, value in list(_connections.items()):
            if value is connection:
                del _connections[key]
                _generation += 1
        if _owned is not None:
            for owner, value in list(_owned.items()):
                if value is connection:
                    del _owned[owner]
    connection.close(timeout_s)


def _disconnect_all() -> None:
    # Jobs sent with durability="none" may still be in flight. The connections are not closed, because later exit
    # handlers and daemon threads may still enqueue. An app's own broker exits with this process anyway.
    for connection in list(_connections.values()):
        connection.rest(1.0)


# Registered at import, so that exit handlers registered later run first.
atexit.register(_disconnect_all)


def _start_anew_after_fork() -> None:
    """Leave the parent's connections to it.

    Writes nothing where there are none, as in a worker's zygote: each write would copy a page for each isolated job.
    """
    global _lock, _connections, _owned, _generation
    if _lock.locked():
        _lock = threading.Lock()  # by a thread that does not exist here
    if _connections or _owned is not None:
        _inherited.append((_connections, [] if _owned is None else list(_owned.values())))
        _connections, _owned, _generation = {}, None, _generation + 1


os.register_at_fork(after_in_child=_start_anew_after_fork)


def penstock_program() -> str | None:
    """Return the executable that ``local:`` starts. Does not use ``sys.executable``, which is wrong under uWSGI."""
    program = os.path.join(os.path.dirname(os.path.abspath(__file__)), "_bin", "penstock")
    return program if os.path.isfile(program) else None
