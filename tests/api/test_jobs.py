"""Jobs at a broker: their states, their waits, from threads and event loops. No worker runs here."""

from __future__ import annotations

import asyncio
import datetime as dt
import gc
import logging
import os
import pickle
import subprocess
import sys
import textwrap
import threading
import time
import uuid
from collections.abc import Iterator

import pytest
from project import eventually, is_quick

from penstock import (
    App,
    InvalidConfiguration,
    Job,
    JobCancelled,
    JobExpired,
    JobState,
    NoSuchJob,
    PayloadTooLarge,
    ResultTimeout,
)
from penstock._connection import Connection
from penstock.testing import inline


@pytest.fixture
def app() -> Iterator[App]:
    app = App("shop", "memory:", call_timeout=5, max_payload_bytes=1000)
    yield app
    app.close()


@pytest.fixture
def send(app):
    @app.task(name="shop.send")
    def send(to: str, body: str = "") -> str:
        return to + body

    return send


def purge(app: App, queue: str) -> None:
    app._connected()._client.purge(queue, 5)


def test_a_job_that_waits(app, send):
    before = time.time()
    job = send.options(queue="mail", priority=2).delay("ada")
    info = job.info()
    assert info.state is JobState.WAITING
    assert (info.task, info.queue, info.attempts, info.crashes) == ("shop.send", "mail", 0, 0)
    assert info.enqueued_at is not None
    assert before - 1 <= info.enqueued_at.timestamp() <= time.time() + 1
    assert (info.started_at, info.finished_at, info.worker, info.error, info.errors) == (None, None, None, None, ())
    assert info.id == job.id
    assert app.job(job.id).info() == info


def test_a_job_that_is_delayed(send):
    info = send.options(countdown=60).delay("ada").info()
    assert info.state is JobState.DELAYED
    assert info.due_at is not None
    assert info.enqueued_at is not None
    is_quick(abs((info.due_at - info.enqueued_at).total_seconds() - 60), 0.1, "the call")


def test_a_job_that_is_purged_ends_as_cancelled(app, send):
    job = send.delay("ada")
    purge(app, "default")
    assert job.info().state is JobState.CANCELLED
    with pytest.raises(JobCancelled, match=job.id):
        job.result()


def test_a_job_that_is_not_started_in_time_ends_as_expired(send):
    job = send.options(expires=0.05).delay("ada")
    with pytest.raises(JobExpired, match=job.id):
        job.result(timeout=10)
    assert job.info().state is JobState.EXPIRED
    assert job.info().enqueued_at is not None


def test_a_job_that_nobody_knows(app):
    job = app.job("0" * 32)
    assert job.info().state is JobState.UNKNOWN
    with pytest.raises(NoSuchJob):
        job.result()


def test_a_wait_can_have_an_end(send):
    job = send.delay("ada")
    started = time.monotonic()
    with pytest.raises(ResultTimeout):
        job.result(timeout=0.1)
    with pytest.raises(TimeoutError):
        job.result(timeout=0)
    assert 0.1 <= time.monotonic() - started < 10
    assert job.info().state is JobState.WAITING


def test_a_wait_may_end_after_a_timedelta_and_names_the_job(app, send):
    job = send.delay("ada")
    for timeout in (dt.timedelta(milliseconds=20), 0, dt.timedelta(0), -3):
        with pytest.raises(ResultTimeout, match=f"^job {job.id}: "):
            job.result(timeout=timeout)
    with pytest.raises(TypeError, match="timeout must be seconds or a timedelta, not '5'"):
        job.result(timeout="5")
    with pytest.raises(ValueError, match="timeout must be seconds or a timedelta, not nan"):
        job.result(timeout=float("nan"))
    unknown = app.job("0" * 32)
    with pytest.raises(NoSuchJob, match=f"^job {unknown.id}: the broker at memory:.* does not know it"):
        unknown.result()


