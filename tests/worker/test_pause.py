"""Workers that people pause, resume, drain and stop from anywhere, with `penstock workers pause NAME` and the like."""

from __future__ import annotations

import json
import os
import signal
from typing import Any

import pytest
from lesser import Lesser
from project import Process, eventually
from worker.odd_shop import Shop


def order(shop: Shop, *words: str, code: int = 0) -> str:
    run = shop.project.penstock("workers", *words)
    assert run.returncode == code, run.output
    return run.output


def workers(shop: Shop) -> dict[str, dict[str, Any]]:
    listed = json.loads(order(shop, "ls", "--json"))
    return {worker["name"]: worker for worker in listed}


def start(shop: Shop, *names: str) -> list[Process]:
    """Start workers with one slot each; return once the broker knows all of them."""
    processes = [shop.worker("-c", "1", "--name", name) for name in names]

    def listed() -> bool:
        known = shop.project.penstock("workers", "ls", "--json")
        found = json.loads(known.output) if known.returncode == 0 else []
        return sorted(worker["name"] for worker in found if worker["state"] == "serving") == sorted(names)

    eventually(listed, 60, lambda: "".join(process.output for process in processes))
    return processes


def state(shop: Shop, name: str = "mill") -> str | None:
    return workers(shop).get(name, {}).get("state")


def test_a_paused_worker_begins_nothing_and_others_take_the_rest(shop: Shop) -> None:
    mill = shop.ready_worker("-c", "2", "--name", "mill")
    running = [shop.tasks.begin_and_wait.delay(label) for label in ("one", "two")]
    pids = {shop.pid_of("one"), shop.pid_of("two")}
    waiting = [shop.tasks.pid.delay() for _ in range(50)]
    assert order(shop, "pause", "mill") == "mill: paused; 2 jobs still running\n"
    assert state(shop) == "paused"
    assert "paused" in order(shop, "ls")
    shop.release("one")
    shop.release("two")
    assert {job.result(timeout=30) for job in running} == pids
    # Both slots are free, but the waiting jobs stay in the queue.
    assert {job.info().state for job in waiting} == {"waiting"}
    queue = next(queue for queue in shop.project.status()["queues"] if queue["name"] == "default")
    # A paused worker keeps its tasks registered, so no warning says that no worker has them.
    assert (queue["ready"], queue["unknown"]) == (50, 0)
    assert queue["consumers"] > 0

    shop.worker("-c", "1", "--name", "other")
    assert pids.isdisjoint({job.result(timeout=30) for job in waiting})
    assert order(shop, "pause", "mill") == "mill: paused; no job is running\n"
    assert order(shop, "resume", "mill") == "mill: serving with 2 slots; no job is running\n"
    assert order(shop, "pause", "other") == "other: paused; no job is running\n"
    assert shop.tasks.pid.delay().result(timeout=30) in pids
    assert {name: worker["state"] for name, worker in workers(shop).items()} == {"mill": "serving", "other": "paused"}
    assert "paused: no job starts until `penstock workers resume mill`" in mill.output


def test_a_worker_stays_paused_when_its_broker_is_killed(shop: Shop) -> None:
    mill = shop.ready_worker("-c", "1", "--name", "mill")
    order(shop, "pause", "mill")
    shop.project.kill_broker()
    # This call starts the next broker.
    job = shop.tasks.pid.delay()
    eventually(lambda: state(shop) == "paused", 30, lambda: mill.output)
    queue = next(queue for queue in shop.project.status()["queues"] if queue["name"] == "default")
    assert (queue["ready"], queue["unknown"]) == (1, 0)
    # The next broker knows which tasks this worker could run.
    assert queue["consumers"] > 0
    order(shop, "resume", "mill")
    assert isinstance(job.result(timeout=30), int)


