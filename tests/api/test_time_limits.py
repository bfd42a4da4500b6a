"""Time limits as options: valid values, and their transport with the job."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

import penstock
from penstock import App, SoftTimeout, TaskTimeout, shield
from penstock._tasks.retries import RetryPolicy
from penstock.testing import capture


def work() -> None: ...


def limits_of(sender: Any) -> tuple[int | None, int | None]:
    details = sender._core_options.details()
    return details["timeout_ms"], details["soft_timeout_ms"]


def test_limits_are_seconds_or_a_timedelta_of_the_task_its_app_or_the_call() -> None:
    app = App("shop", defaults={"timeout": 60})
    task = app.task(soft_timeout=timedelta(seconds=1.5))(work)
    assert limits_of(task) == (60_000, 1_500)
    assert limits_of(task.options(timeout=0.002, soft_timeout=0.001)) == (2, 1)
    assert limits_of(task.options(timeout=None)) == (None, 1_500)
    assert limits_of(task.options(timeout=None, soft_timeout=None)) == (None, None)
    assert limits_of(App("plain").task(work)) == (None, None)


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"timeout": 0}, ValueError, "timeout must be at least a millisecond, not 0; use None for no limit"),
        ({"timeout": -5}, ValueError, "timeout must be at least a millisecond, not -5; use None for no limit"),
        ({"timeout": 0.0001}, ValueError, "timeout must be at least a millisecond, not 0.0001"),
        ({"soft_timeout": timedelta(seconds=-1)}, ValueError, "soft_timeout must be at least a millisecond, not "),
        ({"timeout": True}, TypeError, "timeout must be seconds or a timedelta, not True"),
        ({"timeout": "5 min"}, TypeError, "timeout must be seconds or a timedelta, not '5 min'"),
        ({"timeout": float("inf")}, ValueError, "timeout must be between 0 seconds and 100 years, not inf"),
        ({"timeout": 5, "soft_timeout": 5}, ValueError, "soft_timeout must be less than timeout, which stops the job"),
        ({"time_limit": 5}, TypeError, "got an unknown option 'time_limit'; use timeout"),
        ({"soft_time_limit": 5}, TypeError, "got an unknown option 'soft_time_limit'; use soft_timeout"),
    ],
)
def test_a_limit_that_is_none_is_refused_where_it_is_given(options: Any, error: Any, says: str) -> None:
    app = App("shop")
    task = app.task(work)
    for give in (
        lambda: app.task(name="other", **options)(work),
        lambda: task.options(**options),
        lambda: App("other", defaults=options),
    ):
        with pytest.raises(error) as caught:
            give()
        assert says in str(caught.value)


def test_only_a_task_that_names_it_is_retried_for_its_time() -> None:
    check = lambda expected, **policy: RetryPolicy(**policy).names(TaskTimeout) is expected  # noqa: E731
    assert check(False)
    assert check(False, retry_on=(Exception,))
    assert check(False, retry_on=(ValueError, BaseException))
    assert check(True, retry_on=(TaskTimeout,))
    assert check(True, retry_on=(Exception, TimeoutError))
    assert check(False, retry_on=(TimeoutError,), no_retry_on=(TaskTimeout,))


def test_a_shield_outside_of_a_worker_does_nothing() -> None:
    with shield(), shield():
        pass
    with pytest.raises(ZeroDivisionError), shield():
        _ = 1 / 0
    app = App("shop")

    @app.task(timeout=0.001, soft_timeout=None)
    def shielded() -> str:
        with shield():
            return "done"

    with capture(app) as calls:
        shielded.delay()
        calls.run_until_idle()
    assert shielded() == "done"


def test_what_ends_a_job_is_no_exception_and_a_soft_limit_is_one() -> None:
    assert not issubclass(penstock.JobInterrupt, Exception)
    assert issubclass(SoftTimeout, Exception)
    assert issubclass(SoftTimeout, TimeoutError)
    assert str(SoftTimeout()) == "the task has run longer than its soft_timeout"
    assert str(SoftTimeout("mine")) == "mine"
