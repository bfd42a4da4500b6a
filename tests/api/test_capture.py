"""`penstock.testing.capture` and `worker`, and assertions about calls."""

from __future__ import annotations

import re
import threading
from datetime import UTC, datetime, timedelta

import pytest

import penstock
from penstock import App, JobState, ResultTimeout, current_job, shared_task
from penstock.testing import capture, inline, move_clock, worker

PATIENCE_S = 30


@pytest.fixture
def app() -> App:
    return App("shop", "unix:/nonexistent/broker.sock", call_timeout=0.2)


def no_run(to: str = "", body: str = "") -> None:
    pytest.fail("it runs")


class TestCapture:
    def test_records_and_runs_nothing(self, app):
        send = app.task(name="shop.send")(no_run)
        with capture(app) as calls:
            job = send.delay("ada")
            assert job.info().state is JobState.WAITING
            assert send.options(countdown=60).delay("bob").info().state is JobState.DELAYED
            assert job.cancel("changed my mind") is JobState.WAITING
        assert [call.args for call in calls] == [("ada",), ("bob",)]

    def test_nothing_waits_for_what_never_comes(self, app):
        send = app.task(name="shop.send")(no_run)
        with capture(app):
            job = send.delay()
            # In production these waits have no limit; here each would wait forever.
            for wait in (job.result, lambda: penstock.results([job]), lambda: list(penstock.as_completed([job]))):
                with pytest.raises(ResultTimeout):
                    wait()
            with pytest.raises(ResultTimeout, match=r"nothing runs that could end it. capture\(\) runs no job before"):
                job.result(timeout=PATIENCE_S)
            assert penstock.wait([job]).pending == [job]

    async def test_nothing_is_awaited_that_never_comes(self, app):
        send = app.task(name="shop.send")(no_run)
        with capture(app) as calls:
            job = await send.adelay()
            with pytest.raises(ResultTimeout):
                await job
            with pytest.raises(ResultTimeout):
                await penstock.aresults([job])
            assert (await penstock.async_wait([job])).pending == [job]
        calls.assert_enqueued("shop.send")

    def test_jobs_run_when_they_are_told_to_in_a_workers_order(self, app):
        ran: list[str] = []

        @app.task(name="shop.note")
        def note(text: str, more: int = 0) -> None:
            ran.append(text)
            if more:
                note.delay(f"{text}+", more - 1)

        with capture(app) as calls:
            note.delay("low", 1)
            note.options(priority=9).delay("high", 1)
            note.options(countdown=3600).delay("late")
            assert calls.run_until_idle() == 4
            assert (ran, len(calls)) == (["high", "low", "high+", "low+"], 5)
            assert calls.run_until_idle() == 0
            move_clock(app, timedelta(hours=1))
            assert calls.run_until_idle() == 1
        assert ran[-1] == "late"

    def test_a_retry_waits_for_the_clock(self, app):
        @app.task(name="shop.send", retries=1, backoff=60, jitter=0)
        def send() -> int:
            job = current_job()
            assert job is not None
            if job.attempt == 1:
                raise OSError("not yet")
            return job.attempt

        with capture(app) as calls:
            job = send.delay()
            assert calls.run_until_idle() == 1
            assert job.info().state is JobState.DELAYED
            move_clock(app, 59)
            assert calls.run_until_idle() == 0
            move_clock(app, 2)
            assert calls.run_until_idle() == 1
            assert job.result() == 2

    async def test_jobs_run_in_an_event_loop_too(self, app):
        @app.task(name="shop.later")
        async def later() -> str:
            return "done"

        with capture(app) as calls:
            job = await later.adelay()
            assert calls.run_until_idle() == 1
            assert await job == "done"
            again = await later.adelay()
            assert await calls.arun_until_idle() == 1
            assert await again == "done"

    def test_jobs_of_several_brokers_run(self, app):
        other = App("other", "unix:/nonexistent/other.sock")
        last = app.task(name="shop.last")(lambda: None)
        middle = other.task(name="other.middle")(lambda: last.delay() and None)
        first = app.task(name="shop.first")(lambda: middle.delay() and None)
        with capture(app, other) as calls:
            first.delay()
            assert calls.run_until_idle() == 3
        assert [call.task for call in calls] == ["shop.first", "other.middle", "shop.last"]