def test_a_worker_that_drains_waits_for_its_jobs_without_a_limit(shop: Shop) -> None:
    # The grace period is zero, as SIGTERM would show.
    mill = shop.ready_worker("-c", "2", "--name", "mill", "--grace", "0")
    running = shop.tasks.begin_and_wait.delay("running")
    child = shop.pid_of("running")
    said = order(shop, "drain", "mill")
    assert said == "mill: draining; 1 job still running; exits after the last one\n"
    assert state(shop) == "draining"
    later = shop.tasks.pid.delay()
    # A drain can't be undone, and a second drain doesn't count as a second signal.
    assert order(shop, "drain", "mill") == said
    for other in ("resume", "pause"):
        assert "mill refused: it is stopping" in order(shop, other, "mill", code=1)
    assert "start another worker" in order(shop, "resize", "mill", "-c", "3", code=1)
    # The log reports jobs that no worker takes.
    log = shop.project.data / "broker.log"
    eventually(lambda: "shop.pid" in log.read_text() or "tasks.pid" in log.read_text(), 30, log.read_text)
    shop.release("running")
    assert mill.wait(30) == 0, mill.output
    assert running.result(timeout=30) == child
    assert (running.info().attempts, later.info().state) == (1, "waiting")


def test_a_stop_is_what_sigterm_is(shop: Shop) -> None:
    mill = shop.ready_worker("-c", "1", "--name", "mill", "--grace", "60")
    running = shop.tasks.begin_and_wait.delay("running")
    waiting = shop.tasks.pid.delay()
    child = shop.pid_of("running")
    assert "mill: stopping; 1 job still running, for at most 59 s" in order(shop, "stop", "mill").replace(
        "1 min 0 s", "59 s"
    )
    # An order may arrive twice, so the second one doesn't count as a second signal, which would kill the job.
    assert "mill: stopping; 1 job still running" in order(shop, "stop", "mill")
    assert state(shop) == "ending"
    shop.release("running")
    assert mill.wait(30) == 0, mill.output
    assert running.result(timeout=30) == child
    assert waiting.info().state == "waiting"


@pytest.mark.parametrize("by_signal", [True, False])
def test_a_drain_that_takes_too_long_is_stopped_like_any_worker(shop: Shop, by_signal: bool) -> None:
    mill = shop.ready_worker("-c", "1", "--name", "mill", "--grace", "0")
    running = shop.tasks.begin_and_wait.delay("running")
    shop.pid_of("running")
    order(shop, "drain", "mill")
    if by_signal:
        mill.signal(signal.SIGTERM)
    else:
        order(shop, "stop", "mill")
    # This counts as the first signal, so the jobs' grace has expired.
    assert mill.wait(30) == 0, mill.output
    assert (running.info().state, running.info().crashes) == ("waiting", 0)


def test_an_idle_worker_that_drains_or_stops_ends_at_once(shop: Shop) -> None:
    mill, other = start(shop, "mill", "other")
    assert order(shop, "drain", "mill") == "mill: draining; no job is running\n"
    assert order(shop, "stop", "other") == "other: stopping; no job is running\n"
    assert (mill.wait(30), other.wait(30)) == (0, 0)


def test_orders_are_for_all_workers_or_for_those_that_are_named(shop: Shop) -> None:
    processes = start(shop, "mill", "loom")
    assert sorted(order(shop, "pause", "--all").splitlines()) == [
        "loom: paused; no job is running",
        "mill: paused; no job is running",
    ]
    said = json.loads(order(shop, "resume", "mill", "loom", "mill", "--json"))
    assert said == [
        {"name": name, "state": "serving", "slots": 1, "busy": 0, "ends_within_ms": None} for name in ("mill", "loom")
    ]
    # No terminal is attached to ask for confirmation.
    refused = order(shop, "stop", "--all", code=2)
    assert "Stop 2 workers" in refused
    assert "Give -y" in refused
    order(shop, "stop", "--all", "-y")
    assert [process.wait(30) for process in processes] == [0, 0]
    assert order(shop, "stop", "--all", "-y") == "no worker is connected\n"
    assert json.loads(order(shop, "pause", "--all", "--json")) == []


