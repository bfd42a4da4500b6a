"""Request a web page that makes 155 queries, in four ways and with up to 32 clients, on a temporary PostgreSQL.

$ python -m examples.breakdown
$ python -m examples.breakdown --celery --output breakdown.html
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

from examples.breakdown import database, violins
from examples.breakdown.tasks import app
from examples.shared import outputs
from examples.shared.peers import celery_python, celery_servers, install_celery
from examples.shared.running import running, tail, take_charge, worker

LIMIT_S = 600  # one way with one number of clients


def penstock(directory: Path, slots: int) -> AbstractContextManager[None]:
    return worker(app, "examples.breakdown.tasks", ["-c", str(slots)], directory)


@contextlib.contextmanager
def celery(directory: Path, slots: int) -> Iterator[None]:
    # Gossip, mingle and heartbeats are off, as most advice on Celery's speed recommends.
    options = ["--loglevel=WARNING", "--without-gossip", "--without-mingle", "--without-heartbeat"]
    command = ["-m", "celery", "-A", "examples.breakdown.celery_tasks", "worker", f"--concurrency={slots}", *options]
    with celery_servers(directory) as urls:
        os.environ.update(urls)
        with running([str(celery_python()), *command], log=directory / "celery.log", grace_s=1):
            yield


WAYS: dict[str, tuple[str, Callable[[Path, int], AbstractContextManager[None]]]] = {
    "threads": ("threads", lambda directory, slots: contextlib.nullcontext()),
    "group": ("Penstock's group", penstock),
    "union": ("one UNION", lambda directory, slots: contextlib.nullcontext()),
    "celery_group": ("Celery's group", celery),
}

Page = list[list[int]]


def request_pages(way: str, clients: int, fewest: int, directory: Path) -> tuple[list[float], Page]:
    """Return the seconds of each request, and the page. Runs in a new process, on the interpreter that the way
    needs."""
    python = str(celery_python()) if way == "celery_group" else sys.executable
    each = max(2, -(-fewest // clients))
    log = directory / f"{way}-{clients}.log"
    with log.open("wb") as errors:
        run = subprocess.run(
            [python, "-m", "examples.breakdown.client", way, str(clients), str(each)],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, timeout=LIMIT_S,
        )  # fmt: skip
    if run.returncode != 0:
        raise RuntimeError(f"{WAYS[way][0]} with {clients} clients failed:\n{tail(log)}")
    answer = json.loads(run.stdout)
    return answer["seconds"], answer["page"]


def quantile(seconds: list[float], percent: int) -> float:
    return statistics.quantiles(seconds, n=100, method="inclusive")[percent - 1]


def rows(taken: dict[str, dict[int, list[float]]]) -> list[list[str]]:
    found = []
    for clients in sorted(next(iter(taken.values()))):
        for name, by_clients in taken.items():
            seconds = by_clients[clients]
            figures = [*(quantile(seconds, percent) for percent in (10, 50, 90, 99)), max(seconds)]
            found.append([name, str(clients), str(len(seconds)), *(f"{figure * 1e3:,.0f}" for figure in figures)])
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m examples.breakdown", description="Request a page of many queries in four ways."
    )
    parser.add_argument("--countries", type=int, default=155, help="each is a query of its own (155)")
    parser.add_argument("--slots", type=int, default=40, help="of the workers, and threads of the pool (40)")
    parser.add_argument("--clients", default="1,2,4,8,16,32", help="how many request the page at once (1,2,4,8,16,32)")
    parser.add_argument("--requests", type=int, default=32, help="least number of measured requests (32)")
    parser.add_argument("--one-ms", type=float, default=2, help="add data until a query takes as long (2)")
    parser.add_argument("--union-ms", type=float, default=50, help="and until the query of all countries does (50)")
    parser.add_argument("--celery", action="store_true", help="install Celery and its servers if missing")
    parser.add_argument("--ways", default=",".join(WAYS), help=f"which ways ({','.join(WAYS)})")
    outputs.add_option(parser)
    options = parser.parse_args()

    ways = options.ways.split(",")
    if unknown := [way for way in ways if way not in WAYS]:
        parser.error(f"--ways {unknown[0]}: there are {', '.join(WAYS)}")
    if options.celery:
        install_celery()
    if "celery_group" in ways and celery_python() is None:
        ways.remove("celery_group")
        print("Celery is not installed here, and is left out; --celery installs it\n")
    if not ways:
        return 1
    take_charge()
    taken: dict[str, dict[int, list[float]]] = {WAYS[way][0]: {} for way in ways}
    pages: list[Page] = []
    os.environ["BREAKDOWN_COUNTRIES"] = str(options.countries)
    os.environ["BREAKDOWN_SLOTS"] = str(options.slots)
    with tempfile.TemporaryDirectory(prefix="penstock-breakdown-", ignore_cleanup_errors=True) as name:
        directory = Path(name)
        # The server's user must be able to enter its directory.
        directory.chmod(0o711)
        with database.postgres(directory / "postgres") as dsn:
            os.environ["BREAKDOWN_DSN"] = dsn
            data = database.fill(dsn, options.countries, options.one_ms, options.union_ms)
            print(f"{data}\n", flush=True)
            for way in ways:
                title, served = WAYS[way]
                with served(directory / way, options.slots):
                    for clients in map(int, options.clients.split(",")):
                        seconds, page = request_pages(way, clients, options.requests, directory)
                        taken[title][clients] = seconds
                        pages.append(page)
                        median_ms = statistics.median(seconds) * 1e3
                        print(f"{title}, {clients} at once: {median_ms:,.0f} ms", flush=True)
    print()
    header = ["way", "clients", "requests", *(f"p{percent}, ms" for percent in (10, 50, 90, 99)), "longest, ms"]
    outputs.show(options.output, "A page of many queries", header, rows(taken), data, violins.draw(taken))

    # The times are comparable only if all ways made the same page.
    if any(page != pages[0] for page in pages):
        print("the ways have not made the same page", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