class TestDone:
    def test_says_whether_a_job_has_ended(self, app, send):
        job, forgotten = send.delay("ada"), send.options(store_result=False).delay("bob")
        assert not job.done()
        assert not asyncio.run(job.adone())
        job.cancel()
        forgotten.cancel()
        for each in (job, forgotten):
            assert each.done()
            assert asyncio.run(each.adone())

    def test_does_not_guess(self, app):
        unknown = app.job("0" * 32)
        with pytest.raises(NoSuchJob, match=f"^job {unknown.id}: the broker at memory:.* does not know it"):
            unknown.done()
        with pytest.raises(NoSuchJob):
            asyncio.run(unknown.adone())


class TestCancel:
    def test_ends_a_job_and_tells_in_which_state_it_was(self, app, send):
        for job, state in (
            (send.delay("ada"), JobState.WAITING),
            (send.options(countdown=60).delay("ada"), JobState.DELAYED),
            (app.job(send.delay("ada").id), JobState.WAITING),
        ):
            assert job.cancel("no longer wanted") is state
            with pytest.raises(JobCancelled, match=f"^job {job.id}: no longer wanted$"):
                job.result()
            # A second call changes nothing.
            assert job.cancel("another reason") is JobState.CANCELLED
            assert job.info().error == "no longer wanted"

    async def test_in_an_event_loop(self, send):
        job = await send.adelay("ada")
        assert await job.acancel() is JobState.WAITING
        assert await job.acancel() is JobState.CANCELLED
        with pytest.raises(JobCancelled, match="it was cancelled"):
            await job

    def test_leaves_what_has_ended(self, app, send):
        expired = send.options(expires=0.05).delay("ada")
        with pytest.raises(JobExpired):
            expired.result()
        assert expired.cancel() is JobState.EXPIRED
        forgotten = send.options(store_result=False).delay("ada")
        purge(app, "default")
        assert forgotten.cancel() is JobState.ENDED
        with pytest.raises(NoSuchJob):
            app.job(forgotten.id).cancel()

    def test_leaves_a_running_job_where_it_is_told_to(self, project):
        project.write(
            "shop.py",
            """
            import os, time
            from penstock import App
            app = App("shop")
            @app.task
            def work() -> int:
                open("begun", "w").close()
                while not os.path.exists("end"):
                    time.sleep(0.005)
                return 3
            """,
        )
        shop = project.tasks("shop.py")
        project.worker("shop:app", "-c", "1")
        job = shop.work.delay()
        eventually((project.directory / "begun").exists)
        assert job.cancel(running="leave") is JobState.RUNNING
        assert job.info().state is JobState.RUNNING
        (project.directory / "end").touch()
        assert job.result(timeout=30) == 3
        assert job.cancel() is JobState.SUCCEEDED
        assert (job.info().task, job.info().queue) == ("shop.work", "default")

    def test_checks_what_it_is_given(self, send):
        job = send.delay("ada")
        with pytest.raises(TypeError, match="the reason of a cancellation must be a string, not 3"):
            job.cancel(3)
        with pytest.raises(ValueError, match="may have at most 200 bytes, not 201"):
            job.cancel("x" * 201)
        with pytest.raises(ValueError, match='running must be "ask", "kill" or "leave", not \'stop\''):
            job.cancel(running="stop")


def test_a_job_shows_its_headers_while_the_broker_holds_it(project):
    project.write(
        "shop.py",
        """
        from penstock import App
        app = App("shop")
        @app.task
        def pay(amount: int) -> int:
            if amount < 0:
                raise ValueError("no debts")
            return amount
        """,
    )
    shop = project.tasks("shop.py")
    pay = shop.pay.options(headers={"tenant": "north", "größe": "ü"})
    paid, failed, plain = pay.delay(1), pay.delay(-1), shop.pay.delay(-1)
    headers = {"tenant": "north", "größe": "ü"}
    assert [job.info().headers for job in (paid, failed, plain)] == [headers, headers, {}]
    assert asyncio.run(failed.ainfo()).headers == headers
    assert "north" not in repr(paid.info())
    project.worker("shop:app", "-c", "1")
    for job in (failed, plain):
        with pytest.raises(ValueError):
            job.result(timeout=30)
    assert paid.result(timeout=30) == 1
    info = failed.info()
    assert (info.state, info.attempts, info.error, info.headers) == (
        JobState.FAILED,
        1,
        "ValueError: no debts",
        headers,
    )
    assert info.started_at is not None and info.finished_at is not None and info.errors[0].worker == info.worker
    assert (plain.info().headers, paid.info().headers) == ({}, None)
    shop.app.failed(id=failed.id).remove()
    assert (failed.info().state, failed.info().headers) == (JobState.FAILED, None)


