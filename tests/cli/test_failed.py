"""`penstock failed` and `penstock job`: handling failed jobs and single jobs."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from project import Process, Project, eventually

from penstock import Job, JobState

TASKS = """
    import os
    import signal
    from pathlib import Path

    from penstock import App

    app = App("shop")
    here = Path(__file__).parent


    class Gone(Exception):
        pass


    def break_down(why: str) -> None:
        if not (here / "mended").exists():
            raise ValueError(why)


    @app.task(queue="mail")
    def send(to: str) -> str:
        break_down(f"no route to {to}")
        return f"sent to {to}"


    @app.task(retries=1, backoff=0.01)
    def pay(amount: int) -> None:
        raise Gone("no money")


    @app.task(on_crash="fail")
    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)


    @app.task
    def wait() -> None:
        (here / "waiting").touch()
        while not (here / "go").exists():
            pass
"""


@pytest.fixture
def shop(project: Project) -> Project:
    project.write("tasks.py", TASKS)
    return project


def fail(shop: Project, *jobs: Job[Any]) -> Process:
    """Run a worker until these jobs have failed."""
    worker = shop.worker("tasks:app", "-c", "2", "-Q", "default,mail")
    for job in jobs:
        eventually(lambda job=job: job.info().state in (JobState.FAILED, JobState.CRASHED))
    return worker


def stop(worker: Process) -> None:
    worker.popen.terminate()
    assert worker.wait(30) == 0


def asked(shop: Project, *command: str) -> Any:
    run = shop.penstock(*command, "--json")
    assert run.returncode == 0, run.output
    return json.loads(run.output)


def test_failed_jobs_are_listed_by_task_queue_error_and_time(shop: Project) -> None:
    tasks = shop.tasks()
    sent, paid, died = tasks.send.delay("ada"), tasks.pay.delay(3), tasks.die.delay()
    fail(shop, sent, paid, died)
    listed = {job["id"]: job for job in asked(shop, "failed", "ls")}
    assert listed.keys() == {sent.id, paid.id, died.id}
    assert [job["failed_at_ms"] for job in listed.values()] == sorted(job["failed_at_ms"] for job in listed.values())
    job = listed[paid.id]
    assert (job["task"], job["queue"], job["error"], job["message"]) == (
        "tasks.pay",
        "default",
        "tasks.Gone",
        "no money",
    )
    assert (job["attempts"], job["crashes"], job["generation"]) == (2, 0, 0)
    assert (listed[died.id]["attempts"], listed[died.id]["crashes"]) == (1, 1)
    assert listed[sent.id]["argument_bytes"] > 4

    def ids(*options: str) -> set[str]:
        return {job["id"] for job in asked(shop, "failed", "ls", *options)}

    assert ids("--task", "tasks.send") == ids("--queue", "mail") == ids("--error", "ValueError") == {sent.id}
    assert ids("--error", "tasks.Gone") == ids("--fingerprint", job["fingerprint"]) == {paid.id}
    assert ids("--error", "WorkerCrashed") == {died.id}
    assert ids("--task", "tasks.send", "--error", "tasks.Gone") == ids("--task", "tasks.other") == set()
    assert ids("--since", "1h") == {sent.id, paid.id, died.id}
    assert ids("--since", "2099-01-01T00:00:00Z") == set()
    assert ids("--limit", "1") == {list(listed)[-1]}
    assert [job["id"] for job in asked(shop, "failed", "ls", "--limit", "2")] == list(listed)[1:]
    assert ids("--limit", "3") == ids("--limit", "4") == ids("--limit", "0") == set(listed)
    people = shop.penstock("failed", "ls", "--limit", "2").output
    assert "tasks.Gone: no money" in shop.penstock("failed", "ls").output
    assert "these are the newest 2 of 3 failed jobs" in people
    assert "these are the newest" not in shop.penstock("failed", "ls", "--limit", "3").output
    some = shop.penstock("failed", "ls", "--since", "1h", "--limit", "1").output
    assert "these are the newest 1 that match" in some
    assert shop.penstock("failed", "ls", "--since", "yesterday").returncode == 2


def test_errors_are_grouped(shop: Project) -> None:
    tasks = shop.tasks()
    jobs = [*tasks.send.map(["a", "b", "c"]), tasks.pay.delay(1)]
    fail(shop, *jobs)
    groups = {group["error"]: group for group in asked(shop, "failed", "ls", "--group")}
    assert groups.keys() == {"ValueError", "tasks.Gone"}
    assert (groups["ValueError"]["jobs"], groups["ValueError"]["tasks"]) == (3, ["tasks.send"])
    assert groups["ValueError"]["first_failed_at_ms"] <= groups["ValueError"]["last_failed_at_ms"]
    assert re.search(r"ago +3 +tasks.send +ValueError: no route", shop.penstock("failed", "ls", "--group").output)


def test_one_is_shown_with_the_traceback_of_each_attempt(shop: Project) -> None:
    tasks = shop.tasks()
    job = tasks.pay.delay(3)
    fail(shop, job)
    shown = asked(shop, "failed", "show", job.id)
    assert (shown["state"], shown["task"], shown["error"]) == ("failed", "tasks.pay", "tasks.Gone")
    assert [attempt["attempt"] for attempt in shown["attempts"]] == [1, 2]
    assert all("Traceback" in attempt["traceback"] for attempt in shown["attempts"])
    people = shop.penstock("failed", "show", job.id.replace("-", ""))
    assert people.returncode == 0 and people.output.count('raise Gone("no money")') == 2, people.output
    by_both = [re.sub(r"\([^)]* ago\)", "", shop.penstock(group, "show", job.id).output) for group in ("job", "failed")]
    assert by_both[0] == by_both[1]
    waiting = tasks.send.options(queue="nobody").delay("b")
    refused = shop.penstock("failed", "show", waiting.id)
    assert refused.returncode == 1 and "is waiting, so it is not a failed job" in refused.output


def test_a_count_comes_before_anything_is_done(shop: Project) -> None:
    tasks = shop.tasks()
    jobs = tasks.send.map(["a", "b"])
    other = tasks.pay.delay(1)
    stop(fail(shop, *jobs, other))
    for order in ("retry", "rm"):
        unasked = shop.penstock("failed", order, "--queue", "mail")
        assert unasked.returncode == 2 and "2 failed jobs. Continue?" in unasked.output, unasked.output
        for nothing in ([], ["--all", "--task", "tasks.send"], [jobs[0].id, "--all"]):
            assert shop.penstock("failed", order, "-y", *nothing).returncode == 2
        none = shop.penstock("failed", order, "--task", "tasks.other")
        assert none.returncode == 0 and none.output == "no failed job matches\n"
    assert len(asked(shop, "failed", "ls")) == 3
    assert asked(shop, "failed", "rm", "--error", "tasks.Gone", "-y") == {"removed": 1, "spared": 0, "refused": []}
    assert {job["id"] for job in asked(shop, "failed", "ls")} == {job.id for job in jobs}
    Path(shop.directory, "mended").touch()
    retried = shop.penstock("failed", "retry", "--all", "-y")
    assert retried.output == "retried 2 failed jobs\n"
    shop.worker("tasks:app", "-c", "1", "-Q", "mail")
    assert [job.result(timeout=30) for job in jobs] == ["sent to a", "sent to b"]
    assert asked(shop, "failed", "ls") == []


@pytest.mark.parametrize(("answer", "code", "left"), [("y", 0, ["b"]), ("n", 1, ["a", "b"]), ("", 1, ["a", "b"])])
def test_a_person_is_asked_and_what_fails_meanwhile_is_not_meant(
    shop: Project, answer: str, code: int, left: list[str]
) -> None:
    tasks = shop.tasks()
    one = tasks.send.delay("a")
    fail(shop, one)
    ours, theirs = pty.openpty()
    command = ["penstock", "failed", "rm", "--queue", "mail"]
    place: dict[str, Any] = {"cwd": shop.directory, "env": shop.environment}
    with subprocess.Popen(command, stdin=theirs, stderr=theirs, stdout=subprocess.DEVNULL, **place) as asking:
        os.close(theirs)
        asked_so_far = b""
        while b"[y/N]" not in asked_so_far:
            asked_so_far += os.read(ours, 1024)
        assert b"This removes 1 failed job. Continue?" in asked_so_far
        two = tasks.send.delay("b")
        eventually(lambda: two.info().state is JobState.FAILED)
        os.write(ours, f"{answer}\n".encode())
        assert asking.wait(30) == code
    os.close(ours)
    known = {one.id: "a", two.id: "b"}
    assert [known[job["id"]] for job in asked(shop, "failed", "ls")] == left


def test_jobs_are_named_by_their_ids(shop: Project) -> None:
    tasks = shop.tasks()
    one, two = tasks.send.map(["a", "b"])
    stop(fail(shop, one, two))
    assert shop.penstock("failed", "retry", one.id, "--to", "elsewhere").output == "retried 1 failed job\n"
    assert (one.info().queue, one.info().state) == ("elsewhere", "waiting")
    again = shop.penstock("failed", "retry", one.id, two.id)
    assert again.returncode == 1
    assert "retried 1 failed job\n" in again.output
    assert f"{one.id} was not retried: the job is waiting, not failed" in again.output
    nobody = "0190aaaa-0000-7000-8000-000000000001"
    for command in (["failed", "rm"], ["job", "retry"], ["job", "show"], ["failed", "show"], ["job", "cancel"]):
        unknown = shop.penstock(*command, nobody)
        assert unknown.returncode == 1 and "Traceback" not in unknown.output, unknown.output
        assert shop.penstock(*command, "17").returncode == 2


def test_a_job_is_shown_wherever_it_is(shop: Project) -> None:
    tasks = shop.tasks()
    later = tasks.send.options(countdown=600).delay("later")
    shown = asked(shop, "job", "show", later.id)
    assert (shown["state"], shown["task"], shown["queue"]) == ("delayed", "tasks.send", "mail")
    assert shown["due_at_ms"] > shown["enqueued_at_ms"]
    Path(shop.directory, "mended").touch()
    job = tasks.send.delay("ada")
    shop.worker("tasks:app", "-c", "1", "-Q", "mail")
    assert job.result(timeout=30) == "sent to ada"
    shown = asked(shop, "job", "show", job.id)
    assert (shown["state"], shown["task"], shown["queue"]) == ("succeeded", "tasks.send", "mail")
    assert shown["result_bytes"] > 0
    people = shop.penstock("job", "show", job.id).output
    assert "sent to ada" not in people and re.search(r"^result +\d+ B$", people, re.MULTILINE), people


def test_jobs_are_cancelled_or_it_is_said_why_not(shop: Project) -> None:
    tasks = shop.tasks()
    waiting, delayed = tasks.send.delay("a"), tasks.send.options(countdown=600).delay("b")
    cancelled = asked(shop, "job", "cancel", waiting.id, delayed.id, "--reason", "sent twice")
    assert cancelled == {
        "cancelled": [{"id": waiting.id, "was": "waiting"}, {"id": delayed.id, "was": "delayed"}],
        "asked": [],
        "refused": [],
    }
    assert waiting.info().state is JobState.CANCELLED
    assert "sent twice" in shop.penstock("job", "show", waiting.id).output
    running = tasks.wait.delay()
    shop.worker("tasks:app", "-c", "1", "-Q", "default")
    eventually(Path(shop.directory, "waiting").exists)
    for command in (("status",), ("workers", "ls")):
        row = rf"(?m)^\d.* +{running.id} +tasks.wait +default +worker@"
        assert re.search(row, shop.penstock(*command).output), command
    (worker,) = asked(shop, "workers", "ls")
    ((shown, started_at_ms),) = [(job["id"], job["started_at_ms"]) for job in worker["running"]]
    assert shown == running.id and started_at_ms == asked(shop, "job", "show", running.id)["started_at_ms"]
    refused = shop.penstock("job", "cancel", running.id, "--running", "leave")
    assert refused.returncode == 1 and "it is running and was left alone" in refused.output, refused.output
    Path(shop.directory, "go").touch()
    assert running.result(timeout=30) is None
    # The output says why a job cannot be cancelled, and an unknown id leaves nothing behind.
    nobody = "01a3185c-52cb-78b4-9daf-bf7df8650000"
    for job_id, why in (
        (running.id, "it has already ended: it succeeded"),
        (waiting.id, "it has already ended: it was cancelled"),
        (nobody, "the broker has no such job"),
    ):
        refused = shop.penstock("job", "cancel", job_id)
        assert refused.returncode == 1 and f"{job_id} was not cancelled: {why}" in refused.output, refused.output
    for arguments, why in (((), "no jobs given"), ((nobody, "--task", "tasks.send"), "give either ids or a filter")):
        refused = shop.penstock("job", "cancel", *arguments)
        assert refused.returncode == 2 and why in refused.output, refused.output


def test_jobs_of_a_task_or_a_queue_are_cancelled_together(shop: Project) -> None:
    tasks = shop.tasks()
    sends = [tasks.send.delay("a") for _ in range(3)]
    other = tasks.wait.delay()
    refused = shop.penstock("job", "cancel", "--queue", "mail")
    assert refused.returncode == 2, refused.output
    assert "This cancels 3 waiting jobs in queue mail, and asks 0 running jobs to stop." in refused.output
    done = shop.penstock("job", "cancel", "--task", "tasks.send", "--reason", "no stamps", "-y")
    assert done.output == "cancelled 3 jobs\n"
    assert [job.info().error for job in sends] == ["no stamps"] * 3
    assert other.info().state is JobState.WAITING
    assert asked(shop, "job", "cancel", "--queue", "default", "-y") == {"cancelled": 1, "asked": 0, "left": 0}
    assert shop.penstock("job", "cancel", "--task", "tasks.send", "-y").output == "no job matches\n"
