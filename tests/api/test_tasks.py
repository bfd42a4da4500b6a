"""Tasks: which functions can be tasks, their names, and valid options."""

from __future__ import annotations

import asyncio
import datetime as dt
import functools
import importlib
import inspect
import pydoc
import re
import sys
import types
import zoneinfo
from typing import Any
from unittest.mock import create_autospec

import pytest

from penstock import App, Job, NotOffered, Task, shared_task
from penstock._tasks.options import _RESERVED as RESERVED
from penstock.testing import inline


def send(to: str) -> str:
    """Send it."""
    return to.upper()


def make_local() -> Any:
    def local() -> None: ...

    return local


class Mailer:
    def method(self) -> None: ...

    @classmethod
    def build(cls) -> None: ...

    @staticmethod
    def deliver() -> str:
        return "delivered"


def test_a_task_is_named_as_it_is_imported():
    app = App("shop")
    assert app.task(send).name == f"{__name__}.send"
    assert app.task(make_local()).name == f"{__name__}.make_local.<locals>.local"
    assert app.task(lambda: None).name.endswith(".<lambda>")
    assert app.task(Mailer.deliver).name == f"{__name__}.Mailer.deliver"
    assert app.task(name="mail")(send).name == "mail"


def test_a_task_still_looks_like_its_function():
    task = App("shop").task(send)
    assert (task.__name__, task.__doc__, task.__wrapped__) == ("send", "Send it.", send)
    assert inspect.signature(task) == inspect.signature(send)
    assert task("ada") == "ADA"
    assert repr(task) == f"<Task {__name__}.send>"


def ship(to, *parcels, fast=False): ...


# A type, since annotations in this module are text.
ship.__annotations__ = {"to": str, "parcels": int, "return": dict[str, int]}


async def fetch(self: Missing) -> Missing: ...  # type: ignore[name-defined]  # noqa: F821


@pytest.mark.parametrize("decorator", [App("shop").task, shared_task])
def test_enqueuing_shows_the_parameters_of_the_function(decorator):
    def shown(method: Any) -> str:
        return str(inspect.signature(method))

    task, late = decorator(ship), decorator(fetch)
    parameters = "(to: str, *parcels: int, fast=False)"
    assert shown(task.delay) == shown(task.adelay) == f"{parameters} -> penstock.Job[dict[str, int]]"
    assert shown(task.si) == f"{parameters} -> penstock.Signature[dict[str, int]]"
    assert f"delay{parameters}" in pydoc.plain(pydoc.render_doc(task.delay))
    assert inspect.getdoc(task.delay) == inspect.getdoc(Task.delay)
    assert inspect.iscoroutinefunction(task.adelay) and not inspect.iscoroutinefunction(task.delay)
    # People and editors read the signature, so its names need not exist.
    assert shown(late.delay) == "(self: 'Missing') -> 'Job[Missing]'"
    double = create_autospec(task.delay)
    double("ada", 1, fast=True)
    with pytest.raises(TypeError, match="missing a required argument: 'to'"):
        double(fast=True)


def test_attributes_of_a_function_do_not_replace_those_of_its_task():
    def report() -> int:
        return 1

    report.name = "sales report"  # type: ignore[attr-defined]
    report.arguments = ["a"]  # type: ignore[attr-defined]
    task = App("shop").task(report)
    assert task.name.endswith(".report")
    assert task.arguments.encode((), {})


def test_a_function_can_be_a_task_of_two_apps():
    first, second = App("a", "memory:a"), App("b", "memory:b")
    one = first.task(name="a.send", queue="aq")(send)
    other = second.task(name="b.send")(one)
    assert (one.app, one.name, other.app, other.name) == (first, "a.send", second, "b.send")
    assert (first.tasks, second.tasks) == ({"a.send": one}, {"b.send": other})
    assert other._options.queue == "default"
    assert other.function is one.function is send


