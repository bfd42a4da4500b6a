"""Waiting for many jobs at once. No worker runs here: jobs end by being purged, cancelled or expired."""

from __future__ import annotations

import asyncio
import threading
import uuid
from collections.abc import Iterator

import pytest

import penstock
from penstock import App, Job, JobCancelled, JobExpired, NoSuchJob, ResultExpired, ResultTimeout, Task
from penstock.testing import inline


@pytest.fixture
def app() -> Iterator[App]:
    app = App("shop", f"memory:{uuid.uuid4()}", call_timeout=20)
    yield app
    app.close()


@pytest.fixture
def send(app: App) -> Task[[str], str]:
    @app.task(name="shop.send")
    def send(to: str) -> str:
        if to == "nobody":
            raise ValueError("nobody there")
        return to

    return send


def cancel_later(jobs: list[Job[str]]) -> threading.Thread:
    thread = threading.Thread(target=lambda: [job.cancel() for job in jobs])
    thread.start()
    return thread


def test_results_come_in_the_order_of_the_jobs(app, send):
    with inline(app):
        jobs = send.map(["ada", "bob"])
        assert penstock.results(jobs) == ["ada", "bob"]
        assert penstock.results(iter([jobs[1], jobs[0], jobs[1]]), timeout=0) == ["bob", "ada", "bob"]
        assert penstock.results([]) == []
        assert asyncio.run(penstock.aresults(jobs)) == ["ada", "bob"]
        failed = send.delay("nobody")
        with pytest.raises(ValueError, match="nobody there"):
            penstock.results([jobs[0], failed])
        fine, error = penstock.results([jobs[0], failed], return_errors=True)
        assert fine == "ada"
        assert isinstance(error, ValueError)


def test_results_wait_for_the_end_of_the_last_job(send):
    jobs = send.map(["a", "b", "c"])
    with pytest.raises(ResultTimeout, match=f"3 of 3 jobs have not ended in time, <Job {jobs[0].id}> among them"):
        penstock.results(jobs, timeout=0.5)
    jobs[0].cancel()
    with pytest.raises(ResultTimeout, match=f"2 of 3 jobs have not ended in time, <Job {jobs[1].id}> among them"):
        penstock.results(jobs, timeout=0)
    thread = cancel_later(jobs[1:])
    errors = penstock.results(jobs, timeout=30, return_errors=True)
    thread.join()
    assert [type(error) for error in errors] == [JobCancelled] * 3
    with pytest.raises(JobCancelled, match=jobs[0].id):
        penstock.results(jobs)


async def test_results_in_an_event_loop(send):
    jobs = await send.amap(["a", "b"])
    with pytest.raises(ResultTimeout, match="2 of 2 jobs have not ended"):
        await penstock.aresults(jobs, timeout=0.5)
    with pytest.raises(ResultTimeout, match="2 of 2 jobs have not ended"):
        await penstock.aresults(jobs, timeout=0)
    waiting = asyncio.ensure_future(penstock.aresults(jobs, return_errors=True))
    await asyncio.sleep(0)
    for job in jobs:
        await job.acancel()
    assert [type(error) for error in await waiting] == [JobCancelled] * 2


def test_wait_tells_the_ended_from_the_others(send):
    jobs = send.map(["a", "b", "c"])
    assert penstock.wait(jobs, timeout=0) == ([], jobs)
    assert penstock.wait(jobs, timeout=0.5) == ([], jobs)
    jobs[1].cancel("not needed")
    done, pending = penstock.wait(jobs, return_when="first")
    assert (done, pending) == ([jobs[1]], [jobs[0], jobs[2]])
    thread = cancel_later([jobs[0], jobs[2]])
    assert penstock.wait(jobs).pending == []
    thread.join()
    assert penstock.wait([]) == ([], [])
    with pytest.raises(ValueError, match='return_when must be "all" or "first"'):
        penstock.wait(jobs, return_when="any")  # type: ignore[arg-type]


async def test_wait_in_an_event_loop(send):
    jobs = await send.amap(["a", "b"])
    assert await penstock.async_wait(jobs, timeout=0) == ([], jobs)
    assert await penstock.async_wait(jobs, timeout=0.5) == ([], jobs)
    await jobs[1].acancel()
    assert await penstock.async_wait(jobs, return_when="first") == ([jobs[1]], [jobs[0]])


def test_a_job_that_a_wait_has_seen_end_asks_nobody_for_its_result(app, send):
    job, lost = send.delay("a"), send.options(store_result=False).delay("b")
    job.cancel("not needed")
    lost.cancel()
    assert penstock.wait([job, lost]).pending == []
    app._connected().wait = app._connected().peek = None  # type: ignore[assignment, method-assign]
    with pytest.raises(JobCancelled, match="not needed"):
        job.result()
    assert job.done()


def test_jobs_are_yielded_as_they_end(send):
    jobs = send.map(["a", "b", "c"])
    jobs[2].cancel()
    seen = []
    for job in penstock.as_completed(jobs):
        seen.append(job)
        if len(seen) < 3:
            jobs[2 - len(seen)].cancel()
    assert seen == jobs[::-1]
    assert list(penstock.as_completed([])) == []
    more = [*jobs, send.delay("d")]
    for timeout in (0, 0.5):
        ends = iter(penstock.as_completed(more, timeout=timeout))
        assert {next(ends) for _ in jobs} == set(jobs)
        with pytest.raises(ResultTimeout, match=f"1 of 4 jobs has not ended in time, <Job {more[3].id}>"):
            next(ends)


async def test_jobs_are_yielded_as_they_end_in_an_event_loop(send):
    jobs = await send.amap(["a", "b", "c"])
    await jobs[2].acancel()
    seen = []
    async for job in penstock.as_completed(jobs):
        seen.append(job)
        if len(seen) < 3:
            await jobs[2 - len(seen)].acancel()
    assert seen == jobs[::-1]
    with pytest.raises(ResultTimeout):
        async for _ in penstock.as_completed([send.delay("d")], timeout=0):
            pass
    # Leaving a loop early leaves nothing behind in the connection to the broker.
    async for _ in penstock.as_completed([*jobs, await send.adelay("e")]):
        break


def test_a_wait_tells_what_is_not_kept_from_what_is_not_known(app, send):
    forgotten = send.options(store_result=False).delay("a")
    forgotten.cancel()
    unknown = app.job("0" * 32)
    errors = penstock.results([forgotten, unknown], return_errors=True)
    assert [type(error) for error in errors] == [ResultExpired, NoSuchJob]


def test_an_expired_job_has_ended(send):
    job = send.options(expires=0.05).delay("a")
    assert penstock.wait([job]) == ([job], [])
    with pytest.raises(JobExpired):
        job.result()


def test_waits_check_what_they_are_given(app, send):
    job = send.delay("a")
    for call in (penstock.results, penstock.wait, lambda jobs: list(penstock.as_completed(jobs))):
        with pytest.raises(TypeError, match=r"jobs must be handles that delay\(\) or app.job\(\) returned, not 'x'"):
            call([job, "x"])
        with pytest.raises(TypeError, match="jobs must be a list or another iterable, not 3"):
            call(3)
        workflow = app.workflow("0" * 32)
        with pytest.raises(TypeError, match=r"not <Workflow .*>; wait for a workflow by its own methods"):
            call([workflow])
        with pytest.raises(ValueError, match="wait for the jobs of each broker separately"):
            call([job, App("other", "memory:other").job("0" * 32)])
