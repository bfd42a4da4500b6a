"""Process that loads the app once and forks a worker's children, on the supervisor's command.

It never runs a job and has one thread, so its forks are safe and share its memory. Its protocol with the supervisor is
described in crates/penstock-worker/src/zygote.rs.
"""

from __future__ import annotations

import errno
import gc
import json
import os
import select
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Collection, Iterator
from types import FrameType
from typing import TYPE_CHECKING, NamedTuple, NoReturn

from penstock._core import ChildLink, WrittenPages, collapse_heap
from penstock._worker.child import flush_output, forget_inherited_finalizers, leave, note_finalizers, run_jobs
from penstock._worker.leftovers import open_descriptors, warnings_since
from penstock._worker.loading import explain, load_all, refuse_unsuitable, report_of
from penstock._worker.log import log_to_stderr
from penstock._worker.orders import set_handler

if TYPE_CHECKING:
    from penstock._tasks.app import App

EXIT_APP = 3
EXIT_LOOP = 1
LENGTH_BYTES = 4
SIGKILL = int(signal.SIGKILL)
# Room for 16 descriptors next to a message.
DESCRIPTORS_BYTES = socket.CMSG_LEN(16 * 4)


def main() -> None:
    worker, control_fd, work_fds, pages_fd, log_level, log_format, *names = sys.argv[1:]
    # Apps, an empty word, then modules.
    places, modules = names[: names.index("")], names[names.index("") + 1 :]
    control = Control(socket.socket(fileno=int(control_fd)))
    # Sockets from which the children of each pool pull jobs, then the shared memory.
    descriptors = [int(number) for number in (*work_fds.split(","), pages_fd)]
    for descriptor in descriptors:
        os.set_inheritable(descriptor, False)
    # Ctrl-C and service managers signal whole process groups, but the supervisor decides about running jobs. A handler
    # instead of SIG_IGN, which programs started by tasks would inherit.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _do_nothing)
    # Tracebacks and `ps` show this name, so it should be the called program rather than `-m`.
    sys.argv = [places[0]]
    before = open_descriptors()
    try:
        loaded = load_all(places, modules)
        for each in loaded:
            each.app._begin_worker()
        refuse_unsuitable(loaded)
    except BaseException as error:
        control.send(f"failed {explain(' '.join(places), error)}")
        sys.exit(EXIT_APP)
    warn_of_threads(control)
    for warning in warnings_since(before):
        control.send(f"warning {warning}")
    warn_of_django(control)
    log_to_stderr(log_level, log_format)
    control.send(f"ready {json.dumps(report_of(loaded))}")
    Zygote([each.app for each in loaded], worker, control, descriptors).serve()
    leave()


def _do_nothing(number: int, frame: FrameType | None) -> None:
    pass


def warn_of_threads(control: Control) -> None:
    """Warn of threads: a fork copies one thread and all locks, so locks that other threads hold stay locked forever."""
    try:
        count = len(os.listdir("/proc/self/task"))
    except OSError:
        count = threading.active_count()
    if count > 1:
        names = [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]
        control.send(
            f"warning the app started {count - 1} thread(s) while it was loaded"
            f" ({', '.join(names) or 'from native code'}); they do not exist in the processes that run jobs, and locks"
            " they hold at the fork stay locked there. Start threads in tasks, not at import"
        )


def warn_of_django(control: Control) -> None:
    """Warn if Django was imported but not set up, because each job that touches a model would fail."""
    if "django" not in sys.modules or not ("DJANGO_SETTINGS_MODULE" in os.environ or os.path.exists("manage.py")):
        return  # not there, or only because some library looks for it
    apps = sys.modules.get("django.apps")
    if apps is None or not apps.apps.ready:
        control.send(
            "warning Django is imported and not set up, so models can't be used. Give the worker a module that calls"
            " django.setup() before it imports the tasks: shop.worker:app in Penstock's page about Django"
        )


