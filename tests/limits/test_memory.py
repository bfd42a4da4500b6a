"""A broker at its memory limit refuses new jobs, serves everything else, and accepts jobs again automatically."""

from __future__ import annotations

from types import ModuleType

import pytest
from project import Process, Project, eventually

from penstock import Job, QueueFull

TASKS = """
    from penstock import App

    app = App("shop")

    @app.task
    def measure(document: bytes) -> int:
        return len(document)
"""
MEBI = 1 << 20
DOCUMENT = bytes(200_000)


def serve(project: Project, monkeypatch: pytest.MonkeyPatch, memory_limit: str) -> Process:
    project.url = f"unix:{project.directory}/socket"
    project.environment["PENSTOCK_URL"] = project.url
    monkeypatch.setenv("PENSTOCK_URL", project.url)
    data = project.directory / "data"
    options = ["--listen", project.url, "--data", str(data), "--memory-limit", memory_limit]
    server = project.start("penstock", "server", *options)
    server.wait_for_output("listening")
    return server


def says_what_it_means(full: QueueFull) -> None:
    assert "memory limit" in str(full)


def enqueue(tasks: ModuleType, count: int) -> list[Job[int]]:
    """Enqueue until a call is refused. No call waits for space, which would end it with BrokerUnavailable."""
    jobs = []
    for _ in range(count):
        try:
            jobs.append(tasks.measure.delay(DOCUMENT))
        except QueueFull as full:
            says_what_it_means(full)
            return jobs
    return jobs


def test_at_its_memory_limit_a_broker_refuses_new_jobs_and_workers_go_on(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    project.write("tasks.py", TASKS)
    server = serve(project, monkeypatch, "0")
    jobs = enqueue(project.tasks(), 10)
    assert len(jobs) == 10
    server.end()

    # Less than an empty broker uses, so it is always full.
    server = serve(project, monkeypatch, "1M")
    tasks = project.tasks()
    eventually(lambda: enqueue(tasks, 1) == [], 60, lambda: server.output)
    status = project.status()
    assert status["broker"]["memory_is_full"]
    assert status["counts"]["refused"] > 0
    assert "accepts no new jobs" in project.penstock("status").output
    project.worker("tasks:app", "-c", "1")
    assert [job.result(timeout=30) for job in jobs] == [len(DOCUMENT)] * 10


def test_a_backlog_several_times_the_limit_waits_on_disk_and_is_drained(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    project.write("tasks.py", TASKS)
    server = serve(project, monkeypatch, "96M")
    tasks = project.tasks()
    jobs = enqueue(tasks, 2_000)  # 400 MB
    assert len(jobs) == 2_000, server.output
    held = project.status()["broker"]["memory_bytes"]
    assert held < 96 * MEBI * 1.25, f"{held} bytes, {len(jobs)} jobs"
    worker = project.worker("tasks:app", "-c", "1")
    assert [job.result(timeout=60) for job in jobs] == [len(DOCUMENT)] * len(jobs)
    eventually(lambda: len(enqueue(tasks, 1)) == 1, 10, lambda: server.output)
    worker.end()
    assert server.returncode is None, server.output