def test_a_parameter_may_have_any_name(monkeypatch):
    def odd(self: int, task: int, app: int) -> int:
        return self + task + app

    shop = App("shop", "memory:any-name")
    task = shop.task(odd)
    assert task(self=1, task=2, app=3) == 6
    assert task.si(self=1, task=2, app=3).kwargs == task.s(self=1, task=2, app=3).kwargs
    assert task.delay(self=1, task=2, app=3).id
    shop.close()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"name": 3}, "an app's name must be a string, not 3"),
        ({"name": ""}, "an app's name must be a string, not ''"),
        ({"url": 3}, "url must be a string such as 'local:.penstock', not 3"),
        ({"call_timeout": None}, "call_timeout must be seconds or a timedelta, not None"),
        ({"call_timeout": "5"}, "call_timeout must be seconds or a timedelta, not '5'"),
        ({"call_timeout": -1}, "call_timeout must be between 0 seconds and 100 years, not -1"),
        ({"call_timeout": 0}, "call_timeout must be more than 0 seconds, not 0"),
        ({"max_payload_bytes": "1"}, "max_payload_bytes must be an integer of at least 1, not '1'"),
    ],
)
def test_an_app_checks_what_it_is_given(arguments, says):
    with pytest.raises((TypeError, ValueError)) as caught:
        App(**{"name": "shop", **arguments})
    assert str(caught.value) == says


def test_a_time_is_seconds_or_a_timedelta():
    assert App("shop", call_timeout=dt.timedelta(seconds=2)).call_timeout == 2


def test_calls_that_make_no_sense_say_so():
    app = App("shop", "memory:nonsense")
    task = app.task(send)
    with pytest.raises(TypeError, match=r"takes calls that are not enqueued yet, such as send.s\(1\), not <Task"):
        app.enqueue([task])  # type: ignore[list-item]
    with pytest.raises(TypeError, match="starmap takes a tuple of arguments for each call, not 1"):
        task.starmap([1])  # type: ignore[list-item]
    with pytest.raises(TypeError, match="starmap takes a tuple of arguments for each call, not 'ab'"):
        task.starmap(["ab"])  # type: ignore[list-item]
    with pytest.raises(TypeError, match=r"a job id must be a string such as Job.id, not None"):
        app.job(None)  # type: ignore[arg-type]


def test_a_task_of_the_prompt_warns_that_no_worker_can_import_it(caplog):
    app = App("shop")
    app.task(name="__main__.send")(send).arguments  # noqa: B018
    app.task(send).arguments  # noqa: B018
    assert len(caplog.messages) == 1
    assert caplog.messages[0].startswith("__main__.send is defined where no worker can import it")


def test_a_static_method_is_a_task_either_way_round():
    class Local:
        @staticmethod
        @App("shop").task
        def inner() -> int:
            return 1

    assert Local.inner() == 1
    assert App("shop").task(Mailer.__dict__["deliver"])() == "delivered"


@pytest.mark.parametrize(
    ("thing", "says"),
    [
        (Mailer.method, "Mailer.method() takes self; a task is a plain function or a staticmethod"),
        (Mailer.__dict__["build"], "a task must be a function, not <classmethod"),
        (Mailer, "a task must be a function, not <class"),
        ("send", "a task must be a function, not 'send'"),
        (functools.partial(send, "x"), "a task must be a function, not functools.partial"),
        ((lambda: (yield)), "is a generator; a task must return its result"),
    ],
)
def test_what_cannot_be_a_task_is_refused_at_the_decorator(thing, says):
    with pytest.raises(TypeError) as caught:
        App("shop").task(thing)
    assert says in str(caught.value)


