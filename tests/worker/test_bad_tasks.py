"""Tasks that attack their own process, its parent, its memory or its descriptors: each job ends as it should, the
other slots keep running, and the worker still stops in order."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from project import Project, eventually
from worker.odd_shop import Shop

from penstock.errors import WorkerCrashed

TASKS = """
    import ctypes, os, signal, sys, threading, time
    from pathlib import Path
    from penstock import App, current_job

    app = App("bad")
    here = Path(__file__).parent

    def say(name: str) -> None:
        (here / name).write_text(str(os.getpid()))

    @app.task
    def tiny(number: int) -> int:
        return number

    @app.task
    def waits(name: str) -> int:
        say(name)
        while not (here / f"{name} may end").exists():
            time.sleep(0.005)
        return current_job().crashes

    @app.task
    def hangs_in_c() -> None:
        # The job runs no Python code and blocks all signals.
        signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 64))
        say("hangs")
        ctypes.CDLL(None).sleep(600)

    @app.task
    def leaves_a_thread() -> None:
        threading.Thread(target=threading.Event().wait).start()

    @app.task
    def leaves_a_process() -> int:
        pid = os.fork()
        if pid == 0:
            time.sleep(600)
        return pid

    @app.task
    def floods(megabytes: int) -> None:
        for _ in range(megabytes):
            os.write(1, b"flood " * 174_763)

    @app.task
    def gives_what_does_not_travel() -> object:
        return threading.Lock()

    @app.task
    def gives_a_deep_list() -> list:
        value: list = []
        for _ in range(100_000):
            value = [value]
        return value

    @app.task
    def gives_too_much() -> bytes:
        return bytes(17 << 20)

    @app.task
    def wants_all_memory() -> int:
        return len(bytearray(1 << 46))

    class Odd(BaseException):
        pass

    class Mute(Exception):
        def __str__(self) -> str:
            raise RuntimeError("not even that")

    RAISED = {"KeyboardInterrupt": KeyboardInterrupt, "GeneratorExit": GeneratorExit, "Odd": Odd, "Mute": Mute}

    @app.task
    def raises(name: str) -> None:
        raise RAISED[name]()

    @app.task(max_crashes=1)
    def closes_all_descriptors() -> None:
        os.closerange(3, 1 << 12)

    @app.task(max_crashes=1)
    def kills_its_group() -> None:
        os.killpg(0, signal.SIGKILL)

    @app.task(max_crashes=1)
    def kills_its_parent() -> None:
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(600)

    @app.task
    def makes_itself_at_home() -> None:
        os.chdir("/")
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD, signal.SIGPIPE):
            signal.signal(number, signal.SIG_DFL)
        sys.stdout = sys.stderr = None
        os.umask(0o777)

    @app.task
    def pid() -> int:
        return os.getpid()
