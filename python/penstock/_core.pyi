"""The Rust half of penstock: conversions and nothing else. A test checks this file against the compiled module.

Every blocking call releases the interpreter lock. Times are in seconds where a name ends in ``_s``,
milliseconds where it ends in ``_ms``. Errors are the classes of ``penstock.errors``.
"""

from collections.abc import Sequence
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
    "SlotLink",
    "__version__",
    "collapse_heap",
    "draw_workflow",
    "flush_c_output",
    "Timing",
    "declare_schedule",
]

__version__: str

_Filter: TypeAlias = tuple[str | None, str | None, str | None, int | None, int | None, int | None, bytes | None]
"""(queue, task, class, fingerprint, failed_from_ms, failed_before_ms, workflow)"""

@final
class Options:
    """Everything about a job but its body, checked and frozen: made once for a task and each ``options()``.

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
        """Return the same options with these headers in place of their own."""
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

        ``is_own``: the key is the caller's own. ``until``: ``"start"``, ``"end"``, or ``"time"`` and ``for_ms``.
        ``wait_ms``: the call is due after this time, and the last of several at most ``max_wait_ms`` after the first.
        """
    def at_once(self) -> Options:
        """Return the same options without their countdown or eta."""
    def details(self) -> dict[str, Any]:
        """Return the options without a property: priority, countdown_ms, eta_ms, expires_after_ms, expires_at_ms,
        result_ttl_ms, max_crashes, durability, timeout_ms and soft_timeout_ms, each as it was given, or None."""
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
    """Inbox of asynchronous calls that have ended: register ``fileno()`` with the event loop, then ``drain()``."""

    def __new__(cls) -> Port: ...
    def fileno(self) -> int: ...
    def drain(self) -> list[tuple[int, object | BaseException]]:
        """Return each call that has ended since the last drain, as (token, value or exception)."""
    def close(self) -> None: ...

