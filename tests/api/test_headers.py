"""Headers: where they come from, and which ones take precedence."""

from __future__ import annotations

import asyncio
import dataclasses
import pickle
import threading

import pytest

import penstock
from penstock import App, Middleware, current_job
from penstock.testing import inline

app = App("shop", "memory:headers")


def headers_here() -> dict[str, str]:
    job = current_job()
    assert job is not None
    return dict(job.headers)


@app.task
def look() -> dict[str, str]:
    return headers_here()


@app.task
def enqueue_another(own: dict[str, str]) -> dict[str, str]:
    """Return the headers of a job that this one enqueues."""
    return (look.options(headers=own) if own else look).delay().result()


@app.task
async def enqueue_another_async() -> dict[str, str]:
    return await (await look.adelay())


def test_a_call_has_its_own_headers_and_none_without_them():
    with inline(app):
        assert look.options(headers={"tenant": "north"}).delay().result() == {"tenant": "north"}
        assert look.delay().result() == {}


def test_a_block_gives_headers_to_all_calls_in_it():
    with inline(app):
        with app.headers(tenant="north", trace="1"):
            assert look.delay().result() == {"tenant": "north", "trace": "1"}
            with app.headers({"trace": "2", "x-request": "7"}):
                assert look.delay().result() == {"tenant": "north", "trace": "2", "x-request": "7"}
            assert [job.result() for job in look.starmap([(), ()])] == [{"tenant": "north", "trace": "1"}] * 2
            assert app.enqueue(look.s()).result() == {"tenant": "north", "trace": "1"}
            own = look.options(headers={"trace": "own"})
            assert own.delay().result() == {"tenant": "north", "trace": "own"}
        assert look.delay().result() == {}


def test_the_current_job_is_plain_data_with_its_headers():
    shop = App("plain", "memory:plain")

    @shop.task
    def as_data() -> dict[str, object]:
        job = current_job()
        assert pickle.loads(pickle.dumps(job)) == job
        return dataclasses.asdict(job)["headers"]

    with inline(shop):
        assert as_data.options(headers={"a": "1"}).delay().result() == {"a": "1"}


def test_a_block_is_of_its_app_and_its_thread():
    other = App("other", "memory:other-headers")
    with inline(app), other.headers(tenant="north"):
        assert look.delay().result() == {}
    found = []
    with inline(app), app.headers(tenant="north"):
        thread = threading.Thread(target=lambda: found.append(look.delay().result()))
        thread.start()
        thread.join()
    assert found == [{}]


async def test_a_block_holds_for_the_tasks_of_an_event_loop_that_are_started_in_it():
    with inline(app):

        async def look_later() -> dict[str, str]:
            return await (await look.adelay())

        with app.headers(tenant="north"):
            started = asyncio.ensure_future(look_later())
        assert await started == {"tenant": "north"}
        assert await look_later() == {}


def test_a_job_hands_its_headers_on():
    with inline(app):
        outer = enqueue_another.options(headers={"tenant": "north", "trace": "1"})
        assert outer.delay({}).result() == {"tenant": "north", "trace": "1"}
        assert outer.delay({"trace": "2"}).result() == {"tenant": "north", "trace": "2"}
        # The context of the call that enqueued a job is not the context of the job.
        assert enqueue_another.delay({}).result() == {}
        with app.headers(tenant="north"):
            assert enqueue_another.delay({}).result() == {"tenant": "north"}


def test_a_job_sees_nothing_of_the_block_that_it_was_enqueued_in():
    """A block of another app adds no header to this app's job; in a worker there would be no block."""
    other = App("other", "memory:other-block")
    inner = other.task(name="inner")(headers_here)

    @app.task(name="enqueues_inner")
    def enqueues_inner() -> dict[str, str]:
        return inner.delay().result()

    with inline(app), inline(other), other.headers(tenant="north"):
        assert inner.delay().result() == {"tenant": "north"}
        assert enqueues_inner.delay().result() == {}


class Stamp(Middleware):
    def enqueue(self, calls, next):
        for call in calls:
            call.headers["trace"] = "stamped"
            call.headers["queue"] = call.queue
        return next(calls)


def test_middleware_goes_before_blocks_and_behind_the_call():
    shop = App("stamped", "memory:stamped")
    task = shop.task(look)
    shop.use(Stamp())
    with inline(shop), shop.headers(trace="block", tenant="north"):
        expected = {"tenant": "north", "trace": "stamped", "queue": "default"}
        assert task.delay().result() == expected
        assert task.options(headers={"trace": "own"}).delay().result() == {**expected, "trace": "own"}


@pytest.mark.parametrize(
    ("headers", "error", "says"),
    [
        ({"a": 1}, TypeError, "headers must be strings, not 'a': 1"),
        ({1: "a"}, TypeError, "headers must be strings, not 1: 'a'"),
        ("tenant", TypeError, "headers must be a dictionary of strings, not 'tenant'"),
        ({"penstock.x": "a"}, ValueError, "'penstock.x': names that begin with 'penstock.' are reserved"),
        ({"": "a"}, ValueError, "a header can't be called ''"),
        ({"a": "x" * 4096}, ValueError, "the headers take 4,097 bytes with their names, and 4,096 are allowed"),
        ({"a": "\ud800"}, ValueError, "the header 'a' is not valid Unicode"),
    ],
)
def test_headers_that_can_not_travel_are_refused_where_they_are_named(headers, error, says):
    with pytest.raises(error) as caught:
        look.options(headers=headers)
    assert says in str(caught.value)
    with pytest.raises(error):
        app.headers(headers)


def test_headers_that_are_too_long_only_together_are_refused_at_the_call():
    with inline(app) as calls, app.headers(a="x" * 3000), pytest.raises(ValueError, match="4,096 are allowed"):
        look.options(headers={"b": "y" * 2000}).delay()
    assert calls == []


def test_4_kib_of_headers_arrive_through_a_worker(project):
    project.write(
        "shop.py",
        """
        from penstock import App, current_job
        app = App("shop")

        @app.task(retries=1, backoff=0)
        def look() -> dict[str, str]:
            job = current_job()
            if job.attempt == 1:
                raise OSError("again")
            return dict(job.headers)

        @app.task
        def hand_on() -> dict[str, str]:
            return dict(inner.delay().result(timeout=30))

        @app.task
        def inner() -> dict[str, str]:
            return dict(current_job().headers)
        """,
    )
    shop = project.tasks("shop.py")
    project.worker("shop:app", "-c", "2")
    headers = {"tenant": "größe", "x": "y" * (4096 - len("tenant") - len("größe".encode()) - 1)}
    assert shop.look.options(headers=headers).delay().result(timeout=30) == headers
    with shop.app.headers(trace="7"):
        assert penstock.results([shop.hand_on.delay()], timeout=30) == [{"trace": "7"}]