def test_an_ended_job_keeps_its_task_and_its_queue_as_long_as_its_result(app, send):
    """Both used to be None for expired and cancelled jobs, and the queue for all ended jobs."""
    mail = send.options(queue="mail")
    expired, cancelled, purged = mail.options(expires=0.05).delay("a"), mail.delay("b"), mail.delay("c")
    with pytest.raises(JobExpired):
        expired.result()
    cancelled.cancel()
    purge(app, "mail")
    for job, state in (
        (expired, JobState.EXPIRED),
        (cancelled, JobState.CANCELLED),
        (purged, JobState.CANCELLED),
    ):
        info = job.info()
        assert (info.state, info.task, info.queue) == (state, "shop.send", "mail")
        assert info.finished_at is not None
    short = mail.options(result_ttl=0.01).delay("d")
    short.cancel()
    eventually(lambda: short.info().state is JobState.ENDED)
    assert app.job(short.id).info().state is JobState.UNKNOWN


class TestJobsTravel:
    def test_as_arguments_and_results(self):
        app = App("shop", f"memory:{uuid.uuid4()}")

        @app.task
        def add(a: int) -> int:
            return a + 1

        @app.task
        def again(jobs: list[Job[int]], last: Job[int] | None = None) -> Job[int]:
            assert last is not None
            assert last.result() == 3
            return add.delay(jobs[0].result())

        with inline(app):
            job = again.delay([add.delay(1)], last=add.delay(2))
            assert job.result().result() == 3
            with pytest.raises(TypeError, match="argument last must be"):
                again.delay([], last=3)

    def test_through_a_worker(self, project):
        project.write(
            "shop.py",
            """
            from penstock import App, Job
            app = App("shop")
            @app.task
            def add(a: int) -> int:
                return a + 1
            @app.task
            def read(job: Job[int]) -> int:
                return job.result(timeout=30)
            """,
        )
        shop = project.tasks("shop.py")
        project.worker("shop:app", "-c", "2")
        assert shop.read.delay(shop.add.delay(1)).result(timeout=30) == 2

    def test_pickled(self, app, send):
        job = send.delay("ada")
        copy = pickle.loads(pickle.dumps(job))
        assert copy == job
        assert copy._app is app
        job.cancel()
        with pytest.raises(JobCancelled):
            copy.result()
        script = "import pickle, sys; job = pickle.load(sys.stdin.buffer); print(job.id, job._app)"
        output = subprocess.run(
            [sys.executable, "-c", script], input=pickle.dumps(job), capture_output=True, check=True, timeout=60
        )
        assert output.stdout.decode() == f"{job.id} <App 'shop' {app.url}>\n"


def test_a_task_gives_its_jobs_by_their_id(app, send):
    job = send.delay("ada")
    assert send.job(job.id) == job


class TestRetriesOfACall:
    def test_go_before_those_of_the_task(self, project):
        project.write(
            "shop.py",
            """
            from penstock import App, Retry, current_job
            app = App("shop", defaults={"retries": 1, "backoff": 0})
            @app.task
            def fail() -> None:
                raise ValueError(str(current_job().retries_left))
            @app.task(retries=[0, 0.05, 0])
            def listed() -> None:
                raise ValueError(str(current_job().retries_left))
            @app.task(retries=None, backoff=0)
            def no_limit() -> int:
                job = current_job()
                assert job.retries_left is None
                if job.attempt < 20:
                    raise OSError("again")
                return job.attempt
            """,
        )
        shop = project.tasks("shop.py")
        project.worker("shop:app", "-c", "2")
        none, one, two, three = shop.app.enqueue(
            shop.fail.options(retries=0).s(), shop.fail.s(), shop.fail.options(retries=[0, 0]).s(), shop.listed.s()
        )
        for job, attempts in ((none, 1), (one, 2), (two, 3), (three, 4)):
            with pytest.raises(ValueError, match=r"^0$"):
                job.result(timeout=30)
            info = job.info()
            assert (info.state, info.queue, info.attempts) == (JobState.FAILED, "default", attempts)
            assert [error.message for error in info.errors] == [str(left) for left in range(attempts - 1, -1, -1)]
        info = three.info()
        second, third = info.errors[1:3]
        assert (third.started_at - second.finished_at).total_seconds() >= 0.05
        assert shop.no_limit.delay().result(timeout=30) == 20


