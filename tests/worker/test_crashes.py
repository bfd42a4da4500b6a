"""A process that dies settles its job with the reason, is replaced, and harms no other job."""

from __future__ import annotations

import os
import re
import signal
from itertools import pairwise

import pytest
from project import eventually, pidfd
from worker.odd_shop import Shop, parent_of

from penstock.errors import JobCancelled, ResultTimeout, WorkerCrashed

DEATHS = {
    "segfault": "killed by signal 11 (SIGSEGV)",
    "abort": "killed by signal 6 (SIGABRT)",
    "exit 3": "exited with status 3",
    "exit 0": "exited with status 0",
    "kill -9": "killed by signal 9 (SIGKILL)",
    "sigterm by default": "killed by signal 15 (SIGTERM)",
}


@pytest.mark.parametrize("how", DEATHS)
def test_a_death_ends_its_job_with_the_reason_and_nothing_else(shop: Shop, how: str) -> None:
    labels = [f"job {number}" for number in range(200)]
    before = shop.tasks.run.map(labels[:100])
    dying = shop.tasks.die.delay(how)
    after = shop.tasks.run.map(labels[100:])
    worker = shop.worker("-c", "2")
    with pytest.raises(WorkerCrashed) as raised:
        dying.result(timeout=60)
    assert DEATHS[how] in str(raised.value)
    assert [job.result(timeout=60) for job in [*before, *after]] == labels
    # No other job ran twice or was charged with the crash.
    assert shop.times_run() == {**dict.fromkeys(labels, 1), f"die {how}": 1}
    assert {job.info().crashes for job in [*before, *after]} == {0}
    assert DEATHS[how] in worker.wait_for_output("was lost")


def test_a_job_survives_the_death_of_two_processes_and_counts_them(shop: Shop) -> None:
    shop.worker("-c", "1")
    job = shop.tasks.die_twice.delay("kill -9")
    assert job.result(timeout=60) == 3
    assert job.info().crashes == 2


def test_a_job_runs_again_at_once_after_its_first_crash_and_a_second_after_its_next(shop: Shop) -> None:
    shop.worker("-c", "2")
    hows = ("kill -9", "abort", "exit 3")
    for job in [shop.tasks.die_twice.delay(how) for how in hows]:
        assert job.result(timeout=60) == 3
    starts = [(shop.project.directory / f"starts of {how}.txt").read_text().split() for how in hows]
    gaps = [[float(later) - float(earlier) for earlier, later in pairwise(times)] for times in starts]
    # On a busy machine one of the jobs may have to wait for its process.
    assert min(first for first, _ in gaps) < 1
    # These times come from another clock than the broker's, so allow for a small difference.
    assert all(second > 0.9 for _, second in gaps), gaps


def test_a_job_that_waits_after_a_crash_says_so_and_can_be_cancelled(shop: Shop) -> None:
    shop.worker("-c", "1")
    job = shop.tasks.die_often.delay("kill -9")
    eventually(lambda: job.info().crashes == 3, 30)
    info = job.info()
    assert (info.state, info.attempts) == ("delayed", 3)
    assert info.due_at is not None and str(info.error).startswith(f"penstock.WorkerCrashed: {DEATHS['kill -9']}")
    with pytest.raises(ResultTimeout, match=r"it is delayed until .*, after its process died"):
        job.result(timeout=0.01)
    shown = shop.project.penstock("job", "show", job.id).output
    assert re.search(r"due .*, after its process died", shown)
    assert job.cancel() == "delayed"
    with pytest.raises(JobCancelled):
        job.result(timeout=30)


def test_a_crash_burns_no_retry(shop: Shop) -> None:
    job = shop.tasks.die_twice.delay("exit 3")
    later = shop.tasks.attempts.delay()
    shop.worker("-c", "1")
    assert job.result(timeout=60) == 3
    assert later.result(timeout=60) == (1, 0)


