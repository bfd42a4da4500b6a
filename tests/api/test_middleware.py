"""Middleware and hooks: their order, and the data that they see."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from penstock import App, Middleware, Retry
from penstock.testing import inline


class Note(Middleware):
    """Records the calls and runs that it wraps."""

    def __init__(self, name: str, seen: list[str]) -> None:
        self.name = name
        self.seen = seen

    def enqueue(self, calls, next):
        self.seen.append(f"{self.name} enqueues {[(call.task, *call.args) for call in calls]}")
        jobs = next(calls)
        self.seen.append(f"{self.name} enqueued {len(jobs)}")
        return jobs

    async def aenqueue(self, calls, next):
        self.seen.append(f"{self.name} awaits {len(calls)}")
        return await next(calls)

    def run(self, job, next):
        self.seen.append(f"{self.name} runs {job.task} {job.attempt}")
        try:
            return next()
        except Exception as error:
            self.seen.append(f"{self.name} sees {type(error).__name__}, {job.retries_left} left")
            raise

    async def arun(self, job, next):
        self.seen.append(f"{self.name} runs {job.task}, awaiting")
        return await next()


def shop(*layers: Middleware) -> Any:
    app = App("shop", "memory:middleware")

    @app.task(name="add", retries=2, backoff=0)
    def add(a: int, fails: str = "") -> int:
        if fails:
            raise Retry() if fails == "Retry" else ValueError(fails)
        return a + 1

    @app.task(name="add_async")
    async def add_async(a: int) -> int:
        return a + 1

    app.use(*layers)
    return app, add, add_async


def test_layers_are_called_from_the_first_to_the_last_once_a_transaction():
    seen: list[str] = []
    app, add, _ = shop(Note("outer", seen), Note("inner", seen))
    with inline(app):
        assert add.delay(1).result() == 2
        assert seen == [
            "outer enqueues [('add', 1)]",
            "inner enqueues [('add', 1)]",
            "outer runs add 1",
            "inner runs add 1",
            "inner enqueued 1",
            "outer enqueued 1",
        ]
        for call, expected in (
            (lambda: add.map([1, 2]), "outer enqueues [('add', 1), ('add', 2)]"),
            (lambda: add.starmap([(3,)]), "outer enqueues [('add', 3)]"),
            (lambda: app.enqueue(add.s(4), add.s(5)), "outer enqueues [('add', 4), ('add', 5)]"),
            (lambda: add.options(queue="mail").s(6).delay(), "outer enqueues [('add', 6)]"),
        ):
            seen.clear()
            call()
            assert [line for line in seen if line.startswith("outer enqueues")] == [expected]


async def test_an_event_loop_has_methods_of_its_own():
    seen: list[str] = []
    app, add, _ = shop(Note("outer", seen))
    with inline(app):
        job = await add.adelay(1)
        jobs = await add.amap([1, 2])
        await app.aenqueue(add.s(1), add.s(2), add.s(3))
        assert await job.aresult() == 2
        assert len(jobs) == 2
        assert [line for line in seen if "awaits" in line] == ["outer awaits 1", "outer awaits 2", "outer awaits 3"]


def test_async_tasks_run_within_arun():
    seen: list[str] = []
    app, _, add_async = shop(Note("outer", seen), Note("inner", seen))
    with inline(app):
        assert add_async.delay(1).result() == 2
    assert seen[2:4] == ["outer runs add_async, awaiting", "inner runs add_async, awaiting"]


def test_a_layer_sees_each_attempt_and_how_many_are_left():
    seen: list[str] = []
    app, add, _ = shop(Note("it", seen))
    with inline(app):
        with pytest.raises(ValueError, match="broken"):
            add.delay(1, "broken").result()
        assert [line for line in seen if "sees" in line] == [f"it sees ValueError, {left} left" for left in (2, 1, 0)]
        seen.clear()
        add.delay(1, "Retry")
        assert [line for line in seen if "sees" in line] == [f"it sees Retry, {left} left" for left in (2, 1, 0)]


def test_a_layer_can_change_a_result_and_what_it_raises_is_the_job_s_error():
    class Double(Middleware):
        def run(self, job, next):
            value = next()
            if value == 4:
                raise RuntimeError("four")
            return value * 2

        async def arun(self, job, next):
            return await next() * 2

    app, add, add_async = shop(Double())
    with inline(app):
        assert add.delay(1).result() == 4
        assert add_async.delay(1).result() == 4
        with pytest.raises(RuntimeError, match="four"):
            add.delay(3).result()


def test_a_layer_without_its_twin_lets_nothing_go_around_it():
    class Half(Middleware):
        def enqueue(self, calls, next):
            return next(calls)

        def run(self, job, next):
            return next()

    app, add, add_async = shop(Half())
    message = r"Half has run\(\) but no arun\(\): add_async, which is an async def would bypass it"
    with pytest.raises(TypeError, match=message):
        app.check()
    with inline(app):
        assert add.delay(1).result() == 2
        with pytest.raises(TypeError, match=message):
            add_async.delay(1).result()


async def test_a_layer_without_aenqueue_is_not_gone_around():
    class Half(Middleware):
        def enqueue(self, calls, next):
            return next(calls)

    _, add, _ = shop(Half())
    with pytest.raises(TypeError, match=r"Half has enqueue\(\) but no aenqueue\(\): adelay\(\) would bypass it"):
        await add.adelay(1)


def test_a_layer_that_keeps_jobs_to_itself_is_told_so():
    class Swallow(Middleware):
        def enqueue(self, calls, next):
            next(calls)

    app, add, _ = shop(Swallow())
    with inline(app), pytest.raises(TypeError, match=r"must return the jobs that next\(calls\) returned, 1 of them"):
        add.delay(1)


def test_use_and_hooks_check_what_they_are_given():
    app = App("shop")
    with pytest.raises(TypeError, match=r"app.use takes instances of penstock.Middleware, not <class '.*Note'>"):
        app.use(Note)  # type: ignore[arg-type]

    async def connect() -> None: ...

    for hook in (app.on_worker_start, app.on_process_start, app.on_process_stop):
        with pytest.raises(TypeError, match="takes a function without arguments, and no async def"):
            hook(connect)


def test_without_middleware_nothing_is_in_the_way():
    app = App("shop")
    assert app._enqueue_layers is None
    assert app._run_layers is None
    app.use(Middleware())
    assert app._enqueue_layers is None
    assert app._run_layers is None


HOOKS = """
    import os
    from penstock import App

    app = App("shop")

    def note(text):
        with open("notes.txt", "a") as file:
            file.write(f"{text} {os.getpid()}\\n")

    @app.on_worker_start
    def once():
        note("worker")

    @app.on_process_start
    def connect():
        if not os.path.exists("database"):
            note("refused")
            raise ConnectionError("no database yet")
        note("start")

    @app.on_process_stop
    def fails():
        note("fails")
        raise OSError("can't say goodbye")

    @app.on_process_stop
    def disconnect():
        note("stop")

    @app.task
    def work() -> int:
        note("work")
        return os.getpid()