@final
class Graph:
    """Jobs and joins of one workflow, gathered for one transaction.

    What others depend on is added first: a join before its members.
    """

    def __new__(cls, depth: int = 0) -> Graph:
        """``depth``: number of jobs, one after another, in whose place these are."""
    def encode(self, workflow: bytes | None) -> bytes:
        """Take all of it for the end of the job that runs. ``workflow``: that of each job; None: of a single job."""
    def derive_ids(self, job_id: bytes, seed: bytes) -> None:
        """Make all its ids from that of the job that sends it and from 32 bytes: the same ones each time."""
    def note(self, key: bytes, ttl_ms: int, once: bool) -> None:
        """Add a note under a key of its own. ``once``: all of it is sent only if there is no such note yet."""
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

        ``grows``, with a ``count`` of 0: its members come in several transactions, until one seals it. If its creator
        ends before that, the broker cancels the workflow: the session, and the lease of the running job ``creator``.

        ``then``: its own places in other joins, as (join, index). With ``result_ttl_ms`` its outcome is a value. The
        keys of that are the results of these places (``join`` with the index + 1 in its last three bytes), or that of
        its own id. ``kind``: the two lowest bits of byte 12 of its id. They say what its value is made of: 0 a list of
        its members', 1 its only member's, 2 theirs by name, 3 an empty list. ``expects``: outcomes that some members
        are to have, as (index, ``when`` of a job), by ascending index.
        """
    def also(self, join: bytes, place: tuple[bytes, int]) -> None:
        """Give a join one more place in another. Its outcome must not be a value."""
    def value(self, id: bytes, body: bytes, ttl_ms: int) -> None:
        """Add a value that goes with the workflow, under the id of a job that there is not."""
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

        ``place``: its place in a join, (join, index). ``held_by``: the join that it waits for. ``shape``: of that
        join's values as its first argument: 0 the only one, 1 a list, 2 named; None: it does without. ``when``:
        released when the join 0 succeeds, 1 fails, 2 ends. ``mark``: value of its header ``penstock.step``.
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
        """Have the workflow made known by this name, of at most 255 bytes.

        ``description``: its steps as JSON, of at most 16 KiB (``crates/penstock-drawing`` reads it). It is
        cancelled ``deadline_after_ms`` from now, or at ``deadline_at_ms``. ``kept_ms``: for which it is listed after it
        has succeeded. ``parent``: job that sends it.
        """
    def seal(self, join: bytes, count: int) -> None:
        """Say that the members 0 to ``count - 1`` of a join that ``grows`` have all come."""
    def __len__(self) -> int: ...

@final
class Timing:
    """Times of a schedule and its policies, checked and frozen. ``ValueError`` says what is wrong."""

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
    """Return the declaration of a schedule by code, for a worker to send."""

@final
class Client:
    """Connection of one process to a broker. Making one opens, starts and connects nothing.

    After a fork the first call in the child begins a new session automatically.
    ``url``: ``local:PATH``, ``penstock+unix:PATH``/``unix:PATH``, ``tcp://HOST:PORT``, or ``memory:``.
    ``program``: the penstock executable that ``local:`` starts when no broker serves PATH, and ``memory:`` always.
    """

    def __new__(
        cls, url: str, *, token: str | None = None, program: str | None = None, name: str | None = None
    ) -> Client: ...

    # Blocking, from any thread. One call is one transaction.
    def publish(self, options: Options, body: bytes, timeout_s: float) -> bytes:
        """Commit one job and return its id (16 bytes) once it is as durable as its options say."""
    def publish_same(self, options: Options, bodies: Sequence[bytes], timeout_s: float) -> list[bytes]: ...
    def publish_many(self, jobs: Sequence[tuple[Options, bytes]], timeout_s: float) -> list[bytes | tuple[bytes]]:
        """Commit the jobs in one transaction and return their ids; ``(id,)`` is that of a job which has the key of a
        call and existed already."""
    def publish_graph(self, graph: Graph, workflow: bytes | None, timeout_s: float) -> bool:
        """Commit all of it in one transaction; False: its note says that it was sent before.

        ``workflow``: the id that each of its jobs names; None: a single job names none.
        """
    def cancel_workflow(self, workflow: bytes, reason: str, running: str, timeout_s: float) -> int | None:
        """Cancel all jobs of a workflow, and return the number of the operation."""
    def wait(
        self, job_id: bytes, timeout_s: float | None, *, waiter: bytes | None = None, loan: Loan | None = None
    ) -> tuple[int, bytes]:
        """Wait for the job's end and return (status, body).

        The status is 0 succeeded, 1 failed, 2 expired, 3 crashed or 4 cancelled.
        Raises ResultExpired when there is no value and none is on its way, ResultTimeout when the time is up and
        the broker answers, BrokerUnavailable when it is up and the broker is out of reach. ``waiter``: id of the job
        inside which the caller waits; then WaitCycle and TooManyWaiting may be raised, too.
        """
    def wait_all(
        self,
        job_ids: Sequence[bytes],
        timeout_s: float | None,
        *,
        waiter: bytes | None = None,
        loan: Loan | None = None,
    ) -> list[tuple[int, bytes]]:
        """As ``wait`` for each, in order of the ids; a value that has gone is (-1, b"")."""
    def cancel(self, job_id: bytes, reason: str, running: str, timeout_s: float) -> str | None:
        """End a job that does not run, or ask one that does to stop, and return the state that it was found in.

        The state is as in ``message_info``, or None: the broker holds no such job, or no longer knows its state.
        """
    def peek(self, job_id: bytes, timeout_s: float) -> tuple[int, bytes, tuple[str, str, int, int, int] | None] | None:
        """Return the value if it is there now; None while it is pending; raises ResultExpired when it has gone.

        Returns (status, body, run). The run that it came from, where the broker knows it, is (task, queue, attempt,
        generation, ended_at_ms).
        """
    def message_info(self, job_id: bytes, timeout_s: float) -> dict[str, object] | None:
        """Return the details of a job that the broker still holds: task, queue, state ("ready", "delayed", "running",
        "held", "failed", "blocked", "cancelling", "parked"), enqueued_at_ms, started_at_ms, due_at_ms, failed_at_ms,
        attempt, crashes, generation, worker, notes (list of bytes), failure (text or None)."""
    def progress(self, job_id: bytes, timeout_s: float) -> bytes | None:
        """Return the latest progress of a job: JSON, [done, total or null, message]."""
    def consumers(self, queue: str, timeout_s: float) -> int:
        """Return the number of consumers of a queue: a worker has one for each kind of slot."""
    def broker(self) -> str:
        """Return the broker's URL, with the directory of a local one in full. Asks nothing."""
    def status(self, timeout_s: float) -> dict[str, object]: ...
    def purge(self, queue: str, timeout_s: float) -> None: ...
    def failed(
        self, filter: _Filter, newest_first: bool, after: int, timeout_s: float
    ) -> tuple[list[dict[str, Any]], int | None]:
        """Return a page of failed jobs, oldest or newest first, and what to pass as ``after`` for the next one.

        A job is id (text), task, queue, attempt, crashes, generation, enqueued_at_ms, failed_at_ms, error, message,
        fingerprint, preview (text), body_bytes.
        """
    def workflows(
        self, state: str | None, name: str | None, after: bytes | None, timeout_s: float
    ) -> tuple[list[str], bytes | None]:
        """Return a page of workflows as JSON, the newest first, and what to pass as ``after`` for the next one."""
    def workflow_status(self, workflow: bytes, timeout_s: float) -> tuple[str, list[bytes]] | None:
        """Return a workflow as JSON, with its steps and their states, and the ids of its first 100 failed jobs.

        None: it is not listed.
        """
    def order_schedule(
        self, app: str, name: str, order: str, call: tuple[Timing, Options, bytes] | None, timeout_s: float
    ) -> bytes | None:
        """``"set"`` (with a call), ``"pause"``, ``"resume"``, ``"run"``, ``"reset"`` or ``"remove"`` a schedule.

        Returns the id of the job that this has made, if any.
        """
    def schedules(
        self, app: str, name: str | None, after: str | None, times: int, timeout_s: float
    ) -> tuple[list[str], str | None]:
        """Return a page of an app's schedules as JSON, with so many coming times of each, and what to pass as ``after``
        for the next one."""
    def order_failed(
        self, order: str, job_id: bytes | None, filter: _Filter, queue: str | None, timeout_s: float
    ) -> int | None:
        """``"retry"`` or ``"remove"`` one failed job; or, without an id, decide it for all that match and return the
        number of the operation."""
    def operation(self, operation: int, timeout_s: float) -> tuple[int, int, bool] | None:
        """Return the progress of an operation: (done, spared, is_over)."""
    def declare_schedule(self, declaration: str, timeout_s: float) -> None:
        """Send what a worker says of a schedule when it starts."""
    def move_clock(self, forward_ms: int, timeout_s: float, *, by_schedules: bool = False) -> int:
        """Move the clock of a ``memory:`` broker on, and return its time (Unix milliseconds).

        ``by_schedules``: from one time of a schedule to the next, and only up to one that has made a job, or less far:
        to be called again. Other brokers raise NotOffered.
        """
    def take_notices(self) -> list[str]:
        """Return the broker's notices that nobody has seen yet, each once: for the log."""
    def close(self, timeout_s: float) -> None: ...
    def rest(self, timeout_s: float) -> None:
        """Disconnect for now: the next call opens a new connection. Calls of other threads go on."""

    # For an event loop: return at once, end at the port under the token.
    def submit_graph(self, graph: Graph, workflow: bytes, timeout_s: float, port: Port, token: int) -> None: ...
    def submit(self, jobs: Sequence[tuple[Options, bytes]], timeout_s: float, port: Port, token: int) -> list[bytes]:
        """Start to commit the jobs and return their ids; the port gets the exception, or of each call that made no job
        its place and the id of the job that has its key."""
    def watch(
        self, job_id: bytes, timeout_s: float | None, port: Port, token: int, *, waiter: bytes | None = None
    ) -> None:
        """The port gets what ``wait`` would return or raise."""
    def watch_all(
        self,
        job_ids: Sequence[bytes],
        timeout_s: float | None,
        port: Port,
        token: int,
        *,
        waiter: bytes | None = None,
    ) -> None:
        """The port gets what ``wait_all`` would return or raise."""
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
        """The port gets (place, (status, body)) for each job as it ends, all under one token.

        A value that has gone is (-1, b""). ``only_ask``: it gets each at once, with None for one that has not ended.
        """
    def cancel_async(
        self, job_id: bytes, reason: str, running: str, timeout_s: float, port: Port, token: int
    ) -> None: ...
    def message_info_async(self, job_id: bytes, timeout_s: float, port: Port, token: int) -> None: ...
    def peek_async(self, job_id: bytes, timeout_s: float, port: Port, token: int) -> None: ...
    def forget(self, port: Port, token: int) -> None:
        """Forget a call after a cancelled await: its end is no longer wanted. The job is not touched."""