def test_the_jobs_behind_one_that_kills_its_process_run_once_each(shop: Shop) -> None:
    """Processes die in the middle of packets of hundreds of jobs."""
    jobs = []
    for number in range(20):
        jobs += shop.tasks.run.map([f"{number} {index}" for index in range(100)])
        shop.tasks.die.delay("kill -9")
    shop.worker("-c", "2")
    for job in jobs:
        job.result(timeout=60)
    runs = shop.times_run()
    assert runs.pop("die kill -9") <= 20
    assert set(runs.values()) == {1} and len(runs) == 2_000


def test_an_idle_process_that_is_killed_is_replaced(shop: Shop) -> None:
    worker = shop.ready_worker("-c", "1")
    old = shop.tasks.pid.delay().result(timeout=30)
    with pidfd(old) as ended:
        os.kill(old, signal.SIGKILL)
        ended.wait(30)
    assert shop.tasks.pid.delay().result(timeout=30) != old
    worker.wait_for_output("an idle process was lost: killed by signal 9 (SIGKILL)")


def test_a_process_that_is_stopped_holds_up_nothing_else(shop: Shop) -> None:
    shop.ready_worker("-c", "2")
    held = shop.tasks.begin_and_wait.delay("held")
    stopped = shop.pid_of("held")
    os.kill(stopped, signal.SIGSTOP)
    assert shop.tasks.tiny.map(range(2_000))[-1].result(timeout=30) == 1_999
    shop.release("held")
    os.kill(stopped, signal.SIGCONT)
    assert held.result(timeout=30) == stopped


def test_when_the_zygote_is_killed_its_children_end_and_others_take_over(shop: Shop) -> None:
    worker = shop.ready_worker("-c", "2")
    running = shop.tasks.begin_and_wait.delay("running")
    first = shop.pid_of("running")
    waiting = shop.tasks.run.map([f"waiting {number}" for number in range(100)])
    zygote = shop.zygote_pid()
    assert parent_of(first) == zygote
    with pidfd(first) as ended:
        os.kill(zygote, signal.SIGKILL)
        ended.wait(30)
    shop.release("running")
    assert running.result(timeout=30) != first
    assert [job.result(timeout=30) for job in waiting] == [f"waiting {number}" for number in range(100)]
    assert running.info().crashes == 1
    worker.wait_for_output("the zygote, which forks the processes that run jobs, was lost")


def test_when_the_supervisor_is_killed_everything_of_it_ends_and_its_jobs_run_elsewhere(shop: Shop) -> None:
    worker = shop.ready_worker("-c", "2", "--heartbeat", "2")
    running = shop.tasks.begin_and_wait.delay("running")
    first = shop.pid_of("running")
    zygote = shop.zygote_pid()
    with pidfd(first) as child_ended, pidfd(zygote) as zygote_ended:
        worker.signal(signal.SIGKILL)
        child_ended.wait(30)
        zygote_ended.wait(30)
    shop.worker("-c", "1")
    eventually(lambda: shop.pid_of("running") != first, 60)
    shop.release("running")
    assert running.result(timeout=30) != first


def test_deaths_one_after_another_leave_no_zombies_and_no_descriptors(shop: Shop) -> None:
    worker = shop.ready_worker("-c", "2")

    def descriptors(pid: int) -> int:
        return len(os.listdir(f"/proc/{pid}/fd"))

    zygote = shop.zygote_pid()

    def all_are_there() -> bool:
        children = [pid for pid in shop.project.processes() if parent_of_or_none(pid) == zygote]
        return len(children) == 2

    # The second process may start only after the first has run a job.
    eventually(all_are_there, 30)
    before = descriptors(worker.pid), descriptors(zygote)
    for job in [shop.tasks.die.delay("kill -9") for _ in range(40)]:
        with pytest.raises(WorkerCrashed):
            job.result(timeout=60)

    def all_are_replaced() -> bool:
        return all_are_there() and (descriptors(worker.pid), descriptors(zygote)) == before

    eventually(all_are_replaced, 30)


def parent_of_or_none(pid: int) -> int | None:
    try:
        return parent_of(pid)
    except (FileNotFoundError, ProcessLookupError):
        return None