class TestWorker:
    def test_jobs_run_at_once_side_by_side(self, app):
        both = threading.Barrier(2)

        @app.task(name="shop.meet")
        def meet() -> str:
            both.wait(PATIENCE_S)
            return threading.current_thread().name

        with worker(app, threads=2) as calls:
            names = penstock.results([meet.delay(), meet.options(queue="other").delay()], timeout=PATIENCE_S)
            calls.run_until_idle()
        assert sorted(names) == ["penstock worker 1", "penstock worker 2"]
        assert [call.queue for call in calls] == ["default", "other"]

    async def test_async_tasks_and_what_they_enqueue(self, app):
        @app.task(name="shop.child")
        async def child() -> int:
            return 1

        @app.task(name="shop.parent")
        async def parent() -> int:
            return 1 + await (await child.adelay())

        with worker(app) as calls:
            assert await (await parent.adelay()).aresult(PATIENCE_S) == 2
            await calls.arun_until_idle()
        assert [call.task for call in calls] == ["shop.parent", "shop.child"]

    def test_idle_is_when_nothing_is_ready_and_nothing_runs(self, app):
        ran: list[int] = []

        @app.task(name="shop.count", retries=1, backoff=3600)
        def count(left: int) -> None:
            ran.append(left)
            if left:
                count.delay(left - 1)
            else:
                raise OSError("later")

        with worker(app) as calls:
            calls.run_until_idle()
            count.delay(20)
            calls.run_until_idle(PATIENCE_S)
            assert ran == [*range(20, -1, -1)]
            move_clock(app, timedelta(hours=3))
            calls.run_until_idle(PATIENCE_S)
        assert ran[-2:] == [0, 0]

    def test_a_wait_for_idleness_ends(self, app):
        goes_on = threading.Event()
        task = app.task(name="shop.wait")(lambda: goes_on.wait(PATIENCE_S) and None)
        with worker(app) as calls:
            task.delay()
            with pytest.raises(TimeoutError, match="0 jobs are ready and 1 run: the worker did not become idle"):
                calls.run_until_idle(timeout=0.2)
            goes_on.set()

    def test_a_task_that_must_not_run_fails_the_test(self, app):
        task = app.task(name="shop.send")(no_run)
        with worker(app) as calls:
            task.delay()
            with pytest.raises(pytest.fail.Exception, match="it runs"):
                calls.run_until_idle()

    def test_also_where_nobody_waited_for_it(self, app):
        task = app.task(name="shop.send")(no_run)
        block = worker(app)
        calls = block.__enter__()
        failed = penstock.wait([task.delay()], PATIENCE_S).done
        with pytest.raises(pytest.fail.Exception, match="it runs"):
            block.__exit__(None, None, None)
        assert (len(failed), len(calls)) == (1, 1)

    def test_it_has_a_thread_at_least(self, app):
        with pytest.raises(ValueError, match="threads must be at least 1, not 0"), worker(app, threads=0):
            pass


