"""Setting the wall clock while no broker runs."""

from __future__ import annotations

import os
import signal

import pytest
from project import Process, Project, needs, wall_clock

TASKS = """
    from penstock import App

    app = App("shop", call_timeout=30)

    @app.task
    def greet() -> str:
        return "hello"
"""


def serve(project: Project, **environment: str) -> Process:
    server = project.start("penstock", "server", "--listen", project.url, "--data", project.data, **environment)
    server.wait_for_output("listening")
    return server


@pytest.mark.parametrize("step", ["+1h", "-1h"])
def test_a_countdown_goes_on_by_the_machines_clock_while_no_broker_runs(
    project: Project, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    needs(os.path.exists("/proc/sys/kernel/random/boot_id"), "a system that names its boot")
    project.url = f"unix:{project.directory}/socket"
    project.environment["PENSTOCK_URL"] = project.url
    monkeypatch.setenv("PENSTOCK_URL", project.url)
    project.write("tasks.py", TASKS)
    server = serve(project)
    tasks = project.tasks()
    slow = tasks.greet.options(countdown=600).delay()
    soon = tasks.greet.options(countdown=2).delay()
    server.signal(signal.SIGKILL)
    server.wait()
    serve(project, **wall_clock(step))
    project.worker("tasks:app", "-c", "1")
    # The job runs neither at once nor an hour late.
    assert soon.result(timeout=20) == "hello"
    assert slow.info().state == "delayed"
