"""Processes that jobs start and leave behind exit with the process that ran the job, or with the worker. The worker
reaps them, even as the first process of a container."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
from project import Process, Project, eventually, needs, pidfd

from penstock.errors import WorkerCrashed

SOURCE = """
    import os, signal, subprocess, sys, time
    from pathlib import Path
    from penstock import App

    app = App("leaves")
    here = Path(__file__).parent

    def start(group: int | None, session: bool) -> int:
        return subprocess.Popen(["sleep", "600"], process_group=group, start_new_session=session).pid

    @app.task
    def leaves(group: int | None = None, session: bool = False) -> int:
        return start(group, session)

    @app.task(slot="isolated")
    def leaves_alone(group: int | None = None, session: bool = False) -> int:
        return start(group, session)

    @app.task(slot="isolated")
    def leaves_a_dead_one() -> int:
        # The parent exits first, which makes the process an orphan.
        script = "sleep 0.2 & echo $!"
        shell = subprocess.run(["sh", "-c", script], process_group=0, stdout=subprocess.PIPE, text=True)
        return int(shell.stdout)

    @app.task(slot="isolated")
    def leaves_one_that_cleans_up() -> int:
        script = "trap 'echo done > cleaned; exit 0' TERM; echo ready; while :; do sleep 0.05; done"
        program = subprocess.Popen(["sh", "-c", script], cwd=here, process_group=0, stdout=subprocess.PIPE)
        program.stdout.readline()
        return program.pid

    @app.task(max_crashes=1)
    def dies_with_a_program() -> None:
        (here / "program").write_text(str(start(None, False)))
        os.kill(os.getpid(), signal.SIGKILL)

    @app.task
    def who() -> int:
        return os.getppid()

    @app.task
    def starts_a_broker(directory: str) -> int:
        from penstock import App
        other = App("other", url=f"local:{directory}")
        @other.task
        def nothing() -> None: ...
        nothing.delay()
        return os.getpid()
"""


@pytest.fixture
def tasks(project: Project):
    project.write("leaves.py", SOURCE)
    return project.tasks("leaves.py")


def worker(project: Project, *options: str) -> Process:
    return project.worker("leaves:app", "-c", "1", "--isolated", "1", *options)


def children_of(*parents: int) -> dict[int, str]:
    """Return the id and state of each child process."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
            except OSError:
                continue
            if int(parent) in parents:
                found[int(entry.name)] = state
    return found


def is_gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


def test_what_an_isolated_job_starts_ends_with_its_process(project: Project, tasks) -> None:
    worker(project)
    pid = tasks.leaves_alone.delay().result(timeout=60)
    eventually(lambda: is_gone(pid), 30)


def test_what_a_job_starts_in_a_process_that_dies_ends_with_it(project: Project, tasks) -> None:
    worker(project)
    with pytest.raises(WorkerCrashed):
        tasks.dies_with_a_program.delay().result(timeout=60)
    pid = int((project.directory / "program").read_text())
    eventually(lambda: is_gone(pid), 30)


@pytest.mark.parametrize("way", ["in order", "at once", "without its zygote"])
def test_what_is_left_ends_with_the_worker_unless_it_has_a_session_of_its_own(
    project: Project, tasks, way: str
) -> None:
    running = worker(project)
    zygote = tasks.who.delay().result(timeout=60)
    plain = tasks.leaves.delay().result(timeout=60)
    grouped = tasks.leaves_alone.delay(group=0).result(timeout=60)
    apart = tasks.leaves_alone.delay(session=True).result(timeout=60)
    try:
        eventually(lambda: grouped in children_of(zygote, running.pid), 30)
        assert not is_gone(plain)
        with pidfd(plain) as plain_ended, pidfd(grouped) as grouped_ended:
            if way == "without its zygote":
                os.kill(zygote, signal.SIGKILL)
                grouped_ended.wait(30)
                plain_ended.wait(30)
                assert tasks.who.delay().result(timeout=60) != zygote
            running.signal(signal.SIGTERM)
            if way == "at once":
                running.signal(signal.SIGTERM)
            assert running.wait(30) in (0, 4), running.output
            plain_ended.wait(30)
            grouped_ended.wait(30)
        assert not is_gone(apart), "it has said that it wants to outlive who started it"
    finally:
        os.kill(apart, signal.SIGKILL)


