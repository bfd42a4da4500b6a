"""How a worker stops: in order at the first signal, at once at the second, automatically in a burst."""

from __future__ import annotations

import os
import signal

import pytest
from project import eventually, pidfd
from worker.odd_shop import Shop


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_running_jobs_end_and_the_rest_goes_back_unburned(shop: Shop, number: signal.Signals) -> None:
    worker = shop.ready_worker("-c", "2")
    running = [shop.tasks.begin_and_wait.delay(label) for label in ("one", "two")]
    waiting = [shop.tasks.attempts.delay() for _ in range(50)]
    pids = {shop.pid_of("one"), shop.pid_of("two")}
    worker.signal(number)
    worker.wait_for_output("stopping")
    shop.release("one")
    shop.release("two")
    assert worker.wait(30) == 0, worker.output
    assert {job.result(timeout=30) for job in running} == pids
    assert {job.info().state for job in waiting} == {"waiting"}
    shop.worker("-c", "1")
    assert {job.result(timeout=30) for job in waiting} == {(1, 0)}


def test_ctrl_c_on_the_terminal_does_not_reach_running_jobs(shop: Shop) -> None:
    """The terminal and service managers signal every process of a group, or every process that they know."""
    worker = shop.ready_worker("-c", "1")
    running = shop.tasks.begin_and_wait.delay("running")
    child = shop.pid_of("running")
    worker.signal(signal.SIGINT)
    for pid in (shop.zygote_pid(), child):
        os.kill(pid, signal.SIGINT)
        os.kill(pid, signal.SIGTERM)
    worker.wait_for_output("stopping")
    shop.release("running")
    assert worker.wait(30) == 0, worker.output
    assert running.result(timeout=30) == child


def test_what_outlasts_the_grace_is_handed_back_unburned(shop: Shop) -> None:
    worker = shop.ready_worker("-c", "1", "--grace", "1")
    running = shop.tasks.begin_and_wait.delay("running")
    first = shop.pid_of("running")
    worker.signal(signal.SIGTERM)
    assert worker.wait(30) == 0, worker.output
    assert "the grace is over" in worker.output
    assert running.info().state == "waiting"
    shop.release("running")
    shop.worker("-c", "1")
    assert running.result(timeout=30) != first
    assert (running.info().attempts, running.info().crashes) == (1, 0)


def test_a_second_signal_ends_it_at_once(shop: Shop) -> None:
    worker = shop.ready_worker("-c", "2")
    running = shop.tasks.begin_and_wait.delay("running")
    child = shop.pid_of("running")
    with pidfd(child) as ended:
        worker.signal(signal.SIGTERM)
        worker.wait_for_output("stopping")
        worker.signal(signal.SIGTERM)
        assert worker.wait(30) == 4, worker.output
        ended.wait(30)
    assert running.info().state == "waiting"
    assert running.info().crashes == 0


def test_a_signal_while_the_app_is_loaded_ends_it(shop: Shop) -> None:
    shop.project.write("slow.py", "import time\nopen('loading', 'w').close()\ntime.sleep(600)\n")
    worker = shop.project.worker("slow:app")
    eventually((shop.project.directory / "loading").exists, 30)
    worker.signal(signal.SIGTERM)
    assert worker.wait(30) == 0, worker.output


def test_a_storm_of_signals_loses_nothing(shop: Shop) -> None:
    worker = shop.ready_worker("-c", "2")
    jobs = shop.tasks.run.map([str(number) for number in range(3_000)])
    for number in range(200):
        os.kill(shop.zygote_pid() if number % 20 == 0 else worker.pid, signal.SIGCHLD)
        os.kill(worker.pid, signal.SIGWINCH)
    assert [job.result(timeout=30) for job in jobs] == [str(number) for number in range(3_000)]
    assert set(shop.times_run().values()) == {1}


def test_a_burst_ends_when_nothing_is_ready(shop: Shop) -> None:
    jobs = shop.tasks.tiny.map(range(5_000))
    delayed = shop.tasks.tiny.options(countdown=3600).delay(1)
    worker = shop.worker("-c", "2", "--burst")
    assert worker.wait(60) == 0, worker.output
    assert [job.result(timeout=30) for job in jobs] == list(range(5_000))
    assert delayed.info().state == "delayed"


def test_a_burst_of_nothing_ends(shop: Shop) -> None:
    assert shop.worker("--burst").wait(30) == 0


def test_a_burst_runs_what_its_own_jobs_enqueue(shop: Shop) -> None:
    shop.project.write(
        "chain.py",
        """
        from penstock import App

        app = App("chain")

        @app.task
        def count_down(number: int) -> None:
            with open("chain.txt", "a") as file:
                file.write(f"{number}\\n")
            if number:
                count_down.delay(number - 1)
        """,
    )
    chain = shop.project.tasks("chain.py")
    chain.count_down.delay(20)
    worker = shop.project.worker("chain:app", "-c", "2", "--burst")
    assert worker.wait(60) == 0, worker.output
    numbers = (shop.project.directory / "chain.txt").read_text().split()
    assert numbers == [str(number) for number in range(20, -1, -1)]
