"""Rust half of penstock: conversions only. A test checks this file against the compiled module.

Every blocking call releases the interpreter lock. Times are in seconds where a name ends in ``_s``, and in milliseconds
where it ends in ``_ms``. Errors are the classes of ``penstock.errors``.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, final

from penstock._worker.runner import Delivered

__all__ = [
    "ChildLink",
    "Client",
    "Consumer",
    "Graph",
    "Loan",
    "Options",
    "Port",
    "Role",
    "SlotLink",
    "WrittenPages",
    "__version__",
    "collapse_heap",
    "draw_workflow",
    "fill_holes",
    "flush_c_output",
    "gather_arenas",
    "has_one_thread",
    "make_immortal",
    "Timing",
    "declare_schedule",
    "serve_forks",
]

__version__: str

_Filter: TypeAlias = tuple[str | None, str | None, str | None, int | None, int | None, int | None, bytes | None]
"""(queue, task, class, fingerprint, failed_from_ms, failed_before_ms, workflow)"""

@final
class Options:
    """Everything about a job except its body, checked and frozen. Created once per task and per ``options()``.

    By default the priority is 4 and a result is kept for 24 hours.
    """

    def __new__(
        cls,
        task: str,
        *,
        queue: str = "default",
        priority: int = ...,
        countdown_ms: int | None = None,
        eta_ms: int | None = None,
        expires_after_ms: int | None = None,
        expires_at_ms: int | None = None,
        result_ttl_ms: int | None = ...,
        max_crashes: int = 3,
        durability: str = "disk",
        retries: int | Sequence[int] | None = None,
        headers: Sequence[tuple[str, str]] = ...,
        timeout_ms: int | None = None,
        soft_timeout_ms: int | None = None,
    ) -> Options: ...
    def with_headers(self, headers: Sequence[tuple[str, str]]) -> Options:
        """Return the same options with these headers instead of their own."""
    def claimed(
        self,
        key: bytes,
        *,
        is_own: bool,
        until: str,
        for_ms: int | None = None,
        conflict: str = "return",
        wait_ms: int | None = None,
        max_wait_ms: int | None = None,
    ) -> Options:
        """Return the options of one call that claims a key.

        ``is_own``: the key is the caller's own. ``until``: ``"start"``, ``"end"``, or ``"time"`` with ``for_ms``.
        ``wait_ms``: the call is due after this time; the last of several calls is due at most ``max_wait_ms`` after the
        first.
        """
    def at_once(self) -> Options:
        """Return the same options without their countdown or eta."""
    def details(self) -> dict[str, Any]:
        """Return the options that have no property: priority, countdown_ms, eta_ms, expires_after_ms, expires_at_ms,
        result_ttl_ms, max_crashes, durability, timeout_ms and soft_timeout_ms, each as given, or None."""
    @property
    def task(self) -> str: ...
    @property
    def queue(self) -> str: ...
    @property
    def retries(self) -> int | tuple[int, ...] | None: ...
    @property
    def headers(self) -> dict[str, str]: ...

@final
class Port:
    """Inbox of finished asynchronous calls: register ``fileno()`` with the event loop, then call ``drain()``."""

    def __new__(cls) -> Port: ...
    def fileno(self) -> int: ...
    def drain(self) -> list[tuple[int, object | BaseException]]:
        """Return the calls that finished since the last drain, each as (token, value or exception)."""
    def close(self) -> None: ...

@final
class Graph:
    """Jobs and joins of one workflow, collected for one transaction.

    Add dependencies first: a join before its members.
    """

    def __new__(cls, depth: int = 0) -> Graph:
        """``depth``: number of successive replacements that led to this graph."""
    def encode(self, workflow: bytes | None) -> bytes:
        """Return the encoded graph, for the end of the running job. ``workflow``: id for its jobs; None for a single
        job."""
    def derive_ids(self, job_id: bytes, seed: bytes) -> None:
        """Derive all ids from the sending job's id and 32 bytes, so that they are the same each time."""
    def grow(self, job_id: bytes, outer: bool) -> bytes:
        """Make the graph a new member of a running job's group, and return the id that stands for it. ``outer``: the
        job's join is a member of the group."""
    def note(self, key: bytes, ttl_ms: int, once: bool) -> None:
        """Add a note under its own key. ``once``: send the graph only if there is no such note yet."""
    def join(
        self,
        count: int,
        max_failures: int | None,
        then: Sequence[tuple[bytes, int]],
        result_ttl_ms: int | None,
        *,
        kind: int = 0,
        expects: Sequence[tuple[int, int]] = ...,
        grows: bool = False,
        creator: bytes | None = None,
    ) -> bytes:
        """Add a join of ``count`` members and return its id. ``max_failures``: None for any number.

        ``grows``, with a ``count`` of 0: members come in several transactions, until one seals the join. If the creator
        (the session, or the lease of the running job ``creator``) ends before that, the broker cancels the workflow.

        ``then``: places of the join in other joins, as (join, index). With ``result_ttl_ms`` its outcome is a value,
        stored under the keys of these places (``join`` with the index + 1 in its last three bytes), or else under its
        own id.

        ``kind``: the three lowest bits of byte 12 of its id. Two are for the composition of its value: 0 a list of its
        members' values, 1 the only member's value, 2 the members' values by name, 3 an empty list. The third bit (4) is
        set for a group to which its members may add others, and for a join that wraps one of its members.

        ``expects``: required outcomes of some members, as (index, ``when`` of a job), by ascending index.
        """
    def also(self, join: bytes, place: tuple[bytes, int]) -> None:
        """Add one more place of a join in another join. The join's outcome must not be a value."""
    def value(self, id: bytes, body: bytes, ttl_ms: int) -> None:
        """Add a value that is sent with the workflow, under an id that no job has."""
    def job(
        self,
        options: Options,
        body: bytes,
        *,
        place: tuple[bytes, int] | None = None,
        held_by: bytes | None = None,
        shape: int | None = None,
        when: int = 0,
        mark: str | None = None,
    ) -> bytes:
        """Add a job and return its id.

        ``place``: its place in a join, as (join, index). ``held_by``: the join that it waits for. ``shape``: shape of
        that join's values as its first argument: 0 the only one, 1 a list, 2 named, None for no argument. ``when``:
        outcome of the join that releases the job: 0 success, 1 failure, 2 either. ``mark``: value of its header
        ``penstock.step``.
        """
    def open(
        self,
        name: str,
        description: bytes,
        *,
        deadline_after_ms: int | None = None,
        deadline_at_ms: int | None = None,
        kept_ms: int | None = None,
        parent: bytes | None = None,
    ) -> None:
        """List the workflow at the broker under this name, of at most 255 bytes.

        ``description``: steps as JSON, at most 16 KiB, for ``crates/penstock-drawing``. The workflow is cancelled
        ``deadline_after_ms`` from now, or at ``deadline_at_ms``. ``kept_ms``: time for which it is listed after it has
        succeeded. ``parent``: job that sends it.
        """
    def seal(self, join: bytes, count: int) -> None:
        """Declare that members 0 to ``count - 1`` of a join that ``grows`` have all been sent."""
    def __len__(self) -> int: ...

