"""A clock for tests: schedules, delays, expiry and results follow it, and each scheduled time fires in order."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from penstock import App, JobExpired, NotOffered, ResultExpired
from penstock.testing import Calls, Clock, capture, inline, move_clock, worker

EVE = datetime(2031, 1, 31, 23, 59, tzinfo=UTC)
MINUTE, HOUR, DAY = timedelta(minutes=1), timedelta(hours=1), timedelta(days=1)


@pytest.fixture
def app() -> App:
    return App("shop")


@pytest.fixture
def clock() -> Clock:
    return Clock()


def counted(app: App, name: str, during: Callable[[], object] = lambda: None, **options: Any) -> list[datetime]:
    """Add a task, and return the list of times at which it ran."""
    runs: list[datetime] = []

    @app.task(name=name, **options)
    def run() -> None:
        runs.append(Clock().now())
        during()

    return runs


def tally(app: App, name: str) -> tuple[int, int, int]:
    found = app.schedules.get(name)
    assert found is not None
    return found.fired, found.skipped, found.missed


class TestInline:
    @pytest.fixture
    def calls(self, app: App) -> Iterator[Calls]:
        with inline(app) as calls:
            yield calls

    def test_the_invoice_goes_out_on_the_first_of_the_month_once(self, app: App, clock: Clock, calls: Calls) -> None:
        runs = counted(app, "invoice")
        app.periodic("0 6 1 * *")(app.tasks["invoice"])
        clock.start_at(EVE)
        clock.move(6 * HOUR)
        assert runs == []
        clock.move(22 * DAY)
        calls.assert_enqueued("invoice", times=1)
        assert [when.replace(second=0, microsecond=0) for when in runs] == [datetime(2031, 2, 1, 6, tzinfo=UTC)]
        assert clock.move_to(datetime(2031, 3, 1, 6, tzinfo=UTC)) - datetime(2031, 3, 1, 6, tzinfo=UTC) < MINUTE
        assert len(runs) == 2

    def test_each_time_of_months_has_its_job_at_its_time(self, app: App, clock: Clock, calls: Calls) -> None:
        runs = counted(app, "nightly")
        app.periodic("30 2 * * *", tz="Europe/Paris")(app.tasks["nightly"])
        clock.start_at(EVE)
        clock.move(90 * DAY)
        assert (len(runs), tally(app, "nightly")) == (90, (90, 0, 0))
        # On 30 March 2031 Paris clocks skip from 2:00 to 3:00.
        assert {(when.hour, when.minute) for when in runs} == {(1, 30), (1, 0), (0, 30)}

    def test_a_retry_comes_at_its_time_and_has_others_skipped(self, app: App, clock: Clock, calls: Calls) -> None:
        failing = [True, True]

        def during() -> None:
            if failing:
                failing.pop()
                raise ValueError

        runs = counted(app, "report", during, retries=[5 * MINUTE, 2 * HOUR])
        app.periodic("0 * * * *")(app.tasks["report"])
        clock.start_at(EVE)
        clock.move(4 * HOUR)
        # The run of midnight finishes at 2:05, and the next run is at 3:00.
        assert [(when.hour, when.minute) for when in runs] == [(0, 0), (0, 5), (2, 5), (3, 0)]
        assert tally(app, "report") == (2, 2, 0)

    def test_a_job_that_is_run_at_once_runs_inside_the_call(self, app: App, calls: Calls) -> None:
        runs = counted(app, "report", queue="reports")
        app.periodic("@yearly", name="yearly", args=[])(app.tasks["report"])
        assert [(each.name, each.queue, each.is_declared) for each in app.schedules] == [("yearly", "reports", True)]
        job = app.schedules.run("yearly")
        assert job is not None and job.done() and len(runs) == 1
        calls.assert_enqueued("report", queue="reports", times=1)
        app.schedules.set("other", app.tasks["report"].options(queue="others").s(), every=60)
        Clock().move(MINUTE)
        calls.assert_enqueued("report", queue="others", times=1)

    def test_a_test_of_something_else_meets_no_schedule(self, app: App, calls: Calls) -> None:
        runs = counted(app, "poll")
        app.periodic(every=1)(app.tasks["poll"])
        move_clock(app, DAY)
        assert (runs, calls) == ([], [])

    def test_delays_expiry_and_results_follow_it(self, app: App, clock: Clock, calls: Calls) -> None:
        @app.task
        def double(n: int) -> int:
            return 2 * n

        clock.start_at(EVE)
        job = double.options(result_ttl=3 * DAY).delay(4)
        assert double.options(eta=EVE + HOUR, expires=2 * HOUR).delay(5).result() == 10
        with pytest.raises(JobExpired):
            double.options(eta=EVE + 9 * HOUR, expires=2 * HOUR).delay(6).result()
        clock.move(2 * DAY)
        assert job.result() == 8
        clock.move(2 * DAY)
        with pytest.raises(ResultExpired):
            job.result()

    def test_it_is_never_moved_back(self, clock: Clock, calls: Calls, app: App) -> None:
        with pytest.raises(ValueError, match="never moves back"):
            clock.move_to(datetime(2020, 1, 1, tzinfo=UTC))
        counted(app, "poll")
        app.periodic(every=60)(app.tasks["poll"])
        clock.move(MINUTE)
        with pytest.raises(ValueError, match="call start_at before"):
            clock.start_at(EVE)

    def test_arguments_that_do_not_fit_are_told_as_at_a_workers_start(
        self, app: App, clock: Clock, calls: Calls
    ) -> None:
        counted(app, "poll")
        app.periodic(every=60, args=[1], name="of-one")(app.tasks["poll"])
        with pytest.raises(TypeError, match="schedule 'of-one': "):
            clock.move(MINUTE)


def test_what_nobody_runs_is_skipped_and_its_jobs_are_recorded(app: App, clock: Clock) -> None:
    runs = counted(app, "poll", queue="polls")
    app.periodic(every=60)(app.tasks["poll"])
    app.periodic(every=3600, name="all", overlap="allow")(app.tasks["poll"])
    with capture(app) as calls:
        clock.move(DAY)
        assert (tally(app, "poll"), tally(app, "all")) == ((1, 1439, 0), (24, 0, 0))
        calls.assert_enqueued("poll", queue="polls", times=25)
        assert calls.run_until_idle() == len(runs) == 25
        clock.move(MINUTE)
        assert tally(app, "poll") == (2, 1439, 0)


def test_a_worker_in_threads_runs_each_time_and_each_retry_before_the_next(app: App, clock: Clock) -> None:
    failing = [True]

    def during() -> None:
        if failing:
            failing.pop()
            raise ValueError

    runs = counted(app, "nightly", during, retries=[HOUR])
    app.periodic("0 0 * * *")(app.tasks["nightly"])
    with worker(app):
        clock.start_at(EVE)
        clock.move(30 * DAY)
        assert (len(runs), tally(app, "nightly")) == (31, (30, 0, 0))


def test_of_several_overlapping_times_one_waits(app: App, clock: Clock) -> None:
    runs = counted(app, "poll")
    app.periodic(every=60, overlap="queue")(app.tasks["poll"])
    with capture(app) as calls:
        clock.move(HOUR)
        assert tally(app, "poll") == (1, 58, 0)
        assert calls.run_until_idle() == len(runs) == 2
        assert len(calls) == 2


@pytest.mark.parametrize("double", [inline, capture, worker])
def test_all_apps_of_the_test_move_together(double: Callable[..., Any], clock: Clock) -> None:
    apps = [App("shop"), App("bank", "memory:bank")]
    runs = [counted(app, app.name) for app in apps]
    for app in apps:
        app.periodic("@hourly")(app.tasks[app.name])
    with double(*apps) as calls:
        now = clock.move(3 * HOUR)
        if double is not inline:
            calls.run_until_idle()
        assert abs(clock.now() - now) < MINUTE
        assert [tally(app, app.name)[0] for app in apps] == [1, 1] if double is capture else [3, 3]
        assert [len(each) for each in runs] == [tally(app, app.name)[0] for app in apps]


def test_an_app_with_a_broker_in_memory_of_its_own(clock: Clock) -> None:
    app = App("shop", "memory:")
    counted(app, "poll")
    app.periodic(every=60)(app.tasks["poll"])
    clock.move(HOUR)
    assert tally(app, "poll") == (1, 59, 0)
    move_clock(app, HOUR)
    assert tally(app, "poll") == (1, 119, 0)
    app.close()


def test_real_brokers_are_not_moved(project: Any) -> None:
    app = App("shop", project.url)
    counted(app, "poll")
    app.periodic(every=60)(app.tasks["poll"])
    with pytest.raises(NotOffered):
        move_clock(app, HOUR)
    assert list(app.schedules) == []
    app.close()


def test_without_a_broker_in_memory_it_says_what_to_use(project: Any) -> None:
    script = """
        from penstock import App, PenstockError
        from penstock.testing import Clock

        app = App("shop")
        try:
            Clock().move(1)
        except PenstockError as error:
            print(error)
    """
    assert "use penstock_inline, penstock_capture or penstock_worker" in project.python(script)


@pytest.mark.alone
def test_months_of_minutes_take_seconds(app: App, clock: Clock) -> None:
    counted(app, "poll")
    app.periodic(every=60)(app.tasks["poll"])
    with capture(app):
        begun = time.perf_counter()
        clock.move(90 * DAY)
        assert tally(app, "poll") == (1, 129_599, 0)
    took_s = time.perf_counter() - begun
    print(f"129,600 times took {took_s:.2f} s")
    assert took_s < 10


def test_the_brokers_of_other_apps_in_the_process_stay_as_they_are(app: App) -> None:
    other = App("other", "memory:")
    before = move_clock(other, 0)
    with inline(app):
        Clock().start_at(EVE)
        Clock().move(DAY)
    assert move_clock(other, 0) - before < HOUR
    other.close()
