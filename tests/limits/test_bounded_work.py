"""Work on very many jobs is bounded: it finishes on a full disk, and other clients are served during it."""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

import pytest
from project import SCRIPTS, Process, Project, TooSlow, eventually, is_quick, needs

from penstock import DiskFull

# The full matrix of sizes and shapes takes several minutes.
IS_LONG = bool(os.environ.get("PENSTOCK_LONG"))
DISK_MEGABYTES = 40 if IS_LONG else 24
ARGUMENTS_BYTES = [0, 300] if IS_LONG else [0]
SPREAD_S = 30.0 if IS_LONG else 3.0
# Time allowed for filling the disk before the first job expires.
FILLED_S = 15.0 if IS_LONG else 6.0
EXPIRING = 1_000_000 if IS_LONG else 200_000
ROUNDS = 3

# Deadline of a single call, in Python and in commands.
DEADLINE_S = 5.0
WORKS_AGAIN_S = 5.0
# `status` answers from memory; most of this time is process startup.
STATUS_S = 1.0
# The bounds above are for a machine that starts the program within this time. A slower one is too busy, and all
# bounds are scaled up by the same factor.
STARTS_S = 0.2
JOURNAL_BYTES = 10 << 20
KEPT_VALUE_BYTES = 24
# Added p99 latency for other clients.
DELAYED_MS = 50.0

TASKS = """
    from penstock import App

    app = App("shop")

    @app.task
    def nothing() -> None: ...

    @app.task(queue="other")
    def quick() -> None: ...

    @app.task
    def read(document: bytes) -> int:
        return len(document)
"""


class Shop:
    """A server whose data is on a small disk, with its measurements."""

    def __init__(self, project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
        self.project = project
        project.data = project.directory / "disk" / "data"
        project.url = f"unix:{project.directory / 'socket'}"
        project.environment["PENSTOCK_URL"] = project.url
        monkeypatch.setenv("PENSTOCK_URL", project.url)
        project.write("tasks.py", TASKS)
        self.server = self.serve()
        self.tasks = project.tasks()
        self.slowness = max(1.0, max(self.start_s() for _ in range(3)) / STARTS_S)
        self.tasks.app.call_timeout = DEADLINE_S * self.slowness
        self.status_took: list[float] = []

    def start_s(self) -> float:
        began = time.monotonic()
        assert self.project.run(SCRIPTS / "penstock", "--version").returncode == 0
        return time.monotonic() - began

    def filled_at(self) -> float:
        """Return when the disk will be full; a busy machine needs longer."""
        began = time.monotonic()
        self.publish(2_000, 0, None)
        batches = DISK_MEGABYTES << 20 >> 17
        moment = time.time() + max(FILLED_S, 3 * batches * (time.monotonic() - began))
        assert self.project.penstock("purge", "default", "--yes").returncode == 0
        return moment

    def serve(self) -> Process:
        server = self.project.start("penstock", "server", "--listen", self.project.url, "--data", self.project.data)
        server.wait_for_output("listening")
        return server

    def publish(self, count: int, arguments_bytes: int, expires: datetime | None) -> None:
        if arguments_bytes:
            self.tasks.read.options(expires=expires).map([bytes(arguments_bytes)] * count)
        else:
            self.tasks.nothing.options(expires=expires).starmap([()] * count)

    def fill(self, arguments_bytes: int, expires: Callable[[int], datetime | None] = lambda _batch: None) -> int:
        """Enqueue until every further job is refused; return the number of accepted jobs."""
        accepted = 0
        batch = 0
        for count in (2_000, 1):
            while True:
                try:
                    self.publish(count, arguments_bytes, expires(batch))
                except DiskFull:
                    break
                accepted += count
                batch += 1
        return accepted

    def status(self) -> dict[str, Any]:
        """Run the command that people use; any thread may call this."""
        began = time.monotonic()
        command = [str(SCRIPTS / "penstock"), "status", "--json"]
        run = subprocess.run(command, env=self.project.environment, capture_output=True, text=True, timeout=30)
        self.status_took.append(time.monotonic() - began)
        assert run.returncode == 0, run.stderr
        return dict(json.loads(run.stdout))

    def left(self) -> int:
        queues = self.status()["queues"]
        return sum(queue["ready"] + queue["delayed"] + queue.get("ending", 0) for queue in queues)

    def is_accepted(self) -> bool:
        try:
            self.tasks.nothing.delay()
        except DiskFull:
            return False
        return True

    def works_again(self) -> float:
        """Return the time until a job is accepted."""
        began = time.monotonic()
        eventually(self.is_accepted, WORKS_AGAIN_S * self.slowness, self.explain)
        return time.monotonic() - began

    def journal_excess(self) -> int:
        status = self.status()
        return int(status["broker"]["journal_bytes"] - KEPT_VALUE_BYTES * status["results"])

    def explain(self) -> str:
        return f"{self.project.penstock('status', '--json').output}\n{self.server.output}"

    def is_over(self) -> bool:
        # Jobs enqueued only to check that the queue accepts again are still waiting.
        return self.left() < 100 and self.journal_excess() <= JOURNAL_BYTES

    def check_the_end(self) -> None:
        eventually(self.is_over, 30 * self.slowness, self.explain)
        assert self.server.returncode is None
        # This machine may have become busier since.
        slowness = max(self.slowness, self.start_s() / STARTS_S)
        is_quick(max(self.status_took), STATUS_S * slowness, "a status")
        note(
            status_n=len(self.status_took),
            status_median_ms=statistics.median(self.status_took) * 1000,
            status_max_ms=max(self.status_took) * 1000,
            journal_mb=self.status()["broker"]["journal_bytes"] / 1e6,
            excess_mb=self.journal_excess() / 1e6,
            results=self.status()["results"],
        )


def note(**figures: object) -> None:
    """Print figures for anyone who runs this by hand with `-s`."""
    print(
        json.dumps(
            {name: round(figure, 2) if isinstance(figure, float) else figure for name, figure in figures.items()}
        )
    )


@contextmanager
def small_disk(project: Project) -> Iterator[None]:
    """Mount a disk in memory, so that disk latency doesn't count."""
    at = project.directory / "disk"
    at.mkdir()
    needs(os.geteuid() == 0, "root, to mount a small disk")
    needs(shutil.which("mount"), "mount")
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_MEGABYTES}m", "none", str(at)]
    mounted = subprocess.run(command, capture_output=True, text=True, timeout=30)
    needs(mounted.returncode == 0, f"a system that mounts a small disk ({mounted.stderr.strip()})")
    try:
        yield
    finally:
        project.end_all()
        subprocess.run(["umount", "--lazy", str(at)], check=True, timeout=30)