@final
class Timing:
    """Times and policies of a schedule, checked and frozen. Raises ``ValueError``."""

    def __new__(
        cls,
        *,
        cron: str | None,
        every_ms: int | None,
        at_ms: int | None,
        zone: str,
        jitter_ms: int,
        overlap: str,
        catchup: str,
        window_ms: int,
    ) -> Timing: ...

def declare_schedule(
    app: str, name: str, timing: Timing, options: Options, body: bytes, version: int | str | None, started_ms: int
) -> str:
    """Return the declaration of a schedule in code, for a worker to send."""

@final
class Client:
    """Connection of one process to a broker. Creating it opens, starts and connects nothing.

    After a fork the first call in the child begins a new session automatically.
    ``url``: ``local:PATH``, ``penstock+unix:PATH``/``unix:PATH``, ``tcp://HOST:PORT``, or ``memory:``.
    ``program``: the penstock executable that ``local:`` starts when no broker serves PATH, and ``memory:`` always.
    """

    def __new__(
        cls, url: str, *, token: str | None = None, program: str | None = None, name: str | None = None
    ) -> Client: ...

    # Blocking calls, allowed in any thread. Each call is one transaction.
    def publish(self, options: Options, body: bytes, timeout_s: float) -> bytes:
        """Commit one job and return its id (16 bytes) once it is as durable as its options say."""
    def publish_same(self, options: Options, bodies: Sequence[bytes], timeout_s: float) -> list[bytes]: ...
    def publish_many(self, jobs: Sequence[tuple[Options, bytes]], timeout_s: float) -> list[bytes | tuple[bytes]]:
        """Commit the jobs in one transaction and return their ids; ``(id,)`` is the id of an existing job that already
        holds the key of the call."""
    def publish_graph(self, graph: Graph, workflow: bytes | None, timeout_s: float) -> bool:
        """Commit the graph in one transaction; False if its note says that it was sent before.

        ``workflow``: workflow id of its jobs; None for a single job.
        """
    def cancel_workflow(self, workflow: bytes, reason: str, running: str, timeout_s: float) -> int | None:
        """Cancel all jobs of a workflow, and return the number of the operation."""
    def wait(
        self, job_id: bytes, timeout_s: float | None, *, waiter: bytes | None = None, loan: Loan | None = None
    ) -> tuple[int, bytes]:
        """Wait for the job's end and return (status, body).

        The status is 0 succeeded, 1 failed, 2 expired, 3 crashed or 4 cancelled. Raises ResultExpired when there is no
        value and none is to come. When the time is up, raises ResultTimeout if the broker answers, or BrokerUnavailable
        if it is unreachable. ``waiter``: id of the job inside which the caller waits; WaitCycle and TooManyWaiting may
        then be raised, too.
        """
    def wait_all(
        self,
        job_ids: Sequence[bytes],
        timeout_s: float | None,
        *,
        waiter: bytes | None = None,
        loan: Loan | None = None,
    ) -> list[tuple[int, bytes]]:
        """Like ``wait`` for each job, in order of the ids; a value that is no longer kept is (-1, b"")."""
    def cancel(self, job_id: bytes, reason: str, running: str, timeout_s: float) -> str | None:
        """Cancel a job that is not running, or ask a running one to stop, and return the state it was found in.

        The state is as in ``message_info``; None if the broker holds no such job, or no longer knows its state.
        """
    def peek(self, job_id: bytes, timeout_s: float) -> tuple[int, bytes, tuple[str, str, int, int, int] | None] | None:
        """Return the value if it is available, None while it is pending. Raises ResultExpired when it is no longer
        kept.

        The value is (status, body, run). ``run``, where the broker knows it, is (task, queue, attempt, generation,
        ended_at_ms).
        """
    def message_info(self, job_id: bytes, timeout_s: float) -> dict[str, object] | None:
        """Return the details of a job that the broker still holds: task, queue, state ("ready", "delayed", "running",
        "held", "failed", "blocked", "cancelling", "parked"), enqueued_at_ms, started_at_ms, due_at_ms, failed_at_ms,
        attempt, crashes, generation, worker, notes (list of bytes), failure (text or None)."""
    def progress(self, job_id: bytes, timeout_s: float) -> bytes | None:
        """Return the latest progress of a job as JSON: [done, total or null, message]."""
    def consumers(self, queue: str, timeout_s: float) -> int:
        """Return the number of consumers of a queue: a worker has one for each kind of slot."""
    def broker(self) -> str:
        """Return the broker's URL, with the full directory of a local one. Does not ask the broker."""
    def status(self, timeout_s: float) -> dict[str, object]: ...
    def purge(self, queue: str, timeout_s: float) -> None: ...
    def failed(
        self, filter: _Filter, newest_first: bool, after: int, timeout_s: float
    ) -> tuple[list[dict[str, Any]], int | None]:
        """Return a page of failed jobs, oldest or newest first, and the value of ``after`` for the next page.

        A job is id (text), task, queue, attempt, crashes, generation, enqueued_at_ms, failed_at_ms, error, message,
        fingerprint, preview (text), body_bytes.
        """
    def workflows(
        self, state: str | None, name: str | None, after: bytes | None, timeout_s: float
    ) -> tuple[list[str], bytes | None]:
        """Return a page of workflows as JSON, newest first, and the value of ``after`` for the next page."""
    def workflow_status(self, workflow: bytes, timeout_s: float) -> tuple[str, list[bytes]] | None:
        """Return a workflow with its steps and states as JSON, and the ids of its first 100 failed jobs.

        Returns None if the broker does not list it.
        """
    def order_schedule(
        self, app: str, name: str, order: str, call: tuple[Timing, Options, bytes] | None, timeout_s: float
    ) -> bytes | None:
        """Change a schedule: ``"set"`` (with a call), ``"pause"``, ``"resume"``, ``"run"``, ``"reset"`` or
        ``"remove"``.

        Returns the id of the job that this created, if any.
        """
    def schedules(
        self, app: str, name: str | None, after: str | None, times: int, timeout_s: float
    ) -> tuple[list[str], str | None]:
        """Return a page of an app's schedules as JSON, with the given number of upcoming times for each, and the value
        of ``after`` for the next page."""
    def order_failed(
        self, order: str, job_id: bytes | None, filter: _Filter, queue: str | None, timeout_s: float
    ) -> int | None:
        """``"retry"`` or ``"remove"`` one failed job. Without an id, do so for all that match, and return the number of
        the operation."""
    def operation(self, operation: int, timeout_s: float) -> tuple[int, int, bool] | None:
        """Return the progress of an operation: (done, skipped, is_over)."""
    def declare_schedule(self, declaration: str, timeout_s: float) -> None:
        """Send the declaration of a schedule, as a worker does when it starts."""
    def move_clock(self, forward_ms: int, timeout_s: float, *, by_schedules: bool = False) -> int:
        """Advance the clock of a ``memory:`` broker, and return its time (Unix milliseconds).

        ``by_schedules``: advance from one time of a schedule to the next, and stop at the first that created a job, or
        earlier; call it again to continue. Other brokers raise NotOffered.
        """
    def take_notices(self) -> list[str]:
        """Return the broker's new notices, each once, for the log."""
    def close(self, timeout_s: float) -> None: ...
    def rest(self, timeout_s: float) -> None:
        """Disconnect for now; the next call opens a new connection. Calls of other threads continue."""

    # Calls for an event loop: they return at once, and the port receives the outcome under the token.
    def submit_graph(self, graph: Graph, workflow: bytes, timeout_s: float, port: Port, token: int) -> None: ...
    def submit(self, jobs: Sequence[tuple[Options, bytes]], timeout_s: float, port: Port, token: int) -> list[bytes]:
        """Start to commit the jobs and return their ids. The port receives the exception, or the (index, id) of the
        existing job for each call that created none."""
    def watch(
        self, job_id: bytes, timeout_s: float | None, port: Port, token: int, *, waiter: bytes | None = None
    ) -> None:
        """Send to the port what ``wait`` would return or raise."""
    def watch_all(
        self,
        job_ids: Sequence[bytes],
        timeout_s: float | None,
        port: Port,
        token: int,
        *,
        waiter: bytes | None = None,
    ) -> None:
        """Send to the port what ``wait_all`` would return or raise."""
    def watch_each(
        self,
        job_ids: Sequence[bytes],
        timeout_s: float | None,
        only_ask: bool,
        port: Port,
        token: int,
        *,
        waiter: bytes | None = None,
    ) -> None:
        """Send to the port (index, (status, body)) for each job as it ends, all under one token.

        A value that is no longer kept is (-1, b""). ``only_ask``: send each at once, with None for a job that has not
        ended.
        """
    def cancel_async(
        self, job_id: bytes, reason: str, running: str, timeout_s: float, port: Port, token: int
    ) -> None: ...
    def message_info_async(self, job_id: bytes, timeout_s: float, port: Port, token: int) -> None: ...
    def peek_async(self, job_id: bytes, timeout_s: float, port: Port, token: int) -> None: ...
    def forget(self, port: Port, token: int) -> None:
        """Forget a call after a cancelled await, whose outcome nobody needs. Does not affect the job."""

