"""An engine that lacks a feature: workers and clients name the feature, and everything else works."""

from __future__ import annotations

import pytest
from lesser import Lesser
from project import Project

import penstock

TASKS = """
    import penstock

    app = penstock.App("shop")

    @app.task
    def fail() -> None:
        raise ValueError("as it should")

    @app.task
    def work() -> int:
        return 1
"""


def test_a_worker_that_needs_more_than_the_engine_has_exits_with_75_and_says_what(project: Project) -> None:
    project.write("shop.py", TASKS)
    project.python("import shop; shop.work.delay()")
    with Lesser(project.data / "broker.sock", project.directory / "lesser.sock", "tasks of consumers") as lesser:
        worker = project.worker("shop:app", "-c1", PENSTOCK_URL=lesser.url)
        assert worker.wait(60) == 75, worker.output
    assert "naming the tasks of a worker is not offered by Lesser 1" in worker.output
    assert "use a broker that has it" in worker.output
    # The job isn't lost: a worker on another engine runs it.
    burst = project.worker("shop:app", "-c1", "--burst")
    assert burst.wait(60) == 0, burst.output
    assert project.status()["queues"][0]["ready"] == 0


def test_orders_are_kept_as_durably_as_the_engine_can(project: Project) -> None:
    project.write("shop.py", TASKS)
    project.python("import shop; shop.fail.delay()")
    assert project.worker("shop:app", "-c1", "--burst").wait(60) == 0
    project.python("import shop; shop.work.delay(); shop.work.delay()")
    with Lesser(project.data / "broker.sock", project.directory / "lesser.sock", "disk durability") as lesser:
        app = penstock.App("clerk", lesser.url)
        task = app.task(name="shop.work")(lambda: 1)
        with pytest.raises(penstock.NotOffered, match='durability="disk" is not offered by Lesser 1'):
            task.delay()
        job = task.options(durability="os").delay()
        assert job.cancel() is penstock.JobState.WAITING
        assert app.failed().remove() == 1
        app.close()
        purge = project.penstock("purge", "default", "--yes", PENSTOCK_URL=lesser.url)
        assert purge.returncode == 0, purge.output
        assert "dropped 2 waiting jobs" in purge.output


def test_nobody_waits_for_a_result_that_the_engine_would_not_keep(project: Project) -> None:
    project.write("shop.py", TASKS)
    project.python("import shop; shop.work.delay()")
    with Lesser(project.data / "broker.sock", project.directory / "lesser.sock", "results") as lesser:
        app = penstock.App("clerk", lesser.url)
        job = app.task(name="shop.work")(lambda: 1).delay()
        with pytest.raises(penstock.NotOffered, match="keeping results is not offered by Lesser 1"):
            job.result(timeout=60)
        app.close()