"""


def test_hooks_run_once_in_a_worker_and_once_in_each_of_its_processes(project):
    project.write("shop.py", HOOKS)
    (project.directory / "database").touch()
    shop = project.tasks("shop.py")
    worker = project.worker("shop:app", "-c", "2")
    pids = {job.result(timeout=30) for job in shop.work.starmap([()] * 20)}
    worker.signal(signal.SIGTERM)
    assert worker.wait() == 0
    notes = [line.split() for line in (project.directory / "notes.txt").read_text().splitlines()]
    by = {name: [int(pid) for what, pid in notes if what == name] for name in ("worker", "start", "stop", "fails")}
    assert len(by["worker"]) == 1
    assert by["worker"][0] not in pids
    assert len(by["start"]) == 2
    assert pids <= set(by["start"])
    assert sorted(by["start"]) == sorted(by["stop"]) == sorted(by["fails"])
    assert "a function of on_process_stop failed" in worker.output
    for pid in pids:
        of_process = [what for what, by_pid in notes if int(by_pid) == pid]
        assert of_process[0] == "start"
        assert of_process[-2:] == ["fails", "stop"]


def test_a_process_that_can_not_start_takes_no_job_and_another_one_does(project):
    project.write("shop.py", HOOKS)
    shop = project.tasks("shop.py")
    worker = project.worker("shop:app", "-c", "1")
    job = shop.work.delay()
    worker.wait_for_output("no database yet")
    (project.directory / "database").touch()
    assert job.result(timeout=30)
    assert job.info().crashes == 0