class TestTwoTasksOfOneName:
    def test_are_an_error_that_names_both_places(self):
        app = App("shop")
        app.task(name="mail")(send)
        with pytest.raises(
            ValueError, match=r"two tasks are called 'mail': .*test_tasks\.py:\d+ and .*test_tasks\.py:\d+"
        ):
            app.task(name="mail")(lambda: None)
        first = make_local()
        app.task(first)
        with pytest.raises(ValueError, match="two tasks are called"):
            app.task(make_local())  # the same location, but another closure

    def test_are_fine_when_a_module_is_loaded_again(self, tmp_path, monkeypatch):
        (tmp_path / "reloaded.py").write_text("def f(): ...\n")
        monkeypatch.syspath_prepend(tmp_path)
        module = importlib.import_module("reloaded")
        monkeypatch.setitem(sys.modules, "reloaded", module)
        app = App("shop")
        app.task(module.f)
        again = app.task(importlib.reload(module).f)
        assert app.tasks["reloaded.f"] is again

    def test_are_fine_in_a_notebook(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "__main__", types.ModuleType("__main__"))
        app = App("shop")
        for cell in ("def f(): return 1", "def f(): return 2"):
            scope: dict[str, Any] = {"__name__": "__main__"}
            exec(compile(cell, f"<cell {cell}>", "exec"), scope)
            task = app.task(scope["f"])
        assert app.tasks["__main__.f"] is task


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"coutdown": 3}, "options() got an unknown option 'coutdown'; did you mean 'countdown'?"),
        (
            {"x": 3},
            "options() got an unknown option 'x'; it takes countdown, debounce, durability, eta, expires, headers,",
        ),
        ({"task": "y"}, "options() got an unknown option 'task'"),
        (
            {"backoff": 5},
            "options() got an unknown option 'backoff'; set it on the task, for all of its jobs: @app.task(backoff=",
        ),
        ({"delay": 5}, "options() got an unknown option 'delay'; use countdown"),
        ({"ttl": 5}, "options() got an unknown option 'ttl'; use expires for waiting jobs"),
        ({"countdown": -1}, "countdown must be between 0 seconds and 100 years, not -1"),
        ({"countdown": float("nan")}, "countdown must be between 0 seconds and 100 years, not nan"),
        ({"countdown": 10**12}, "countdown must be between 0 seconds and 100 years"),
        ({"countdown": "3"}, "countdown must be seconds or a timedelta, not '3'"),
        ({"countdown": True}, "countdown must be seconds or a timedelta, not True"),
        ({"countdown": 1, "eta": dt.datetime.now(dt.UTC)}, "give countdown or eta, not both"),
        ({"eta": dt.datetime.now()}, "eta must have a time zone"),
        ({"eta": 3}, "eta must be a datetime, not 3"),
        ({"expires": dt.datetime.now()}, "expires must have a time zone"),
        ({"expires": "soon"}, "expires must be seconds, a timedelta or a datetime, not 'soon'"),
        ({"priority": 10}, "priority must be an integer from 0 to 9, not 10"),
        ({"priority": True}, "priority must be an integer from 0 to 9, not True"),
        ({"queue": ""}, "queue must be a name without control characters or surrounding spaces, not ''"),
        ({"queue": 3}, "queue must be a name without control characters or surrounding spaces, not 3"),
        ({"queue": "a\n"}, "queue must be a name without control characters or surrounding spaces, not 'a\\n'"),
        ({"queue": " "}, "queue must be a name without control characters or surrounding spaces, not ' '"),
        ({"durability": "tape"}, 'durability must be "replicated", "disk", "os" or "none", not \'tape\''),
    ],
)
def test_options_that_make_no_sense_are_refused(options, says):
    task = App("shop").task(send)
    with pytest.raises((TypeError, ValueError)) as caught:
        task.options(**options)
    assert says in str(caught.value)


@pytest.mark.parametrize("call", [lambda task: task.map(5), lambda task: asyncio.run(task.amap(5))])
def test_a_map_over_no_items_says_what_it_takes(call):
    with pytest.raises(TypeError, match="map takes an iterable of arguments, one for each call, not 5"):
        call(App("shop").task(send))


def test_options_build_on_one_another():
    task = App("shop").task(queue="mail", expires=60)(send)
    view = task.options(countdown=3).options(priority=9, expires=None)
    assert (view._options.queue, view._options.countdown, view._options.priority) == ("mail", 3, 9)
    assert view._options.expires is None
    assert task._options.countdown is None


