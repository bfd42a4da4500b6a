"""Every call but `result()` ends in time, and its error says whether the job may have been accepted."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from project import suspend

TASKS = """
    from penstock import App

    app = App("shop")

    @app.task
    def double(number: int) -> int:
        return 2 * number
"""


@pytest.fixture
def tasks(project):
    project.write("tasks.py", TASKS)
    return project.tasks()


@contextmanager
def stopped_broker(project) -> Iterator[None]:
    pid = project.broker_pid()
    suspend(pid)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def test_delay_raises_within_its_deadline_and_says_that_it_may_have_been_accepted(project, tasks):
    from penstock import BrokerUnavailable, CallTimeout

    tasks.double.delay(1)
    with stopped_broker(project):
        began = time.monotonic()
        with pytest.raises((BrokerUnavailable, CallTimeout)) as caught:
            tasks.double.delay(2)
        # Without a deadline, the heartbeat would end the call after fifteen seconds.
        assert 4.5 < time.monotonic() - began < 14
        assert caught.value.maybe_accepted
        assert "may have been accepted" in str(caught.value)
    # It was accepted: the broker had received the frame, and processed it once it resumed.
    tasks.double.delay(3)
    assert project.status()["queues"][0]["ready"] == 3


async def test_no_asynchronous_call_blocks_the_loop(project, tasks):
    from penstock import BrokerUnavailable, CallTimeout

    job = await tasks.double.adelay(1)
    gaps: list[float] = []

    async def tick() -> None:
        last = time.monotonic()
        while True:
            await asyncio.sleep(0.01)
            now = time.monotonic()
            gaps.append(now - last)
            last = now

    with stopped_broker(project):
        ticker = asyncio.create_task(tick())
        waiting = asyncio.ensure_future(job)
        calls = (tasks.double.adelay(2), tasks.double.amap([3, 4]), tasks.app.aenqueue([tasks.double.s(5)]))
        ends = await asyncio.gather(*calls, return_exceptions=True)
        assert all(isinstance(end, (BrokerUnavailable, CallTimeout)) for end in ends), ends
        assert not waiting.done()
        waiting.cancel()
        ticker.cancel()
    # Each call waits for five seconds; if one blocked the loop, there would be a gap that long.
    assert len(gaps) > 100
    assert max(gaps) < 4, max(gaps)
    # Cancelling the await didn't cancel the job.
    project.worker()
    assert await asyncio.wait_for(job, 30) == 2


def test_result_waits_through_a_restart_of_the_broker(project, tasks):
    job = tasks.double.delay(4)
    project.kill_broker()
    project.worker()
    assert job.result(timeout=None) == 8


def test_many_jobs_are_waited_for_through_a_restart_of_the_broker(project, tasks):
    import penstock

    jobs = tasks.double.map([1, 2, 3])
    seen = []
    thread = threading.Thread(target=lambda: seen.extend(penstock.as_completed(jobs)))
    thread.start()
    project.kill_broker()
    project.worker()
    thread.join(60)
    assert sorted(job.result() for job in seen) == [2, 4, 6]


def test_a_result_that_does_not_come_is_a_timeout_and_the_job_goes_on(project, tasks):
    from penstock import ResultTimeout

    job = tasks.double.delay(4)
    with pytest.raises(ResultTimeout):
        job.result(timeout=0.05)
    project.worker()
    assert job.result(timeout=30) == 8
