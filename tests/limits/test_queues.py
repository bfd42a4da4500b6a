"""A full queue either refuses new jobs with an error, or drops its oldest ones and ends the waits for their results."""

from __future__ import annotations

import pytest
from project import Project

from penstock import JobCancelled, QueueFull

TASKS = """
    from penstock import App, current_job

    app = App("shop")

    @app.task(queue="mail", retries=1, backoff=0.01)
    def send(to: str) -> str:
        if to == "busy" and current_job().attempt == 1:
            raise ConnectionError(to)
        return to
"""


@pytest.fixture
def shop(project: Project) -> Project:
    project.write("tasks.py", TASKS)
    return project


def limit(project: Project, *options: str) -> str:
    run = project.penstock("limit", "set", "mail", *options)
    assert run.returncode == 0, run.output
    return run.output


def test_a_full_queue_refuses_a_whole_call_and_names_its_limit(shop: Project) -> None:
    tasks = shop.tasks()
    first = tasks.send.delay("ada")
    assert "at most 2 jobs" in limit(shop, "--max-length", "2")
    second = tasks.send.delay("bob")
    with pytest.raises(QueueFull) as full:
        tasks.send.delay("cleo")
    assert "2 jobs" in str(full.value)
    assert "penstock limit set mail" in str(full.value)
    assert "was accepted" in str(full.value)
    # The limit survives a restart of the broker.
    shop.kill_broker()
    with pytest.raises(QueueFull):
        tasks.send.map(["cleo", "dan"])
    queue = shop.status()["queues"][0]
    assert (queue["ready"], queue["max_length"], queue["overflow"]) == (2, 2, "reject")
    assert queue["refused"] > 0

    # Workers make space.
    shop.worker("tasks:app", "-c", "1")
    assert [first.result(timeout=30), second.result(timeout=30)] == ["ada", "bob"]
    assert tasks.send.delay("cleo").result(timeout=30) == "cleo"


def test_a_retry_passes_into_a_full_queue(shop: Project) -> None:
    tasks = shop.tasks()
    busy = tasks.send.delay("busy")
    limit(shop, "--max-length", "0")
    with pytest.raises(QueueFull):
        tasks.send.delay("ada")
    shop.worker("tasks:app", "-c", "1")
    assert busy.result(timeout=30) == "busy"
    assert "no limit" in shop.penstock("limit", "rm", "mail").output
    assert tasks.send.delay("ada").result(timeout=30) == "ada"


def test_where_the_oldest_make_room_their_results_say_so(shop: Project) -> None:
    tasks = shop.tasks()
    oldest = tasks.send.delay("ada")
    limit(shop, "--max-length", "2", "--overflow", "drop-oldest")
    kept = [tasks.send.delay("bob"), tasks.send.delay("cleo")]
    with pytest.raises(JobCancelled, match="its queue was full"):
        oldest.result(timeout=30)
    assert shop.status()["queues"][0]["dropped"] == 1
    assert "1 dropped" in shop.penstock("status").output
    shop.worker("tasks:app", "-c", "1")
    assert [job.result(timeout=30) for job in kept] == ["bob", "cleo"]


def test_a_limit_that_makes_no_sense_is_refused(shop: Project) -> None:
    shop.tasks().send.delay("ada")
    assert shop.penstock("limit", "set", "mail", "--overflow", "drop-oldest").returncode == 2
    assert shop.penstock("limit", "set", "mail", "--max-bytes", "lots").returncode == 2
    assert shop.penstock("limit", "rm", "mail", "--max-length", "1").returncode == 2
    assert shop.penstock("limit", "set", "task:tasks.send", "--max-length", "1").returncode == 75
    assert "no queue has a limit" in shop.penstock("limit", "ls").output