class TestOptionsThatWereGivenBefore:
    """Checking options takes longer than enqueuing a job, so a task caches the return values of `options`."""

    def test_are_not_checked_again(self, monkeypatch):
        task = App("shop").task(send)
        view = task.options(queue="mail", countdown=dt.timedelta(seconds=3))
        deeper = view.options(priority=2)
        monkeypatch.setattr("penstock._tasks.options.Options.for_core", lambda self: pytest.fail("checked again"))
        assert task.options(queue="mail", countdown=dt.timedelta(seconds=3)) is view
        assert view.options(priority=2) is deeper

    def test_are_others_when_they_are_equal_and_of_another_type(self):
        task = App("shop").task(send)
        task.options(priority=1, store_result=True)
        with pytest.raises(ValueError, match="priority must be an integer from 0 to 9, not True"):
            task.options(priority=True, store_result=True)

    def test_are_others_in_the_hour_that_a_clock_shows_twice(self):
        task = App("shop").task(send)
        twice = dt.datetime(2026, 10, 25, 2, 30, tzinfo=zoneinfo.ZoneInfo("Europe/Berlin"))
        first, second = (task.options(eta=twice.replace(fold=fold))._options.eta for fold in (0, 1))
        assert first is not None
        assert second is not None
        assert second.timestamp() - first.timestamp() == 3600

    def test_may_be_lists_and_dictionaries_that_change(self):
        task = App("shop").task(send)
        headers, delays = {"a": "1"}, [1]
        before = task.options(headers=headers, retries=delays)
        headers["a"], delays[0] = "2", 2
        after = task.options(headers=headers, retries=delays)
        assert (before._options.headers, before._options.retries) == ({"a": "1"}, (1_000,))
        assert (after._options.headers, after._options.retries) == ({"a": "2"}, (2_000,))

    def test_are_forgotten_when_there_are_many(self):
        task = App("shop").task(send)
        for countdown in range(1_000):
            assert task.options(countdown=countdown)._options.countdown == countdown
        assert len(task._views) <= 32


def test_a_job_id_is_read_in_either_spelling():
    app = App("shop")
    job = app.job("01a1f91d-d660-70af-8bbe-658d22fc8859")
    assert job.id == "01a1f91d-d660-70af-8bbe-658d22fc8859"
    assert job == app.job("01A1F91DD66070AF8BBE658D22FC8859")
    assert len({job, app.job("01A1F91DD66070AF8BBE658D22FC8859")}) == 1
    assert job != "01a1f91d-d660-70af-8bbe-658d22fc8859"
    for wrong in ("", "01a1", "zz" * 16, "01a1f91d-d660-70af-8bbe-658d22fc885", "0 " * 16):
        with pytest.raises(ValueError, match="a job id must have 32 hexadecimal digits, with or without hyphens, not"):
            app.job(wrong)


def test_a_worker_checks_first_and_then_runs_the_hooks_in_order():
    app = App("shop")
    ran = []

    @app.on_worker_start
    def first() -> None:
        ran.append("first")

    app.on_worker_start(lambda: ran.append("second"))
    app._begin_worker()
    assert ran == ["first", "second"]
    first()
    assert ran[-1] == "first"

    @app.task
    def broken(a: Nowhere) -> None: ...  # type: ignore[name-defined]  # noqa: F821

    with pytest.raises(TypeError, match="cannot be resolved"):
        app._begin_worker()
    assert ran[-2:] == ["second", "first"]


def test_the_url_is_read_when_it_is_needed(monkeypatch):
    app = App("shop")
    monkeypatch.delenv("PENSTOCK_URL", raising=False)
    assert app.url == "local:.penstock"
    monkeypatch.setenv("PENSTOCK_URL", "tcp://example.org:5670")
    assert app.url == "tcp://example.org:5670"
    assert App("shop", "memory:").url == "memory:"
    monkeypatch.setenv("PENSTOCK_URL", "")
    assert app.url == "local:.penstock"


@pytest.mark.parametrize("name", sorted(RESERVED))
def test_names_that_options_will_have_are_taken(name):
    app = App("shop")
    message = f"{name!r} is reserved for .*, not built yet; leave it out"
    with pytest.raises(NotOffered, match=f"^@app.task: {message}"):
        app.task(**{name: 1})(send)
    task = app.task(send)
    with pytest.raises(NotOffered, match=rf"^options\(\): {message}"):
        task.options(**{name: 1})
    with pytest.raises(NotOffered, match=rf"^App\(defaults=...\): {message}"):
        App("other", defaults={name: 1})


