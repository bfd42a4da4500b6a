"""`memory:`, the test double: a real broker for each app, with a clock that can be moved."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import uuid
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from project import eventually, pidfd

from penstock import App, JobExpired, JobState, NotOffered
from penstock.errors import BrokerUnavailable, InvalidConfiguration
from penstock.testing import move_clock

PATIENCE_S = 30


@pytest.fixture
def app() -> Iterator[App]:
    app = App("shop", "memory:")
    yield app
    app.close()


def with_task(app: App) -> Callable[..., object]:
    @app.task(name="shop.send")
    def send(to: str) -> str:
        return to

    return send


def broker_of(app: App) -> int:
    pid = app._connected()._client.status(5.0)["broker_pid"]
    assert isinstance(pid, int)
    return pid


def test_a_job_is_due_and_expires_by_the_clock_that_is_moved(app):
    send = with_task(app)
    # The fraction of a millisecond at which they are enqueued makes no difference.
    later, *others = [send.options(countdown=timedelta(hours=2)).delay("ada") for _ in range(10)]
    stale = send.options(expires=timedelta(hours=3)).delay("bob")
    assert later.info().state is JobState.DELAYED
    now = move_clock(app, timedelta(hours=2))
    assert abs(now - datetime.now(UTC) - timedelta(hours=2)) < timedelta(minutes=1)
    assert (later.info().state, stale.info().state) == (JobState.WAITING, JobState.WAITING)
    assert {other.info().state for other in others} == {JobState.WAITING}
    move_clock(app, timedelta(hours=1))
    with pytest.raises(JobExpired):
        stale.result(timeout=PATIENCE_S)
    assert later.info().state is JobState.WAITING


def test_a_client_is_not_taken_for_dead_when_its_clock_is_moved(app):
    pid = broker_of(app)
    for _ in range(20):
        move_clock(app, timedelta(days=365))
    assert broker_of(app) == pid


def test_a_clock_is_moved_on_and_not_beyond_all_bounds(app):
    with pytest.raises(ValueError, match="by must be between 0 seconds and 100 years"):
        move_clock(app, timedelta(seconds=-1))
    move_clock(app, timedelta(days=365 * 99))
    with pytest.raises(Exception, match="a hundred years in total"):
        move_clock(app, timedelta(days=365 * 2))
    assert with_task(app).delay("ada").info().state is JobState.WAITING


def test_no_other_broker_lets_its_clock_be_moved(project):
    app = App("shop", project.url)
    with pytest.raises(NotOffered, match=r"moving the clock is not offered by penstock .* a double for tests"):
        move_clock(app, timedelta(seconds=1))
    app.close()


def test_each_app_has_a_broker_of_its_own(app):
    other = App("other", app.url)
    assert broker_of(other) != broker_of(app)
    job = with_task(app).delay("ada")
    assert other._connected().message_info(uuid.UUID(job.id).bytes, 5.0) is None
    # As usual, the app that enqueues determines the broker.
    [others] = other.enqueue([app.tasks["shop.send"].s("ada")])
    assert others.info().state is JobState.WAITING
    assert app._connected().message_info(uuid.UUID(others.id).bytes, 5.0) is None
    other.close()
    assert job.info().state is JobState.WAITING


def test_the_broker_ends_with_its_app(app):
    with pidfd(broker_of(app)) as broker:
        app.close()
        broker.wait(PATIENCE_S)


def test_the_broker_ends_with_its_process_also_where_a_fork_lives_on():
    code = """
        import os, sys, time
        from penstock import App

        app = App("shop", "memory:")
        print(app._connected()._client.status(5.0)["broker_pid"], flush=True)
        if os.fork() == 0:
            # It has a copy of the socket.
            sys.stdin.read()
        else:
            time.sleep(3600)
    """
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    with process, pidfd(int(process.stdout.readline())) as broker:
        process.kill()
        broker.wait(PATIENCE_S)


def test_a_broker_that_was_killed_is_gone_with_all_it_held_and_that_is_said(app):
    send = with_task(app)
    job = send.delay("ada")
    os.kill(broker_of(app), signal.SIGKILL)
    with pytest.raises(
        (InvalidConfiguration, BrokerUnavailable), match="everything that it stored is gone; create a new"
    ):
        job.result(timeout=5)
    app.close()
    assert send.delay("bob").info().state is JobState.WAITING


def _enqueue_in_fork(app: App, said: multiprocessing.connection.Connection) -> None:
    try:
        app.tasks["shop.send"].delay("ada")
        said.send("it was enqueued")
    except InvalidConfiguration as error:
        said.send(str(error))


def test_a_fork_is_refused_and_told_why(app):
    with_task(app).delay("ada")
    context = multiprocessing.get_context("fork")
    heard, said = context.Pipe(duplex=False)
    child = context.Process(target=_enqueue_in_fork, args=(app, said))
    child.start()
    text = heard.recv()
    child.join(PATIENCE_S)
    assert f"lives in the process that created it ({os.getpid()})" in text
    assert "Use local:PATH to share a broker" in text


@pytest.mark.parametrize(
    "command", [["worker", "shop:app"], ["status"], ["purge", "mail", "--yes"], ["broker", "stop"]]
)
def test_no_second_process_can_reach_it_and_each_command_says_why(command, project):
    outcome = project.penstock(*command, PENSTOCK_URL="memory:")
    assert outcome.wait() == 2, outcome.output
    assert "memory: is a test double inside the process that created it" in outcome.output
    assert "Use local:PATH or a server" in outcome.output


def test_queues_and_tasks_that_were_used_once_are_forgotten_but_for_their_counts(app):
    """Clients can use any number of names. A broker keeps only those of the last hour."""
    client = app._connected()._client

    def use_once(round: int) -> None:
        """Use 3,000 queues and tasks, with names of 250 bytes."""
        names = [f"{round}.{number:0>248}" for number in range(3_000)]
        app.enqueue([app.remote_task(name, queue=name, expires=1, store_result=False).s() for name in names])
        assert set(names) <= client.status(PATIENCE_S)["ready"].keys()
        move_clock(app, timedelta(hours=1))
        # Only queues that have been empty for an hour are forgotten.
        move_clock(app, timedelta(hours=2))
        used = 3_000 * (round + 1)
        others = {"queues": used, "tasks": used, "enqueued": used, "expired": used}
        eventually(lambda: client.status(PATIENCE_S)["others"] == others, PATIENCE_S)
        assert client.status(PATIENCE_S)["ready"] == {}

    # The broker needs memory for the first names, and for its journal, which is in memory, too.
    for round in range(3):
        use_once(round)
    before = memory_of(broker_of(app))
    for round in range(3, 13):
        use_once(round)
    # The forgotten names alone take 30 MB.
    assert memory_of(broker_of(app)) - before < 18_000_000


def memory_of(pid: int) -> int:
    """Return the resident memory in bytes."""
    pages = Path(f"/proc/{pid}/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")
