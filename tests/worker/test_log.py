"""A worker's log is for people: if its output can't be written, jobs run anyway."""

from __future__ import annotations

import json
import signal

import pytest
from project import Project

TASKS = """
    import os
    import sys

    from penstock import App

    app = App("shop")
    if "OWN_LOG" in os.environ:
        # This stays in a buffer until something flushes it.
        sys.stdout = open(os.environ["OWN_LOG"], "w")
        print("loading")

    @app.task(retries=0)
    def divide(one: int, other: int) -> float:
        return one / other
"""


@pytest.mark.parametrize(
    "log", ["> >(head --lines=1 >&-) 2>&1", ">/dev/full 2>/dev/full"], ids=["reader ended", "disk full"]
)
@pytest.mark.parametrize("style", ["text", "json"])
def test_a_log_that_can_not_be_written_ends_no_job_and_no_worker(project: Project, log: str, style: str) -> None:
    project.write("tasks.py", TASKS)
    command = ["penstock", "worker", "tasks:app", "-c", "1", "--verbose", "--log-format", style]
    worker = project.start("bash", "-c", f'exec "$@" {log}', "bash", *command, OWN_LOG="/dev/full")
    tasks = project.tasks()
    # The process that runs a job logs it.
    for number in range(1, 30):
        assert tasks.divide.delay(number, 1).result(timeout=20) == number
        with pytest.raises(ZeroDivisionError):
            tasks.divide.delay(number, 0).result(timeout=20)
    assert worker.returncode is None
    worker.signal(signal.SIGTERM)
    assert worker.wait(30) == 0


TALKS = """
    import logging
    from penstock import App, JobLogFilter

    app = App("shop")
    log = logging.getLogger("shop.orders")
    {setup}

    @app.task
    def order(number: int) -> None:
        log.info("looking at %d", number)
        log.warning("number %d is odd", number)
"""


def lines_of(project: Project, *options: str, setup: str = "") -> tuple[str, list[str]]:
    """Run one job; return its id and the log lines that name its order."""
    project.write("tasks.py", TALKS.format(setup=setup))
    job = project.tasks().order.delay(7)
    worker = project.penstock("worker", "tasks:app", "-c", "1", "--burst", *options)
    assert worker.returncode == 0, worker.output
    return job.id, [line for line in worker.output.splitlines() if "looking at" in line or "is odd" in line]


def test_a_line_that_a_task_logs_tells_its_job(project: Project) -> None:
    job_id, lines = lines_of(project)
    assert [line[28:] for line in lines] == [
        f" INFO tasks.order {job_id}: looking at 7",
        f" WARN tasks.order {job_id}: number 7 is odd",
    ]


def test_the_level_of_a_worker_is_that_of_its_tasks_too(project: Project) -> None:
    _, lines = lines_of(project, "--log-level", "warning")
    assert [line[28:33] for line in lines] == [" WARN"]


def test_a_log_of_json_has_a_line_of_json_for_everything(project: Project) -> None:
    job_id, (line,) = lines_of(project, "--log-format", "json", "--log-level", "warning")
    assert json.loads(line) == {
        "timestamp": json.loads(line)["timestamp"],
        "level": "WARN",
        "message": "number 7 is odd",
        "target": "shop.orders",
        "task": "tasks.order",
        "job_id": job_id,
    }
    worker = project.started[-1].output.splitlines()
    assert {"timestamp", "level", "message"} <= set.intersection(*(set(json.loads(line)) for line in worker))


def test_an_app_that_sets_up_logging_has_the_job_in_a_filter(project: Project) -> None:
    setup = """
    handler = logging.StreamHandler()
    handler.addFilter(JobLogFilter())
    logging.basicConfig(format="%(task)s|%(job_id)s|%(message)s", handlers=[handler])"""
    job_id, (line,) = lines_of(project, setup=setup)
    assert line == f"tasks.order|{job_id}|number 7 is odd"
