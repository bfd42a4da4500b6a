"""Unique jobs, idempotency keys and debounce, on the core in memory."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import pickle
from collections import Counter, OrderedDict, defaultdict
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from penstock import App, Debounce, JobExists, JobState, NotOffered, PenstockError, Unique, chain
from penstock._tasks.unique import digest, given, key_of
from penstock.testing import capture, inline, move_clock, worker

GOLDEN = Path(__file__).parent / "unique_keys.json"


@pytest.fixture
def app():
    app = App("shop", "memory:")
    yield app
    app.close()


def test_a_call_with_the_same_arguments_is_the_same_job(app):
    @app.task(unique="done")
    def refresh(user: int, full: bool = False) -> int:
        return user

    with capture(app) as calls:
        first = refresh.delay(1)
        same = refresh.delay(user=1)
        assert (first.created, same.created, same == first) == (True, False, True)
        assert refresh.delay(2).created
        assert refresh.delay(1, True).created
        # Arguments count as given: an explicit default is an argument like any other.
        assert refresh.delay(1, False).created
        assert len(calls) == 4
        assert calls.run_until_idle() == 4
        assert same.result() == 1
        assert refresh.delay(1).created, "it has ended"


def test_each_way_to_enqueue_returns_the_job_that_exists(app):
    @app.task(unique="waiting")
    def refresh(user: int) -> int:
        return user

    async def all_of_them() -> list[Any]:
        return [
            await refresh.adelay(1),
            *await refresh.amap([1]),
            await app.aenqueue(refresh.s(1)),
            *await refresh.astarmap([(1,)]),
        ]

    with capture(app) as calls:
        first = refresh.delay(1)
        others = [
            *refresh.map([1]),
            *refresh.starmap([(1,)]),
            app.enqueue(refresh.s(1)),
            refresh.s(1).delay(),
            app.remote_task(refresh.name).delay(1),
            refresh.options(priority=9).delay(1),
            *asyncio.run(all_of_them()),
        ]
        assert [job.created for job in others] == [False] * len(others)
        assert set(others) == {first}
        assert [job.created for job in refresh.map([2, 2, 3])] == [True, False, True]
        assert len(calls) == 3
        assert refresh.options(unique=None).delay(1).created


def test_until_waiting_ends_when_a_worker_takes_the_job(app):
    inner: list[bool] = []

    @app.task(unique="waiting")
    def refresh(again: bool) -> None:
        if again and not inner:
            inner.append(refresh.delay(again).created)

    with capture(app) as calls:
        refresh.delay(True)
        assert calls.run_until_idle() == 2
        assert inner == [True]


def test_until_done_lasts_through_retries_and_ends_with_the_failure(app):
    inner: list[bool] = []

    @app.task(unique="done", retries=1, backoff=5)
    def fail() -> None:
        inner.append(fail.delay().created)
        raise ValueError

    with capture(app) as calls:
        first = fail.delay()
        calls.run_until_idle()
        assert not fail.delay().created, "it waits for its retry"
        move_clock(app, timedelta(seconds=6))
        calls.run_until_idle()
        assert (first.info().state, inner) == (JobState.FAILED, [False, False])
        second = fail.delay()
        assert second.created
        with pytest.raises(PenstockError, match=f"belongs to job {second.id}"):
            app.failed(id=first.id).retry()


def test_a_time_goes_on_whatever_becomes_of_the_job(app):
    @app.task(unique=timedelta(minutes=5))
    def report() -> int:
        return 1

    with capture(app) as calls:
        first = report.delay()
        calls.run_until_idle()
        again = report.delay()
        assert (again.created, again.result()) == (False, first.result())
        move_clock(app, timedelta(minutes=5))
        assert report.delay().created


def test_an_idempotency_key_is_kept_for_a_day_and_so_is_the_result(app):
    @app.task(result_ttl=60)
    def charge(cents: int) -> int:
        return cents

    @app.task
    def refund(cents: int) -> int:
        return cents

    with capture(app) as calls:
        once = charge.options(idempotency_key="order-7")
        job = once.delay(500)
        calls.run_until_idle()
        move_clock(app, timedelta(hours=23))
        # The arguments make no difference.
        again = once.delay(600)
        assert (again.created, again, again.result()) == (False, job, 500)
        assert charge.options(idempotency_key="order-8").delay(500).created
        assert refund.options(idempotency_key="order-7").delay(500).created, "keys are a task's own"
        move_clock(app, timedelta(hours=2))
        assert once.delay(600).created


def test_a_call_is_refused_that_asked_for_it(app):
    @app.task(unique=Unique(on_conflict="raise"))
    def refresh(user: int) -> int:
        return user

    with capture(app) as calls:
        first = refresh.delay(1)
        with pytest.raises(
            JobExists, match=f"job {first.id} already has its unique key; nothing was accepted"
        ) as caught:
            app.enqueue(refresh.s(2), refresh.s(1))
        assert app.job(caught.value.job_id) == first
        assert len(calls) == 1
        with pytest.raises(JobExists):
            asyncio.run(refresh.adelay(1))


def test_the_last_call_takes_the_place_of_one_that_waits(app):
    ran: list[tuple[str, int]] = []

    @app.task(unique=Unique(by=("page",), until="waiting", on_conflict="replace"))
    def render(page: str, version: int) -> int:
        ran.append((page, version))
        return version

    with capture(app) as calls:
        first = render.delay("a", 1)
        other = render.delay("b", 1)
        second = render.delay("a", 2)
        last = render.delay("a", 3)
        assert second.created and last.created
        info = first.info()
        assert (info.state, info.error) == (JobState.REPLACED, f"job {second.id} took its place")
        assert not first.done()
        calls.run_until_idle()
        assert ran == [("a", 3), ("b", 1)], "in the place of the first"
        # A caller that waits for a replaced job gets the result of the last one.
        assert [first.result(), second.result(timeout=1), last.result(), other.result()] == [3, 3, 3, 1]
        assert asyncio.run(first.aresult()) == 3
        assert first.done() and asyncio.run(first.adone())


def test_quick_calls_become_one_with_the_arguments_of_the_last(app):
    ran: list[tuple[int, str]] = []

    @app.task(debounce=Debounce(2.0, max_wait=5, by=("user",)))
    def index(user: int, text: str) -> None:
        ran.append((user, text))

    with capture(app) as calls:
        for number in range(4):
            index.delay(1, f"draft {number}")
            move_clock(app, timedelta(seconds=1.5))
            assert calls.run_until_idle() == (1 if number == 3 else 0)
        # Due at the fifth second, although there were never two quiet seconds.
        assert ran == [(1, "draft 3")]
        index.delay(1, "a")
        index.delay(2, "b")
        move_clock(app, timedelta(seconds=2.1))
        assert calls.run_until_idle() == 2
        assert ran[1:] == [(1, "a"), (2, "b")]


def test_inline_runs_each_call_that_is_a_job(app):
    ran: list[int] = []

    @app.task(unique="done")
    def refresh(user: int) -> None:
        ran.append(user)
        if len(ran) < 3:
            assert not refresh.delay(user).created

    @app.task(debounce=2.0)
    def index(user: int) -> None:
        ran.append(user)

    with inline(app):
        assert refresh.delay(1).created
        assert refresh.delay(1).created
        index.delay(7)
        index.delay(8)
    assert ran == [1, 1, 7, 8]


def test_a_worker_runs_a_unique_job_once(app):
    @app.task(unique=timedelta(hours=1))
    def refresh(user: int) -> int:
        return user

    with worker(app):
        jobs = [refresh.delay(5) for _ in range(10)]
        assert {job.result(timeout=20) for job in jobs} == {5}
        assert len(set(jobs)) == 1
        assert pickle.loads(pickle.dumps(jobs[1])) == jobs[0]


def test_a_key_function_says_which_calls_are_the_same(app):
    @app.task(unique=Unique(by=lambda url, **_: url.rstrip("/")))
    def crawl(url: str, depth: int = 1) -> None: ...

    with capture(app):
        assert crawl.delay("https://a.example").created
        assert not crawl.delay("https://a.example/", depth=2).created


def test_a_key_function_that_raises_sends_nothing(app):
    def broken(user: int) -> object:
        raise KeyError("name")

    @app.task(unique=Unique(by=broken))
    def refresh(user: int) -> None: ...

    @app.task(unique=Unique(by=lambda user: object()))
    def other(user: int) -> None: ...

    with capture(app) as calls:
        where = "test_a_key_function_that_raises_sends_nothing.<locals>.broken()"
        with pytest.raises(ValueError) as caught:
            refresh.delay(1)
        assert str(caught.value) == (
            f"{refresh.name}(): the function {where} of its unique key raised KeyError: 'name'; nothing was sent"
        )
        with pytest.raises(TypeError, match="a value of its unique key is an object"):
            other.delay(1)
        assert calls == []


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"unique": "started"}, 'unique must be "waiting", "done", a timedelta or Unique(...), not \'started\''),
        ({"unique": True}, 'unique must be "waiting", "done", a timedelta or Unique(...), not True'),
        ({"unique": timedelta(seconds=-1)}, "unique must be between 0 seconds and 100 years"),
        ({"unique": timedelta(0)}, "unique must be at least a millisecond"),
        ({"unique": Unique(on_conflict="wait")}, 'on_conflict must be "return", "replace" or "raise", not \'wait\''),
        ({"unique": Unique(by="user")}, "by must be \"args\", names of parameters such as ('user',), or a function"),
        ({"unique": Unique(by=7)}, 'by must be "args", names of parameters, or a function, not 7'),
        ({"unique": Unique(by=("user", "usr"))}, "has no parameter 'usr' to be unique by; it has user, full"),
        (
            {"unique": Unique(until=timedelta(1), on_conflict="replace")},
            'on_conflict="replace" needs until="waiting" or "done", not a time',
        ),
        ({"debounce": -1}, "debounce must be between 0 seconds and 100 years"),
        ({"debounce": 0}, "debounce must be at least a millisecond"),
        ({"debounce": "2"}, "debounce must be seconds, a timedelta or Debounce(...), not '2'"),
        ({"debounce": Debounce(5, max_wait=2)}, "max_wait must be at least wait: they are 2 and 5"),
        ({"debounce": Debounce(5, by="args")}, "debounce by all arguments would merge only identical calls"),
        ({"debounce": Debounce(5, by=("usr",))}, "has no parameter 'usr'"),
        ({"debounce": 2.0, "unique": "done"}, "give unique or debounce, not both: a call has one key"),
    ],
)
def test_options_that_make_no_sense_are_refused_where_they_stand(app, options, says):
    def refresh(user: int, full: bool = False) -> None: ...

    with pytest.raises((ValueError, TypeError)) as caught:
        app.task(**options)(refresh)
    assert says in str(caught.value)


def test_options_of_a_call_are_refused_where_they_stand(app):
    @app.task(unique="done")
    def refresh(user: int) -> None: ...

    for options, says in [
        ({"idempotency_key": "k"}, "give unique or idempotency_key, not both"),
        ({"unique": None, "idempotency_key": ""}, "idempotency_key must be a string"),
        ({"unique": None, "idempotency_key": "k" * 513}, "idempotency_key may have at most 512 bytes, not 513"),
        ({"unique": None, "debounce": 2, "countdown": 5}, "give debounce, or countdown or eta, not both"),
    ]:
        with pytest.raises((ValueError, TypeError), match=says):
            refresh.options(**options)
    assert refresh.options(unique=None, idempotency_key="k").delay
    with pytest.raises(TypeError, match="'idempotency_key'"):
        app.task(idempotency_key="k")(lambda: None)
    with pytest.raises(NotOffered, match="'single_flight' is reserved"):
        app.task(single_flight=True)(lambda: None)
    with pytest.raises(ValueError, match="known only by name"):
        app.remote_task("elsewhere.refresh", unique="done")


def test_a_step_of_a_workflow_is_not_unique(app):
    @app.task(unique="done")
    def refresh(user: int) -> int:
        return user

    with capture(app):
        with pytest.raises(TypeError, match=r"is unique or debounced, and a step of a workflow can't be"):
            chain(refresh.s(1), refresh.si(2)).delay()
        single = refresh.s(1).options(unique=None)
        chain(single, refresh.si(2).options(unique=None)).delay()


@dataclasses.dataclass
class Point:
    x: int
    tags: set[str]


# The name is part of the key, and this module is imported under several names.
Point.__module__ = "shop"


CASES: dict[str, Any] = {
    "nothing": {},
    "plain": {"user": 1, "name": "ada", "rate": 0.5, "on": True, "none": None, "raw": b"\x00\xff"},
    "the order of maps": {"b": 1, "a": {"z": 1, "y": [1, 2]}},
    "keys of other types": {"map": {2: "b", 1: "a", (1, 2): "c"}},
    "sets": {"set": {"b", "a", "c"}, "frozen": frozenset({3, 1, 2})},
    "large numbers": {"up": 1 << 80, "down": -(1 << 70)},
    "lists and tuples": {"list": [1, [2, 3]], "tuple": (1, (2, 3))},
    "times": {
        "at": datetime(2030, 1, 2, 3, 4, 5, tzinfo=UTC),
        "day": date(2030, 1, 2),
        "for": timedelta(days=1, seconds=2),
    },
    "exact numbers": {"price": Decimal("1.10"), "id": UUID(int=7)},
    "maps of other kinds": {
        "count": Counter({"b": 1, "a": 2}),
        "ordered": OrderedDict([("b", 1), ("a", 2)]),
        "default": defaultdict(list, {"b": [1], "a": [2]}),
    },
    "a class": {"point": Point(1, {"b", "a"})},
}


def key_of_case(app: App, value: Any) -> str:
    def refresh(point: Point | None = None, **more: Any) -> None: ...

    task = app.tasks.get("shop.refresh") or app.task(name="shop.refresh")(refresh)
    return key_of(task.name, digest(task, value)).hex()


def test_keys_are_the_same_bytes_for_ever(app):
    """Workers of other versions, on other Pythons, must make the same keys, because journals contain them."""
    found = {name: key_of_case(app, value) for name, value in CASES.items()}
    expected = json.loads(GOLDEN.read_text())
    assert found == expected
    assert len(set(found.values())) == len(CASES)
    begins = bytes([1, len("shop.refresh")]) + b"shop.refresh"
    assert all(bytes.fromhex(key).startswith(begins) and len(key) == 2 * (len(begins) + 16) for key in found.values())


def test_equal_arguments_have_equal_keys_in_whatever_order(app):
    one = {"a": {"x": 1, "y": 2}, "s": {f"item {number}" for number in range(50)}}
    other = {"s": {f"item {number}" for number in reversed(range(50))}, "a": {"y": 2, "x": 1}}
    assert key_of_case(app, one) == key_of_case(app, other)
    assert key_of_case(app, {"a": [1]}) != key_of_case(app, {"a": (1,)})
    assert key_of_case(app, {"a": 1}) != key_of_case(app, {"a": 1.0})


def test_arguments_are_taken_by_the_names_of_their_parameters():
    def send(to: str, *rest: int, body: str = "", **more: int) -> None: ...

    assert given(send, ("ada", 1, 2), {"body": "x", "z": 3}) == {"to": "ada", "rest": [1, 2], "body": "x", "z": 3}
    assert given(send, (), {"to": "ada"}) == {"to": "ada"}