def test_an_app_has_defaults_for_its_tasks():
    app = App("shop", defaults={"queue": "mail", "retries": 5, "max_backoff": 3})
    task = app.task(send)
    own = app.task(name="own", retries=0, queue="other")(lambda: None)
    assert (task._options.queue, task.retry_policy.retries, task.retry_policy.cap_ms) == ("mail", 5, 3000)
    assert (own._options.queue, own.retry_policy.retries, own.retry_policy.cap_ms) == ("other", 0, 3000)


@pytest.mark.parametrize(
    ("defaults", "error", "says"),
    [
        ({"retires": 5}, TypeError, "App(defaults=...) got an unknown option 'retires'; did you mean 'retries'?"),
        ({"name": "x"}, TypeError, "App(defaults=...) got an unknown option 'name'"),
        ({"retries": -1}, ValueError, "retries must be an integer from 0, None for no limit, or a list of delays"),
        ({"priority": 10}, ValueError, "priority must be an integer from 0 to 9"),
        ([], TypeError, "defaults must be a dictionary of task options, not []"),
    ],
)
def test_defaults_are_checked_where_they_are_given(defaults, error, says):
    with pytest.raises(error) as caught:
        App("shop", defaults=defaults)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("retries", "says"),
    [
        ("3", "retries must be an integer from 0, None for no limit, or a list of delays, not '3'"),
        ([1] * 33, "retries has 33 delays, but 32 are the most"),
        ([-1], "a delay of retries must be between 0 seconds and 100 years, not -1"),
        (True, "retries must be an integer from 0"),
    ],
)
def test_retries_are_checked_on_a_task_and_in_a_call(retries, says):
    app = App("shop")
    task = app.task(send)
    for give in (lambda: app.task(retries=retries)(send), lambda: task.options(retries=retries)):
        with pytest.raises(ValueError, match=re.escape(says)):
            give()


def test_enqueue_gives_jobs_as_it_was_given_calls():
    app = App("shop", "memory:enqueue")
    task = app.task(send)
    with inline(app):
        assert isinstance(app.enqueue(task.s("a")), Job)
        assert [type(job) for job in app.enqueue(task.s("a"), task.s("b"))] == [Job, Job]
        assert isinstance(app.enqueue(task.s("a"), task.s("b")), tuple)
        assert isinstance(app.enqueue([task.s("a")]), list)
        assert isinstance(app.enqueue(task.s(to) for to in "abc"), list)
        assert app.enqueue([]) == []
        assert app.enqueue() == ()
    for wrong in ((task,), (3,), ([task],), (task.s("a"), 3)):
        with pytest.raises(TypeError, match=r"app.enqueue takes calls that are not enqueued yet, such as send.s\(1\)"):
            app.enqueue(*wrong)


def plain() -> None: ...


async def awaits() -> None: ...


@pytest.mark.parametrize(
    ("function", "slot", "raised", "says"),
    [
        (
            awaits,
            "thread",
            TypeError,
            r'awaits\(\) is an async def, so its slot must be "async", "process" or "isolated"',
        ),
        (plain, "async", TypeError, r"plain\(\) is not an async def and would block the loop"),
        (plain, "gevent", ValueError, "slot must be 'process' or 'thread' or 'async' or 'isolated', not 'gevent'"),
        (plain, 3, ValueError, "not 3"),
    ],
)
def test_a_kind_of_slot_that_does_not_fit_is_refused_where_it_is_said(function, slot, raised, says):
    with pytest.raises(raised, match=says):
        App("slots").task(slot=slot)(function)


def test_a_default_kind_of_slot_is_for_the_tasks_that_it_fits():
    app = App("slots", defaults={"slot": "thread"})
    assert (app.task(plain).slot, app.task(awaits).slot) == ("thread", None)
    assert app.task(name="other", slot="process")(plain).slot == "process"
    with pytest.raises(ValueError, match="slot must be"):
        App("slots", defaults={"slot": "gevent"})  # type: ignore[typeddict-item]


def test_a_call_can_not_choose_the_kind_of_slot():
    with pytest.raises(TypeError, match=r"set it on the task, for all of its jobs: @app.task\(slot=...\)"):
        App("slots").task(plain).options(slot="thread")  # type: ignore[call-arg]
