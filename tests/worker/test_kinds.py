"""Slots of every kind: a job can rely on the same things in a process, in a thread and on an event loop."""

from __future__ import annotations

import contextlib
import os
import signal
from typing import Any

import pytest
from project import Process, Project, eventually, within
from worker.kinds import Kind, named, notes, source

from penstock.errors import WorkerCrashed

TASKS = """
    import asyncio, contextvars, ctypes, os, sys, threading, time
    from penstock import App, current_job

    app = App("kinds")
    tenant = contextvars.ContextVar("tenant", default="nobody")
    SLOT = {"slot": "@KIND"}

    @NOTES

    @app.on_slot_start
    def slot_starts() -> None:
        note(f"start {os.getpid()} {threading.get_native_id()}")

    @app.on_slot_stop
    def slot_stops() -> None:
        note(f"stop {os.getpid()} {threading.get_native_id()}")

    @app.task(**SLOT)
    @DEF place(takes_s: float = 0) -> tuple[int, int]:
        if takes_s:
            @SLEEP(takes_s)
        return os.getpid(), threading.get_native_id()

    @app.task(**SLOT)
    @DEF add(a: int, b: int) -> int:
        return a + b

    @app.task(retries=2, backoff=0.01, **SLOT)
    @DEF succeeds_at_last() -> tuple[int, str]:
        job = current_job()
        if job.attempt < 3:
            raise LookupError(f"attempt {job.attempt}")
        return job.attempt, job.task

    @app.task(**SLOT)
    @DEF raises(name: str) -> None:
        if name == "exit":
            sys.exit("not like this")
        raise {"KeyboardInterrupt": KeyboardInterrupt, "ValueError": ValueError,
               "CancelledError": asyncio.CancelledError}[name]("on purpose")

    @app.task(**SLOT)
    @DEF who(name: str) -> tuple[str, str, str]:
        found = tenant.get()
        tenant.set(name)
        before = current_job().id
        @SLEEP(0.01)
        return found, tenant.get(), "same" if current_job().id == before else "another's"

    @app.task(**SLOT)
    @DEF echo(data: bytes) -> bytes:
        return data

    @app.task(**SLOT)
    @DEF waits(name: str) -> tuple[int, int]:
        note(f"waits {name}")
        while not (here / "go").exists():
            @SLEEP(0.005)
        return os.getpid(), current_job().crashes

    @app.task(**SLOT)
    @DEF forks() -> str:
        pid = os.fork()
        if pid == 0:
            return "from the fork"
        os.waitpid(pid, 0)
        return "from the task"

    @app.task(**SLOT)
    @DEF breaks_what_records_errors() -> None:
        from penstock._worker import runner

        runner.record_of = None
        raise LookupError("this can't be recorded")

    @app.task(max_crashes=1, **SLOT)
    @DEF dies() -> None:
        os.kill(os.getpid(), 9)

    @app.task(max_crashes=1, **SLOT)
    @DEF ends_its_thread() -> None:
        note("ends its thread")
        ctypes.CDLL(None).pthread_exit(None)
"""


KINDS = [
    Kind("process", ("-c", "2")),
    Kind("thread", ("-c", "2", "--threads", "8")),
    Kind("async", ("-c", "1", "--async", "8")),
]
SHARED = [kind for kind in KINDS if kind.slots > 1]


class Kinds:
    def __init__(self, project: Project) -> None:
        self.project = project

    def start(self, kind: Kind, *options: str) -> tuple[Any, Process]:
        self.project.write("kinds.py", kind.source(TASKS))
        worker = self.project.worker("kinds:app", *(options or kind.options))
        return self.project.tasks("kinds.py"), worker

    def notes(self, word: str) -> list[str]:
        return notes(self.project, word)

    def go(self) -> None:
        (self.project.directory / "go").touch()


@pytest.fixture
def kinds(project: Project) -> Kinds:
    return Kinds(project)


