"""Things that a task may do to its own process, but must not do to others."""

from __future__ import annotations

import os
import re
import signal

import pytest
from project import pidfd
from worker.odd_shop import Shop

from penstock.errors import JobError, TaskError, WorkerCrashed


@pytest.mark.parametrize("size", [0, 1, 40_000, 70_000, 300_000, 16 * 1024 * 1024 - 100])
def test_bodies_and_results_of_any_size(shop: Shop, size: int) -> None:
    shop.worker("-c", "1")
    data = os.urandom(size)
    assert shop.tasks.echo.delay(data).result(timeout=60) == data


def test_large_and_small_jobs_mixed_on_one_slot(shop: Shop) -> None:
    shop.worker("-c", "1")
    sizes = [10, 60_000, 10, 400_000, 10, 10, 3_000_000, 20_000, 20_000, 20_000, 10] * 3
    jobs = [(size, shop.tasks.echo.delay(bytes(size))) for size in sizes]
    assert all(job.result(timeout=60) == bytes(size) for size, job in jobs)


def test_a_task_may_fork_and_even_forget_to_exit(shop: Shop) -> None:
    shop.worker("-c", "1")
    for _ in range(3):
        assert shop.tasks.forks.delay().result(timeout=30) == "from the task"
    assert shop.tasks.tiny.map(range(100))[-1].result(timeout=30) == 99


def test_a_task_may_run_programs_and_end_them(shop: Shop) -> None:
    shop.worker("-c", "1")
    assert shop.tasks.runs_a_program.delay().result(timeout=30) == "hello\n"
    # A child that ignored SIGTERM would have passed that on to the program.
    assert shop.tasks.ends_a_program.delay().result(timeout=30) == -signal.SIGTERM


def test_programs_that_tasks_run_inherit_nothing_of_ours(shop: Shop) -> None:
    shop.worker("-c", "1")
    # Descriptor 3 is the directory that ls itself reads.
    assert shop.tasks.open_descriptors_of_a_program.delay().result(timeout=30) == ["0", "1", "2", "3"]


def test_a_flood_on_stdout_comes_out_whole(shop: Shop) -> None:
    worker = shop.worker("-c", "1", "--burst")
    shop.tasks.floods_stdout.delay(50_000)
    assert worker.wait(60) == 0
    # The worker logs to the same pipe, perhaps between two halves of a line.
    without_log = re.sub(r"\d{4}-\d\d-\d\dT\d\d:.*\n", "", worker.output)
    lines = [line for line in without_log.splitlines() if "of the flood" in line]
    assert lines == [f"line {number} of the flood" for number in range(50_000)]


def test_stdin_is_empty(shop: Shop) -> None:
    shop.worker("-c", "1")
    assert shop.tasks.reads_stdin.delay().result(timeout=30) == ""


def test_signals_to_a_child_do_not_end_its_job(shop: Shop) -> None:
    shop.worker("-c", "1")
    assert shop.tasks.signals_itself.delay().result(timeout=30) == "still here"


@pytest.mark.parametrize("name", ["recurses", "exits"])
def test_what_gets_out_of_a_task_fails_the_job_and_not_the_process(shop: Shop, name: str) -> None:
    shop.worker("-c", "1")
    before = shop.tasks.pid.delay().result(timeout=30)
    arguments = [0] if name == "recurses" else []
    with pytest.raises((JobError, RecursionError, SystemExit)):
        getattr(shop.tasks, name).delay(*arguments).result(timeout=30)
    assert shop.tasks.pid.delay().result(timeout=30) == before


def test_a_process_that_a_forgotten_alarm_ends_is_replaced_and_named(shop: Shop) -> None:
    """The process used to wait forever for a thread that the task had left, and its slot ran no further jobs."""
    worker = shop.worker("-c", "1")
    child = shop.tasks.leaves_an_alarm.delay("ring").result(timeout=30)
    with pidfd(child) as ended:
        shop.release("ring")
        ended.wait(30)
    assert shop.tasks.pid.delay().result(timeout=30) != child
    worker.wait_for_output(f"pid={child} process=0")
    assert "TimeoutError: the forgotten alarm" in worker.output
    assert "an idle process was lost: exited with status 1" in worker.output


def test_a_process_that_damages_its_outcomes_is_killed_named_and_replaced(shop: Shop) -> None:
    """None of its reports can be trusted, and it would run forever."""
    worker = shop.ready_worker("-c", "2")
    running = shop.tasks.begin_and_wait.delay("other")
    other = shop.pid_of("other")
    damaging = shop.tasks.damages_its_outcomes.delay()
    with pytest.raises(WorkerCrashed, match="killed by signal 9"):
        damaging.result(timeout=30)
    (damaged,) = [int(run.removeprefix("damages ")) for run in shop.runs() if run.startswith("damages")]
    worker.wait_for_output("the memory in which a child reports its outcomes is damaged")
    assert f"pid={damaged}" in worker.output and other != damaged
    # Its slot runs jobs again, and the neighbouring job isn't affected.
    assert shop.tasks.pid.delay().result(timeout=30) not in (damaged, other)
    shop.release("other")
    assert running.result(timeout=30) == other
    assert running.info().crashes == 0


def test_a_task_that_breaks_the_interpreter_fails_and_its_process_is_replaced(shop: Shop) -> None:
    shop.worker("-c", "1")
    with pytest.raises(TaskError, match="TypeError: <it could not be recorded"):
        shop.tasks.breaks_the_interpreter.delay().result(timeout=30)
    assert shop.tasks.tiny.delay(7).result(timeout=30) == 7
