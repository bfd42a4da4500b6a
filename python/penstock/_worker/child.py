"""Child of a worker: runs jobs in its slots until its supervisor has no more."""

from __future__ import annotations

import atexit
import inspect
import logging
import os
import sys
import threading
import traceback
from collections.abc import Callable
from itertools import islice
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from penstock._core import ChildLink, flush_c_output, has_one_thread
from penstock._jobs import current, interrupts
from penstock._worker.orders import OrdersOfProcess
from penstock._worker.runner import Runner

if TYPE_CHECKING:
    from penstock._core import Role, WrittenPages
    from penstock._tasks.app import App


logger = logging.getLogger("penstock")


class Prepared:
    """State that the children of a zygote have in common, made before the first fork.

    Each page of the shared heap that a child writes to is copied, so a child makes as little as possible by itself.
    """

    def __init__(self, apps: list[App], worker: str, pages_fd: int) -> None:
        self.apps = apps
        self.worker = worker
        self.link = ChildLink(pages_fd)
        # A task may fork. If the forked process ever returns here, it must not continue with our jobs.
        os.register_at_fork(after_in_child=self.link.abandon)
        current.tell_progress = self.link.progress
        # Only a hook can add others, for example by an import.
        self.has_start_hooks = any(app._process_start_hooks or app._slot_start_hooks for app in apps)
        # For slots that are processes.
        self.runner = Runner(apps, worker)
        # Orders come with a signal, which also interrupts the wait for a job when the process has to exit.
        self.runner.slot = self.slot = self.link.only_slot
        interrupts.slot_of = OrdersOfProcess(self.runner, self.slot).slot_of
        self.run, self.finish = self.runner.run, self.slot.finish


def run_jobs(prepared: Prepared, role: Role, written: WrittenPages) -> None:
    """Run the jobs that arrive over the link, of any of these apps, in the slots of its role."""
    if prepared.has_start_hooks:
        for app in prepared.apps:
            for hook in app._process_start_hooks:
                hook()
    link = prepared.link
    try:
        if role.has_only_slot:
            run_in_process(prepared, role, written)
        elif role.kind == "thread":
            # Imported here because a child has slots of only one kind.
            from penstock._worker.threads import Threads

            Threads(prepared.apps, prepared.worker, link, role.slots, role.once).run()
        else:
            from penstock._worker.loop import Loop

            Loop(prepared.apps, prepared.worker, link, role.slots, role.once).run()
    except (BrokenPipeError, ConnectionResetError):
        # The supervisor is gone, and this process with it.
        pass
    for app in prepared.apps:
        if app._process_stop_hooks:
            stop(app._process_stop_hooks, "on_process_stop")


def run_in_process(prepared: Prepared, role: Role, written: WrittenPages) -> None:
    """Be one slot, in the main thread."""
    if prepared.has_start_hooks:
        for app in prepared.apps:
            for hook in app._slot_start_hooks:
                if not inspect.iscoroutinefunction(hook):
                    hook()
    link, runner, slot = prepared.link, prepared.runner, prepared.slot
    run, finish = prepared.run, prepared.finish
    if role.warm:
        written.copy()
    if not role.once:
        # From now on this process takes jobs, so the one that it replaces may close.
        link.serve(1)
    # As little as possible happens between two jobs: this loop is most of the cost of a short job.
    for job in islice(slot, 1) if role.once else slot:
        if finish(*run(job)):
            finish(*runner.overrule(job, slot))
        if runner.is_unsound:
            # Its jobs would fail one after another, with errors that are not theirs.
            raise RuntimeError(UNSOUND)
    # The supervisor learns the outcome of a last job now, not when everything else has ended.
    link.flush()
    if role.once:
        written.job_ended()
    # After an exception nothing is closed: that could wait for threads which never end.
    for app in prepared.apps:
        if app._slot_stop_hooks:
            stop(app._slot_stop_hooks, "on_slot_stop")
    runner.close()


UNSOUND = "an error could not be recorded, so this process is replaced"


def wake(number: int, frame: FrameType | None) -> None:
    """Do nothing. Handler of a signal that only has to interrupt a wait."""


def stop(hooks: list[Callable[[], object]], name: str) -> None:
    for hook in hooks:
        if inspect.iscoroutinefunction(hook):
            continue  # for slots on an event loop
        try:
            hook()
        except Exception:
            logger.exception("a function of %s failed in process %d; the others still run", name, os.getpid())


def leave() -> NoReturn:
    """Exit this process like the interpreter, but without finalization, which would visit every object.

    That would copy every page of the heap that is shared with the zygote. In the interpreter's order, this waits for
    non-daemon threads, runs exit handlers (including that of logging), and flushes output. Live objects are not
    finalized: a file that was not closed loses its buffered data.
    """
    try:
        for step in (wait_for_threads, atexit._run_exitfuncs, flush_output):
            try:
                step()
            except BaseException:
                traceback.print_exc()
    finally:
        os._exit(0)


def wait_for_threads() -> None:
    """Wait for the threads that are not daemons."""
    # The process of an isolated job seldom has any, and code that runs copies pages.
    if not has_one_thread():
        # Private, but the same in all versions of Python since 3.7.
        vars(threading)["_shutdown"]()


def flush_output() -> None:
    """Flush the output of Python and C code. Output that nobody can read is lost."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except Exception:
            pass  # the app may have replaced its streams
    flush_c_output()


def leave_fork() -> NoReturn:
    """Exit a process that a task forked and that returned from its task as if it were the child."""
    try:
        flush_output()
    finally:
        os._exit(0)
