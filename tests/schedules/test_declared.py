"""Schedules declared in code: a worker declares them to the broker when it starts, and the broker makes the jobs."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from project import Project, eventually

from penstock import App

TASKS = """
    import os
    from pathlib import Path

    from penstock import App

    app = App("shop", version=VERSION)
    here = Path(__file__).parent


    @app.periodic(every=1, args=["ada"])
    @app.task
    def greet(name: str) -> None:
        with open(here / "greeted", "a") as file:
            file.write(f"{name}\\n")


    @app.periodic("30 2 * * *", name="nightly", tz="Europe/Paris")
    @app.periodic("@hourly", name="hourly")
    @app.task(queue="reports")
    def report() -> None: ...
"""


def schedules(project: Project) -> dict[str, dict[str, Any]]:
    run = project.penstock("schedule", "ls", "--json")
    return {each["name"]: each for each in json.loads(run.output)} if run.returncode == 0 else {}


@pytest.fixture
def shop(project: Project) -> Project:
    project.write("tasks.py", TASKS.replace("VERSION", "2"))
    return project


def test_a_worker_declares_schedules_and_the_broker_makes_their_jobs(shop: Project) -> None:
    worker = shop.worker("tasks:app", "-c", "1")
    greeted = shop.directory / "greeted"
    eventually(lambda: greeted.exists() and greeted.read_text().count("ada\n") >= 2, 30, lambda: worker.output)
    listed = schedules(shop)
    assert sorted(listed) == ["hourly", "nightly", "tasks.greet"]
    assert listed["nightly"]["cron"] == "30 2 * * *"
    assert (listed["nightly"]["zone"], listed["nightly"]["queue"]) == ("Europe/Paris", "reports")
    assert listed["tasks.greet"]["every_ms"] == 1000
    assert listed["tasks.greet"]["declared"] and not listed["tasks.greet"]["set"]
    shown = shop.penstock("schedule", "ls").output
    assert "30 2 * * * (Europe/Paris)" in shown and "every 1.0 s" in shown


def test_a_kill_of_the_broker_makes_no_time_come_twice(shop: Project) -> None:
    worker = shop.worker("tasks:app", "-c", "1")
    greeted = shop.directory / "greeted"

    def count() -> int:
        return greeted.read_text().count("ada\n") if greeted.exists() else 0

    eventually(lambda: count() >= 1, 30, lambda: worker.output)
    shop.kill_broker()
    before = count()
    eventually(lambda: count() >= before + 2, 60, lambda: worker.output)
    shop.penstock("schedule", "pause", "tasks.greet")
    eventually(lambda: not schedules(shop)["tasks.greet"]["running"], 30, lambda: worker.output)
    assert count() == schedules(shop)["tasks.greet"]["fired"]


def test_the_schedules_of_the_newer_version_hold(shop: Project) -> None:
    new = shop.worker("tasks:app", "-c", "1")
    eventually(lambda: len(schedules(shop)) == 3, 30, lambda: new.output)
    # A worker of the previous version restarts during the deployment.
    old = TASKS.replace("VERSION", "1").replace("every=1", "every=77").replace('"hourly"', '"before"')
    shop.write("before.py", old.replace("@app.task\n", '@app.task(name="tasks.greet")\n'))
    worker = shop.worker("before:app", "-c", "1")
    eventually(lambda: "before" in schedules(shop), 30, lambda: worker.output)
    assert schedules(shop)["tasks.greet"]["every_ms"] == 1000


def test_bad_schedules_are_one_clear_error_where_they_are_declared() -> None:
    app = App("shop")

    @app.task
    def send(to: str) -> None: ...

    def refused(error: str, *args: Any, **kwargs: Any) -> None:
        with pytest.raises(ValueError, match=error):
            app.periodic(*args, **kwargs)

    refused("it has 6 fields instead of five.*for seconds, use every=", "0 * * * * *")
    refused("no month that it names has that day, so it never fires", "0 0 30 2 *")
    refused("there is no time zone 'Mars/Base'|there is no time zone \"Mars/Base\"", "@daily", tz="Mars/Base")
    refused("there is no time zone", every=5, tz="Mars/Base")
    refused("between 1 second and 10 years, not 0 seconds", every=0)
    refused("needs exactly one of")
    refused("needs exactly one of", "@daily", every=5)
    refused(
        'overlap must be one of "skip", "queue", "cancel_previous", "allow", not "never"', "@daily", overlap="never"
    )
    refused("must have a time zone", at=datetime(2030, 1, 1))
    app.periodic("@daily", args=["ada"])(send)
    with pytest.raises(ValueError, match="two schedules are called"):
        app.periodic("@hourly", args=["bob"])(send)
    with pytest.raises(TypeError, match=r"goes above @app\.task"):
        app.periodic("@hourly")(lambda: None)  # type: ignore[type-var]  # pyright: ignore
    # Arguments are checked when the worker starts, and all errors are reported at once.
    app.periodic("@hourly", name="empty")(send)
    with pytest.raises(TypeError, match="schedule 'empty'"):
        app.check()


def test_people_and_programs_change_schedules(project: Project) -> None:
    app = App("shop", project.url)

    @app.task
    def send(to: str) -> None: ...

    tomorrow = datetime.now(UTC).replace(microsecond=0) + timedelta(days=1)
    app.schedules.set("once", send.s("ada"), at=tomorrow)
    app.schedules.set("poll", send.options(queue="slow").s("bob"), every=60, overlap="queue", jitter=5)
    once, poll = app.schedules
    assert (once.name, once.at, once.next) == ("once", tomorrow, (tomorrow,))
    assert (poll.every, poll.queue, poll.overlap, len(poll.next)) == (timedelta(seconds=60), "slow", "queue", 5)
    job = app.schedules.run("once")
    assert job is not None and (job.info().task or "").endswith("send")
    with pytest.raises(ValueError, match="its last job has not ended"):
        app.schedules.run("once")
    app.schedules.pause("poll")
    paused = app.schedules.get("poll")
    assert paused is not None and paused.paused and paused.next == ()
    app.schedules.resume("poll")
    with pytest.raises(ValueError, match="no code declares"):
        app.schedules.reset("poll")
    app.schedules.remove("poll")
    assert app.schedules.get("poll") is None
    with pytest.raises(ValueError, match="there is no schedule"):
        app.schedules.pause("poll")
    app.close()


def test_operators_change_schedules_at_a_terminal(project: Project) -> None:
    app = App("shop", project.url)

    @app.task
    def send(to: str) -> None: ...

    app.schedules.set("poll", send.s("ada"), every=timedelta(hours=1))

    def penstock(*words: str) -> str:
        run = project.penstock("schedule", *words)
        assert run.returncode == 0, run.output
        return run.output

    assert penstock("pause", "poll") == "poll: paused\n"
    assert json.loads(penstock("show", "poll", "--json"))["paused"]
    assert "paused" in penstock("ls")
    assert penstock("resume", "poll") == "poll: resumed\n"
    assert penstock("run", "poll").startswith("poll: enqueued a job, ")
    shown = penstock("show", "poll")
    assert "every 1 h" in shown and "set by hand or by a program" in shown and "has not ended" in shown
    assert penstock("rm", "poll") == "poll: removed\n"
    assert penstock("ls") == "there are no schedules\n"
    missing = project.penstock("schedule", "pause", "poll")
    assert missing.returncode == 1 and "there is no schedule" in missing.output
    app.close()


def test_operators_add_schedules_and_change_their_times(shop: Project) -> None:
    def penstock(*words: str) -> str:
        run = shop.penstock("schedule", *words)
        assert run.returncode == 0, run.output
        return run.output

    def refused(code: int, error: str, *words: str) -> None:
        run = shop.penstock("schedule", *words)
        assert run.returncode == code and error in run.output, run.output

    worker = shop.worker("tasks:app", "-c", "1")
    eventually(lambda: "hourly" in schedules(shop), 30, lambda: worker.output)
    # The arguments are a JSON array or object, as any client would send them.
    added = penstock("add", "hello", "tasks.greet", "--app", "shop", "--every", "1s", "--args", '["bob"]')
    assert added.startswith("hello: added, every 1.0 s; next "), added
    penstock("add", "hello-too", "tasks.greet", "--app", "shop", "--every", "1s", "--kwargs", '{"name": "eve"}')
    greeted = shop.directory / "greeted"
    eventually(
        lambda: greeted.exists() and {"bob", "eve"} <= set(greeted.read_text().split()), 30, lambda: worker.output
    )
    # Options that aren't named keep their values.
    penstock("edit", "hello", "--overlap", "queue")
    edited = json.loads(penstock("edit", "hello", "--cron", "30 2 * * *", "--tz", "Europe/Paris", "--json"))
    assert (edited["cron"], edited["zone"], edited["overlap"]) == ("30 2 * * *", "Europe/Paris", "queue")
    assert edited["task"] == "tasks.greet"
    # The edit overrides the code until a reset.
    penstock("edit", "hourly", "--every", "2h")
    assert schedules(shop)["hourly"]["set"] and schedules(shop)["hourly"]["queue"] == "reports"
    penstock("reset", "hourly")
    assert schedules(shop)["hourly"]["cron"] == "@hourly"
    add = ("add", "hello", "tasks.greet", "--app", "shop")
    refused(1, 'already has a schedule "hello"; `penstock schedule edit` changes its times', *add, "--every", "1s")
    refused(2, "give the times of the schedule: --cron, --every or --at", *add)
    refused(2, "give only one of --cron, --every and --at", *add, "--every", "1s", "--cron", "@daily")
    refused(2, "--args must be a JSON array", *add, "--every", "1s", "--args", "bob")
    refused(2, "give one of skip, queue, cancel_previous, allow", "edit", "hello", "--overlap", "never")
    refused(2, "give at least one change", "edit", "hello")
    refused(1, "there is no time zone", "edit", "hello", "--tz", "Mars/Base")
    refused(1, 'there is no schedule "other"', "edit", "other", "--every", "1s")


def test_overlap_covers_the_workflow_that_a_job_hands_over_to(project: Project) -> None:
    project.write(
        "tasks.py",
        """
        import time
        from pathlib import Path

        from penstock import App

        app = App("shop")
        here = Path(__file__).parent


        @app.task
        def note(word: str) -> None:
            with open(here / "notes", "a") as file:
                file.write(f"{word}\\n")


        @app.task
        def rest() -> str:
            time.sleep(1.5)
            return "end"


        @app.periodic(every=1, name="night")
        @app.task
        def begin() -> None:
            note("begin")
            return app.replace(rest.s() | note.s())
        """,
    )
    worker = project.worker("tasks:app", "-c", "4")
    notes = project.directory / "notes"
    eventually(lambda: notes.exists() and notes.read_text().count("end") >= 3, 60, lambda: worker.output)
    project.penstock("schedule", "pause", "night")
    eventually(lambda: not schedules(project)["night"]["running"], 30, lambda: worker.output)
    words = notes.read_text().split()
    assert words == ["begin", "end"] * (len(words) // 2), words
    night = schedules(project)["night"]
    assert night["fired"] == len(words) // 2 and night["skipped"] >= 2, night


def test_a_run_that_hangs_is_named_in_the_logs(project: Project) -> None:
    project.write(
        "tasks.py",
        """
        import time
        from pathlib import Path

        from penstock import App

        app = App("shop")
        runs = Path(__file__).parent / "runs"


        @app.periodic(every=1, name="poll")
        @app.task
        def poll() -> None:
            with open(runs, "a") as file:
                file.write(".")
            if len(runs.read_text()) == 6:
                time.sleep(600)
        """,
    )
    worker = project.worker("tasks:app", "-c", "1")
    said = worker.wait_for_output('of schedule "poll" has not ended for', 90)
    job = schedules(project)["poll"]["last_job"]
    assert f"`penstock job cancel {job} --running kill` ends it" in said, said
    ended = project.penstock("job", "cancel", job, "--running", "kill")
    assert ended.returncode == 0, ended.output
    eventually(lambda: schedules(project)["poll"]["last_job"] != job, 60, lambda: worker.output)