class Control:
    """Socket to the supervisor."""

    def __init__(self, connection: socket.socket) -> None:
        connection.set_inheritable(False)
        self._connection = connection
        self._incoming = bytearray()
        self._descriptors: list[int] = []

    def fileno(self) -> int:
        return self._connection.fileno()

    def send(self, text: str) -> None:
        message = text.encode("utf-8", "backslashreplace")
        self._connection.sendall(len(message).to_bytes(LENGTH_BYTES, "little") + message)

    def receive(self) -> list[list[str]]:
        """Return the received commands, split into words. Raises EOFError when the supervisor is gone."""
        data, attached, _, _ = self._connection.recvmsg(4096, DESCRIPTORS_BYTES)
        if not data:
            raise EOFError
        self._incoming += data
        for _, _, numbers in attached:
            self._descriptors += memoryview(numbers).cast("i")
        commands: list[list[str]] = []
        while len(self._incoming) >= LENGTH_BYTES:
            end = LENGTH_BYTES + int.from_bytes(self._incoming[:LENGTH_BYTES], "little")
            if len(self._incoming) < end:
                break
            commands.append(self._incoming[LENGTH_BYTES:end].decode().split())
            del self._incoming[:end]
        return commands

    def take_descriptor(self) -> int | None:
        """Return the descriptor that came with a command; None if the system dropped it for lack of descriptors."""
        if not self._descriptors:
            return None
        descriptor = self._descriptors.pop(0)
        os.set_inheritable(descriptor, False)
        return descriptor

    def close(self) -> None:
        os.close(self._connection.detach())


class Fork(NamedTuple):
    """Request of the supervisor for a child."""

    child: int
    pool: int
    """Index of the socket from which it pulls jobs."""
    kind: str
    """Kind of the slots: ``"process"``, ``"thread"``, ``"async"`` or ``"isolated"``."""
    slots: int
    once: bool
    """Whether the child exits after its first job."""
    warm: bool
    """Whether half of the slots are idle, so that the child has time to prepare for that job."""

    @classmethod
    def of(cls, command: list[str]) -> Fork:
        _, child, pool, kind, slots, use = command
        return cls(int(child), int(pool), kind, int(slots), use != "long", use == "warm")


