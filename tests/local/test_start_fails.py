"""A broker that can't start for a while, for lack of space or because of disk errors, only makes calls time out.

A worker in the middle of a job used to exit and kill the job's process, and calls raised `InvalidConfiguration`.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator

import pytest
from crash.disks import ForgetfulDisk, forgetful_disk
from project import Project, eventually, within

from penstock import BrokerUnavailable, ResultTimeout

TASKS = """
    import time
    from pathlib import Path

    from penstock import App, current_job

    app = App("shop", call_timeout=2)

    @app.task
    def waits(release: str) -> int:
        Path("begun").touch()
        while not Path(release).exists():
            time.sleep(0.005)
        return current_job().attempt
"""
# Faults in the first operations of a start; each lasts until the disk is healed.
FAULTS = [("open", "EIO"), ("read", "EIO"), ("open", "ENOSPC"), ("open", "EROFS")]
# Longer than a call's deadline, to allow for a busy machine.
IN_TIME_S = 2 + 3


@pytest.fixture
def disk(project: Project) -> Iterator[ForgetfulDisk]:
    """Holds the journal of the project's local broker; the broker's socket is elsewhere."""
    with forgetful_disk(project, "starts", at=project.data / "journal") as disk:
        project.data.chmod(0o700)
        try:
            yield disk
        finally:
            project.end_all()


@pytest.mark.parametrize(("what", "error"), FAULTS)
def test_workers_and_clients_wait_until_a_broker_can_start(
    project: Project, disk: ForgetfulDisk, what: str, error: str
) -> None:
    project.write("tasks.py", TASKS)
    tasks = project.tasks()
    job = tasks.waits.delay("release")
    worker = project.worker("tasks:app", "-c", "1", "-v")
    eventually((project.directory / "begun").exists, 30)
    results: list[int] = []
    waiting = threading.Thread(target=lambda: results.append(job.result()))
    waiting.start()

    disk.fail(what, 1, error, forever=True)
    project.kill_broker()
    worker.wait_for_output("can't start a broker")
    for _ in range(2):
        with within(IN_TIME_S, "delay()"), pytest.raises(BrokerUnavailable) as refused:
            tasks.waits.delay("release")
        assert not refused.value.maybe_accepted, refused.value
    with within(IN_TIME_S, "result()"), pytest.raises((ResultTimeout, BrokerUnavailable)):
        job.result(timeout=0.5)
    # The job runs to its end, and its outcome is kept.
    (project.directory / "release").touch()
    worker.wait_for_output("succeeded")
    assert worker.returncode is None and waiting.is_alive()

    assert disk.heal() > 0
    waiting.join(30)
    assert results == [1]
    assert (job.info().attempts, job.info().crashes) == (1, 0)
    assert tasks.waits.delay("release").result(timeout=30) == 1
    worker.signal(signal.SIGTERM)
    assert worker.wait(30) == 0, worker.output
