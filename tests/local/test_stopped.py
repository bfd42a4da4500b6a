"""`penstock stop` and a deleted directory, while a worker is connected.

A worker used to restart the broker as soon as it was stopped, and to recreate a directory that had been deleted
while in use.
"""

from __future__ import annotations

import shutil
import signal
import socket
from pathlib import Path

from project import Process, Project, eventually, pidfd

TASKS = """
    import time
    from pathlib import Path

    from penstock import App, current_job

    app = App("shop")

    @app.task
    def double(number: int) -> int:
        return 2 * number

    @app.task
    def waits(release: str) -> int:
        Path("begun").touch()
        while not Path(release).exists():
            time.sleep(0.005)
        return current_job().attempt
"""


def worker_of(project: Project) -> Process:
    """Start a worker, and return it once it has run a job."""
    project.write("tasks.py", TASKS)
    worker = project.worker("tasks:app", "-c", "1", "-v")
    assert project.tasks().double.delay(4).result(timeout=30) == 8
    return worker


def stop(project: Project, worker: Process) -> None:
    stopped = project.penstock("broker", "stop")
    assert stopped.returncode == 0, stopped.output
    assert "has stopped; a worker waits until a client starts it again" in stopped.output
    worker.wait_for_output("waiting until a client starts it again")
    assert project.broker_pid() is None
    # The exiting broker ends each connection of the worker, which reports that once.
    assert worker.output.count("was stopped; waiting until") == 1, worker.output


def begun_job(project: Project) -> object:
    job = project.tasks().waits.delay("release")
    eventually((project.directory / "begun").exists, 30)
    return job


def test_a_broker_that_was_stopped_stays_so_until_a_client_calls(project: Project) -> None:
    worker = worker_of(project)
    stop(project, worker)
    # The worker now polls for a broker every few milliseconds, but starts none.
    assert {project.penstock("status").returncode for _ in range(5)} == {69}
    assert worker.returncode is None
    assert project.tasks().double.delay(5).result(timeout=30) == 10


def test_a_job_that_runs_outlasts_the_stop_and_its_outcome_is_kept_until_a_client_calls(project: Project) -> None:
    worker = worker_of(project)
    job = begun_job(project)
    stop(project, worker)
    (project.directory / "release").touch()
    worker.wait_for_output("succeeded")
    assert project.broker_pid() is None
    assert job.result(timeout=30) == 1
    assert (job.info().attempts, job.info().crashes) == (1, 0)


def test_a_worker_that_ends_after_the_stop_stores_its_outcomes_first(project: Project) -> None:
    worker = worker_of(project)
    job = begun_job(project)
    stop(project, worker)
    (project.directory / "release").touch()
    worker.signal(signal.SIGTERM)
    assert worker.wait(30) == 0, worker.output
    assert "did not confirm" not in worker.output
    # No worker is left to run the job a second time.
    assert job.result(timeout=30) == 1


def test_a_worker_waits_out_what_keeps_the_next_broker_from_its_start(project: Project) -> None:
    """The worker used to exit, along with its running job, after the first failed start."""
    worker = worker_of(project)
    job = begun_job(project)
    # Opening a socket as a file fails with the same device error as a disk that is gone.
    lock = project.data / "lock"
    lock.unlink()
    with socket.socket(socket.AF_UNIX) as device:
        device.bind(str(lock))
    project.kill_broker()
    worker.wait_for_output("can't start a broker")
    (project.directory / "release").touch()
    worker.wait_for_output("succeeded")
    lock.unlink()
    worker.wait_for_output("is serving")
    assert job.result(timeout=30) == 1
    assert (job.info().attempts, job.info().crashes) == (1, 0)
    assert worker.output.count("retrying until one starts") == 1
    assert worker.returncode is None


def test_a_worker_whose_directory_is_deleted_ends_and_says_why(project: Project) -> None:
    worker = worker_of(project)
    broker = project.broker_pid()
    assert broker is not None
    with pidfd(broker) as ended:
        shutil.rmtree(project.data)
        ended.wait(30)
    assert worker.wait(30) == 78, worker.output
    assert f"the directory {project.data} was deleted" in worker.output
    assert worker.output.count("was deleted") == 1
    assert not Path(project.data).exists()


def test_a_worker_of_a_stopped_server_waits_for_whoever_starts_servers(project: Project) -> None:
    project.write("tasks.py", TASKS)
    listen = f"unix:{project.directory}/socket"
    server = project.start("penstock", "server", "--listen", listen, "--data", project.data)
    server.wait_for_output("listening")
    worker = project.worker("tasks:app", "-c", "1", "--url", listen)
    worker.wait_for_output("is connected")
    server.signal(signal.SIGTERM)
    assert server.wait() == 0, server.output
    worker.wait_for_output(f"the broker at {listen} was stopped; waiting until it is started again")
    assert worker.output.count("was stopped; waiting until") == 1, worker.output