@final
class Consumer:
    """Takes jobs of a client's broker in this process, over the client's connection. For tests of applications.

    Any thread may call it, and several threads may take jobs at once.
    """

    def __new__(cls, client: Client, app: str) -> Consumer:
        """``app``: name shown to people."""
    def serve(self, queues: Sequence[str], tasks: Sequence[str]) -> None:
        """Take jobs of these tasks from these queues from now on. Call it before the first ``take``."""
    def take(self, wait: bool, timeout_s: float) -> Delivered | None:
        """Take the next job.

        Without ``wait``, None means that the broker has no ready job; it must answer within the timeout. With ``wait``,
        None means that ``stop`` was called.
        """
    def progress(self, job_id: bytes, done: float, total: float | None, message: str) -> bool:
        """Report the progress of a taken job. False if it was not taken, or was settled already."""
    def finish(
        self,
        job_id: bytes,
        kind: int,
        delay_ms: int,
        value: bytes | None,
        note: bytes | None,
        failure: tuple[str, str, int, bytes] | None,
        timeout_s: float,
    ) -> None:
        """Settle a taken job with the outcome of ``Runner.run``. Returns once the broker has confirmed that."""
    def left(self, timeout_s: float) -> tuple[int, int]:
        """Return the number of ready jobs that it could take, and the number of taken jobs that are not settled."""
    def stop(self, timeout_s: float) -> None:
        """Make every ``take`` return, and hand back jobs that have arrived but were not taken."""

