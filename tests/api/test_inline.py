"""`penstock.testing.inline`: jobs run inside the call that enqueues them, through a real broker and a worker's code."""

from __future__ import annotations

import asyncio
import contextvars
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta

import pytest
from project import pidfd, suspend

import penstock
from penstock import App, JobExpired, JobState, ResultExpired, ResultTimeout, Retry, current_job
from penstock.errors import PenstockError
from penstock.testing import Call, capture, inline, move_clock

PATIENCE_S = 30


@pytest.fixture
def app() -> App:
    # Nothing listens there, so any call that bypasses the double fails.
    return App("shop", "unix:/nonexistent/broker.sock", call_timeout=0.2)


class TestInEventLoops:
    """As in a worker, a job must not run inside a running event loop, wherever it is enqueued."""

    async def test_a_plain_function_of_async_code_enqueues_an_async_task(self, app):
        @app.task(name="shop.fetch")
        async def fetch(url: str) -> int:
            await asyncio.sleep(0)
            return len(url)

        def helper() -> int:
            return fetch.delay("penstock").result()

        with inline(app):
            assert helper() == 8
            assert await (await fetch.adelay("ada")) == 3

    async def test_an_async_task_awaits_one_that_it_enqueues(self, app):
        @app.task(name="shop.child")
        async def child(number: int) -> int:
            await asyncio.sleep(0)
            return number + 1

        @app.task(name="shop.parent")
        async def parent(number: int) -> int:
            awaited = await (await child.adelay(number))
            return awaited + child.delay(number).result()

        with inline(app) as calls:
            assert await (await parent.adelay(1)) == 4
            assert parent.delay(2).result() == 6
        assert [(call.task, call.args) for call in calls] == [
            ("shop.parent", (1,)), ("shop.child", (1,)), ("shop.child", (1,)),
            ("shop.parent", (2,)), ("shop.child", (2,)), ("shop.child", (2,)),
        ]  # fmt: skip

    async def test_a_plain_task_has_no_loop_around_it_and_may_run_one(self, app):
        @app.task(name="shop.report")
        def report() -> int:
            async def main() -> int:
                return 7

            return asyncio.run(main())

        with inline(app):
            assert report.delay().result() == 7

    def test_async_tasks_share_a_loop_in_a_thread_that_is_not_the_tests(self, app):
        @app.task(name="shop.loop")
        async def loop() -> tuple[int, int]:
            return id(asyncio.get_running_loop()), threading.get_ident()

        with inline(app):
            first, second = loop.delay().result(), loop.delay().result()
        assert first == second
        assert first[1] != threading.get_ident()

    def test_a_plain_task_runs_in_the_thread_that_enqueues_it(self, app):
        """Otherwise it would not see the writes of the test's database transaction."""
        app.task(name="shop.thread")(lambda: threading.get_ident())
        with inline(app):
            assert app.send("shop.thread").result() == threading.get_ident()


def test_blocks_may_be_nested_and_the_innermost_has_the_jobs(app):
    task = app.task(name="shop.send")(lambda: "sent")
    with inline(app) as outer:
        task.delay()
        with inline(app) as inner:
            assert task.delay().result() == "sent"
        with inline(app), inline(app):
            task.delay()
        with capture(app) as captured:
            assert task.delay().info().state is JobState.WAITING
        assert task.delay().result() == "sent"
    assert (len(outer), len(inner), len(captured)) == (2, 1, 1)
    with pytest.raises(penstock.BrokerUnavailable):
        task.delay()


def test_blocks_may_end_in_any_order(app):
    task = app.task(name="shop.send")(lambda: "sent")
    first, second = inline(app), inline(app)
    first.__enter__()
    calls = second.__enter__()
    first.__exit__(None, None, None)
    assert task.delay().result() == "sent"
    second.__exit__(None, None, None)
    assert len(calls) == 1
    assert "_connected" not in vars(app)


def test_an_error_of_the_test_is_not_hidden(app):
    with pytest.raises(KeyError, match="the test's own"), inline(app), inline(app):
        raise KeyError("the test's own")


def test_the_broker_ends_with_the_block(app):
    task = app.task(name="shop.send")(lambda: None)
    with inline(app):
        task.delay()
        broker = pidfd(app._connected()._client.status(5.0)["broker_pid"])
    with broker:
        broker.wait(PATIENCE_S)