@named(KINDS)
def test_jobs_have_results_and_errors_and_their_own_context(kinds: Kinds, kind: Kind) -> None:
    tasks, _ = kinds.start(kind)
    assert [job.result(timeout=60) for job in tasks.add.starmap([(n, 1) for n in range(2_000)])] == [
        n + 1 for n in range(2_000)
    ]
    assert tasks.succeeds_at_last.delay().result(timeout=30) == (3, "kinds.succeeds_at_last")
    jobs = [(name, tasks.who.delay(name)) for name in map(str, range(40))]
    assert [job.result(timeout=30) for _, job in jobs] == [("nobody", name, "same") for name, _ in jobs]
    for size in (0, 60_000, 9_000_000):
        assert len(tasks.echo.delay(bytes(size)).result(timeout=30)) == size


@named(KINDS)
@pytest.mark.parametrize("name", ["exit", "KeyboardInterrupt", "CancelledError", "ValueError"])
def test_an_error_of_any_class_ends_the_job_alone(kinds: Kinds, kind: Kind, name: str) -> None:
    tasks, worker = kinds.start(kind)
    before = {tasks.place.delay().result(timeout=30)[0] for _ in range(8)}
    job = tasks.raises.delay(name)
    with contextlib.suppress(BaseException):
        job.result(timeout=30)
    # The job itself failed, not just the wait for it.
    assert job.info().state == "failed"
    after = {tasks.place.delay().result(timeout=30)[0] for _ in range(8)}
    # A second process may run its first job only now, but none was lost.
    assert before & after and "was lost" not in worker.output


@named(KINDS)
def test_a_fork_that_comes_back_from_its_task_is_not_the_task(kinds: Kinds, kind: Kind) -> None:
    tasks, _ = kinds.start(kind)
    assert [tasks.forks.delay().result(timeout=30) for _ in range(3)] == ["from the task"] * 3
    assert tasks.add.delay(1, 1).result(timeout=30) == 2


@named(SHARED)
def test_one_process_runs_as_many_jobs_at_once_as_it_has_slots(kinds: Kinds, kind: Kind) -> None:
    tasks, worker = kinds.start(kind, "-c", "1", *kind.options[2:])
    jobs = [tasks.waits.delay(str(number)) for number in range(kind.slots + 3)]
    eventually(lambda: len(kinds.notes("waits")) >= kind.slots, 30, lambda: worker.output)
    # Three jobs wait at the broker, for any worker.
    assert len(kinds.notes("waits")) == kind.slots
    kinds.go()
    assert len({job.result(timeout=30)[0] for job in jobs}) == 1


@named(SHARED)
def test_long_jobs_hold_up_no_short_ones_in_the_slots_beside_them(kinds: Kinds, kind: Kind) -> None:
    tasks, worker = kinds.start(kind, "-c", "1", *kind.options[2:])
    # These jobs are so short that the broker sends hundreds at once.
    assert tasks.add.starmap([(n, 0) for n in range(3_000)])[-1].result(timeout=60) == 2_999
    long = [tasks.waits.delay(str(number)) for number in range(kind.slots - 1)]
    eventually(lambda: len(kinds.notes("waits")) == len(long), 30, lambda: worker.output)
    assert [job.result(timeout=60) for job in tasks.add.starmap([(n, 0) for n in range(3_000)])] == [*range(3_000)]
    kinds.go()
    assert len({job.result(timeout=30)[0] for job in long}) == 1


@named(KINDS)
def test_a_slot_starts_and_stops_where_its_jobs_run(kinds: Kinds, kind: Kind) -> None:
    tasks, worker = kinds.start(kind)
    place = "{} {}".format(*tasks.place.delay().result(timeout=30))
    assert place in kinds.notes("start")
    worker.signal(signal.SIGTERM)
    assert worker.wait(30) == 0, worker.output
    starts, stops = kinds.notes("start"), kinds.notes("stop")
    assert sorted(starts) == sorted(stops) and len(set(starts)) == len(starts)
    assert len(starts) == {"process": 2, "thread": 16, "async": 1}[kind.name]


