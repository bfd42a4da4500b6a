"""Jobs wait in the broker, where any worker can take them, not behind a long job."""

from __future__ import annotations

from collections import Counter

from project import within
from worker.odd_shop import Shop


def test_a_long_job_holds_up_no_tiny_one(shop: Shop) -> None:
    shop.ready_worker("-c", "2")
    # These jobs are so short that the broker sends hundreds at once.
    assert shop.tasks.tiny.map(range(5_000))[-1].result(timeout=30) == 4_999
    long = shop.tasks.begin_and_wait.delay("long")
    shop.pid_of("long")
    jobs = shop.tasks.tiny.map(range(5_000))
    assert [job.result(timeout=30) for job in jobs] == list(range(5_000))
    shop.release("long")
    assert long.result(timeout=30) > 0


def test_jobs_that_come_one_at_a_time_are_run_by_few_processes(shop: Shop) -> None:
    """The others touch no memory and open no connections."""
    shop.ready_worker("-c", "8")
    pids = Counter(shop.tasks.pid.delay().result(timeout=30) for _ in range(200))
    # A job may come before the process that ended the last one waits again, so it is seldom one process alone. In turn,
    # three of eight would run 75 jobs.
    assert sum(jobs for _, jobs in pids.most_common(3)) > 150, pids


def test_jobs_that_share_a_packet_with_one_that_turns_out_long_go_elsewhere(shop: Shop) -> None:
    shop.project.write(
        "moody.py",
        """
        import time
        from pathlib import Path
        from penstock import App

        app = App("moody")
        here = Path(__file__).parent

        @app.task
        def work(number: int) -> int:
            while number == -1 and not (here / "go").exists():
                time.sleep(0.005)
            return number
        """,
    )
    moody = shop.project.tasks("moody.py")
    shop.project.worker("moody:app", "-c", "2")
    assert moody.work.map(range(5_000))[-1].result(timeout=30) == 4_999
    jobs = moody.work.map([*range(500), -1, *range(500)])
    for job, number in zip(jobs, [*range(500), -1, *range(500)], strict=True):
        if number != -1:
            assert job.result(timeout=30) == number
    (shop.project.directory / "go").touch()
    assert jobs[500].result(timeout=30) == -1


def test_a_worker_whose_slots_are_taken_leaves_jobs_to_others(shop: Shop) -> None:
    shop.ready_worker("-c", "1")
    # The first worker now requests hundreds of these at a time; then its only slot is taken.
    assert shop.tasks.tiny.map(range(5_000))[-1].result(timeout=30) == 4_999
    long = shop.tasks.begin_and_wait.delay("long")
    busy = shop.pid_of("long")
    jobs = [shop.tasks.pid.delay() for _ in range(200)]
    shop.worker("-c", "1")
    pids = {job.result(timeout=30) for job in jobs}
    assert len(pids) == 1 and busy not in pids
    shop.release("long")
    assert long.result(timeout=30) == busy


def test_two_workers_share_jobs_of_a_tenth_of_a_second(shop: Shop) -> None:
    shop.project.write(
        "naps.py",
        """
        import os, time
        from penstock import App

        app = App("naps")

        @app.task
        def nap() -> int:
            time.sleep(0.1)
            return os.getppid()
        """,
    )
    naps = shop.project.tasks("naps.py")
    for _ in range(2):
        shop.project.worker("naps:app", "-c", "2").wait_for_output("slots")
    for job in [naps.nap.delay() for _ in range(4)]:
        job.result(timeout=30)
    # 40 naps on four slots take 1 s.
    with within(3, "40 naps"):
        jobs = [naps.nap.delay() for _ in range(40)]
        zygotes = [job.result(timeout=30) for job in jobs]
    assert len(set(zygotes)) == 2
    assert min(zygotes.count(zygote) for zygote in set(zygotes)) >= 15