def draw_workflow(status: str, how: str) -> str:
    """Draw a workflow that ``workflow_status`` returned, as a ``"tree"``, ``"dot"`` or ``"svg"``."""

def make_immortal() -> int:
    """Make all objects that the garbage collector knows immortal, and what they refer to. Return their number.

    Processes that are forked then use them without writing to their memory. Does nothing on versions of Python without
    immortal objects (3.11), nor on those whose marks are not known here (after 3.13).
    """

def gather_arenas() -> bool:
    """Place the memory of further Python objects side by side, until ``collapse_heap``.

    Returns False, and changes nothing, where the allocator of Python can't be replaced or address space is limited.
    """

def fill_holes() -> None:
    """Fill the holes of the heap, so that forks allocate without copying its pages.

    Call it between ``gather_arenas`` and ``collapse_heap``, from the main thread. The blocks are never freed.
    """

def collapse_heap() -> int:
    """Ask the kernel to move this process's memory into huge pages, and return the number of bytes moved."""

def has_one_thread() -> bool:
    """Return whether this process certainly has no thread but the calling one."""

def flush_c_output() -> None:
    """Flush output that C code has printed and the C library still buffers."""

@final
class Role:
    """Role of a process that was forked from the zygote."""

    @property
    def kind(self) -> str:
        """Kind of its slots: ``"process"``, ``"thread"``, ``"async"`` or ``"isolated"``."""
    @property
    def has_only_slot(self) -> bool:
        """Whether it has one slot, in its main thread."""
    @property
    def slots(self) -> int: ...
    @property
    def once(self) -> bool:
        """Whether it exits after its first job."""
    @property
    def warm(self) -> bool:
        """Whether half of the slots are idle, so that it has time to prepare for that job."""

