"""`penstock workflow`: handling workflows."""

from __future__ import annotations

import json
import re
from typing import Any
from xml.etree import ElementTree

import pytest
from project import Project, eventually

from penstock import JobState, group

TASKS = """
    from pathlib import Path

    from penstock import App

    app = App("press")
    here = Path(__file__).parent


    @app.task
    def fetch(page: int) -> str:
        if page == 13 and not (here / "printed").exists():
            raise LookupError("there is no page 13")
        return f"page {page}"


    @app.task
    def bind(pages: list[str]) -> str:
        return " + ".join(pages)
"""


@pytest.fixture
def press(project: Project) -> Project:
    project.write("tasks.py", TASKS)
    return project


def asked(press: Project, *command: str) -> Any:
    run = press.penstock("workflow", *command, "--json")
    assert run.returncode == 0, run.output
    return json.loads(run.output)


def test_workflows_are_listed_by_state_and_name(press: Project) -> None:
    tasks = press.tasks()
    well = (group(tasks.fetch.s(page) for page in (1, 2)) | tasks.bind.s()).delay(name="nightly")
    badly = (group(tasks.fetch.s(page) for page in (12, 13)) | tasks.bind.s()).delay()
    press.worker("tasks:app", "-c", "2")
    assert (well.wait(60), badly.wait(60)) == (JobState.SUCCEEDED, JobState.FAILED)
    later = group(tasks.fetch.options(countdown=900).s(1)).delay(name="nightly")
    eventually(lambda: badly.status().ended_at is not None)
    listed = asked(press, "ls")
    assert [workflow["id"] for workflow in listed] == [well.id, badly.id, later.id]
    assert [workflow["state"] for workflow in listed] == ["succeeded", "failed", "running"]
    assert [workflow["name"] for workflow in listed] == ["nightly", "group(2 x fetch) | bind", "nightly"]
    counts = [[each[state] for state in ("waiting", "succeeded", "failed", "blocked")] for each in listed]
    assert counts == [[0, 3, 0, 0], [0, 1, 1, 1], [1, 0, 0, 0]]

    def ids(*options: str) -> list[str]:
        return [workflow["id"] for workflow in asked(press, "ls", *options)]

    assert ids("--name", "nightly") == [well.id, later.id]
    assert ids("--name", "nightly", "--state", "running") == [later.id]
    assert (ids("--state", "failed"), ids("--state", "expired")) == ([badly.id], [])
    assert (ids("--limit", "2"), ids("--limit", "0")) == ([badly.id, later.id], [well.id, badly.id, later.id])
    people = press.penstock("workflow", "ls", "--limit", "2").output
    assert re.search(rf"ago +{badly.id} +group\(2 x fetch\) \| bind +failed +0 +0 +1 +1 +0 +1", people), people
    assert "these are the newest 2 that match" in people
    assert "these are the newest" not in press.penstock("workflow", "ls").output
    assert "DEADLINE" not in press.penstock("workflow", "ls").output
    hurried = group(tasks.fetch.options(countdown=900).s(1)).delay(name="hurried", deadline=3600)
    people = press.penstock("workflow", "ls").output
    assert re.search(r"BLOCKED +DEADLINE\n", people), people
    assert re.search(r"hurried +running +1 .* \d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ \(in (59|60)", people), people
    assert re.search(r"deadline \d{4}-\d\d-\d\dT\S+ \(in ", press.penstock("workflow", "show", hurried.id).output)
    assert press.penstock("workflow", "ls", "--name", "weekly").output == "no workflow matches\n"
    assert press.penstock("workflow", "ls", "--state", "odd").returncode == 2


def test_one_is_drawn_as_a_tree_as_dot_and_as_a_picture(press: Project) -> None:
    tasks = press.tasks()
    workflow = (group(tasks.fetch.s(page) for page in (12, 13)) | tasks.bind.s()).delay(name="book")
    press.worker("tasks:app", "-c", "2")
    workflow.wait(60)
    eventually(lambda: workflow.status().ended_at is not None)
    shown = press.penstock("workflow", "show", workflow.id).output.splitlines()
    assert shown[:5] == [
        "book  failed  (1 succeeded, 1 failed, 1 blocked)",
        "├─ group of 2  failed, 2 of 2 have ended, 1 failed",
        "│  ├─ tasks.fetch  succeeded",
        "│  └─ tasks.fetch  failed",
        "└─ tasks.bind  blocked",
    ]
    assert shown[5].startswith("sent ") and ", ended " in shown[5]
    dot = press.penstock("workflow", "show", workflow.id, "--dot").output
    assert dot == workflow.status().dot() and dot.startswith('digraph "book" {')
    ElementTree.fromstring(press.penstock("workflow", "show", workflow.id, "--svg").output)
    steps = asked(press, "show", workflow.id)["steps"]["chain"]
    assert [step["state"] for step in steps] == ["failed", "blocked"]
    assert press.penstock("workflow", "show", workflow.id, "--dot", "--svg").returncode == 2
    unknown = press.penstock("workflow", "show", "01890000-0000-7000-8000-000000000000")
    assert unknown.returncode == 1 and "lists no workflow 01890000" in unknown.output


def test_workflows_are_cancelled_by_their_ids(press: Project) -> None:
    tasks = press.tasks()
    sent = [group(tasks.fetch.options(countdown=900).s(page) for page in (1, 2)).delay() for _ in range(3)]
    unknown = "01890000-0000-7000-8000-000000000000"
    run = press.penstock("workflow", "cancel", sent[0].id, sent[1].id, unknown, "--reason", "not today")
    assert run.returncode == 1 and "cancelled 4 jobs" in run.output
    assert f"{unknown} was not cancelled: the broker lists no workflow" in run.output
    states = {workflow["id"]: workflow["state"] for workflow in asked(press, "ls")}
    assert [states[each.id] for each in sent] == ["cancelled", "cancelled", "running"]
    assert asked(press, "cancel", sent[2].id) == {"cancelled": 2, "asked": 0, "left": 0, "refused": []}
    again = press.penstock("workflow", "cancel", sent[2].id)
    assert again.returncode == 0 and "have already ended" in again.output
    assert press.penstock("workflow", "cancel").returncode == 2


def test_workflows_that_have_failed_go_on_after_a_retry(press: Project) -> None:
    tasks = press.tasks()
    workflow = (group(tasks.fetch.s(page) for page in (12, 13)) | tasks.bind.s()).delay()
    press.worker("tasks:app", "-c", "2")
    assert workflow.wait(60) is JobState.FAILED
    (press.directory / "printed").touch()
    run = press.penstock("workflow", "retry", workflow.id)
    assert (run.returncode, run.output) == (0, "retried 1 failed job\n")
    assert workflow.result(60) == "page 12 + page 13"
    eventually(lambda: workflow.status().ended_at is not None)
    status = workflow.status()
    assert (status.state, status.jobs.succeeded, status.jobs.failed) == (JobState.SUCCEEDED, 3, 0)
    assert asked(press, "retry", workflow.id) == {"retried": 0, "left": 0, "refused": []}
    unknown = press.penstock("workflow", "retry", "01890000-0000-7000-8000-000000000000")
    assert unknown.returncode == 1 and "was not retried: the broker lists no workflow" in unknown.output
