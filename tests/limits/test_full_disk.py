"""A full disk stops new jobs and nothing else: nothing is lost, and everything resumes once there is space."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from types import ModuleType

import pytest
from limits.disks import SmallDisk, small_disk
from project import Process, Project, eventually, is_quick

from penstock import DiskFull, Job

TASKS = """
    from penstock import App

    app = App("shop", call_timeout=30)

    @app.task
    def measure(document: bytes) -> int:
        return len(document)
"""
DOCUMENT = bytes(100_000)
# A full disk is reported immediately. (An accepted call takes as long as the disk does.)
AT_ONCE_S = 1.0


@pytest.fixture
def disk(project: Project) -> Iterator[SmallDisk]:
    with small_disk(project.directory / "disk.img", project.directory / "disk") as disk:
        try:
            yield disk
        finally:
            for process in reversed(project.started):
                process.end()


def serve(project: Project, disk: SmallDisk, monkeypatch: pytest.MonkeyPatch) -> Process:
    socket = project.directory / "socket"
    project.url = f"unix:{socket}"
    project.environment["PENSTOCK_URL"] = project.url
    monkeypatch.setenv("PENSTOCK_URL", project.url)
    server = project.start("penstock", "server", "--listen", project.url, "--data", disk.path / "data")
    server.wait_for_output("listening")
    return server


def says_what_it_means(full: DiskFull) -> None:
    assert "accepts no new jobs" in str(full)


def enqueue_until_full(tasks: ModuleType) -> list[Job[int]]:
    """Enqueue until a call is refused; each call ends with a job or an error."""
    jobs = []
    for _ in range(2_000):
        try:
            jobs.append(tasks.measure.delay(DOCUMENT))
        except DiskFull as full:
            says_what_it_means(full)
            return jobs
    raise AssertionError("200 MB went onto a disk of 64 MB")


def is_drained(project: Project) -> bool:
    return all(queue["ready"] + queue["running"] == 0 for queue in project.status()["queues"])


def is_accepted(tasks: ModuleType, jobs: list[Job[int]]) -> bool:
    try:
        jobs.append(tasks.measure.delay(DOCUMENT))
    except DiskFull:
        return False
    return True


def drain(project: Project, server: Process, tasks: ModuleType, jobs: list[Job[int]]) -> None:
    """Check that workers alone free the space, and that new jobs are then accepted."""
    worker = project.worker("tasks:app", "-c", "1")
    eventually(lambda: is_drained(project), 90, lambda: f"{project.status()}\n{server.output}\n{worker.output}")
    assert [job.result(timeout=30) for job in jobs] == [len(DOCUMENT)] * len(jobs)
    eventually(lambda: is_accepted(tasks, jobs), 20, lambda: server.output)
    assert jobs[-1].result(timeout=30) == len(DOCUMENT)
    worker.end()


def test_a_full_disk_is_told_at_once_workers_drain_it_and_new_jobs_are_taken_again(
    project: Project, disk: SmallDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    project.write("tasks.py", TASKS)
    server = serve(project, disk, monkeypatch)
    tasks = project.tasks()
    for round in range(3):
        jobs = enqueue_until_full(tasks)
        if round == 0:
            assert len(jobs) > 300
            assert project.status()["broker"]["space"] != "plenty"
            took = []
            for _ in range(20):
                began = time.monotonic()
                with pytest.raises(DiskFull):
                    tasks.measure.delay(DOCUMENT)
                took.append(time.monotonic() - began)
            is_quick(statistics.median(took), AT_ONCE_S, "a refusal")
        drain(project, server, tasks, jobs)
    assert server.returncode is None, server.output
    assert "it accepts no new jobs until there is space" in server.output


def test_when_other_files_fill_the_disk_all_waits_and_goes_on_by_itself_once_there_is_room(
    project: Project, disk: SmallDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    project.write("tasks.py", TASKS)
    server = serve(project, disk, monkeypatch)
    tasks = project.tasks()
    jobs = [tasks.measure.delay(DOCUMENT) for _ in range(5)]
    disk.fill()
    jobs += enqueue_until_full(tasks)
    # The broker accepts no new jobs, but its reserve is enough to finish existing ones.
    worker = project.worker("tasks:app", "-c", "1")
    disk.make_room()
    eventually(lambda: is_accepted(tasks, jobs), 20, lambda: server.output)
    assert [job.result(timeout=30) for job in jobs] == [len(DOCUMENT)] * len(jobs)
    worker.end()


def test_a_broker_starts_on_a_full_disk_or_says_what_to_do(
    project: Project, disk: SmallDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    project.write("tasks.py", TASKS)
    server = serve(project, disk, monkeypatch)
    tasks = project.tasks()
    jobs = enqueue_until_full(tasks)
    disk.fill()
    server.end()
    server = project.start("penstock", "server", "--listen", project.url, "--data", disk.path / "data")
    eventually(lambda: "listening" in server.output or server.returncode is not None, 60, lambda: server.output)
    if server.returncode is not None:
        assert "space" in server.output.splitlines()[-1], server.output
    disk.make_room()
    if server.returncode is not None:
        serve(project, disk, monkeypatch)
    project.worker("tasks:app", "-c", "1")
    assert [job.result(timeout=30) for job in jobs] == [len(DOCUMENT)] * len(jobs)

    # Without a journal yet, there is nothing to lose.
    for process in reversed(project.started):
        process.end()
    disk.fill()
    fresh = project.run("penstock", "server", "--listen", f"{project.url}-2", "--data", disk.path / "fresh")
    assert fresh.returncode != 0
    assert "panicked" not in fresh.output
    assert "No space left" in fresh.output or "full" in fresh.output, fresh.output