@final
class Consumer:
    """Takes jobs of a client's broker in this process, over the client's own connection. For tests of applications.

    Any thread may call it, and several may take at once.
    """

    def __new__(cls, client: Client, app: str) -> Consumer:
        """``app``: shown to people."""
    def serve(self, queues: Sequence[str], tasks: Sequence[str]) -> None:
        """Take jobs of these tasks from these queues from now on. Comes before the first ``take``."""
    def take(self, wait: bool, timeout_s: float) -> Delivered | None:
        """Take the next job.

        Without ``wait``, None says that the broker has none that is ready; it must answer within the timeout. With it,
        None says that ``stop`` was called.
        """
    def progress(self, job_id: bytes, done: float, total: float | None, message: str) -> bool:
        """Tell the progress of a job that was taken. False: none such was, or it was settled."""
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
        """Settle a job that was taken, with what ``Runner.run`` says of it; returns once that is confirmed."""
    def left(self, timeout_s: float) -> tuple[int, int]:
        """Return how many jobs are ready that it could take, and how many are taken and not settled."""
    def stop(self, timeout_s: float) -> None:
        """End every ``take``, and hand back jobs that have arrived and nobody took."""

def draw_workflow(status: str, how: str) -> str:
    """Draw what ``workflow_status`` has returned, as a ``"tree"``, ``"dot"`` or ``"svg"``."""

