"""Progress of jobs, as their code reports it and as waiting callers see it."""

# No `from __future__ import annotations`: see `_public.py`.
import json
import math
import shutil
import sys
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TextIO

from penstock._durations import Seconds, timeout_s
from penstock._jobs.current import format_id
from penstock._public import public
from penstock.errors import BrokerUnavailable, CallTimeout, ResultExpired, ResultTimeout

if TYPE_CHECKING:
    from penstock._jobs.job import Job

# Interval at which a waiting caller asks. Workers do not pass on progress more often.
EVERY_S = 0.1
# Interval between lines where there is no terminal.
_LINE_EVERY_S = 10.0
# Longest bar in characters.
_BAR = 30


@public
@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of a job, as its code reports it: see ``CurrentJob.progress``."""

    done: float
    total: float | None
    """Total amount of work; None if the job has not reported it."""
    message: str

    @property
    def fraction(self) -> float | None:
        """Completed part, from 0 to 1; None without a total."""
        if self.total is None:
            return None
        return 1.0 if self.total <= 0 else min(1.0, max(0.0, self.done / self.total))

    def __str__(self) -> str:
        """Return a text such as ``3 of 10 (30 %): fetching``."""
        text = f"{self.done:,}" if self.fraction is None else f"{self.done:,} of {self.total:,} ({self.fraction:.0%})"
        return f"{text.replace('%)', ' %)')}: {self.message}" if self.message else text.replace("%)", " %)")


def decode(body: bytes | None) -> Progress | None:
    if body is None:
        return None
    done, total, message = json.loads(body)
    return Progress(done, total, message)


@public
class ProgressUpdates:
    """Changes of a job's progress until its end: see ``Job.progress_updates``.

    Iterate with ``for`` or ``async for``.
    """

    def __init__(self, job: "Job[Any]", timeout: Seconds | None) -> None:
        self._job = job
        self._limit_s = timeout_s("timeout", timeout)

    def __iter__(self) -> Iterator[Progress]:
        for progress in changes(self._job, self._limit_s):
            if progress is not None:
                yield progress

    async def __aiter__(self) -> AsyncIterator[Progress]:
        async for progress in achanges(self._job, self._limit_s):
            if progress is not None:
                yield progress


class _Until:
    def __init__(self, limit_s: float | None) -> None:
        self._at = math.inf if limit_s is None else time.monotonic() + limit_s

    @property
    def slice_s(self) -> float:
        return min(EVERY_S, max(0.0, self._at - time.monotonic()))

    @property
    def is_over(self) -> bool:
        return time.monotonic() >= self._at


def changes(job: "Job[Any]", limit_s: float | None) -> Iterator[Progress | None]:
    """Yield the progress reports of a job until its end, and None each time that there is nothing new."""
    until, before = _Until(limit_s), None
    connection = job._app._connected()
    has_ended = False
    while True:
        try:
            latest = decode(connection.progress(job._id, job._app.call_timeout))
        except (BrokerUnavailable, CallTimeout):
            # Like `result()`, this waits for an unreachable broker.
            latest = None
        if latest == before:
            latest = None
        before = latest or before
        yield latest
        if has_ended:
            return
        try:
            connection.wait(job._id, until.slice_s)
            has_ended = True
        except ResultExpired as error:
            has_ended = job._is_over(error)
        except (ResultTimeout, BrokerUnavailable, CallTimeout):
            if until.is_over or not connection.may_end():
                raise job._late(connection) from None


async def achanges(job: "Job[Any]", limit_s: float | None) -> AsyncIterator[Progress | None]:
    """Like ``changes``, but awaitable."""
    from penstock._jobs.job import in_thread

    until, before = _Until(limit_s), None
    connection = job._app._connected()
    has_ended = False
    while True:
        try:
            latest = decode(await in_thread(connection.progress, job._id, job._app.call_timeout))
        except (BrokerUnavailable, CallTimeout):
            latest = None
        if latest == before:
            latest = None
        before = latest or before
        yield latest
        if has_ended:
            return
        try:
            await connection.watch(job._id, until.slice_s)
            has_ended = True
        except ResultExpired as error:
            has_ended = job._is_over(error)
        except (ResultTimeout, BrokerUnavailable, CallTimeout):
            if until.is_over or not connection.may_end():
                raise await in_thread(job._late, connection) from None


class Drawing:
    """Draws progress on stderr: a bar on a terminal, elsewhere a line now and then."""

    def __init__(self, what: str, stream: TextIO | None = None) -> None:
        self._what = what
        self._stream = sys.stderr if stream is None else stream
        self._is_terminal = self._stream.isatty()
        self._begun = time.monotonic()
        self._latest: Progress | None = None
        self._printed: tuple[float, Progress | None] = (self._begun, None)

    def show(self, latest: Progress | None) -> None:
        """Show the progress; None means nothing new."""
        self._latest = latest or self._latest
        if self._is_terminal:
            self._write(f"\r{self._fitting(self._bar())}\x1b[K")
            return
        at, printed = self._printed
        if self._latest != printed and (printed is None or time.monotonic() - at >= _LINE_EVERY_S):
            self._printed = time.monotonic(), self._latest
            self._write(f"{self._what}: {_printable(str(self._latest))}\n")

    def end(self, state: str) -> None:
        """Print the final state on its own line."""
        line = f"{self._what}: {state} after {self._elapsed()}"
        self._write(f"\r{line}\x1b[K\n" if self._is_terminal else f"{line}\n")

    def drop(self) -> None:
        """Leave the drawing where it is."""
        if self._is_terminal:
            self._write("\n")

    def _bar(self) -> str:
        latest = self._latest
        if latest is None:
            return f"{self._what}: {self._elapsed()}"
        if latest.fraction is None:
            return f"{self._what}: {_printable(str(latest))}, {self._elapsed()}"
        full = round(latest.fraction * _BAR)
        return f"{self._what} [{'#' * full}{'-' * (_BAR - full)}] {_printable(str(latest))}, {self._elapsed()}"

    def _fitting(self, line: str) -> str:
        width = shutil.get_terminal_size().columns - 1
        return line if len(line) <= width else line[: max(0, width - 1)] + "…"

    def _elapsed(self) -> str:
        seconds = int(time.monotonic() - self._begun)
        minutes, seconds = divmod(seconds, 60)
        return f"{minutes} min {seconds} s" if minutes else f"{seconds} s"

    def _write(self, text: str) -> None:
        try:
            self._stream.write(text)
        except UnicodeEncodeError:
            self._stream.write(text.encode("ascii", "replace").decode())
        self._stream.flush()


def wait_drawing(job: "Job[Any]", limit_s: float | None) -> None:
    """Wait for the end of a job while drawing its progress."""
    drawing = Drawing(f"job {format_id(job._id)}")
    try:
        for latest in changes(job, limit_s):
            drawing.show(latest)
    except BaseException:
        drawing.drop()
        raise
    drawing.end(str(job.info().state))


async def await_drawing(job: "Job[Any]", limit_s: float | None) -> None:
    """Like ``wait_drawing``, but awaitable."""
    drawing = Drawing(f"job {format_id(job._id)}")
    try:
        async for latest in achanges(job, limit_s):
            drawing.show(latest)
    except BaseException:
        drawing.drop()
        raise
    drawing.end(str((await job.ainfo()).state))


def _printable(text: str) -> str:
    """Return the text with a space in place of each control character."""
    return "".join(letter if letter.isprintable() else " " for letter in text)