@named(KINDS)
def test_a_stop_lets_running_jobs_end_and_gives_back_the_rest(kinds: Kinds, kind: Kind) -> None:
    tasks, worker = kinds.start(kind)
    jobs = [tasks.waits.delay(str(number)) for number in range(40)]
    slots = {"process": 2, "thread": 16, "async": 8}[kind.name]
    eventually(lambda: len(kinds.notes("waits")) == slots, 30, lambda: worker.output)
    worker.signal(signal.SIGTERM)
    worker.wait_for_output("stopping")
    kinds.go()
    assert worker.wait(30) == 0, worker.output
    assert len(kinds.notes("waits")) == slots
    states = [job.info().state for job in jobs]
    assert (states.count("succeeded"), states.count("waiting")) == (slots, 40 - slots)


@named(KINDS)
def test_the_grace_ends_for_slots_of_each_kind(kinds: Kinds, kind: Kind) -> None:
    tasks, worker = kinds.start(kind, *kind.options, "--grace", "1")
    job = tasks.waits.delay("long")
    eventually(lambda: kinds.notes("waits") == ["long"], 30)
    worker.signal(signal.SIGTERM)
    assert worker.wait(30) == 0, worker.output
    assert "the grace is over" in worker.output
    assert job.info().state == "waiting"


@named(SHARED)
def test_a_process_that_can_record_no_error_is_replaced_when_its_jobs_have_ended(kinds: Kinds, kind: Kind) -> None:
    tasks, worker = kinds.start(kind, "-c", "1", *kind.options[2:])
    beside = tasks.waits.delay("beside")
    eventually(lambda: kinds.notes("waits") == ["beside"], 30)
    pid, _ = tasks.place.delay().result(timeout=30)
    broken = tasks.breaks_what_records_errors.delay()
    with contextlib.suppress(BaseException):
        broken.result(timeout=30)
    assert broken.info().state == "failed"
    # No further job begins in that process, and its running job isn't cut off.
    next_one = tasks.place.delay()
    eventually(lambda: next_one.info().state == "waiting", 30)
    assert beside.info().state == "running"
    kinds.go()
    assert next_one.result(timeout=30)[0] != pid
    assert "an error could not be recorded, so this process is replaced" in worker.output


@named(SHARED)
def test_what_a_process_was_sent_before_it_could_record_no_error_is_for_others(kinds: Kinds, kind: Kind) -> None:
    tasks, _ = kinds.start(kind, "-c", "1", *kind.options[2:])
    beside = tasks.waits.delay("beside")
    eventually(lambda: kinds.notes("waits") == ["beside"], 30)
    pid, _ = tasks.place.delay().result(timeout=30)
    tasks.breaks_what_records_errors.delay()
    # Too long for all of them to begin before the error.
    sent = [tasks.place.delay(0.3) for _ in range(20)]
    kinds.project.worker("kinds:app", "-c", "1", *kind.options[2:])
    places = [job.result(timeout=30)[0] for job in sent]
    assert any(place != pid for place in places)
    assert beside.info().state == "running"
    kinds.go()


@named(SHARED)
def test_the_death_of_a_process_interrupts_the_other_jobs_that_it_ran(kinds: Kinds, kind: Kind) -> None:
    tasks, _ = kinds.start(kind, "-c", "1", *kind.options[2:])
    beside = [tasks.waits.delay(str(number)) for number in range(3)]
    eventually(lambda: len(kinds.notes("waits")) == 3, 30)
    with pytest.raises(WorkerCrashed, match="SIGKILL"):
        tasks.dies.delay().result(timeout=30)
    kinds.go()
    assert [job.result(timeout=30)[1] for job in beside] == [0, 0, 0]
    assert len(kinds.notes("waits")) == 6


