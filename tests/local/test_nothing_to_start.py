"""`local:` needs nothing installed or started: the first client starts the broker, which exits automatically."""

from __future__ import annotations

import os
import shutil

import pytest
from project import eventually, pidfd

TASKS = """
    from penstock import App

    app = App("shop")

    @app.task
    def double(number: int) -> int:
        return 2 * number
"""

ENQUEUE = """
    import tasks
    print(tasks.double.delay(21).id)
"""

RESULT = """
    import sys
    import tasks
    print(tasks.app.job(sys.argv[1]).result(timeout=30))
"""


@pytest.fixture
def shop(project):
    project.write("tasks.py", TASKS)
    return project


def test_importing_starts_no_thread_and_no_process_and_touches_no_disk(shop):
    printed = shop.python(
        """
        import os, threading
        import tasks
        print(threading.active_count(), len(os.listdir("/proc/self/task")))
        print(open(f"/proc/self/task/{os.getpid()}/children").read().split())
        """
    )
    assert printed.splitlines() == ["1 1", "[]"]
    assert shop.broker_pid() is None
    assert not shop.data.exists()


def test_a_job_of_a_script_that_has_ended_runs_when_a_worker_comes(shop):
    job = shop.python(ENQUEUE).strip()
    worker = shop.worker()
    assert shop.python(RESULT, job).strip() == "42"
    assert worker.returncode is None


def test_a_job_survives_the_broker_that_took_it(shop):
    job = shop.python(ENQUEUE).strip()
    first = shop.kill_broker()
    shop.worker()
    assert shop.python(RESULT, job).strip() == "42"
    assert shop.broker_pid() != first


def test_two_working_directories_of_one_project_share_a_broker(shop):
    shop.write("pyproject.toml", "")
    inner = shop.directory / "package" / "module"
    inner.mkdir(parents=True)
    shop.python(ENQUEUE, PENSTOCK_URL="local:.penstock")
    first = shop.broker_pid()
    shop.python(ENQUEUE, cwd=inner, PENSTOCK_URL="local:.penstock")
    assert first is not None
    assert shop.broker_pid() == first
    assert not (inner / ".penstock").exists()
    assert shop.status()["queues"][0]["ready"] == 2


def test_many_processes_that_come_at_once_start_one_broker(shop):
    scripts = [shop.start_python(ENQUEUE) for _ in range(8)]
    assert [script.wait() for script in scripts] == [0] * 8, [script.output for script in scripts]
    assert len([line for line in shop.processes().values() if "server" in line]) == 1
    assert shop.status()["queues"][0]["ready"] == 8


def test_the_broker_holds_nothing_of_who_started_it(shop):
    shop.python(ENQUEUE)
    pid = shop.broker_pid()
    assert os.readlink(f"/proc/{pid}/cwd") == "/"
    assert {os.readlink(f"/proc/{pid}/fd/{number}") for number in range(3)} == {"/dev/null"}
    assert os.getsid(pid) == pid
    assert os.stat(shop.data / "broker.sock").st_mode & 0o777 == 0o600
    assert os.stat(shop.data).st_mode & 0o777 == 0o700


def test_a_deleted_directory_ends_its_broker(shop):
    shop.python(ENQUEUE)
    with pidfd(shop.broker_pid()) as ended:
        shutil.rmtree(shop.data)
        ended.wait(30)


def test_a_broker_leaves_some_time_after_its_last_client_and_not_before(shop):
    tasks = shop.tasks()
    server = shop.start("penstock", "server", "--local", str(shop.data), "--linger", "3")
    eventually(lambda: shop.broker_pid() == server.pid)
    job = tasks.double.delay(21)
    assert shop.broker_pid() == server.pid
    with pytest.raises(AssertionError, match="still runs"):
        server.wait(3.5)
    tasks.app.close()
    assert server.wait() == 0
    shop.worker()
    assert shop.python(RESULT, job.id).strip() == "42"


def test_stop_ends_the_broker_and_keeps_its_jobs(shop):
    job = shop.python(ENQUEUE).strip()
    with pidfd(shop.broker_pid()) as ended:
        assert shop.penstock("broker", "stop").returncode == 0
        ended.wait(30)
    assert shop.penstock("broker", "stop").returncode == 0, "nothing to stop is no error"
    shop.worker()
    assert shop.python(RESULT, job).strip() == "42"


def test_a_path_too_long_for_a_socket_works_all_the_same(shop):
    url = f"local:{shop.directory}/{'deep/' * 25}data"
    job = shop.python(ENQUEUE, PENSTOCK_URL=url).strip()
    shop.worker(PENSTOCK_URL=url)
    assert shop.python(RESULT, job, PENSTOCK_URL=url).strip() == "42"
    assert shop.penstock("broker", "stop", PENSTOCK_URL=url).returncode == 0


def test_a_directory_that_cannot_be_made_is_one_clear_error(shop):
    obstacle = shop.write("obstacle", "a file")
    run = shop.start_python(ENQUEUE, PENSTOCK_URL=f"local:{obstacle}/data")
    assert run.wait() == 1
    assert str(obstacle) in run.output
    assert "penstock." in run.output