def serve_forks(
    control_fd: int, work_fds: Sequence[int], flush: Callable[[], object], fork: Callable[[], int]
) -> Role | None:
    """Fork children, and report how they end, as the supervisor at the other end of ``control_fd`` asks.

    Return None when the supervisor is gone, and its role in each child. Takes ownership of the descriptors; the
    children of each pool pull jobs from one of ``work_fds``. Touches no Python object between two forks, except these
    functions: ``flush``, called before each fork, and ``fork``, which is ``os.fork``.
    """

@final
class WrittenPages:
    """Pages of the shared heap that isolated jobs write to. Make it before the forks."""

    def __new__(cls) -> WrittenPages: ...
    def job_ended(self) -> None:
        """Note that a job ended in this process."""
    def copy(self) -> int:
        """Copy the pages that jobs wrote to, and return their number."""

@final
class ChildLink:
    """Worker child's side of the link to its supervisor. Creates the slots that run jobs. See
    crates/penstock-worker/src/link.rs.

    Made in the zygote and opened in the child: each Python object that a child makes is on a page that it must copy
    first."""

    def __new__(cls, pages_fd: int) -> ChildLink:
        """Make the link of a zygote's future children. Take ownership of the descriptor of the worker's pages."""

    def open(self, role: Role) -> None:
        """Open the link in a child, which exits when the zygote does. Take ownership of the role's descriptors."""
    @property
    def only_slot(self) -> SlotLink:
        """Slot of a child with a single one, open once the link is."""
    def slot(self) -> SlotLink:
        """Create a slot, which belongs to the thread that uses it."""
    def begin_threads(self, slots: int) -> int:
        """Prepare this process for this many slots in threads, and return a descriptor that reports the ends of these
        threads (see ``SlotLink.tell_end_of_thread``)."""
    def fileno(self) -> int:
        """Return the socket that slots pull from, for an event loop."""
    def flush(self) -> None:
        """Notify the supervisor of outcomes. Iterating over a slot does so automatically."""
    def serve(self, slots: int) -> None:
        """Tell the supervisor how many slots can take jobs."""
    def close(self) -> None:
        """Take no more jobs. Idle slots in line end now, the others when their jobs end."""
    def nudge(self) -> bool:
        """Interrupt the slot that waits at the socket, after ``close``, by ``SIGURG``. False if there is none."""
    def progress(self, job_id: bytes, done: float, total: float | None, message: str) -> bool:
        """Report the progress of a job that runs here, from any thread. False if it does not run here (any more)."""
    def heed(self) -> bool:
        """Handle the supervisor's requests between two jobs. True if this process must exit after its running jobs."""
    @property
    def parked(self) -> int:
        """Return the number of slots with parked jobs. The same number of other slots may run jobs in their place."""
    @property
    def has_head(self) -> bool:
        """Return whether a slot waits at the socket."""
    def dismiss(self, slots: int) -> int:
        """End up to this many slots in line, except the one at the socket. Return how many ended."""
    def abandon(self) -> None:
        """Leave the link, in a process that was forked from the child."""
    @property
    def is_abandoned(self) -> bool: ...