class TestApps:
    def test_without_any_all_of_the_process_are_meant_and_those_made_within(self, app):
        early = App("early", "unix:/nonexistent/early.sock")
        outer = app.task(name="shop.outer")(lambda: early.send("early.inner").result())
        early.task(name="early.inner")(lambda: "of another app")
        with inline() as calls:
            assert outer.delay().result() == "of another app"
            late = App("late", "unix:/nonexistent/late.sock")
            assert late.task(name="late.send")(lambda: 3).delay().result() == 3
        assert [call.task for call in calls] == ["shop.outer", "early.inner", "late.send"]
        assert all("_connected" not in vars(each) for each in (app, early, late))

    def test_those_of_one_broker_run_each_others_tasks(self, app):
        bank = App("bank", app.url)
        bank.task(name="bank.pay")(lambda amount: amount)
        own = app.task(name="shop.send")(lambda: "own")
        with inline(app, bank):
            paid = app.send("bank.pay", 3)
            assert paid.result() == 3
            assert penstock.results([paid, own.delay(), bank.send("bank.pay", 5)]) == [3, "own", 5]
            assert [job.result() for job in app.enqueue([own.s(), bank.tasks["bank.pay"].s(4)])] == ["own", 4]

    def test_each_runs_its_own_task_where_names_are_equal(self, app):
        other = App("other", app.url)
        mine, theirs = app.task(name="send")(lambda: "mine"), other.task(name="send")(lambda: "theirs")
        with inline(app, other):
            assert (mine.delay().result(), theirs.delay().result()) == ("mine", "theirs")

    def test_a_task_that_none_of_them_has_waits_as_it_would_for_a_worker(self, app):
        app.task(name="shop.send")(lambda: None)
        with inline(app) as calls:
            job = app.send("elsewhere.pay", 3, to="ada")
            assert job.info().state is JobState.WAITING
            with pytest.raises(ResultTimeout, match=r"it is ready, .* no app of the block has its task"):
                job.result()
        calls.assert_enqueued("elsewhere.pay", args=(3,), kwargs={"to": "ada"})

    def test_what_is_no_app_is_refused(self):
        with pytest.raises(TypeError, match="expected an App, not 'shop'"), inline("shop"):
            pass