@pytest.mark.parametrize(
    ("how", "signal_name"), [("null", "SIGSEGV"), ("abort", "SIGABRT"), ("overflow", "SIGSEGV"), ("raise", "SIGFPE")]
)
def test_a_fault_in_a_thread_is_charged_to_its_job_alone(kinds: Kinds, how: str, signal_name: str) -> None:
    kinds.project.write("faulty.py", source(FAULTY))
    faulty = kinds.project.tasks("faulty.py")
    worker = kinds.project.worker("faulty:app", "-c", "1", "--threads", "8")
    beside = [faulty.waits.delay(str(number)) for number in range(5)]
    once = faulty.runs_once.delay()
    eventually(lambda: len(kinds.notes("waits")) == 6, 30, lambda: worker.output)
    with pytest.raises(WorkerCrashed, match=signal_name):
        faulty.dies.delay(how).result(timeout=30)
    # The job that may run only once fails; the others are interrupted, and no crash is counted against them.
    with pytest.raises(WorkerCrashed, match="through another job's fault, and it may not run again"):
        once.result(timeout=30)
    eventually(lambda: len(kinds.notes("waits")) == 11, 30, lambda: worker.output)
    kinds.go()
    assert [job.result(timeout=30) for job in beside] == [(0, True)] * 5
    worker.wait_for_output("jobs=6")
    assert "no crash is counted for them" in worker.output
    assert kinds.notes("dies") == [how]


FAULTY = """
    import ctypes, os, resource, signal, threading, time
    from penstock import App, current_job

    app = App("faulty")

    @NOTES

    @app.task
    def waits(name: str) -> tuple[int, bool]:
        note(f"waits {name}")
        while not (here / "go").exists():
            time.sleep(0.005)
        return current_job().crashes, current_job().redelivered

    @app.task(on_crash="fail")
    def runs_once() -> None:
        waits("once")

    @OVERFLOWS

    DEATHS = {
        "null": lambda: ctypes.string_at(0),
        "abort": os.abort,
        "overflow": overflows,
        "raise": lambda: signal.raise_signal(signal.SIGFPE),
    }

    @app.task(max_crashes=1)
    def dies(how: str) -> None:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        note(f"dies {how}")
        DEATHS[how]()
"""


def test_a_thread_that_c_code_ends_costs_its_job_and_no_other(kinds: Kinds) -> None:
    (kind,) = [kind for kind in KINDS if kind.name == "thread"]
    tasks, worker = kinds.start(kind, "-c", "1", "--threads", "3")
    beside = tasks.waits.delay("beside")
    eventually(lambda: kinds.notes("waits") == ["beside"], 30)
    for _ in range(5):
        with pytest.raises(WorkerCrashed, match="the thread that ran it was lost: C code has ended it"):
            tasks.ends_its_thread.delay().result(timeout=30)
    worker.wait_for_output("a new thread takes its slot, and the other jobs continue")
    # All three slots still exist: two are idle, and run jobs at once.
    more = [tasks.waits.delay(str(number)) for number in range(2)]
    eventually(lambda: len(kinds.notes("waits")) == 3, 30, lambda: worker.output)
    kinds.go()
    pids = {job.result(timeout=30)[0] for job in (beside, *more)}
    assert len(pids) == 1 and beside.info().crashes == 0
    worker.signal(signal.SIGTERM)
    assert worker.wait(30) == 0, worker.output


def test_a_slot_that_cannot_start_takes_no_jobs_and_tries_again(project: Project) -> None:
    project.write(
        "late.py",
        """
        import threading
        from pathlib import Path
        from penstock import App

        app = App("late")
        here = Path(__file__).parent
        first = threading.Lock()

        @app.on_slot_start
        def connects() -> None:
            if not (here / "up").exists() and not first.acquire(blocking=False):
                raise ConnectionError("not yet")

        @app.task
        def name() -> str:
            return threading.current_thread().name

        @app.task
        def meet() -> str:
            both.wait(30)
            return threading.current_thread().name

        both = threading.Barrier(2)
        """,
    )
    late = project.tasks("late.py")
    worker = project.worker("late:app", "-c", "1", "--threads", "2")
    worker.wait_for_output("ConnectionError: not yet")
    assert "takes no jobs; it tries again in 1 s" in worker.output
    assert len({late.name.delay().result(timeout=30) for _ in range(10)}) == 1
    (project.directory / "up").touch()
    assert len({job.result(timeout=60) for job in [late.meet.delay(), late.meet.delay()]}) == 2