def test_a_worker_that_can_not_be_asked_is_named_with_the_reason(shop: Shop) -> None:
    _, *twins = start(shop, "mill", "twin", "twin")
    said = order(shop, "pause", "nobody", code=1)
    assert said == "penstock: no worker named nobody is connected; `penstock workers ls` lists those that are\n"
    assert "several workers are named twin" in order(shop, "stop", "twin", code=1)
    assert [twin.returncode for twin in twins] == [None, None]
    # A client isn't a worker, whatever its name, and the order still reaches the other workers.
    said = order(shop, "pause", "nobody", "mill", "twin", code=1)
    assert "mill: paused" in said
    assert "2 of 3 workers did not carry out the order" in said
    run = shop.project.penstock("workers", "pause", "nobody", "mill", "--json")
    items = json.loads(run.output.splitlines()[0])
    assert [(item["name"], item.get("state")) for item in items] == [("nobody", None), ("mill", "paused")]
    assert run.returncode == 1
    assert shop.project.penstock("workers", "pause").returncode == 2
    assert shop.project.penstock("workers", "resize", "mill").returncode == 2


def test_a_worker_that_is_lost_while_it_is_asked_is_said_to_be(shop: Shop) -> None:
    mill = shop.ready_worker("-c", "1", "--name", "mill", "--heartbeat", "3")
    mill.signal(signal.SIGSTOP)
    try:
        said = order(shop, "pause", "mill", code=1)
    finally:
        mill.signal(signal.SIGCONT)
    assert "mill exited or lost its connection before it replied" in said
    assert "penstock workers ls" in said
    # The worker reconnects, and follows orders again.
    eventually(lambda: state(shop) is not None and workers(shop)["mill"]["connected"], 30, lambda: mill.output)
    order(shop, "pause", "mill")
    order(shop, "resume", "mill")
    assert isinstance(shop.tasks.pid.delay().result(timeout=30), int)


def test_a_worker_is_asked_few_things_at_a_time(shop: Shop) -> None:
    mill = shop.ready_worker("-c", "1", "--name", "mill", "--heartbeat", "60")
    mill.signal(signal.SIGSTOP)
    asking = [shop.project.start("penstock", "workers", "pause", "mill") for _ in range(10)]

    def refused() -> list[Process]:
        return [process for process in asking if process.returncode == 1]

    eventually(lambda: len(refused()) == 6, 30)
    assert all("too many questions are already on their way" in process.output for process in refused())
    # The worker resumes its work, and answers the questions that the broker passed on.
    os.kill(mill.pid, signal.SIGCONT)
    assert sorted(process.wait(30) for process in asking) == [0] * 4 + [1] * 6
    assert order(shop, "resume", "mill") == "mill: serving with 1 slot; no job is running\n"


def test_an_engine_that_passes_nothing_on_says_so(shop: Shop) -> None:
    start(shop, "mill")
    project = shop.project
    with Lesser(project.data / "broker.sock", project.directory / "lesser.sock", "asks") as lesser:
        run = project.penstock("workers", "pause", "mill", PENSTOCK_URL=lesser.url)
        assert run.returncode == 75, run.output
        assert "asking a worker is not offered by Lesser 1" in run.output
        # The engine's own figures still report the worker's state.
        listed = project.penstock("workers", "ls", "--json", PENSTOCK_URL=lesser.url)
        assert [worker["state"] for worker in json.loads(listed.output)] == ["serving"]


def test_a_burst_that_is_paused_ends_once_it_is_resumed(shop: Shop) -> None:
    first = shop.tasks.begin_and_wait.delay("first")
    burst = shop.worker("-c", "1", "--name", "mill", "--burst")
    shop.pid_of("first")
    order(shop, "pause", "mill")
    waiting = shop.tasks.pid.delay()
    shop.release("first")
    first.result(timeout=30)
    assert burst.returncode is None
    assert waiting.info().state == "waiting"
    order(shop, "resume", "mill")
    assert burst.wait(30) == 0, burst.output
    assert isinstance(waiting.result(timeout=30), int)