class TestOutcomes:
    def test_are_those_of_production(self, app):
        @app.task(name="shop.add")
        def add(a: int, b: int = 2) -> int:
            return a + b

        with inline(app):
            unkept = add.options(store_result=False).delay(1)
            with pytest.raises(ResultExpired):
                unkept.result()
            assert unkept.done()
            expired = add.options(expires=0).delay(1)
            with pytest.raises(JobExpired):
                expired.result()
            job = add.options(queue="money").delay(1)
            info = job.info()
            assert (info.state, info.task, info.queue, info.attempts) == (JobState.SUCCEEDED, "shop.add", "money", 1)
            assert job.cancel() is JobState.SUCCEEDED

    def test_a_failed_job_is_listed_and_runs_again_when_it_is_retried(self, app):
        broken = [True]

        @app.task(name="shop.send")
        def send() -> str:
            if broken:
                raise OSError("gone")
            return "sent"

        with inline(app):
            jobs = [send.delay(), send.delay()]
            assert [job.error for job in app.failed()] == ["OSError", "OSError"]
            with pytest.raises(OSError, match="gone"):
                jobs[0].result()
            broken.clear()
            app.failed(id=jobs[0]).retry()
            assert jobs[0].result() == "sent"
            assert app.failed().retry() == 1
            assert jobs[1].result() == "sent"

    def test_retries_take_no_time_and_count(self, app):
        seen: list[tuple[int, int | None]] = []

        @app.task(name="shop.send", retries=3, backoff=300, jitter=0)
        def send() -> str:
            job = current_job()
            assert job is not None
            seen.append((job.attempt, job.retries_left))
            if job.attempt == 2:
                raise Retry(countdown=timedelta(hours=1))
            if job.attempt < 4:
                raise OSError("not yet")
            return job.worker

        with inline(app):
            before = move_clock(app, 0)
            job = send.delay()
            assert job.result() == "inline"
            assert seen == [(1, 3), (2, 2), (3, 1), (4, 0)]
            assert [error.type_name for error in job.info().errors] == ["OSError", "penstock.Retry", "OSError"]
            waited = move_clock(app, 0) - before
        # The broker's clock advanced by 300 s, an hour, and 600 s, the longest backoff.
        assert timedelta(seconds=4500) <= waited < timedelta(seconds=4500 + PATIENCE_S)

    def test_a_job_that_would_be_retried_for_ever_says_so(self, app, monkeypatch):
        monkeypatch.setattr("penstock.testing._bench._MOST_ATTEMPTS", 20)

        @app.task(name="shop.send", retries=None, backoff=0)
        def send() -> None:
            raise OSError("never")

        with inline(app), pytest.raises(PenstockError, match="has failed 20 times and would be retried again"):
            send.delay()

    def test_a_delayed_job_runs_at_once_and_its_call_tells_the_delay(self, app):
        task = app.task(name="shop.remind")(lambda: "now")
        eta = datetime.now(UTC) + timedelta(days=3)
        with inline(app) as calls:
            first = task.delay()
            assert task.options(countdown=timedelta(days=2)).delay().result() == "now"
            assert task.options(eta=eta).delay().result() == "now"
            # The clock was not moved: a value kept for a day is still there, and a job that expires tomorrow has not.
            assert first.result() == "now"
            assert task.options(expires=datetime.now(UTC) + timedelta(days=1)).delay().result() == "now"
        assert [call.countdown for call in calls] == [None, 172_800.0, None, None]
        calls.assert_enqueued(task, eta=eta)

    def test_a_job_that_expires_before_it_is_due_never_runs(self, app):
        task = app.task(name="shop.remind")(lambda: pytest.fail("it runs"))
        with inline(app):
            for options in (
                {"countdown": 60, "expires": 30},
                {"eta": datetime.now(UTC) + timedelta(hours=1), "expires": datetime.now(UTC) + timedelta(minutes=1)},
            ):
                with pytest.raises(JobExpired):
                    task.options(**options).delay().result()

    def test_a_job_sees_no_context_variable_of_the_code_around_the_call(self, app):
        tenant = contextvars.ContextVar("tenant", default="none")
        task = app.task(name="shop.tenant")(lambda: tenant.get())
        with inline(app):
            tenant.set("north")
            assert task.delay().result() == "none"
            assert current_job() is None


class TestWhatEndsATest:
    """Such an error must not become a job's failure, which nobody may ever read."""

    def test_a_task_that_must_not_run_fails_the_test(self, app):
        task = app.task(name="shop.send")(lambda: pytest.fail("it must not be sent"))
        outer = app.task(name="shop.outer")(lambda: task.delay())
        with inline(app):
            for enqueue in (task.delay, outer.delay):
                with pytest.raises(pytest.fail.Exception, match="it must not be sent"):
                    enqueue()

    async def test_also_in_an_async_task(self, app):
        @app.task(name="shop.skip")
        async def skip() -> None:
            pytest.skip("not here")

        with inline(app), pytest.raises(pytest.skip.Exception, match="not here"):
            await skip.adelay()

    def test_ctrl_c_gets_through(self, app):
        def interrupt() -> None:
            raise KeyboardInterrupt

        task = app.task(name="shop.interrupt")(interrupt)
        with inline(app), pytest.raises(KeyboardInterrupt):
            task.delay()