@pytest.mark.parametrize("slot", ["process", "isolated"])
def test_a_hook_may_import_a_module_with_other_hooks(project: Project, slot: str) -> None:
    project.write(
        "heavy.py",
        """
        from imports import app, seen

        @app.on_slot_start
        def begins() -> None:
            seen.append("slot")
        """,
    )
    project.write(
        "imports.py",
        f"""
        from penstock import App

        app = App("imports")
        seen: list[str] = []

        @app.on_process_start
        def loads() -> None:
            seen.append("process")
            import heavy

        @app.task(slot="{slot}")
        def told() -> list[str]:
            return seen
        """,
    )
    imports = project.tasks("imports.py")
    project.worker("imports:app", "-c", "1")
    assert imports.told.delay().result(timeout=60) == ["process", "slot"]


MIXED = """
    import asyncio, os, threading, time
    from pathlib import Path
    from penstock import App

    app = App("mixed")
    here = Path(__file__).parent

    @app.task
    def plain() -> tuple[int, bool]:
        return os.getpid(), threading.current_thread() is threading.main_thread()

    @app.task
    async def fetch() -> tuple[int, bool]:
        await asyncio.sleep(0)
        return os.getpid(), threading.current_thread() is threading.main_thread()

    @app.task(slot="process")
    def alone() -> tuple[int, bool]:
        return os.getpid(), threading.current_thread() is threading.main_thread()

    @app.task(slot="thread")
    def light() -> tuple[int, bool]:
        return os.getpid(), threading.current_thread() is threading.main_thread()

    @app.task
    def holds() -> None:
        while not (here / "go").exists():
            time.sleep(0.005)

    @app.task
    async def holds_a_loop() -> None:
        while not (here / "go").exists():
            await asyncio.sleep(0.005)
"""


def test_each_task_runs_in_a_slot_of_the_kind_that_it_asks_for(project: Project) -> None:
    project.write("mixed.py", MIXED)
    mixed = project.tasks("mixed.py")
    worker = project.worker("mixed:app", "-c", "1", "--threads", "4")
    (plain, in_main), (light, _), (alone, alone_in_main), (fetch, fetch_in_main) = (
        task.delay().result(timeout=30) for task in (mixed.plain, mixed.light, mixed.alone, mixed.fetch)
    )
    assert plain == light and len({plain, alone, fetch}) == 3
    assert (in_main, alone_in_main, fetch_in_main) == (False, True, True)
    worker.wait_for_output("mixed.alone needs a slot that is a process: this worker has one; --processes N adds more")
    worker.wait_for_output("on 105 slots (4 threads in a process, 100 on an event loop)")


def test_a_kind_that_a_worker_has_no_slots_of_is_told_and_its_tasks_run(project: Project) -> None:
    project.write("mixed.py", MIXED)
    mixed = project.tasks("mixed.py")
    worker = project.worker("mixed:app", "-c", "1")
    assert mixed.light.delay().result(timeout=30) == mixed.plain.delay().result(timeout=30)
    worker.wait_for_output('mixed.light needs a slot of the kind "thread", but this worker has none: it runs in a')
    assert worker.output.count("needs a slot of the kind") == 1


@pytest.mark.parametrize(("holds", "goes"), [("holds", "fetch"), ("holds_a_loop", "plain")])
def test_no_kind_waits_behind_another(project: Project, holds: str, goes: str) -> None:
    """All slots of one kind are taken, and thousands of jobs wait for them at the broker."""
    project.write("mixed.py", MIXED)
    mixed = project.tasks("mixed.py")
    project.worker("mixed:app", "-c", "1", "--async", "2")
    held = [getattr(mixed, holds).delay() for _ in range(2_000)]
    eventually(lambda: held[0].info().state == "running", 30)
    with within(20, "100 jobs of the other kind"):
        for _ in range(100):
            getattr(mixed, goes).delay().result(timeout=30)
    (project.directory / "go").touch()
    for job in held:
        job.result(timeout=60)