"""


@pytest.fixture
def bad(project: Project) -> Iterator[Any]:
    project.write("tasks.py", TASKS)
    return project.tasks()


def others_go_on(bad: Any) -> None:
    assert [job.result(timeout=60) for job in bad.tiny.map(range(50))] == list(range(50))


def test_a_hang_in_c_code_holds_up_one_slot_and_not_the_end(project: Project, bad: Any) -> None:
    worker = project.worker("tasks:app", "-c", "2", "--grace", "1")
    hanging = bad.hangs_in_c.delay()
    eventually((project.directory / "hangs").exists, 30)
    others_go_on(bad)
    worker.signal(signal.SIGTERM)
    assert worker.wait(30) == 0, worker.output
    assert "the grace is over" in worker.output
    assert hanging.info().state == "waiting"


def test_threads_that_tasks_leave_behind_do_not_hold_up_the_end(project: Project, bad: Any) -> None:
    worker = project.worker("tasks:app", "-c", "2", "--grace", "1")
    for job in [bad.leaves_a_thread.delay() for _ in range(40)]:
        job.result(timeout=30)
    worker.signal(signal.SIGTERM)
    assert worker.wait(30) == 0, worker.output


def test_a_process_that_a_task_leaves_behind_does_not_hold_up_the_end(project: Project, bad: Any) -> None:
    worker = project.worker("tasks:app", "-c", "1", "--grace", "5")
    left = bad.leaves_a_process.delay().result(timeout=30)
    others_go_on(bad)
    assert os.path.exists(f"/proc/{left}")
    worker.signal(signal.SIGTERM)
    assert worker.wait(30) == 0, worker.output
    eventually(lambda: not os.path.exists(f"/proc/{left}"), 30)


def test_a_flood_of_output_takes_no_memory_of_the_supervisor(project: Project, bad: Any) -> None:
    worker = project.worker("tasks:app", "-c", "2")
    others_go_on(bad)
    before = resident_kb(worker.pid)
    flood = bad.floods.delay(64)
    others_go_on(bad)
    flood.result(timeout=60)
    assert resident_kb(worker.pid) < before + 8 * 1024


@pytest.mark.parametrize(
    ("name", "arguments", "says"),
    [
        ("gives_what_does_not_travel", (), "lock"),
        ("gives_a_deep_list", (), ""),
        ("gives_too_much", (), "the result takes 17,825,79"),
        ("wants_all_memory", (), ""),
        ("raises", ("KeyboardInterrupt",), ""),
        ("raises", ("GeneratorExit",), ""),
        ("raises", ("Odd",), "Odd"),
        ("raises", ("Mute",), ""),
    ],
)
def test_what_a_task_gives_or_raises_ends_its_job_and_not_its_process(
    project: Project, bad: Any, name: str, arguments: tuple[str, ...], says: str
) -> None:
    project.worker("tasks:app", "-c", "1")
    before = bad.pid.delay().result(timeout=30)
    job = getattr(bad, name).delay(*arguments)
    with pytest.raises(BaseException) as raised:
        job.result(timeout=30)
    # The job itself failed, not just the wait for it.
    assert job.info().state == "failed"
    assert not says or says in str(raised.value)
    assert bad.pid.delay().result(timeout=30) == before


def test_a_task_that_closes_all_descriptors_has_ended_well_and_its_process_is_replaced(
    project: Project, bad: Any
) -> None:
    """Outcomes travel through shared memory and need no descriptor; another process runs the next job."""
    worker = project.worker("tasks:app", "-c", "2")
    for _ in range(3):
        bad.closes_all_descriptors.delay().result(timeout=30)
        others_go_on(bad)
    eventually(lambda: worker.output.count("an idle process was lost") == 3, 30, lambda: worker.output)


@pytest.mark.parametrize(("name", "crashes"), [("kills_its_group", 0), ("kills_its_parent", 1)])
def test_a_task_that_kills_the_processes_around_it_ends_itself_and_the_others_run_again(
    project: Project, bad: Any, name: str, crashes: int
) -> None:
    """The task's process has its own group, so killing that harms no other; killing the zygote kills its children."""
    worker = project.worker("tasks:app", "-c", "2")
    beside = bad.waits.delay("beside")
    eventually((project.directory / "beside").exists, 30)
    with pytest.raises(WorkerCrashed):
        getattr(bad, name).delay().result(timeout=30)
    (project.directory / "beside may end").touch()
    assert beside.result(timeout=30) == crashes
    others_go_on(bad)
    worker.signal(signal.SIGTERM)
    assert worker.wait(30) == 0, worker.output


def test_a_task_may_change_its_process_as_it_likes(project: Project, bad: Any) -> None:
    worker = project.worker("tasks:app", "-c", "1")
    bad.makes_itself_at_home.delay().result(timeout=30)
    others_go_on(bad)
    worker.signal(signal.SIGTERM)
    assert worker.wait(30) == 0, worker.output


def test_a_hang_up_ends_it_in_order(shop: Shop) -> None:
    """SIGHUP means that the terminal was closed: jobs finish, as at SIGTERM, instead of dying with their supervisor."""
    worker = shop.ready_worker("-c", "1")
    running = shop.tasks.begin_and_wait.delay("running")
    child = shop.pid_of("running")
    worker.signal(signal.SIGHUP)
    worker.wait_for_output("stopping")
    shop.release("running")
    assert worker.wait(30) == 0, worker.output
    assert running.result(timeout=30) == child


def test_a_hang_up_that_was_to_be_ignored_is(shop: Shop) -> None:
    """`nohup penstock worker` outlives its terminal."""
    worker = shop.project.start("nohup", "penstock", "worker", "tasks:app", "-c", "1")
    shop.tasks.tiny.delay(0).result(timeout=30)
    worker.signal(signal.SIGHUP)
    assert shop.tasks.tiny.map(range(50))[-1].result(timeout=30) == 49
    assert worker.returncode is None


def resident_kb(pid: int) -> int:
    with open(f"/proc/{pid}/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmRSS"))
