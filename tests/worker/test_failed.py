"""A job that raised on its last attempt: the data that is kept about it, and its run after a retry."""

from __future__ import annotations

import os
import socket

from project import Project, eventually

from penstock import JobState, _core

TASKS = """
    from pathlib import Path

    from penstock import App, current_job

    app = App("shop")


    @app.task(retries=1, backoff=0.01, store_result=False)
    def pay(amount: int) -> None:
        job = current_job()
        with Path(__file__).with_name("runs.txt").open("a") as file:
            file.write(f"{job.generation} {job.attempt} {job.retries_left}\\n")
        raise ValueError(f"no money\\nfor {amount}")
"""


def field(number: int, held: bytes | int) -> bytes:
    """Write one field as protobuf does."""
    if isinstance(held, int):
        return varint(number << 3) + varint(held)
    return varint(number << 3 | 2) + varint(len(held)) + held


def varint(number: int) -> bytes:
    low, high = number & 0x7F, number >> 7
    return bytes([low | 0x80]) + varint(high) if high else bytes([low])


def retry_failed(project: Project, job_id: bytes) -> None:
    """Send `retry_failed` of `proto/penstock.proto` for one job, and wait until it is confirmed."""
    hello = field(1, field(1, 2) + field(3, os.urandom(16)))
    target = field(1, field(1, job_id))
    operation = field(1, field(16, target))
    commit = field(2, field(1, 1) + field(3, operation))
    with socket.socket(socket.AF_UNIX) as broker:
        broker.connect(str(project.data / "broker.sock"))
        for frame in (hello, commit):
            broker.sendall(len(frame).to_bytes(4, "little") + frame)
        answers = broker.makefile("rb")
        while True:
            length = int.from_bytes(answers.read(4), "little")
            frame = answers.read(length)
            assert frame, "the broker refused it"
            if frame[:1] == field(2, b"")[:1]:
                break


def runs(project: Project) -> list[str]:
    file = project.directory / "runs.txt"
    return file.read_text().splitlines() if file.exists() else []


def test_a_failed_job_says_why_and_is_retried_with_all_its_retries(project: Project) -> None:
    project.write("tasks.py", TASKS)
    job = project.tasks().pay.delay(3)
    project.worker("tasks:app", "-c", "1")
    eventually(lambda: job.info().state is JobState.FAILED)
    info = job.info()
    assert info.error == "ValueError: no money\nfor 3"
    assert [error.attempt for error in info.errors] == [1, 2]
    assert (info.attempts, info.generation, info.queue) == (2, 0, "default")
    assert info.finished_at is not None
    client = _core.Client(project.url)
    held = client.message_info(job._id, 10)
    assert held is not None
    assert (held["state"], held["failure"]) == ("failed", "ValueError: no money")

    retry_failed(project, job._id)
    eventually(lambda: len(runs(project)) == 4 and job.info().state is JobState.FAILED)
    # Generation, attempt, and retries left.
    assert runs(project) == ["0 1 1", "0 2 0", "1 3 1", "1 4 0"]
    info = job.info()
    assert (info.attempts, info.generation) == (4, 1)
    assert [error.attempt for error in info.errors] == [1, 2, 3, 4]
    client.close(5)
