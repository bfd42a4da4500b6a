"""A worker's log is for people: where nobody can read it, jobs run anyway."""

from __future__ import annotations

import signal

import pytest
from project import Project

TASKS = """
    import os
    import sys

    from penstock import App

    app = App("shop")
    if "OWN_LOG" in os.environ:
        # This stays in a buffer until somebody flushes it.
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
    # Each of them is logged by the process that runs it.
    for number in range(1, 30):
        assert tasks.divide.delay(number, 1).result(timeout=20) == number
        with pytest.raises(ZeroDivisionError):
            tasks.divide.delay(number, 0).result(timeout=20)
    assert worker.returncode is None
    worker.signal(signal.SIGTERM)
    assert worker.wait(30) == 0