@final
class Loan:
    """Single wait of a running job for other jobs, during which its slot may be lent."""

    def begin(self) -> None:
        """Report that the wait is long. Waiting calls that receive the loan do so themselves."""
    def take_back(self) -> None:
        """Report that the wait is over, and return when the job may continue. Orders to the job are still delivered."""
    def ask_back(self) -> bool:
        """Report that the wait is over. True if the job must wait until ``has_turn``, which may change after a
        signal."""
    @property
    def has_turn(self) -> bool: ...
    def drop(self) -> None:
        """Abort the wait: the job continues at once."""

@final
class SlotLink:
    """Slot of a worker's child: iterate over the jobs to run, and report the outcome of each."""

    def __iter__(self) -> SlotLink: ...
    def __next__(self) -> Delivered:
        """Wait for the next job and claim it. Stops when the supervisor closes the slot."""
    def try_pull(self) -> bool | None:
        """Take a packet if there is one. True if it did, False if there is none now, None if there will be none."""
    def begin(self) -> Delivered | None:
        """Claim the next job of the packet, if there is one."""
    def finish(
        self,
        kind: int,
        delay_ms: int,
        value: bytes | None,
        note: bytes | None,
        failure: tuple[str, str, int, bytes] | None,
    ) -> bool:
        """Report the outcome of the job returned last, from ``Runner.run``.

        Returns True if the job's time was over, so that it cannot count as succeeded and must be reported as failed.
        ``failure``, only for a failed job: the error's class, message and fingerprint, and a preview of the arguments
        of at most 1 KiB.
        """
    def order(self) -> int:
        """Return the supervisor's current order for the running job: 0 none, 1 clean up (soft timeout), 2 stop because
        of cancellation, 3 stop because its time is over."""
    def take_order(self) -> int:
        """Like ``order``, and mark the order as carried out."""
    @property
    def heard(self) -> int:
        """Return the order that was taken last for the running job."""
    def strike(
        self, thread: int, exceptions: tuple[type[BaseException], type[BaseException], type[BaseException]]
    ) -> None:
        """Carry out an order by raising its exception in the thread of this slot."""
    def loan(self, job_id: bytes) -> Loan:
        """Return a loan for a wait of the job of this id. It has no effect if the slot runs another job."""
    def shield(self) -> None:
        """Defer orders to the running job, except the end of its time, until ``unshield`` was called as often."""
    def unshield(self) -> None: ...
    @property
    def is_running(self) -> bool:
        """Return whether a job was begun and its outcome not reported."""
    def tell_end_of_thread(self, number: int) -> None:
        """Make the calling thread this slot's. Its end, of whatever cause, and its fatal signals are reported as
        ``number``, in four bytes, on the descriptor of ``ChildLink.begin_threads``."""
    def lose(self, why: str) -> bool:
        """Report that this slot's thread has ended, and why. False if it had no job."""