@pytest.fixture
def shop(project: Project, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shop]:
    with small_disk(project):
        yield Shop(project, monkeypatch)


class Watch:
    """Polls the status continuously."""

    def __init__(self, shop: Shop) -> None:
        self.shop = shop
        self.failed: list[str] = []
        self.is_over = threading.Event()
        self.thread = threading.Thread(target=self.run)

    def run(self) -> None:
        while not self.is_over.wait(0.05):
            try:
                self.shop.status()
            except Exception as error:
                self.failed.append(str(error))

    def __enter__(self) -> None:
        self.thread.start()

    def __exit__(self, *exception: object) -> None:
        self.is_over.set()
        self.thread.join()
        assert not self.failed


def at(moment: float) -> datetime:
    return datetime.fromtimestamp(moment, UTC)


def wait_until(moment: float) -> None:
    is_before(moment, "enqueuing")
    time.sleep(max(0.0, moment - time.time()))


def is_before(moment: float, what: str) -> None:
    """Fail unless the jobs, which expire at this moment, are still waiting."""
    if time.time() >= moment:
        raise TooSlow(f"{what} took longer than the jobs had")


@pytest.mark.parametrize("arguments_bytes", ARGUMENTS_BYTES)
def test_a_purge_on_a_full_disk_is_answered_and_makes_room(shop: Shop, arguments_bytes: int) -> None:
    accepted = shop.fill(arguments_bytes)
    with Watch(shop):
        began = time.monotonic()
        purged = shop.project.penstock("purge", "default", "--yes")
        answered = time.monotonic() - began
        assert purged.returncode == 0, purged.output
        is_quick(answered, DEADLINE_S * shop.slowness, "a purge")
        note(jobs=accepted, answered_s=answered, works_again_s=shop.works_again())
        shop.check_the_end()


def test_one_call_that_is_larger_than_the_disk_has_room_for_is_refused_whole(shop: Shop) -> None:
    """Accepting it would use up the reserve for a full disk, and no purge could free any space."""
    shop.publish(100, 0, None)
    with pytest.raises(DiskFull, match="No job of this call was accepted"):
        shop.publish(DISK_MEGABYTES << 14, 0, None)
    assert shop.left() == 100
    assert shop.is_accepted()
    assert shop.project.penstock("purge", "default", "--yes").returncode == 0
    shop.works_again()
    shop.check_the_end()


@pytest.mark.parametrize("arguments_bytes", ARGUMENTS_BYTES)
def test_jobs_that_all_expire_at_once_on_a_full_disk_make_room(shop: Shop, arguments_bytes: int) -> None:
    moment = shop.filled_at()
    accepted = shop.fill(arguments_bytes, lambda _batch: at(moment))
    with Watch(shop):
        wait_until(moment)
        note(jobs=accepted, works_again_s=shop.works_again())
        shop.check_the_end()


