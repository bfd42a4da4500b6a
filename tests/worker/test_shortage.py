"""A system that briefly runs out of descriptors: jobs wait, and no running job is lost."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager

from project import pidfd
from worker.odd_shop import Shop

CANNOT = "Too many open files"


@contextmanager
def no_more_files(pid: int) -> Iterator[None]:
    """Limit the process to the files that it has open now."""
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    taken = {int(name) for name in os.listdir(f"/proc/{pid}/fd")}
    lowest_free = min(set(range(len(taken) + 1)) - taken)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (lowest_free, before[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, before)


def test_a_job_that_needs_a_file_waits_and_the_one_that_runs_goes_on(shop: Shop) -> None:
    """The worker used to exit, along with its running job."""
    worker = shop.worker("-c", "2")
    running = shop.tasks.begin_and_wait.delay("release")
    shop.pid_of("release")
    data = bytes(200_000)
    with no_more_files(worker.pid):
        large = shop.tasks.echo.delay(data)
        worker.wait_for_output(CANNOT)
    assert large.result(timeout=30) == data
    shop.release("release")
    running.result(timeout=30)
    assert (running.info().attempts, running.info().crashes) == (1, 0)
    assert worker.output.count(CANNOT) == 1
    assert worker.returncode is None


def test_a_process_that_cannot_be_replaced_is_replaced_later(shop: Shop) -> None:
    worker = shop.worker("-c", "1")
    child = shop.tasks.pid.delay().result(timeout=30)
    with no_more_files(worker.pid):
        with pidfd(child) as ended:
            os.kill(child, signal.SIGKILL)
            ended.wait(30)
        worker.wait_for_output(CANNOT)
    assert shop.tasks.pid.delay().result(timeout=30) != child
    assert worker.returncode is None


def test_a_worker_takes_the_files_that_it_may_have_and_its_jobs_keep_their_limit(shop: Shop) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 256
    assert hard > wanted
    worker = shop.project.start("sh", "-c", f"ulimit -S -n {wanted}; exec penstock worker tasks:app -c 1")
    child = shop.tasks.pid.delay().result(timeout=30)
    assert resource.prlimit(worker.pid, resource.RLIMIT_NOFILE) == (hard, hard)
    assert resource.prlimit(child, resource.RLIMIT_NOFILE) == (wanted, hard)