def test_a_call_that_blocks_an_event_loop_says_so_once(send, caplog, monkeypatch):
    monkeypatch.setattr("penstock._connection._warned_of", set())
    send.app._connected()._notices_due = 0.0

    async def main() -> None:
        for _ in range(2):
            with pytest.raises(ResultTimeout):
                send.delay("ada").result(timeout=1)

    asyncio.run(main())
    assert caplog.messages == [
        "delay() was called in an event loop, which it blocks; use adelay() instead",
        "result() was called in an event loop, which it blocks; use aresult() instead",
    ]


def test_a_token_does_not_belong_into_the_url():
    app = App("shop", "tcp://:secret@127.0.0.1:9")
    with pytest.raises(InvalidConfiguration, match="set PENSTOCK_TOKEN"):
        app.task(lambda: None).delay()


def test_a_wait_ends_from_another_thread(app, send):
    job = send.delay("ada")
    waiting = threading.Event()
    caught = []

    def wait() -> None:
        waiting.set()
        try:
            job.result()
        except JobCancelled as error:
            caught.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    waiting.wait()
    purge(app, "default")
    thread.join(10)
    assert len(caught) == 1


def test_many_at_once(app, send):
    jobs = send.map(f"user {number}" for number in range(100))
    assert len({job.id for job in jobs}) == 100
    assert {job.info().state for job in jobs} == {JobState.WAITING}
    jobs = app.enqueue([send.s("a"), send.options(queue="slow").si("b", body="c"), send.s("d").options(countdown=60)])
    assert [job.info().queue for job in jobs] == ["default", "slow", "default"]
    assert jobs[2].info().state is JobState.DELAYED
    assert (send.map([]), send.starmap([]), app.enqueue([])) == ([], [], [])
    assert len(send.starmap([("a", "b"), ("c", "d")])) == 2
    with pytest.raises(TypeError, match="argument to must be str"):
        send.map(["fine", 3])


def test_a_call_of_another_brokers_task_is_refused(app, send):
    neighbour = App("neighbour", app.url).task(name="neighbour.send")(lambda: None)
    assert len(app.enqueue([send.s("a"), neighbour.s()])) == 2
    stranger = App("stranger", "memory:elsewhere").task(name="stranger.send")(lambda: None)
    with pytest.raises(ValueError, match=r"stranger\.send belongs to .*, which uses another broker"):
        app.enqueue([send.s("a"), stranger.s()])


def test_a_payload_beyond_the_limit_is_refused_here(app, send):
    with pytest.raises(
        PayloadTooLarge, match=r"shop\.send\(\): the arguments take 1,0\d\d bytes, but 1,000 are allowed"
    ):
        send.delay("x" * 1000)
    with pytest.raises(PayloadTooLarge):
        send.map(["fine", "x" * 1000])
    with pytest.raises(NoSuchJob):
        app.job("0" * 32).result(timeout=0)


