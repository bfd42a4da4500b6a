"""Warns of jobs that block the event loop, with the line that does."""

from __future__ import annotations

import asyncio
import logging
import os
import selectors
import sys
import sysconfig
import threading
import time
from types import FrameType
from typing import Any

logger = logging.getLogger("penstock")

# A job that is in the same step at two consecutive checks blocks all others.
_LOOK_EVERY_S = 0.1
# Interval between warnings for the same task.
_WARN_EVERY_S = 60.0

_LIBRARIES = tuple(
    os.path.join(path, "") for name, path in sysconfig.get_paths().items() if name in ("stdlib", "purelib", "platlib")
)


class Watch:
    """Watches the event loop of the calling thread from another thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop, runs_jobs: Any) -> None:
        # Code of a coroutine function in whose frames jobs run, with the task's name in the variable `task`.
        self._code = runs_jobs.__code__
        # Time since which the loop has been running callbacks instead of waiting for events.
        self._busy_since: float | None = None
        self._loop_thread = threading.get_ident()
        self._told: dict[str, float] = {}
        self._stopped = threading.Event()
        # Other kinds of loops, such as uvloop's, cannot be watched this way.
        selector = getattr(loop, "_selector", None)
        if isinstance(selector, selectors.BaseSelector):
            self._observe(selector)
            threading.Thread(target=self._run, name="penstock-loop-watch", daemon=True).start()

    def _observe(self, selector: Any) -> None:
        select = selector.select

        def observed(timeout: float | None = None) -> Any:
            self._busy_since = None
            ready = select(timeout)
            self._busy_since = time.monotonic()
            return ready

        selector.select = observed

    def stop(self) -> None:
        self._stopped.set()

    def _run(self) -> None:
        seen: tuple[float, FrameType] | None = None
        seen_at = 0.0
        while not self._stopped.wait(_LOOK_EVERY_S):
            since = self._busy_since
            frame = None if since is None else self._frame_of_job()
            if since is None or frame is None:
                seen = None
            elif seen is None or seen[0] != since or seen[1] is not frame:
                seen, seen_at = (since, frame), time.monotonic()
            else:
                # One pass of the loop gives each job one step, and this job was already in that step before.
                self._warn(frame, time.monotonic() - seen_at)

    def _frame_of_job(self) -> FrameType | None:
        frame = sys._current_frames().get(self._loop_thread)
        while frame is not None and frame.f_code is not self._code:
            frame = frame.f_back
        return frame

    def _warn(self, job: FrameType, blocked_s: float) -> None:
        task, line = job.f_locals["task"], self._line_within(job)
        now = time.monotonic()
        if line is None or now - self._told.get(task, -_WARN_EVERY_S) < _WARN_EVERY_S:
            return
        self._told[task] = now
        logger.warning(
            "%s has blocked the event loop for %.1f s, and with it all other jobs there, at %s: use await"
            " asyncio.to_thread(...) there, or make the task a plain function",
            task,
            blocked_s,
            line,
        )

    def _line_within(self, job: FrameType) -> str | None:
        """Return the current line of the job in the task's own code, not in a library; None if there is none."""
        frame = sys._current_frames().get(self._loop_thread)
        innermost = own = None
        while frame is not None and frame is not job:
            innermost = innermost or frame
            if own is None and not frame.f_code.co_filename.startswith((*_LIBRARIES, "<")):
                own = frame
            frame = frame.f_back
        found = own or innermost
        return None if frame is None or found is None else _line(found)


def _line(frame: FrameType) -> str:
    file = frame.f_code.co_filename.removeprefix(os.path.join(os.getcwd(), ""))
    return f"{file}:{frame.f_lineno} in {frame.f_code.co_name}()"
