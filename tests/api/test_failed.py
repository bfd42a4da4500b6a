"""Failed jobs: finding, retrying and removing them from a program."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import ModuleType

import pytest
from project import Project, eventually

from penstock import FailedJob, Job, JobState, NoSuchJob, TooLate

TASKS = """
    from pathlib import Path

    from penstock import App

    app = App("shop")
    mended = Path(__file__).with_name("mended")


    class Gone(Exception):
        pass


    @app.task(queue="mail")
    def send(to: str, token: str = "") -> str:
        if not mended.exists():
            raise ValueError(f"no route to {to}")
        return to


    @app.task(retries=1, backoff=0.01)
    def pay(amount: int) -> None:
        raise Gone("no money")
"""


@pytest.fixture
def tasks(project: Project) -> ModuleType:
    """Three failed jobs: two of send, one of pay."""
    project.write("tasks.py", TASKS)
    tasks = project.tasks()
    tasks.sent = [*tasks.send.map(["ada"]), tasks.send.delay("bob", token="1234")]
    tasks.paid = tasks.pay.delay(3)
    project.worker("tasks:app", "-c", "1")
    for job in (*tasks.sent, tasks.paid):
        eventually(lambda job=job: job.info().state is JobState.FAILED)
    return tasks


def ids(jobs: object) -> list[str]:
    return [job.id for job in jobs]  # type: ignore[attr-defined]


def test_they_are_found_by_what_they_have_in_common(tasks: ModuleType) -> None:
    app, (one, two), paid = tasks.app, tasks.sent, tasks.paid
    assert sorted(ids(app.failed())) == sorted([one.id, two.id, paid.id])
    assert ids(app.failed(task="tasks.send")) == ids(app.failed(task=tasks.send)) == [one.id, two.id]
    assert ids(app.failed(queue="mail")) == ids(app.failed(error=ValueError)) == [one.id, two.id]
    assert (
        ids(app.failed(error=tasks.Gone))
        == ids(app.failed(error="tasks.Gone"))
        == ids(app.failed(id=paid))
        == [paid.id]
    )
    assert app.failed(queue="mail", error=tasks.Gone).count() == app.failed(task="tasks.other").count() == 0
    assert app.failed(since=timedelta(hours=1)).count() == 3
    assert app.failed(since=datetime.now(UTC) + timedelta(hours=1)).count() == 0
    assert ids(app.failed(newest_first=True)) == ids(app.failed())[::-1]
    assert ids(app.failed(task="tasks.send", newest_first=True)) == [two.id, one.id]
    (job,) = app.failed(id=two.id)
    assert isinstance(job, FailedJob)
    assert ids(app.failed(fingerprint=job.fingerprint)) == [one.id, two.id]
    assert (job.task, job.queue, job.error, job.message) == ("tasks.send", "mail", "ValueError", "no route to bob")
    assert job.arguments == "to='bob', token=***"
    assert job.argument_bytes > 0 and job.job == two
    assert (job.attempts, job.crashes, job.generation) == (1, 0, 0)
    assert [job.attempts for job in app.failed(task=tasks.pay)] == [2]
    assert job.enqueued_at <= job.failed_at <= datetime.now(UTC)


def test_they_are_retried_and_removed_one_by_one_or_all_that_match(tasks: ModuleType, project: Project) -> None:
    app, (one, two), paid = tasks.app, tasks.sent, tasks.paid
    (job,) = app.failed(id=paid)
    job.remove()
    with pytest.raises(NoSuchJob):
        job.retry()
    assert paid.info().state is JobState.FAILED, "its result stays"
    (job,) = app.failed(id=one)
    job.retry(queue="elsewhere")
    assert one.info().state is JobState.WAITING and one.info().queue == "elsewhere"
    with pytest.raises(TooLate):
        job.retry()
    assert app.failed(task="tasks.other").retry() == 0
    Path(project.directory, "mended").touch()
    assert app.failed(queue="mail").retry() == 1
    assert two.result(timeout=30) == "bob"
    assert app.failed().remove() == 0


def test_an_event_loop_does_all_of_it(tasks: ModuleType) -> None:
    app, (one, two), paid = tasks.app, tasks.sent, tasks.paid

    async def look() -> None:
        assert await app.failed().acount() == 3
        found = [job async for job in app.failed(queue="mail")]
        assert ids(found) == [one.id, two.id]
        await found[0].aremove()
        await found[1].aretry(queue="elsewhere")
        assert await app.failed(task=tasks.pay).aretry(queue="elsewhere") == 1
        assert await app.failed().aremove() == 0

    asyncio.run(look())
    assert paid.info().queue == "elsewhere"


def test_a_condition_that_makes_no_sense_is_refused(project: Project) -> None:
    project.write("tasks.py", TASKS)
    app = project.tasks().app
    for wrong in (
        {"fingerprint": "what"},
        {"since": datetime(2026, 1, 31)},
        {"id": "17"},
        {"id": "0190aaaa-0000-7000-8000-000000000001", "queue": "mail"},
    ):
        with pytest.raises(ValueError, match=r"fingerprint|time zone|job"):
            app.failed(**wrong)
    nobody: Job[None] = app.job("0190aaaa-0000-7000-8000-000000000001")
    with pytest.raises(NoSuchJob):
        app.failed(id=nobody).retry()