class TestAsyncio:
    async def test_the_same_calls_awaited(self, app, send):
        job = await send.adelay("ada")
        assert (await job.ainfo()).state is JobState.WAITING
        assert [(await each.ainfo()).state for each in await send.amap(["a", "b"])] == [JobState.WAITING] * 2
        assert len(await send.astarmap([("a", "b")])) == 1
        assert len(await app.aenqueue([send.s("a"), send.s("b")])) == 2
        assert (await send.amap([]), await app.aenqueue([])) == ([], [])
        assert (await app.job("0" * 32).ainfo()).state is JobState.UNKNOWN
        with pytest.raises(ResultTimeout):
            await job.aresult(timeout=0.05)
        with pytest.raises(ResultTimeout):
            await job.aresult(timeout=0)
        waiting = asyncio.ensure_future(job)
        await asyncio.sleep(0)
        await asyncio.to_thread(purge, app, "default")
        with pytest.raises(JobCancelled):
            await waiting

    async def test_a_cancelled_await_leaves_the_job_alone(self, send):
        job = await send.adelay("ada")
        waiting = asyncio.ensure_future(job)
        await asyncio.sleep(0.01)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert job.info().state is JobState.WAITING
        adding = asyncio.ensure_future(send.adelay("bob"))
        await asyncio.sleep(0)
        adding.cancel()
        with pytest.raises(asyncio.CancelledError):
            await adding
        # The job had been sent: cancelling the await does not withdraw it.
        later = await send.adelay("eve")
        assert (await later.ainfo()).state is JobState.WAITING

    async def test_a_wait_with_asyncio_timeout(self, send):
        job = await send.adelay("ada")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await job

    def test_one_loop_after_another_leaves_nothing_behind(self, app, send):
        async def once() -> JobState:
            return (await (await send.adelay("ada")).ainfo()).state

        def descriptors() -> int:
            gc.collect()
            return len(os.listdir("/proc/self/fd" if sys.platform == "linux" else "/dev/fd"))

        asyncio.run(once())
        before = descriptors()
        for _ in range(10):
            assert asyncio.run(once()) is JobState.WAITING
        assert descriptors() <= before + 1
        assert len(app._connected()._ports._of_loop) <= 1

    async def test_a_close_ends_what_is_awaited(self, app, send):
        waiting = asyncio.ensure_future(await send.adelay("ada"))
        await asyncio.sleep(0.01)
        await asyncio.to_thread(app.close)
        with pytest.raises(Exception, match="closed"):
            await asyncio.wait_for(waiting, 5)

    def test_with_uvloop(self, send):
        import uvloop

        async def main() -> JobState:
            jobs = await asyncio.gather(*(send.adelay(str(number)) for number in range(50)))
            return (await jobs[-1].ainfo()).state

        assert uvloop.run(main()) is JobState.WAITING


def test_a_closed_app_connects_anew(app, send):
    send.delay("ada")
    app.close()
    app.close()
    assert send.delay("bob").info().state is JobState.WAITING


def test_apps_of_one_url_share_a_connection(project):
    app, other = App("shop", project.url), App("other", project.url)
    assert other._connected() is app._connected()
    assert App("elsewhere", f"{project.url}-elsewhere")._connected() is not app._connected()
    app.close()


def test_a_url_that_means_nothing_is_an_error():
    app = App("shop", "carrier-pigeon:coop")
    with pytest.raises(InvalidConfiguration):
        app.task(lambda: None).delay()


def test_notices_go_to_the_log_once(app, send, caplog, monkeypatch):
    notices = [["nobody serves 'mail'"], []]

    class Client:
        def take_notices(self) -> list[str]:
            return notices.pop(0)

        def broker(self) -> str:
            return "local:/shop/.penstock"

    connection = Connection.__new__(Connection)
    connection._client, connection._notices_due = Client(), 0.0  # type: ignore[assignment]
    connection.log_notices()
    connection.log_notices()
    assert [(record.name, record.levelno, record.message) for record in caplog.records] == [
        ("penstock", logging.WARNING, "local:/shop/.penstock: nobody serves 'mail'")
    ]
    assert notices == [[]]


def test_importing_and_making_an_app_starts_and_opens_nothing():
    script = """
        import os, sys, threading

        def opened():
            return sorted(os.listdir("/proc/self/fd" if sys.platform == "linux" else "/dev/fd"))

        before = opened()
        import penstock
        app = penstock.App("shop")
        task = app.task(lambda a: a)
        task.options(countdown=3)
        app.job("0" * 32)
        app.close()
        assert threading.active_count() == 1
        if sys.platform == "linux":
            assert len(os.listdir("/proc/self/task")) == 1
        assert opened() == before
        """
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True, timeout=60)