def test_what_is_left_has_time_to_clean_up(project: Project, tasks) -> None:
    running = worker(project)
    with pidfd(tasks.leaves_one_that_cleans_up.delay().result(timeout=60)) as ended:
        running.signal(signal.SIGTERM)
        assert running.wait(30) == 0, running.output
        ended.wait(30)
    assert (project.directory / "cleaned").read_text() == "done\n"
    assert "were killed" not in running.output


def test_what_was_there_before_the_worker_is_left_alone(project: Project, tasks) -> None:
    """A shell starts another program, and then becomes the worker."""
    script = 'sleep 600 & echo $! > beside; exec penstock worker leaves:app -c 1 --isolated 1 --name "after a shell"'
    running = project.start("sh", "-c", script)
    tasks.leaves.delay().result(timeout=60)
    beside = int((project.directory / "beside").read_text())
    try:
        assert beside in children_of(running.pid)
        running.signal(signal.SIGTERM)
        assert running.wait(30) == 0, running.output
        assert not is_gone(beside)
    finally:
        os.kill(beside, signal.SIGKILL)


def test_orphans_are_waited_for(project: Project, tasks) -> None:
    running = worker(project)
    zygote = tasks.who.delay().result(timeout=60)
    orphans = [tasks.leaves_a_dead_one.delay().result(timeout=60) for _ in range(5)]
    eventually(lambda: all(map(is_gone, orphans)), 30, lambda: str(children_of(zygote, running.pid)))
    # The last job's own process may be a zombie for a moment.
    eventually(
        lambda: "Z" not in children_of(zygote, running.pid).values(), 30, lambda: str(children_of(zygote, running.pid))
    )


def test_a_broker_that_a_job_has_started_outlives_the_worker(project: Project, tasks) -> None:
    other = Project(project.directory / "other")
    other.data.parent.mkdir()
    running = worker(project)
    pid = tasks.starts_a_broker.delay(str(other.data)).result(timeout=60)
    broker = other.broker_pid()
    assert broker is not None
    try:
        os.kill(pid, signal.SIGKILL)
        eventually(lambda: is_gone(pid), 30)
        running.signal(signal.SIGTERM)
        assert running.wait(30) == 0, running.output
        assert other.broker_pid() == broker
    finally:
        other.kill_broker()


def namespaces() -> bool:
    unshare = shutil.which("unshare")
    return unshare is not None and subprocess.run([unshare, "--pid", "--fork", "true"], check=False).returncode == 0


def test_a_worker_may_be_the_first_process_of_a_container(project: Project, tasks) -> None:
    needs(os.geteuid() == 0 and namespaces(), "root, and unshare with namespaces of processes")
    jobs = [tasks.leaves_a_dead_one.delay(), tasks.leaves_alone.delay(), tasks.who.delay()]
    container = project.start(
        "unshare", "--pid", "--fork", "--mount-proc", "--kill-child",
        "penstock", "worker", "leaves:app", "-c", "1", "--isolated", "2", "--name", "first",
    )  # fmt: skip
    numbers = [job.result(timeout=60) for job in jobs]
    # Within its own namespace the worker has the number 1, and its children have higher ones.
    assert min(numbers) > 1
    (first,) = children_of(container.pid)
    zygote = next(iter(children_of(first)))
    # A process started next to the worker, as `docker exec` does, leaves an orphan that only the worker can reap.
    beside = ["nsenter", "--target", str(first), "--pid", "--mount", "sh", "-c", "sleep 0.2 & exit 0"]
    subprocess.run(beside, check=True)
    eventually(lambda: set(children_of(first)) == {zygote}, 30, lambda: str(children_of(first, zygote)))
    assert "Z" not in children_of(first, zygote).values()
    os.kill(first, signal.SIGTERM)
    assert container.wait(30) == 0, container.output
    assert "ERROR" not in container.output