def collapse_heap() -> int:
    """Have the kernel move this process's memory into huge pages, and return the number of bytes that it did."""

def flush_c_output() -> None:
    """Write out what C code has printed and the C library still holds."""

@final
class ChildLink:
    """A worker child's side of the link to its supervisor: makes the slots that run jobs. See
    crates/penstock-worker/src/link.rs."""

    def __new__(cls, work_fd: int, reply_fd: int, pages_fd: int, child: int, parent_pid: int) -> ChildLink:
        """Own the descriptors from here on. The process exits when its parent does."""
    def slot(self) -> SlotLink:
        """Make a slot, which belongs to the thread that uses it."""
    def begin_threads(self, slots: int) -> int:
        """Prepare this process for so many slots in threads, and return a descriptor on which the ends of these are
        told (see ``SlotLink.tell_end_of_thread``)."""
    def fileno(self) -> int:
        """The socket that slots pull from, for an event loop."""
    def flush(self) -> None:
        """Tell the supervisor that there are outcomes. Iterating over a slot does so by itself."""
    def serve(self, slots: int) -> None:
        """Tell the supervisor how many slots can take jobs."""
    def close(self) -> None:
        """Take no more jobs: idle slots in line end, and the others when their jobs do."""
    def nudge(self) -> bool:
        """Interrupt the slot in line at the socket, after ``close``, by ``SIGURG``. False: there is none."""
    def progress(self, job_id: bytes, done: float, total: float | None, message: str) -> bool:
        """Tell the progress of a job that runs here, from any thread. False: it does not, or not any more."""
    def heed(self) -> bool:
        """Do what the supervisor asks for between two jobs. True: this process is to end when its running jobs have."""
    @property
    def parked(self) -> int:
        """Number of slots whose jobs are parked: so many others may run jobs in their place."""
    @property
    def has_head(self) -> bool:
        """Whether a slot waits at the socket."""
    def dismiss(self, slots: int) -> int:
        """End so many slots in line, but for the one at the socket. Return how many there were."""
    def abandon(self) -> None:
        """Leave the link, in a process that was forked from the child."""
    @property
    def is_abandoned(self) -> bool: ...

