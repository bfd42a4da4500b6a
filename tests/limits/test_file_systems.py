"""A full disk under a local broker, on real file systems: refusals are prompt, jobs drain, and no kill wedges it.

XFS needs free blocks for each new file, including sockets; Btrfs needs them for each overwritten block.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest
from limits.disks import MAKE, SmallDisk, disk_of
from project import Project, eventually, within

from penstock import DiskFull, Job

TASKS = """
    from penstock import App

    app = App("shop", call_timeout=30)

    @app.task
    def measure(document: bytes) -> int:
        return len(document)
"""
# A call of more than 256 KiB may be refused for its size while smaller ones still fit.
DOCUMENT = bytes(200_000)
# Shorter than a call's deadline. A write to a full Btrfs takes half a second on a quiet machine, because the kernel
# searches everywhere before it gives up, and seconds when other processes write too.
SOON_S = 20.0


@pytest.fixture(params=list(MAKE))
def disk(request: pytest.FixtureRequest, project: Project, monkeypatch: pytest.MonkeyPatch) -> Iterator[SmallDisk]:
    with disk_of(request.param, project) as disk:
        monkeypatch.setenv("PENSTOCK_URL", project.url)
        yield disk


class Shop:
    def __init__(self, project: Project) -> None:
        self.project = project
        project.write("tasks.py", TASKS)
        self.measure = project.tasks().measure
        self.jobs: list[Job[int]] = []

    def is_accepted(self) -> bool:
        """Enqueue once; the call must end soon, with a job or `DiskFull`."""
        accepted = False
        with within(SOON_S, "a call"), contextlib.suppress(DiskFull):
            self.jobs.append(self.measure.delay(DOCUMENT))
            accepted = True
        return accepted

    def enqueue_until_full(self, at_most: int = 2_000) -> None:
        """Enqueue until `status` reports a full disk: a call may be refused just before reclaim frees some space."""
        before = len(self.jobs)
        while self.is_accepted() or self.space() == "plenty":
            assert len(self.jobs) - before < at_most, "the disk is never full"

    def space(self) -> str:
        with within(SOON_S, "a status"):
            return str(self.project.status()["broker"]["space"])

    def is_killed_and_goes_on(self) -> None:
        """Kill the broker; the next one starts on the full disk, accepts few jobs or none, and refuses the rest."""
        self.project.kill_broker()
        self.enqueue_until_full(at_most=20)

    def is_drained(self) -> None:
        worker = self.project.worker("tasks:app", "-c", "1")
        for job in self.jobs:
            assert job.result(timeout=60) == len(DOCUMENT), worker.output
        self.jobs.clear()
        worker.end()
        assert worker.returncode == 0, worker.output

    def eventually(self, condition: Callable[[], object]) -> None:
        eventually(condition, 60, (self.project.data / "broker.log").read_text)


def test_a_disk_full_of_jobs_refuses_more_survives_a_kill_and_is_drained(project: Project, disk: SmallDisk) -> None:
    shop = Shop(project)
    shop.enqueue_until_full()
    assert len(shop.jobs) * len(DOCUMENT) > disk.bytes() // 2
    shop.is_killed_and_goes_on()
    shop.is_drained()
    shop.eventually(shop.is_accepted)
    assert shop.space() == "plenty"


def test_a_disk_that_another_file_fills_survives_a_kill_and_is_drained_while_it_is_full(
    project: Project, disk: SmallDisk
) -> None:
    shop = Shop(project)
    for _ in range(20):
        assert shop.is_accepted()
    disk.fill()
    shop.enqueue_until_full(at_most=20)
    shop.is_killed_and_goes_on()
    shop.is_drained()
    disk.make_room()
    shop.eventually(shop.is_accepted)
    shop.is_drained()
