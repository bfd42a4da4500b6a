"""Process that loads the app once and forks a worker's children, on the supervisor's command.

It never runs a job and has one thread, so its forks are safe and share its memory. Its protocol with the supervisor is
described in crates/penstock-worker/src/zygote.rs.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import threading
import traceback
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from penstock._core import WrittenPages, collapse_heap, fill_holes, gather_arenas, make_immortal, serve_forks
from penstock._worker.child import Prepared, flush_output, leave, run_jobs
from penstock._worker.finalizers import keep_finalizers, take_finalizers_back
from penstock._worker.leftovers import open_descriptors, warnings_since
from penstock._worker.loading import explain, load_all, refuse_unsuitable, report_of
from penstock._worker.log import log_to_stderr

if TYPE_CHECKING:
    from penstock._core import Role
    from penstock._tasks.app import App

EXIT_APP = 3
EXIT_LOOP = 1
LENGTH_BYTES = 4


def main() -> None:
    worker, control_fd, work_fds, pages_fd, log_level, log_format, *names = sys.argv[1:]
    # Apps, an empty word, then modules.
    places, modules = names[: names.index("")], names[names.index("") + 1 :]
    control = Control(int(control_fd))
    # Sockets from which the children of each pool pull jobs.
    work = [int(number) for number in work_fds.split(",")]
    for descriptor in (*work, int(pages_fd)):
        os.set_inheritable(descriptor, False)
    # Ctrl-C and service managers signal whole process groups, but the supervisor decides about running jobs. A handler
    # instead of SIG_IGN, which programs started by tasks would inherit.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _do_nothing)
    # Tracebacks and `ps` show this name, so it should be the called program rather than `-m`.
    sys.argv = [places[0]]
    if os.environ.get("PENSTOCK_COLLAPSE") != "0":
        gather_arenas()
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
    serve([each.app for each in loaded], worker, control.fd, work, int(pages_fd))
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

    def __init__(self, fd: int) -> None:
        os.set_inheritable(fd, False)
        self.fd = fd

    def send(self, text: str) -> None:
        message = text.encode("utf-8", "backslashreplace")
        message = len(message).to_bytes(LENGTH_BYTES, "little") + message
        while message:
            message = message[os.write(self.fd, message) :]


def serve(apps: list[App], worker: str, control_fd: int, work_fds: list[int], pages_fd: int) -> None:
    """Fork children until the supervisor is gone, and be each of them.

    A page of the shared heap is copied when this process or a child writes to it, if only to count a reference. So what
    happens for each child, here and in the child before its job, is plain: no context managers, no enums, no caught
    errors. What happens between two forks is not even Python (crates/penstock-worker/src/forks.rs).
    """
    written = WrittenPages()
    prepared = Prepared(apps, worker, pages_fd)
    signal.set_wakeup_fd(-1)
    # Garbage is freed, and the collector never visits the remaining objects again: in the children it would touch,
    # and so copy, every page.
    gc.collect()
    keep_finalizers()
    # Counting references to the app's objects would copy pages, too.
    if os.environ.get("PENSTOCK_IMMORTAL") != "0":
        make_immortal()
    gc.freeze()
    if os.environ.get("PENSTOCK_COLLAPSE") != "0":
        # What children allocate would copy pages as well.
        fill_holes()
        # Huge pages make forks cheap: most of the cost of a fork is copying the page tables.
        collapse_heap()
    role = None
    try:
        role = serve_forks(control_fd, work_fds, flush_output, os.fork)
    finally:
        if role is None:
            take_finalizers_back()
    if role is not None:
        be_child(prepared, role, written)


def be_child(prepared: Prepared, role: Role, written: WrittenPages) -> NoReturn:
    try:
        prepared.link.open(role)
        run_jobs(prepared, role, written)
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
    leave()


if __name__ == "__main__":
    main()