@final
class Loan:
    """A wait of a running job for others, for which its slot may be lent. Used once."""

    def begin(self) -> None:
        """Tell that the wait takes long. Calls that wait and are given the loan do so themselves."""
    def take_back(self) -> None:
        """Tell that the wait is over, and return when the job may go on. Orders to the job come through."""
    def ask_back(self) -> bool:
        """Tell that the wait is over. True: the job goes on once ``has_turn`` is true, which is news after a signal."""
    @property
    def has_turn(self) -> bool: ...
    def drop(self) -> None:
        """Break the wait off: the job goes on at once."""

@final
class SlotLink:
    """A slot of a worker's child: iterate over the jobs to run, and report how each has ended."""

    def __iter__(self) -> SlotLink: ...
    def __next__(self) -> Delivered:
        """Wait for the next job and claim it. The end comes when the supervisor wants no more."""
    def try_pull(self) -> bool | None:
        """Take a packet if there is one: True. False: there is none now; None: there will be none."""
    def begin(self) -> Delivered | None:
        """Claim the next job of the packet, if it has one more."""
    def finish(
        self,
        kind: int,
        delay_ms: int,
        value: bytes | None,
        note: bytes | None,
        failure: tuple[str, str, int, bytes] | None,
    ) -> bool:
        """Report how the job returned last has ended, as ``Runner.run`` says it.

        True: its time was over, so that it can't have succeeded. It is to be reported as failed.

        ``failure`` of a job that failed, and of no other: the error's class, message and fingerprint, and a preview of
        the arguments of at most 1 KiB.
        """
    def order(self) -> int:
        """Return what the supervisor wants of the running job and may have now: 1, that it winds up; 2, that it ends,
        as it was cancelled; 3, that it ends, as its time is over. 0: nothing."""
    def take_order(self) -> int:
        """Do as ``order``, and let the order count as carried out."""
    @property
    def heard(self) -> int:
        """The order that was taken last for the running job."""
    def strike(
        self, thread: int, exceptions: tuple[type[BaseException], type[BaseException], type[BaseException]]
    ) -> None:
        """Carry out an order in the thread of this slot: raise in it the exception for what is ordered."""
    def loan(self, job_id: bytes) -> Loan:
        """Return a loan for a wait of the job of this id, without effect where the slot runs another."""
    def shield(self) -> None:
        """Keep orders off the running job, but for the end of its time, until ``unshield`` was called as often."""
    def unshield(self) -> None: ...
    @property
    def is_running(self) -> bool:
        """Whether a job was begun and its end not reported."""
    def tell_end_of_thread(self, number: int) -> None:
        """The calling thread is this slot's. Have its end told, however it comes, and its fatal signals: ``number``, in
        four bytes, on the descriptor of ``ChildLink.begin_threads``."""
    def lose(self, why: str) -> bool:
        """Tell that this slot's thread has ended, and why. False: it had no job then."""