def test_a_burst_ends_when_the_jobs_of_all_kinds_have_run(project: Project) -> None:
    project.write("mixed.py", MIXED)
    mixed = project.tasks("mixed.py")
    jobs = [task.delay() for _ in range(200) for task in (mixed.plain, mixed.fetch, mixed.alone, mixed.light)]
    worker = project.worker("mixed:app", "-c", "1", "--threads", "3", "--burst")
    assert worker.wait(60) == 0, worker.output
    assert {job.info().state for job in jobs} == {"succeeded"}
    assert len({job.result(timeout=30)[0] for job in jobs}) == 3


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--threads", "0"), "a process without slots runs nothing; give at least 1, or leave the option out"),
        (("--async", "0"), "a process without slots runs nothing; give at least 1, or leave the option out"),
        (("--threads", "many"), "give a number from 1 to 32000"),
        (("--processes", "2"), "without --threads, use -c N"),
        (("-c", "100", "--threads", "1000"), "100101 slots are too many: a worker has at most 32000"),
    ],
)
def test_slots_that_a_worker_cannot_have_are_refused(project: Project, options: tuple[str, ...], says: str) -> None:
    project.write("mixed.py", MIXED)
    worker = project.worker("mixed:app", *options)
    assert worker.wait(30) == 2, worker.output
    assert says in worker.output


def test_a_loop_survives_what_jobs_leave_on_it(project: Project) -> None:
    project.write(
        "rude.py",
        """
        import asyncio, os, sys
        from penstock import App

        app = App("rude")

        @app.task
        async def pid() -> int:
            return os.getpid()

        @app.task
        async def stops_the_loop() -> None:
            asyncio.get_running_loop().stop()

        @app.task
        async def leaves_an_exit() -> None:
            asyncio.get_running_loop().call_soon(sys.exit, 3)

        @app.task
        async def begins_with_another(name: str) -> None:
            for task in asyncio.all_tasks():
                task.cancel()

        @app.task
        async def cancels_all() -> None:
            for task in asyncio.all_tasks():
                task.cancel()
            await asyncio.sleep(60)
        """,
    )
    rude = project.tasks("rude.py")
    worker = project.worker("rude:app", "-c", "1")
    before = rude.pid.delay().result(timeout=30)
    rude.stops_the_loop.delay().result(timeout=30)
    rude.leaves_an_exit.delay().result(timeout=30)
    cancels = rude.cancels_all.delay()
    with contextlib.suppress(BaseException):
        cancels.result(timeout=30)
    assert cancels.info().state == "failed"
    # Several jobs begin in one pass of the loop: the first cancels the others before their first step.
    for job in rude.begins_with_another.map([str(number) for number in range(50)]):
        with contextlib.suppress(BaseException):
            job.result(timeout=30)
        assert job.info().state in ("failed", "succeeded")
    assert rude.pid.delay().result(timeout=30) == before
    worker.wait_for_output("SystemExit(3) escaped from the event loop")
    worker.signal(signal.SIGTERM)
    assert worker.wait(30) == 0, worker.output
    assert not os.path.exists(f"/proc/{before}")


def test_a_job_that_blocks_the_loop_is_named_with_its_line(project: Project) -> None:
    project.write(
        "blocks.py",
        """
        import asyncio, time
        from pathlib import Path
        from penstock import App

        app = App("blocks")
        here = Path(__file__).parent

        def wait_for(name: str) -> None:
            while not (here / name).exists():
                time.sleep(0.005)  # the line

        @app.task
        async def polite() -> None:
            while not (here / "go").exists():
                await asyncio.sleep(0.005)

        @app.task
        async def rude() -> None:
            await asyncio.sleep(0)
            wait_for("told")
        """,
    )
    blocks = project.tasks("blocks.py")
    worker = project.worker("blocks:app", "-c", "1")
    beside = [blocks.polite.delay() for _ in range(5)]
    eventually(lambda: beside[-1].info().state == "running", 30)
    rude = blocks.rude.delay()
    output = worker.wait_for_output("has blocked the event loop for")
    assert "WARN blocks.rude has blocked" in output and "at blocks.py:11 in wait_for()" in output
    (project.directory / "told").touch()
    rude.result(timeout=30)
    (project.directory / "go").touch()
    for job in beside:
        job.result(timeout=30)
    # Jobs that only awaited were held up, and aren't to blame.
    assert worker.output.count("has blocked the event loop") == 1
