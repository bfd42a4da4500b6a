"""A worker's child: runs jobs until its supervisor has no more."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

from penstock._worker.runner import Runner

if TYPE_CHECKING:
    from penstock._core import ChildLink
    from penstock._tasks.app import App


logger = logging.getLogger("penstock")


def run_jobs(apps: list[App], worker: str, link: ChildLink) -> None:
    """Run each job that the link gives, of any of these apps."""
    # A task may fork. What it forks must not go on with our jobs, should it ever come back here.
    os.register_at_fork(after_in_child=link.abandon)
    for hook in [hook for app in apps for hook in app._process_start_hooks]:
        hook()
    runner = Runner(apps, worker)
    slot = link.slot()
    run, finish = runner.run, slot.finish
    try:
        # As little as can be between two jobs: this loop is most of what a short one costs.
        for job in slot:
            finish(*run(job))
            if runner.is_unsound:
                # Its jobs would fail one after another, with errors that are not theirs.
                raise RuntimeError("an error could not be recorded: this process is replaced by another")
    except (BrokenPipeError, ConnectionResetError):
        # The supervisor is gone, and this process with it.
        pass
    # After another exception nothing is closed: that could wait for threads which never end.
    for hook in [hook for app in apps for hook in app._process_stop_hooks]:
        try:
            hook()
        except Exception:
            logger.exception("a function of on_process_stop failed in process %d; the others run", os.getpid())
    runner.close()
