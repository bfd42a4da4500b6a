"""Collect 6,000 objects from a slow service in four ways, and draw what the slots did.

$ python -m examples.collector
$ python -m examples.collector --output collector.html
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from examples.shared import outputs
from examples.shared.running import take_charge, worker
from penstock import group

from . import timelines
from .catalogue import Catalogue
from .tasks import Page, app, begin_page, collect, collect_page, fetch, get, page_of, rest

LIMIT_S = 600  # for every wait


def serially(pages: int) -> list[Page]:
    return [collect(page) for page in range(pages)]


def a_job_a_page(pages: int) -> list[Page]:
    return [job.result(timeout=LIMIT_S) for job in collect_page.map(range(pages))]


def a_group_a_page(pages: int) -> list[Page]:
    found = []
    for page in range(pages):
        listing = get(page, f"/pages/{page}")
        answers = group(fetch.s(page, number) for number in listing.value).delay().result(timeout=LIMIT_S)
        found.append(page_of(answers, listing))
    return found


def overlapping_chords(pages: int) -> list[Page]:
    begun = begin_page.map(range(pages))
    return [app.workflow(job.result(timeout=LIMIT_S)).result(timeout=LIMIT_S) for job in begun]


@dataclass(frozen=True)
class Run:
    """Run of one way. ``scale`` is more than 1 if it collected only a part; ``seconds`` is scaled by it."""

    name: str
    began: float
    seconds: float
    scale: float
    pages: list[Page]


def measure(name: str, way: Callable[[int], list[Page]], pages: int, of: int) -> Run:
    began = time.monotonic()
    found = way(pages)
    return Run(name, began, (time.monotonic() - began) * of / pages, of / pages, found)


def measure_all(catalogue: Catalogue, slots: int, serial_pages: int) -> list[Run]:
    """Start a service, a broker and a worker just for this run, and collect in each way."""
    with tempfile.TemporaryDirectory(prefix="penstock-collector-", ignore_cleanup_errors=True) as name:
        directory = Path(name)
        processes = 2 if slots % 2 == 0 else 1
        options = ["-c", str(processes), "--threads", str(slots // processes)]
        with service(catalogue), worker(app, "examples.collector.tasks", options, directory):
            # All slots are up once each has run one of these.
            group(rest.s() for _ in range(slots)).delay().result(timeout=60)
            pages = catalogue.pages
            return [
                measure("serial", serially, serial_pages, pages),
                measure("a job a page", a_job_a_page, pages, pages),
                measure("a group a page", a_group_a_page, pages, pages),
                measure("overlapping chords", overlapping_chords, pages, pages),
            ]


@contextlib.contextmanager
def service(catalogue: Catalogue) -> Iterator[None]:
    numbers = json.dumps(dataclasses.asdict(catalogue))
    command = [sys.executable, "-m", "examples.collector.server", numbers]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE) as server:
        try:
            assert server.stdout is not None
            os.environ["COLLECTOR_ADDRESS"] = f"127.0.0.1:{int(server.stdout.readline())}"
            yield
        finally:
            server.terminate()


def rows(runs: list[Run], catalogue: Catalogue, slots: int) -> list[list[str]]:
    limit_s = catalogue.limit_s(slots)
    found = []
    for run in runs:
        scaled = "" if run.scale == 1 else f" ({len(run.pages)} of {catalogue.pages} pages, scaled)"
        speed = f"{runs[0].seconds / run.seconds:.1f}"
        found.append([run.name + scaled, f"{run.seconds:.2f}", speed, f"{run.seconds / limit_s:.3f}"])
    return [*found, ["limit", f"{limit_s:.2f}", f"{runs[0].seconds / limit_s:.1f}", "1"]]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m examples.collector", description="Collect objects in four ways.")
    parser.add_argument("--pages", type=int, default=20)
    parser.add_argument("--objects", type=int, default=300, help="on each page (300)")
    parser.add_argument("--slots", type=int, default=60)
    parser.add_argument(
        "--latency",
        type=float,
        nargs=2,
        default=[50, 150],
        metavar=("LEAST", "MOST"),
        help="of the service, ms (50 150)",
    )
    parser.add_argument("--seed", type=int, default=1, help="of the latencies (1)")
    parser.add_argument("--serial-pages", type=int, default=2, help="pages that the serial way collects (2)")
    outputs.add_option(parser)
    options = parser.parse_args()

    take_charge()
    catalogue = Catalogue(options.pages, options.objects, *options.latency, options.seed)
    slots = options.slots
    runs = measure_all(catalogue, slots, min(options.serial_pages, options.pages))

    header = ["way", "seconds", "times as fast", "times the limit"]
    shown = rows(runs, catalogue, slots)
    note = (
        f"{options.pages} pages of {options.objects} objects, {slots} slots, latency {options.latency[0]:g} to"
        f" {options.latency[1]:g} ms. The limit is the larger of the longest path"
        f" ({catalogue.critical_path_s():.2f} s) and the sum of all waits divided by the slots"
        f" ({catalogue.waits_s(options.pages):.0f} s / {slots})."
    )
    picture = timelines.draw([timelines.Timeline(*bars) for bars in map(bars_of, runs)], slots)
    outputs.show(options.output, "A collector, four ways", header, shown, note, picture)

    # The times are comparable only if all ways collected the same objects.
    whole = {tuple(page.size for page in run.pages) for run in runs if run.scale == 1}
    part = tuple(page.size for page in runs[0].pages)
    if len(whole) != 1 or next(iter(whole))[: len(part)] != part:
        print("the four ways have not collected the same objects", file=sys.stderr)
        return 1
    return 0


def bars_of(run: Run) -> tuple[str, float, float, list[timelines.Bar]]:
    answers = [answer for page in run.pages for answer in page.answers]
    bars = [timelines.Bar(one.page, one.asked - run.began, one.came - run.began) for one in answers]
    return run.name, run.seconds, run.scale, bars


if __name__ == "__main__":
    sys.exit(main())