@pytest.mark.parametrize("arguments_bytes", ARGUMENTS_BYTES)
def test_jobs_that_expire_one_after_the_other_on_a_full_disk_make_room(shop: Shop, arguments_bytes: int) -> None:
    first = shop.filled_at()
    # Expiry times are spread so that they don't follow the order of arrival.
    accepted = shop.fill(arguments_bytes, lambda batch: at(first + batch * 0.618 % 1 * SPREAD_S))
    with Watch(shop):
        wait_until(first + SPREAD_S)
        note(jobs=accepted, works_again_s=shop.works_again())
        shop.check_the_end()


class Crowd:
    """A server on this machine's disk, with very many jobs that expire at the same instant."""

    def __init__(self, project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
        project.url = f"unix:{project.directory / 'socket'}"
        project.environment["PENSTOCK_URL"] = project.url
        monkeypatch.setenv("PENSTOCK_URL", project.url)
        project.write("tasks.py", TASKS)
        self.project = project
        self.server = self.serve()
        self.tasks = project.tasks()
        self.tasks.app.call_timeout = 30
        self.ahead_s = self.measure_enqueuing_s()

    def measure_enqueuing_s(self) -> float:
        """Return how far in the future jobs must expire to be enqueued in time; a busy machine needs longer."""
        began = time.monotonic()
        self.tasks.nothing.starmap([()] * 10_000)
        took_s = (time.monotonic() - began) * EXPIRING / 10_000
        assert self.project.penstock("purge", "default", "--yes").returncode == 0
        return max(ENQUEUED_S, 2 * took_s)

    def serve(self) -> Process:
        data = self.project.directory / "data"
        server = self.project.start("penstock", "server", "--listen", self.project.url, "--data", data)
        server.wait_for_output("listening")
        return server

    def restart(self) -> None:
        self.server.popen.kill()
        self.server.wait()
        self.server = self.serve()

    def enqueue(self, moment: float) -> None:
        for _ in range(EXPIRING // 10_000):
            self.tasks.nothing.options(expires=at(moment)).starmap([()] * 10_000)

    def p99_ms(self, for_s: float) -> float:
        """Return the 99th percentile of a call's latency, with one call each millisecond."""
        until = time.monotonic() + for_s
        took: list[float] = []
        while (began := time.monotonic()) < until:
            self.tasks.quick.delay()
            last_ms = (time.monotonic() - began) * 1000
            # A single caller meets each delay once; concurrent callers would wait for the rest of it.
            took += [last_ms - later_ms for later_ms in range(int(last_ms) + 1)]
        took.sort()
        return took[len(took) * 99 // 100]

    def expired(self) -> int:
        return int(self.project.status()["counts"]["expired"])


@pytest.fixture
def crowd(project: Project, monkeypatch: pytest.MonkeyPatch) -> Crowd:
    return Crowd(project, monkeypatch)


# Enqueuing takes a second, and all jobs expire within a second of their deadline.
ENQUEUED_S = EXPIRING / 100_000
MEASURED_S = EXPIRING / 1_000_000


@pytest.mark.alone
def test_very_many_jobs_that_expire_at_once_delay_nobody(crowd: Crowd) -> None:
    delayed = []
    crowd.tasks.quick.delay()
    for round in range(1, ROUNDS + 1):
        moment = time.time() + crowd.ahead_s
        crowd.enqueue(moment)
        wait_until(moment - 2 * MEASURED_S)
        without = crowd.p99_ms(MEASURED_S)
        wait_until(moment)
        beside = crowd.p99_ms(MEASURED_S)
        eventually(lambda count=round * EXPIRING: crowd.expired() == count, 30)
        note(without_ms=without, beside_ms=beside)
        delayed.append(beside - without)
    is_quick(statistics.median(delayed) / 1000, DELAYED_MS / 1000, "a call beside them, beyond one without,")


@pytest.mark.alone
def test_very_many_jobs_that_expired_while_the_broker_was_down_delay_nobody(crowd: Crowd) -> None:
    delayed = []
    for _ in range(ROUNDS):
        moment = time.time() + crowd.ahead_s
        crowd.enqueue(moment)
        # Baseline: the same restart before any of them has expired.
        crowd.restart()
        without = crowd.p99_ms(MEASURED_S)
        is_before(moment, "a restart")
        crowd.server.popen.kill()
        crowd.server.wait()
        wait_until(moment)
        crowd.server = crowd.serve()
        beside = crowd.p99_ms(MEASURED_S)
        eventually(lambda: crowd.expired() == EXPIRING, 30)
        note(without_ms=without, beside_ms=beside)
        delayed.append(beside - without)
    is_quick(statistics.median(delayed) / 1000, DELAYED_MS / 1000, "a call beside them, beyond one without,")