class Zygote:
    """Forks children, and reports how they end.

    A page of the shared heap is copied when this process or a child writes to it, if only to count a reference. So the
    code between two forks is plain: no context managers, no enums, no caught errors.
    """

    def __init__(self, apps: list[App], worker: str, control: Control, descriptors: list[int]) -> None:
        self._apps = apps
        self._worker = worker
        self._control = control
        *self._work_fds, self._pages_fd = descriptors
        self._children: dict[int, int] = {}  # by process id
        self._written = WrittenPages()

    def serve(self) -> None:
        # Garbage is freed, and the collector never visits the remaining objects again: in the children it would touch,
        # and so copy, every page.
        gc.collect()
        note_finalizers()
        gc.freeze()
        # Huge pages make forks cheap: most of the cost of a fork is copying the page tables.
        if os.environ.get("PENSTOCK_COLLAPSE") != "0":
            collapse_heap()
        bell, ringer = socket.socketpair()
        bell.setblocking(False)
        ringer.setblocking(False)
        signal.set_wakeup_fd(ringer.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, _do_nothing)
        poll = select.poll()
        poll.register(bell, select.POLLIN)
        poll.register(self._control, select.POLLIN)
        try:
            while True:
                ready = [descriptor for descriptor, _ in poll.poll()]
                if bell.fileno() in ready:
                    # Whatever this leaves in the socket makes it ready again.
                    bell.recv(4096)
                    self._report_deaths()
                if self._control.fileno() in ready:
                    for command in self._control.receive():
                        if command[0] == "fork":
                            self._fork(Fork.of(command), [bell, ringer])
                        elif command[0] == "kill":
                            self._signal(signal.SIGKILL, *map(int, command[1:]))
                        elif command[0] == "nudge":
                            self._signal(signal.SIGURG, int(command[1]))
        except (EOFError, BrokenPipeError, ConnectionResetError):
            # The supervisor is gone, and its jobs already belong to another worker.
            self._signal(signal.SIGKILL)

    def _fork(self, fork: Fork, bells: list[socket.socket]) -> None:
        reply_fd = self._control.take_descriptor()
        if reply_fd is None:
            self._control.send(f"unforked {fork.child} {os.strerror(errno.EMFILE)}")
            return
        zygote_pid = os.getpid()
        # Unflushed output would be written once by each child.
        flush_output()
        try:
            pid = os.fork()
        except OSError as error:
            os.close(reply_fd)
            self._control.send(f"unforked {fork.child} {error}")
            return
        if pid:
            os.close(reply_fd)
            lead_group(pid)
            self._children[pid] = fork.child
            self._control.send(f"forked {fork.child} {pid}")
            return
        lead_group(os.getpid())
        signal.set_wakeup_fd(-1)
        set_handler(signal.SIGCHLD, signal.SIG_DFL)
        for bell in bells:
            os.close(bell.detach())
        self._control.close()
        self._run(reply_fd, fork, zygote_pid)

    def _run(self, reply_fd: int, fork: Fork, zygote_pid: int) -> NoReturn:
        try:
            # The sockets of other pools are not for this child, and must not stay open in it.
            work_fd = self._work_fds.pop(fork.pool)
            for other in self._work_fds:
                os.close(other)
            link = ChildLink(work_fd, reply_fd, self._pages_fd, fork.child, zygote_pid)
            run_jobs(self._apps, self._worker, link, fork, self._written)
        except ChildProcessError:
            # The zygote died before this child could ask to die with it.
            os._exit(0)
        except BaseException:
            # Possibly a signal handler that a task left. Nothing can be relied on any more, and threads that tasks left
            # may never end, so this does not wait for them.
            try:
                traceback.print_exc()
                sys.stderr.flush()
            finally:
                os._exit(EXIT_LOOP)
        forget_inherited_finalizers()
        leave()

    def _report_deaths(self) -> None:
        for pid, status, peak_kib in ends_of_children(self._children):
            self._control.send(f"died {self._children.pop(pid)} {pid} {status} {peak_kib}")

    def _signal(self, number: signal.Signals, only: int | None = None) -> None:
        for pid, child in self._children.items():
            if only in (None, child):
                # The number cannot belong to another process: a child is waited for only when it leaves this list.
                os.kill(pid, number)
                if number == signal.SIGKILL:
                    kill_group(pid)


def lead_group(pid: int) -> None:
    """Give a child its own process group, so that processes started by its jobs end with it.

    Both sides of the fork call this. Whichever is first, no signal is sent to a group that does not exist yet.
    """
    try:
        os.setpgid(pid, pid)
    except OSError:
        pass


def kill_group(pid: int) -> None:
    """Kill all processes that a child's jobs started and left behind. The child must not have been waited for."""
    try:
        os.killpg(pid, SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass


def ends_of_children(children: Collection[int]) -> Iterator[tuple[int, int, int]]:
    """Yield number, wait status and peak memory (in KiB) of each of these children that has ended, and kill its group.

    Other children are waited for as well, because orphans of jobs are reparented to this process. The cost per ended
    child does not depend on the number of children.
    """
    if not hasattr(os, "waitid"):  # macOS before Python 3.13, where no orphans come
        for child in list(children):
            ended, status, usage = os.wait4(child, os.WNOHANG)
            if ended:
                kill_group(child)
                yield child, status, usage.ru_maxrss
        return
    while (pid := _ended_child()) is not None:
        if pid in children:
            kill_group(pid)
        _, status, usage = os.wait4(pid, 0)
        if pid in children:
            yield pid, status, usage.ru_maxrss


def _ended_child() -> int | None:
    """Return the number of an ended child. The number stays reserved until the child is waited for."""
    try:
        ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return None
    return ended.si_pid if ended else None


if __name__ == "__main__":
    main()
