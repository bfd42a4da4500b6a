"""A process that dies with many jobs: the guilty one is charged, and each of the others is interrupted at most once."""

from __future__ import annotations

import os
import signal
from collections import Counter
from datetime import UTC, datetime
from typing import Any

import pytest
from project import Process, Project, eventually, pidfd
from worker.kinds import Kind, lines, named, source

from penstock.errors import WorkerCrashed

JOBS = 20

SOURCE = """
    import asyncio, ctypes, os, resource, signal, time
    from penstock import App, current_job

    app = App("many")
    ready = []

    @NOTES

    @app.on_slot_start
    @DEF slot_starts() -> None:
        ready.append(os.getpid())

    @DEF until(name: str) -> None:
        while not (here / name).exists():
            @SLEEP(0.005)

    # Waits for the file `go`, but ends at once if the file `second` existed when the job began.
    @app.task(slot="@KIND")
    @DEF waits(name: str) -> tuple[int, bool, bool]:
        job = current_job()
        is_second = (here / "second").exists()  # checked first: the note lets the test create the file
        note("run", name, os.getpid())
        if not is_second:
            @AWAIT until("go")
        else:
            @SLEEP(0.01)
        note("end", name, os.getpid())
        return job.crashes, job.redelivered, ready == [os.getpid()]

    @app.task(slot="@KIND")
    @DEF stays(name: str) -> int:
        note("run", name, os.getpid())
        @AWAIT until("go")
        note("end", name, os.getpid())
        return current_job().crashes

    @app.task(slot="@KIND")
    @DEF quick(number: int) -> int:
        return number

    @OVERFLOWS

    DEATHS = dict(
        segfault=lambda: ctypes.string_at(0),
        abort=os.abort,
        overflow=overflows,
        _exit=lambda: os._exit(3),
        exit=lambda: ctypes.CDLL(None).exit(4),
        kill=lambda: os.kill(os.getpid(), signal.SIGKILL),
        ends_thread=lambda: ctypes.CDLL(None).pthread_exit(None),
    )

    @app.task(slot="@KIND", max_crashes=2)
    @DEF dies(how: str) -> None:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        note("run", "guilty", os.getpid())
        @AWAIT until("die")
        DEATHS[how]()

    @app.task(slot="@KIND", on_crash="fail")
    @DEF runs_once() -> None:
        note("run", "once", os.getpid())
        @AWAIT until("go")
"""


THREADS = Kind("thread", ("-c", "1", "--threads", str(JOBS)))
ASYNC = Kind("async", ("-c", "1", "--async", str(JOBS)))
KINDS = named([THREADS, ASYNC])


class Many:
    def __init__(self, project: Project) -> None:
        self.project = project
        self.tasks: Any = None

    def start(self, kind: Kind, *options: str) -> Process:
        self.project.write("many.py", kind.source(SOURCE))
        self.tasks = self.project.tasks("many.py")
        return self.worker(kind, *options)

    def worker(self, kind: Kind, *options: str) -> Process:
        return self.project.worker("many:app", *kind.options, *options)

    def touch(self, name: str) -> None:
        (self.project.directory / name).touch()

    def notes(self, word: str = "run") -> list[tuple[str, int]]:
        """Return the names and processes of the jobs that began, or ended."""
        return [(name, int(pid)) for first, name, pid in lines(self.project) if first == word]

    def runs(self) -> Counter[str]:
        return Counter(name for name, _ in self.notes())

    def wait_for_runs(self, count: int, worker: Process) -> None:
        eventually(lambda: len(self.notes()) >= count, 60, lambda: f"{self.notes()}\n{worker.output}")

    def assert_one_at_a_time(self, begun: int) -> None:
        """Check that the jobs after the first ``begun`` ran one after another, each in a process of its own."""
        words = lines(self.project)[begun:]
        running = None
        for word, name, pid in words:
            if name == "guilty":
                assert running is None, words
            elif word == "run":
                assert running is None, words
                running = name, pid
            else:
                assert running == (name, pid), words
                running = None
        pids = [pid for _, pid in self.notes()]
        assert len(set(pids[begun:])) == len(pids) - begun and not set(pids[:begun]) & set(pids[begun:])


@pytest.fixture
def many(project: Project) -> Many:
    return Many(project)


