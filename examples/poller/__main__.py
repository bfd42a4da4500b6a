"""Poll a service each second while it slows down, with three overlap policies, and draw the unfinished polls.

$ python -m examples.poller
$ python -m examples.poller --output poller.html
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeAlias

from examples.shared import outputs
from examples.shared.running import PENSTOCK, running, take_charge, worker
from penstock import ScheduleInfo

from . import curves
from .tasks import app, poll

Overlap: TypeAlias = Literal["skip", "queue", "allow"]
OVERLAPS: tuple[Overlap, ...] = ("skip", "queue", "allow")
SLOTS = 4  # of each worker
SAMPLE_S = 0.25


@dataclass
class Course:
    """Course of one schedule."""

    overlap: Overlap
    samples: list[tuple[float, int]] = field(default_factory=list)
    """Samples: seconds from the start, and the number of unfinished jobs."""
    info: ScheduleInfo | None = None

    @property
    def most(self) -> int:
        return max(unfinished for _, unfinished in self.samples)

    @property
    def left(self) -> int:
        return self.samples[-1][1]


def measure(seconds: float, service: dict[str, float]) -> tuple[list[Course], str]:
    """Start three services, a broker and three workers, and poll. Returns ``penstock status`` at the worst moment,
    too."""
    courses = [Course(overlap) for overlap in OVERLAPS]
    allow = courses[OVERLAPS.index("allow")]
    worst = ""
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="poller-", ignore_cleanup_errors=True)))
        threads = ["-c", "1", "--threads", str(SLOTS)]
        first, *others = OVERLAPS
        stack.enter_context(worker(app, "examples.poller.tasks", ["-Q", first, *threads], directory))
        for overlap in others:
            command = [PENSTOCK, "worker", "examples.poller.tasks:app", "-Q", overlap, *threads]
            stack.enter_context(running(command, log=directory / f"{overlap}.log"))
        for overlap in OVERLAPS:
            port = stack.enter_context(serving(service))
            app.schedules.set(overlap, poll.options(queue=overlap).s(port), every=1, overlap=overlap)
        began = time.monotonic()
        while (at := time.monotonic() - began) < seconds:
            unfinished = unfinished_jobs()
            if unfinished.get(allow.overlap, 0) > max((most for _, most in allow.samples), default=0):
                text = status()
                if unfinished_jobs() != unfinished:
                    continue  # the text may be of another moment than the numbers
                worst = text
            for course in courses:
                course.samples.append((at, unfinished.get(course.overlap, 0)))
            time.sleep(max(0.0, began + SAMPLE_S * len(courses[0].samples) - time.monotonic()))
        for course in courses:
            app.schedules.pause(course.overlap)
            course.info = app.schedules.get(course.overlap)
    return courses, worst


@contextlib.contextmanager
def serving(service: dict[str, float]) -> Iterator[int]:
    command = [sys.executable, "-m", "examples.poller.server", json.dumps(service)]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE) as server:
        try:
            assert server.stdout is not None
            yield int(server.stdout.readline())
        finally:
            server.terminate()


def status(*options: str) -> str:
    return subprocess.run([PENSTOCK, "status", *options], check=True, capture_output=True, text=True).stdout


def unfinished_jobs() -> dict[str, int]:
    queues = json.loads(status("--json"))["queues"]
    return {queue["name"]: queue["ready"] + queue["running"] for queue in queues}


def rows(courses: list[Course]) -> list[list[str]]:
    found = []
    for course in courses:
        assert course.info is not None
        info = course.info
        numbers = (info.fired, info.skipped, course.most, course.left)
        found.append([f"`{course.overlap}`", *(f"{number:,}" for number in numbers)])
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m examples.poller", description="Poll a service that slows down.")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument(
        "--slow", type=float, nargs=2, default=[10, 40], metavar=("FROM", "TO"), help="seconds of slowness (10 40)"
    )
    parser.add_argument("--slow-takes", type=float, default=3, help="seconds of a request meanwhile (3)")
    outputs.add_option(parser)
    options = parser.parse_args()

    take_charge()
    slow_from, slow_to = options.slow
    service = {"slow_from_s": slow_from, "slow_to_s": slow_to, "quick_s": 0.05, "slow_s": options.slow_takes}
    courses, worst = measure(options.seconds, service)
    header = ["overlap", "polls", "skipped", "most that had not ended", "left at the end"]
    note = (
        f"A poll each second for {options.seconds:g} s, {SLOTS} slots. The service answers in 0.05 s, and from second"
        f" {slow_from:g} to {slow_to:g} one request at a time, in {options.slow_takes:g} s."
    )
    lines = [curves.Curve(course.overlap, course.samples) for course in courses]
    picture = curves.draw(lines, options.seconds, (slow_from, slow_to))
    print(f"`penstock status` when most polls had not ended:\n\n{worst}")
    outputs.show(options.output, "A poll that can't overlap itself", header, rows(courses), note, picture)
    return 0


if __name__ == "__main__":
    sys.exit(main())
