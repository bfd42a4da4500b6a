"""Every request to a broker that doesn't answer ends with a clear error, in time, and never hangs."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from project import Process, Project, suspend, within

import penstock
from penstock import App, BrokerUnavailable, CallTimeout, ResultTimeout

TIMEOUT_S = 0.1
# Allows for a machine that is busy with other work.
SLACK_S = 5


@dataclass
class Reach:
    """A broker's address. ``lose`` makes the broker unreachable after the first job was enqueued."""

    url: str
    lose: Callable[[], object] | None = None


@contextmanager
def refused(project: Project) -> Iterator[Reach]:
    """Yield an address where nothing listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # without `listen`: reserves the port, but refuses connections
        yield Reach(f"tcp://127.0.0.1:{taken.getsockname()[1]}")


@contextmanager
def no_socket(project: Project) -> Iterator[Reach]:
    yield Reach(f"unix:{project.directory}/nothing-here")


@contextmanager
def silent(project: Project) -> Iterator[Reach]:
    """Yield the address of a server that accepts connections and never answers."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield Reach(f"tcp://127.0.0.1:{listener.getsockname()[1]}")


@contextmanager
def killed(project: Project) -> Iterator[Reach]:
    url, server = serve(project)

    def kill() -> None:
        server.signal(signal.SIGKILL)
        server.wait()

    yield Reach(url, kill)


@contextmanager
def stopped(project: Project) -> Iterator[Reach]:
    """Yield the address of a stopped process: the kernel accepts its data, but nothing answers."""
    url, server = serve(project)
    yield Reach(url, lambda: suspend(server.pid))
    server.end()


def serve(project: Project) -> tuple[str, Process]:
    url = f"unix:{project.directory}/socket"
    server = project.start("penstock", "server", "--listen", url, "--data", project.directory / "data")
    server.wait_for_output("listening")
    return url, server


def one_of_each(app: App) -> dict[str, Callable[[], Any]]:
    """Return every call that sends the broker a request."""

    @app.task(name="double")
    def double(number: int) -> int:
        return 2 * number

    job = app.job("01234567-89ab-4cde-8f01-23456789abcd")
    asynchronous: dict[str, Callable[[], Any]] = {
        "adelay": lambda: double.adelay(1),
        "amap": lambda: double.amap([1, 2]),
        "astarmap": lambda: double.astarmap([(1,), (2,)]),
        "aenqueue": lambda: app.aenqueue([double.s(1)]),
        "adelay of a signature": lambda: double.s(1).adelay(),
        "aresult": lambda: job.aresult(timeout=TIMEOUT_S),
        "aresult at once": lambda: job.aresult(timeout=0),
        "ainfo": job.ainfo,
        "adone, which only asks": job.adone,
        "acancel": job.acancel,
        "aresults": lambda: penstock.aresults([job, job], timeout=TIMEOUT_S),
        "aresults at once": lambda: penstock.aresults([job, job], timeout=0),
        "async_wait for results": lambda: penstock.async_wait([job], timeout=TIMEOUT_S),
    }

    def waited_for(call: Callable[[], Any]) -> Callable[[], Any]:
        async def run() -> Any:
            return await call()

        return lambda: asyncio.run(run())

    return {
        "delay": lambda: double.delay(1),
        "delay with options": lambda: double.options(countdown=3).delay(1),
        "delay of a signature": lambda: double.s(1).delay(),
        "map": lambda: double.map([1, 2]),
        "starmap": lambda: double.starmap([(1,), (2,)]),
        "enqueue": lambda: app.enqueue([double.s(1)]),
        "result": lambda: job.result(timeout=TIMEOUT_S),
        "result at once": lambda: job.result(timeout=0),
        "info": job.info,
        "done, which only asks": job.done,
        "cancel": job.cancel,
        "results": lambda: penstock.results([job, job], timeout=TIMEOUT_S),
        "results at once": lambda: penstock.results([job, job], timeout=0),
        "wait for results": lambda: penstock.wait([job], timeout=TIMEOUT_S),
        "results as they come": lambda: list(penstock.as_completed([job], timeout=TIMEOUT_S)),
        **{name: waited_for(call) for name, call in asynchronous.items()},
    }


@pytest.mark.parametrize("reach", [refused, no_socket, silent, killed, stopped])
def test_every_call_raises_in_time(project: Project, reach: Callable[[Project], AbstractContextManager[Reach]]) -> None:
    with reach(project) as broker:
        app = App("shop", url=broker.url, call_timeout=30)
        calls = one_of_each(app)
        if broker.lose is not None:
            calls["delay"]()
            broker.lose()
        app.call_timeout = TIMEOUT_S
        for name, call in calls.items():
            with (
                within(TIMEOUT_S + SLACK_S, name),
                pytest.raises((BrokerUnavailable, CallTimeout, ResultTimeout)) as caught,
            ):
                call()
            asks_only = any(word in name for word in ("result", "info", "asks"))
            if asks_only or broker.lose is None:
                assert not caught.value.maybe_accepted, name
            elif reach is stopped:
                assert caught.value.maybe_accepted, name
        with within(SLACK_S, "close()"):
            app.close()


def test_every_command_ends_with_an_error_that_names_the_broker(project: Project) -> None:
    commands = [
        "status",
        "status --json",
        "ping",
        "queue ls",
        "purge default -y",
        "limit set default --max-length 3",
        "broker stop",
    ]
    with refused(project) as broker:
        started = [project.start("penstock", *command.split(), PENSTOCK_URL=broker.url) for command in commands]
        for process in started:
            assert process.wait() != 0, process.output
            assert f"no connection to {broker.url}" in process.output
            assert "Traceback" not in process.output


def test_a_worker_waits_for_its_broker_and_says_so(project: Project) -> None:
    project.write(
        "tasks.py",
        """
        from penstock import App

        app = App("shop")

        @app.task
        def double(number: int) -> int:
            return 2 * number
        """,
    )
    url = f"unix:{project.directory}/socket"
    worker = project.worker("tasks:app", "-c", "1", PENSTOCK_URL=url)
    worker.wait_for_output("no connection")
    _, server = serve(project)
    script = "import tasks\nprint(tasks.double.delay(4).result(timeout=30))"
    assert project.python(script, PENSTOCK_URL=url) == "8\n"
    worker.end()
    server.end()


def test_a_worker_without_a_broker_stops_at_once(project: Project) -> None:
    """The worker used to wait 5 s, until its first request to the broker timed out."""
    project.write("tasks.py", "from penstock import App\napp = App('shop')\n@app.task\ndef work(): ...\n")
    worker = project.worker("tasks:app", "-c", "1", "-v", PENSTOCK_URL=f"unix:{project.directory}/socket")
    worker.wait_for_output("no connection to the broker")
    with within(3, "its end"):
        worker.signal(signal.SIGTERM)
        assert worker.wait(30) == 0, worker.output