@KINDS
@pytest.mark.parametrize("how", ["_exit", "exit", "kill"])
def test_where_nobody_is_named_each_runs_alone_and_only_the_guilty_one_is_charged(
    many: Many, kind: Kind, how: str
) -> None:
    worker = many.start(kind)
    waiting = many.tasks.waits.map([str(number) for number in range(JOBS - 1)])
    guilty = many.tasks.dies.delay(how)
    many.wait_for_runs(JOBS, worker)
    assert len({pid for _, pid in many.notes()}) == 1
    many.touch("second")
    many.touch("die")
    # The guilty job and 19 others died once; the guilty job alone dies twice more.
    assert [job.result(timeout=60) for job in waiting] == [(0, True, True)] * (JOBS - 1)
    reason = {"_exit": "status 3", "exit": "status 4|C code has ended it", "kill": "SIGKILL"}[how]
    with pytest.raises(WorkerCrashed, match=reason):
        guilty.result(timeout=60)
    runs = many.runs()
    times = runs.pop("guilty")
    # C's exit() ends its own thread first. If that is noticed before the process is gone, the guilty job is known.
    assert times == 3 or (how, times) == ("exit", 2)
    assert runs == {str(number): 2 for number in range(JOBS - 1)}
    many.assert_one_at_a_time(JOBS)
    assert guilty.info().crashes == 2
    assert {job.info().crashes for job in waiting} == {0}
    assert "each is handed back, and runs alone next" in worker.output
    # There are slots for further jobs, and the log has one line per event, not one per job.
    assert many.tasks.quick.delay(7).result(timeout=30) == 7
    assert worker.output.count("ERROR") == 3, worker.output  # which is 1 + 1 + 1, or 2 + 1


@pytest.mark.parametrize("how", ["segfault", "abort", "overflow"])
def test_where_the_guilty_one_is_named_it_alone_is_interrupted_again(many: Many, how: str) -> None:
    worker = many.start(THREADS)
    waiting = many.tasks.stays.map([str(number) for number in range(JOBS - 1)])
    many.wait_for_runs(JOBS - 1, worker)
    many.touch("die")
    guilty = many.tasks.dies.delay(how)
    with pytest.raises(WorkerCrashed, match="SIGABRT" if how == "abort" else "SIGSEGV"):
        guilty.result(timeout=60)
    many.wait_for_runs(2 * (JOBS - 1) + 2, worker)
    many.touch("go")
    assert [job.result(timeout=60) for job in waiting] == [0] * (JOBS - 1)
    # The guilty job killed the shared process once, and then one of its own.
    assert many.runs() == {**{str(number): 2 for number in range(JOBS - 1)}, "guilty": 2}
    assert guilty.info().crashes == 2
    second = [pid for name, pid in many.notes()[JOBS:] if name != "guilty"]
    assert len(set(second)) == 1, "no suspects: they run together again"


@KINDS
def test_a_process_that_is_killed_from_outside_costs_each_job_one_run(many: Many, kind: Kind) -> None:
    worker = many.start(kind)
    waiting = many.tasks.waits.map([str(number) for number in range(JOBS)])
    many.wait_for_runs(JOBS, worker)
    many.touch("second")
    os.kill(many.notes()[0][1], signal.SIGKILL)
    assert [job.result(timeout=60) for job in waiting] == [(0, True, True)] * JOBS
    assert set(many.runs().values()) == {2}
    many.assert_one_at_a_time(JOBS)


@KINDS
def test_a_lone_job_is_guilty_of_the_death_of_its_process(many: Many, kind: Kind) -> None:
    many.start(kind)
    many.touch("die")
    guilty = many.tasks.dies.delay("_exit")
    with pytest.raises(WorkerCrashed, match="status 3"):
        guilty.result(timeout=60)
    assert many.runs() == {"guilty": 2}


@KINDS
def test_a_job_that_may_run_once_fails_at_once_when_it_is_a_suspect(many: Many, kind: Kind) -> None:
    worker = many.start(kind)
    once = many.tasks.runs_once.delay()
    guilty = many.tasks.dies.delay("kill")
    many.wait_for_runs(2, worker)
    many.touch("die")
    with pytest.raises(WorkerCrashed, match="it ran other jobs too, and any of them may be guilty"):
        once.result(timeout=60)
    with pytest.raises(WorkerCrashed):
        guilty.result(timeout=60)
    assert many.runs() == {"once": 1, "guilty": 3}


@KINDS
def test_waiting_suspects_hold_up_no_other_jobs(many: Many, kind: Kind) -> None:
    worker = many.start(kind)
    waiting = many.tasks.stays.map([str(number) for number in range(JOBS)])
    many.wait_for_runs(JOBS, worker)
    os.kill(many.notes()[0][1], signal.SIGKILL)
    # One suspect runs alone, for as long as it likes, while 19 wait for it to end.
    many.wait_for_runs(JOBS + 1, worker)
    assert [job.result(timeout=30) for job in many.tasks.quick.map(list(range(200)))] == list(range(200))
    assert len(many.notes()) == JOBS + 1
    many.touch("go")
    assert [job.result(timeout=60) for job in waiting] == [0] * JOBS