class TestAssertions:
    MOMENT = datetime(2100, 1, 1, tzinfo=UTC)

    @pytest.fixture
    def calls(self, app):
        @app.task(name="shop.send", queue="mail")
        def send(to: str, body: str = "") -> None: ...

        pay = app.task(name="bank.pay")(lambda amount: None)
        self.send = send
        with capture(app) as calls:
            send.options(countdown=timedelta(minutes=1), headers={"tenant": "north", "trace": "7"}).delay(
                "ada", "hello"
            )
            send.options(priority=9, retries=[1], eta=self.MOMENT).delay(to="bob")
            send.options(retries=None, expires=self.MOMENT, store_result=False, durability="none").delay("bob")
            pay.options(expires=0.5).delay(3)
            app.send("elsewhere.go", 1, b=2)
            yield calls

    @pytest.mark.parametrize(
        ("task", "expected"),
        [
            ("shop.send", {}),
            ("shop.send", {"times": 3}),
            ("shop.send", {"args": ("ada", "hello")}),
            ("shop.send", {"args": ["ada"], "kwargs": {"body": "hello"}}),
            ("shop.send", {"kwargs": {"to": "ada", "body": "hello"}, "countdown": 60}),
            ("shop.send", {"args": ("bob",), "times": 2}),
            ("shop.send", {"args": ("bob", ""), "priority": 9, "queue": "mail", "retries": [timedelta(seconds=1)]}),
            ("shop.send", {"eta": MOMENT, "countdown": None}),
            ("shop.send", {"retries": None, "expires": MOMENT, "store_result": False, "durability": "none"}),
            ("shop.send", {"headers": {"tenant": "north"}}),
            ("shop.send", {"headers": {"tenant": "north", "trace": "7"}, "countdown": timedelta(seconds=60)}),
            ("bank.pay", {"expires": timedelta(milliseconds=500), "args": (3,)}),
            ("elsewhere.go", {"args": (1,), "kwargs": {"b": 2}}),
        ],
    )
    def test_find_what_was_enqueued(self, calls, task, expected):
        assert calls.assert_enqueued(task, **expected).task == task
        expected.pop("times", None)
        with pytest.raises(
            AssertionError, match=rf"^expected {task}\(.*\).* not to be enqueued, but it was, (once|\d times)\."
        ):
            calls.refute_enqueued(task, **expected)

    @pytest.mark.parametrize(
        ("task", "expected"),
        [
            ("shop.sent", {}),
            ("shop.send", {"args": ("ada",)}),
            ("shop.send", {"args": ("ada", "hello"), "countdown": 61}),
            ("shop.send", {"args": ("ada", "hello"), "countdown": None}),
            ("shop.send", {"args": ("ada", "hello"), "eta": MOMENT}),
            ("shop.send", {"queue": "default"}),
            ("shop.send", {"headers": {"tenant": "south"}}),
            ("shop.send", {"headers": {"more": ""}}),
            ("shop.send", {"retries": 0}),
            ("shop.send", {"expires": 5}),
            ("shop.send", {"durability": "os"}),
            ("bank.pay", {"args": (4,)}),
            ("bank.pay", {"store_result": False}),
            ("elsewhere.go", {"args": (1,)}),
        ],
    )
    def test_find_nothing_else(self, calls, task, expected):
        calls.refute_enqueued(task, **expected)
        with pytest.raises(AssertionError, match=r"to be enqueued, but it was not\. These calls were enqueued:"):
            calls.assert_enqueued(task, **expected)

    def test_a_task_stands_for_its_name(self, calls, app):
        @shared_task(name="shop.send")
        def shared(to: str) -> None: ...

        calls.assert_enqueued(self.send, args=("bob",))
        calls.assert_enqueued(self.send.options(queue="x"), args=("bob",), queue="mail")
        other = App("other")
        other.add(shared)
        calls.assert_enqueued(shared)
        with pytest.raises(TypeError, match="the first argument must be a task or its name, not 3"):
            calls.assert_enqueued(3)

    def test_a_message_lists_what_was_enqueued_the_likeliest_first(self, calls):
        with pytest.raises(AssertionError) as raised:
            calls.assert_enqueued("bank.pay", args=(4,), queue="money")
        assert str(raised.value).splitlines() == [
            "expected bank.pay(4) with queue='money' to be enqueued, but it was not. These calls were enqueued:",
            "  bank.pay(3)  queue='default', expires=0.5",
            "  shop.send('ada', 'hello')  queue='mail', countdown=60.0, headers={'tenant': 'north', 'trace': '7'}",
            f"  shop.send(to='bob')  queue='mail', priority=9, eta={self.MOMENT!r}, retries=(1.0,)",
            f"  shop.send('bob')  queue='mail', expires={self.MOMENT!r}, durability='none', retries=inf,"
            " result_ttl=None",
            "  elsewhere.go(1, b=2)  queue='default'",
        ]

    def test_a_message_says_how_often(self, calls):
        message = r"^expected shop.send\('bob'\) to be enqueued once, but it was 2 times. These"
        with pytest.raises(AssertionError, match=message):
            calls.assert_enqueued("shop.send", args=("bob",), times=1)
        with pytest.raises(
            AssertionError, match=re.escape("expected shop.send('eve') to be enqueued 2 times, but it was not.")
        ):
            calls.assert_enqueued("shop.send", args=("eve",), times=2)

    def test_a_message_stays_short_and_says_so(self, app):
        task = app.task(name="shop.count")(lambda number: None)
        with capture(app) as calls:
            with pytest.raises(AssertionError, match=r"was not. Nothing was enqueued.$"):
                calls.assert_enqueued(task)
            task.map(range(25))
        with pytest.raises(AssertionError, match=r"shop.count\(19\)  queue='default'\n  and 5 more$"):
            calls.assert_enqueued("shop.sent")

    def test_mistakes_in_an_expectation_are_told(self, calls):
        with pytest.raises(TypeError, match="unknown option 'colour'"):
            calls.assert_enqueued(self.send, colour="red")
        with pytest.raises(TypeError, match="args must be a tuple or a list of arguments, not 'ada'"):
            calls.assert_enqueued(self.send, args="ada")
        with pytest.raises(TypeError, match=r"shop.send\(\): missing a required argument: 'to'"):
            calls.assert_enqueued(self.send, kwargs={"form": "ada"})
        with pytest.raises(ValueError, match="eta must have a time zone"):
            calls.assert_enqueued(self.send, args=("bob",), eta=datetime(2100, 1, 1))


def test_a_plain_delay_pays_nothing_for_all_this(app):
    """A double replaces the connection in the instance of its app, only within the block."""
    with inline(app), capture(app), worker(app):
        assert "_connected" in vars(app)
    assert "_connected" not in vars(app)
    assert "_connected" in vars(App)