def test_threads_run_what_they_enqueue_themselves(app):
    """A thread that happens to take a job of another thread leaves it to that thread."""
    app.task(name="shop.thread")(lambda: threading.get_ident())
    thread_of = app.tasks["shop.thread"]
    found: dict[int, list[int]] = {}
    begin = threading.Barrier(4)

    def enqueue() -> None:
        begin.wait(PATIENCE_S)
        jobs = [thread_of.options(priority=number % 10).delay() for number in range(20)]
        jobs += thread_of.starmap([()] * 5)
        found[threading.get_ident()] = [job.result() for job in jobs]

    with inline(app) as calls:
        threads = [threading.Thread(target=enqueue) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(calls) == 100
    assert {thread: set(ran_in) for thread, ran_in in found.items()} == {thread: {thread} for thread in found}
    assert len(found) == 4


class TestWaits:
    def test_for_a_job_that_another_thread_runs(self, app):
        runs, goes_on = threading.Event(), threading.Event()

        @app.task(name="shop.wait")
        def wait() -> str:
            runs.set()
            goes_on.wait(PATIENCE_S)
            return "done"

        with inline(app) as calls:
            thread = threading.Thread(target=wait.delay)
            thread.start()
            assert runs.wait(PATIENCE_S)
            job = calls[0].job
            with pytest.raises(ResultTimeout):
                job.result(timeout=0.1)
            assert penstock.wait([job], 0.1).pending == [job]
            threading.Timer(0.1, goes_on.set).start()
            assert job.result() == "done"
            thread.join()

    @pytest.mark.parametrize("wait", ["result", "results", "as_completed", "aresult"])
    def test_of_a_job_for_what_nothing_runs_end_at_once(self, app, wait):
        """The waiting job and the jobs around it also run, but none of them could end the awaited job."""

        @app.task(name="shop.inner")
        def inner() -> str:
            job = app.send("elsewhere.never")
            waits = {
                "result": job.result,
                "results": lambda: penstock.results([job]),
                "as_completed": lambda: list(penstock.as_completed([job])),
                "aresult": lambda: asyncio.run(job.aresult()),
            }
            with pytest.raises(ResultTimeout):
                waits[wait]()
            return "ended"

        outer = app.task(name="shop.outer")(lambda: inner.delay().result())
        with inline(app):
            assert outer.delay().result() == "ended"


def test_a_call_has_what_it_was_enqueued_with(app):
    @app.task(name="shop.send", queue="mail", retries=2)
    def send(to: str, body: str = "") -> None: ...

    moment = datetime(2100, 5, 17, 8, 30, tzinfo=UTC)
    with inline(app) as calls, app.headers(tenant="north"):
        job = send.options(
            priority=9, countdown=1.5, expires=timedelta(minutes=1), durability="os", retries=[1, 2.5], result_ttl=60,
            headers={"trace": "7"},
        ).delay("ada", body="hello")  # fmt: skip
        send.options(eta=moment, expires=moment, store_result=False, retries=None, queue="slow").delay("bob")
    first, second = calls
    assert first == Call(
        task="shop.send", args=("ada",), kwargs={"body": "hello"}, queue="mail", priority=9, countdown=1.5, eta=None,
        expires=60.0, durability="os", retries=(1.0, 2.5), headers={"tenant": "north", "trace": "7"}, result_ttl=60.0,
        job=job,
    )  # fmt: skip
    assert (first.job_id, first.store_result) == (job.id, True)
    assert (second.eta, second.expires, second.store_result, second.queue) == (moment, moment, False, "slow")
    assert str(first) == (
        "shop.send('ada', body='hello')  queue='mail', priority=9, countdown=1.5, expires=60.0, durability='os',"
        " retries=(1.0, 2.5), headers={'tenant': 'north', 'trace': '7'}, result_ttl=60.0"
    )


class TestBusyMachine:
    """Where a broker takes longer to answer than a wait looks for running jobs."""

    @pytest.fixture
    def add(self):
        app = App("shop", "unix:/nonexistent/broker.sock")
        return app.task(name="shop.add")(lambda a, b: a + b)

    @contextmanager
    def silence(self, job: penstock.Job[int]) -> Iterator[None]:
        """Stop the job's broker, and let it go on while the block waits for it."""
        broker = job._app._connected()._client.status(PATIENCE_S)["broker_pid"]
        suspend(broker)
        timer = threading.Timer(0.3, os.kill, (broker, signal.SIGCONT))
        timer.start()
        try:
            yield
        finally:
            timer.join()

    def test_a_result_is_waited_for(self, add):
        with inline(add.app):
            job = add.delay(1, 2)
            with self.silence(job):
                assert job.result() == 3

    def test_the_results_of_a_group_are_waited_for(self, add):
        with inline(add.app):
            workflow = penstock.group(add.s(1, number) for number in range(3)).delay()
            job = workflow[0]
            with self.silence(job):
                assert workflow.result() == [1, 2, 3]
            with self.silence(job):
                assert penstock.results([*workflow]) == [1, 2, 3]

    def test_a_job_that_nothing_runs_is_reported_by_the_broker(self, add):
        with capture(add.app):
            job = add.delay(1, 2)
            with self.silence(job), pytest.raises(ResultTimeout, match="nothing runs that could end it"):
                job.result()