@KINDS
def test_suspects_are_given_back_at_a_stop(many: Many, kind: Kind) -> None:
    worker = many.start(kind)
    waiting = many.tasks.stays.map([str(number) for number in range(JOBS)])
    many.wait_for_runs(JOBS, worker)
    os.kill(many.notes()[0][1], signal.SIGKILL)
    many.wait_for_runs(JOBS + 1, worker)
    worker.signal(signal.SIGTERM)
    worker.wait_for_output("stopping")
    many.touch("go")
    assert worker.wait(30) == 0, worker.output
    states = Counter(job.info().state for job in waiting)
    assert states == {"succeeded": 1, "waiting": JOBS - 1}
    many.worker(kind)
    assert [job.result(timeout=60) for job in waiting] == [0] * JOBS
    many.assert_one_at_a_time(JOBS)


@KINDS
def test_suspects_outlive_their_worker_and_the_broker(many: Many, kind: Kind) -> None:
    worker = many.start(kind, "--heartbeat", "2")
    waiting = many.tasks.stays.map([str(number) for number in range(JOBS)])
    many.wait_for_runs(JOBS, worker)
    os.kill(many.notes()[0][1], signal.SIGKILL)
    many.wait_for_runs(JOBS + 1, worker)
    # The worker reconnects to a broker that knows the suspects, and keeps serving.
    many.project.kill_broker()
    assert many.tasks.quick.delay(1).result(timeout=60) == 1
    assert len(many.notes()) == JOBS + 1
    with pidfd(worker.pid) as ended:
        worker.signal(signal.SIGKILL)
        ended.wait(30)
    many.wait_for_runs(JOBS + 2, many.worker(kind))
    many.touch("go")
    # Like all jobs of a lost worker, the suspects are charged with its loss.
    assert [job.result(timeout=60) for job in waiting] == [1] * JOBS
    many.assert_one_at_a_time(JOBS + 1)
    assert set(many.runs().values()) == {2, 3}


def test_jobs_whose_worker_was_lost_are_no_suspects(many: Many) -> None:
    """Jobs of a lost machine must run elsewhere at once, not one by one."""
    worker = many.start(THREADS, "--heartbeat", "1")
    waiting = many.tasks.stays.map([str(number) for number in range(JOBS)])
    many.wait_for_runs(JOBS, worker)
    worker.signal(signal.SIGKILL)
    many.wait_for_runs(2 * JOBS, many.worker(THREADS))
    assert len({pid for _, pid in many.notes()[JOBS:]}) == 1
    many.touch("go")
    assert [job.result(timeout=60) for job in waiting] == [1] * JOBS


def test_a_thread_that_ends_alone_takes_no_other_job_with_it(many: Many) -> None:
    worker = many.start(THREADS)
    many.touch("die")
    jobs = [many.tasks.dies.delay("ends_thread") for _ in range(6)]
    for job in jobs:
        with pytest.raises(WorkerCrashed, match="the thread that ran it was lost: C code has ended it"):
            job.result(timeout=60)
    assert many.runs() == {"guilty": 12}
    alone = Counter(pid for _, pid in many.notes())
    assert sorted(alone.values()) == [1] * 6 + [6], "six together, and then each in a process of its own"
    assert "and is killed" not in worker.output


def test_of_threads_and_an_event_loop_one_job_runs_alone_at_a_time(many: Many) -> None:
    """The threads and the event loop take turns: neither waits for all suspects of the other."""
    many.project.write(
        "many.py",
        source(
            """
        import asyncio, os, time
        from penstock import App

        app = App("many")

        @NOTES

        @app.task
        def thread(name: str) -> None:
            note("run", name, os.getpid())
            while not (here / "second").exists():
                time.sleep(0.005)
            note("end", name, os.getpid())

        @app.task
        async def loop(name: str) -> None:
            note("run", name, os.getpid())
            while not (here / "second").exists():
                await asyncio.sleep(0.005)
            note("end", name, os.getpid())
        """
        ),
    )
    many.tasks = many.project.tasks("many.py")
    worker = many.project.worker("many:app", "-c", "1", "--threads", "5", "--async", "5")
    jobs = [*many.tasks.thread.map([f"t{n}" for n in range(5)]), *many.tasks.loop.map([f"l{n}" for n in range(5)])]
    many.wait_for_runs(10, worker)
    pids = {pid for _, pid in many.notes()}
    assert len(pids) == 2
    killed = datetime.now(UTC)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    eventually(lambda: worker.output.count("runs alone next") == 2, 30, lambda: worker.output)
    many.wait_for_runs(11, worker)
    # The first suspect runs until the worker has all of both kinds to choose from.
    eventually(lambda: all(job.info().started_at > killed for job in jobs), 30, lambda: worker.output)
    many.touch("second")
    for job in jobs:
        job.result(timeout=60)
    many.assert_one_at_a_time(10)
    order = "".join(name[0] for name, _ in many.notes()[10:])
    assert "ttt" not in order and "lll" not in order, order
