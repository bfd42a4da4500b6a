"""Time limits in slots of every kind: wherever a job is stuck, it ends in time, and nothing else is lost."""

from __future__ import annotations

from collections import Counter
from itertools import cycle, islice
from typing import Any

import pytest
from project import Process, Project, eventually, within
from worker.kinds import Kind, named, notes

from penstock import JobState, TaskTimeout
from penstock.errors import SoftTimeout

SOURCE = """
    import asyncio, os, random, re, socket, sqlite3, threading, time
    from penstock import App, SoftTimeout, TaskTimeout, current_job, shield

    app = App("limits", defaults={"slot": "@KIND"})
    @NOTES

    def loop() -> None:
        while True:
            pass

    def lock() -> None:
        held = threading.Lock()
        held.acquire()
        held.acquire()

    def recv() -> None:
        mine, theirs = socket.socketpair()
        mine.recv(1)

    def sqlite() -> None:
        endless = "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c) SELECT count(*) FROM c"
        sqlite3.connect(":memory:").execute(endless).fetchall()

    def regex() -> None:
        re.match("(a+)+$", "a" * 60 + "b")

    def swallow() -> None:
        while True:
            try:
                time.sleep(60)
            except BaseException:
                pass

    def shielded() -> None:
        with shield():
            time.sleep(60)

    WAYS = dict(loop=loop, sleep=lambda: time.sleep(60), lock=lock, recv=recv, sqlite=sqlite, regex=regex,
                swallow=swallow, shielded=shielded)

    @app.task(timeout=0.4, on_crash="fail")
    @DEF stuck(way: str) -> None:
        note("stuck", way)
        if way == "await":
            @SLEEP(60)
        else:
            WAYS[way]()

    @app.task(on_crash="fail")
    @DEF fails_in_time(way: str) -> None:
        note("fails", way)
        WAYS[way]()

    @app.task(timeout=0.3, retries=2, backoff=0.01, retry_on=TaskTimeout)
    @DEF stuck_at_first(way: str) -> int:
        if current_job().attempt < 3:
            WAYS[way]()
        return current_job().attempt

    @app.task(timeout=0.3, retries=2, backoff=0.01)
    @DEF stuck_and_not_retried() -> None:
        note("runs")
        loop()

    @app.task
    @DEF neighbour(number: int) -> tuple[int, int]:
        note("neighbour", number, os.getpid())
        while not (here / "go").exists():
            @SLEEP(0.005)
        return current_job().attempt, current_job().crashes

    @app.task
    @DEF add(a: int, b: int) -> int:
        return a + b

    @app.task
    @DEF where() -> int:
        return os.getpid()

    @app.task(soft_timeout=0.2)
    @DEF winds_up(way: str) -> str:
        try:
            if way == "await":
                @SLEEP(60)
            else:
                while True:
                    time.sleep(0.005)
        except SoftTimeout as error:
            # The error is raised only once.
            @SLEEP(0.4)
            return str(error)

    @app.task(soft_timeout=0.2)
    @DEF ignores_the_soft_limit() -> None:
        while True:
            @SLEEP(0.005)

    @app.task(soft_timeout=0.2, timeout=60)
    @DEF keeps_off() -> None:
        try:
            with shield():
                until = time.monotonic() + 0.6
                while time.monotonic() < until:
                    @SLEEP(0.005)
                note("whole")
            @SLEEP(60)
            note("never")
        except SoftTimeout:
            note("then")
            raise

    @app.task(timeout=0.3)
    @DEF returns_all_the_same() -> int:
        try:
            while True:
                time.sleep(0.005)
        except BaseException:
            return 1

    @app.task(timeout=0.3)
    @DEF raises_another() -> None:
        try:
            while True:
                time.sleep(0.005)
        except BaseException as error:
            raise ValueError("while it cleaned up") from error

    class Slow:
        pass

    def encode_slowly(value: Slow) -> str:
        time.sleep(0.5)
        return "slow"

    app.codec(Slow, encode_slowly, lambda text: Slow())

    @app.task(soft_timeout=0.1, timeout=0.2)
    @DEF returns_in_time() -> Slow:
        return Slow()

    @app.task(timeout=0.5)
    @DEF imports() -> None:
        import slow_to_import
        loop()

    def spin(seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            pass

    @app.task
    @DEF about_as_long(number: int, seconds: float) -> int:
        try:
            if number % 3:
                spin(seconds)
            else:
                @SLEEP(seconds)
        except BaseException as error:
            note("interrupted", number)
            raise
        note("done", number)
        return number
"""


WAYS = ["loop", "sleep", "lock", "recv", "sqlite", "regex", "swallow", "shielded"]
PROCESS = Kind("process", ("-c", "2"))
ISOLATED = Kind("isolated", ("-c", "1", "--isolated", "2"))
THREAD = Kind("thread", ("-c", "1", "--threads", "4"))
ASYNC = Kind("async", ("-c", "1", "--async", "4"))
KINDS = [PROCESS, THREAD, ASYNC, ISOLATED]

IN_MAIN_THREAD = frozenset({"loop", "sleep", "lock", "recv", "regex", "shielded"})
CAN_INTERRUPT = {
    PROCESS: IN_MAIN_THREAD,
    ISOLATED: IN_MAIN_THREAD,
    THREAD: frozenset({"loop"}),
    ASYNC: IN_MAIN_THREAD | {"await"},
}
"""Ways to be stuck that an exception interrupts, by kind."""


class Limits:
    def __init__(self, project: Project) -> None:
        self.project = project
        self.tasks: Any = None

    def start(self, kind: Kind, *options: str) -> Process:
        self.project.write("limits.py", kind.source(SOURCE))
        self.tasks = self.project.tasks("limits.py")
        return self.project.worker("limits:app", *kind.options, *(options or ("--kill-grace", "0.5", "--grace", "1")))

    def notes(self, word: str) -> list[str]:
        return notes(self.project, word)

    def go(self) -> None:
        (self.project.directory / "go").touch()


@pytest.fixture
def limits(project: Project) -> Limits:
    return Limits(project)


CASES = [
    *(pytest.param(kind, way, id=f"{kind.name}-{way}") for kind in KINDS for way in WAYS),
    pytest.param(ASYNC, "await", id="async-await"),
]


@pytest.mark.parametrize(("kind", "way"), CASES)
def test_a_job_ends_in_time_and_its_slot_serves_on(limits: Limits, kind: Kind, way: str) -> None:
    worker = limits.start(kind)
    assert limits.tasks.add.delay(1, 2).result(timeout=60) == 3
    with within(10, "to stop it"):
        job = limits.tasks.stuck.delay(way)
        with pytest.raises(TaskTimeout) as caught:
            job.result(timeout=60)
    assert "ran longer than its timeout of 0.4 s" in str(caught.value)
    assert ("did not end within 0.5 s after that" in str(caught.value)) == (way not in CAN_INTERRUPT[kind])
    # The job failed without a crash, and doesn't run again.
    info = job.info()
    assert (info.state, info.crashes, limits.notes("stuck")) == (JobState.FAILED, 0, [way])
    assert [job.result(timeout=60) for job in limits.tasks.add.starmap([(n, n) for n in range(50)])] == [
        2 * n for n in range(50)
    ]
    assert "limits.stuck" in worker.output and "was lost" not in worker.output
    # The log says whether the job was killed.
    assert ("did not end within" in worker.output) == (way not in CAN_INTERRUPT[kind])


@pytest.mark.parametrize(
    ("kind", "way"), [case for case in CASES if case.values[0].is_shared and case.values[1] != "shielded"]
)
def test_neighbours_lose_nothing(limits: Limits, kind: Kind, way: str) -> None:
    worker = limits.start(kind)
    jobs = limits.tasks.neighbour.map(range(3))
    eventually(lambda: len(limits.notes("neighbour")) == 3)
    with pytest.raises(TaskTimeout):
        limits.tasks.stuck.delay(way).result(timeout=60)
    limits.go()
    # Nothing is lost even if the neighbours' process had to be killed.
    assert [job.result(timeout=60) for job in jobs] == [(1, 0)] * 3
    runs = Counter(line.split()[0] for line in limits.notes("neighbour"))
    if way in CAN_INTERRUPT[kind]:
        assert set(runs.values()) == {1}
    assert max(runs.values()) <= 2
    assert "guilty" not in worker.output, worker.output


@named([THREAD])
@pytest.mark.parametrize("way", ["sleep", "sqlite"])
def test_an_evicted_process_is_replaced_at_once_and_its_jobs_may_end(limits: Limits, kind: Kind, way: str) -> None:
    worker = limits.start(kind, "--kill-grace", "0.5", "--grace", "120")
    jobs = limits.tasks.neighbour.map(range(2))
    eventually(lambda: len(limits.notes("neighbour")) == 2)
    evicted = {int(line.split()[1]) for line in limits.notes("neighbour")}
    stuck = limits.tasks.stuck.delay(way)
    worker.wait_for_output("takes no more jobs")
    # All slots are available again, in another process.
    found = {job.result(timeout=60) for job in limits.tasks.where.starmap([()] * 20)}
    assert found and not found & evicted
    assert not stuck.done()
    limits.go()
    assert [job.result(timeout=60) for job in jobs] == [(1, 0)] * 2
    # The evicted process has nothing left to wait for.
    with pytest.raises(TaskTimeout):
        stuck.result(timeout=60)
    assert len(limits.notes("neighbour")) == 2


@named([THREAD])
def test_more_stuck_jobs_than_there_are_processes_to_spare_cost_slots_and_are_named(limits: Limits, kind: Kind) -> None:
    worker = limits.start(kind, "--kill-grace", "0.3", "--grace", "120")
    neighbours = limits.tasks.neighbour.map(range(1))
    eventually(lambda: len(limits.notes("neighbour")) == 1)
    stuck = []
    # Each job runs in the process that replaced the previous one.
    for number in (1, 2):
        stuck.append(limits.tasks.stuck.delay("sleep"))
        eventually(lambda number=number: worker.output.count("takes no more jobs") == number)
        neighbours += limits.tasks.neighbour.map([number])
        eventually(lambda number=number: len(limits.notes("neighbour")) == number + 1)
    stuck.append(limits.tasks.stuck.delay("sleep"))
    worker.wait_for_output("its slot is lost for now")
    assert [job.result(timeout=60) for job in limits.tasks.add.starmap([(n, n) for n in range(20)])] == [
        2 * n for n in range(20)
    ]
    limits.go()
    assert [job.result(timeout=60) for job in neighbours] == [(1, 0)] * 3
    for job in stuck:
        with pytest.raises(TaskTimeout):
            job.result(timeout=60)
    assert worker.output.count("its slot is lost for now") == 1


@named(KINDS)
def test_a_job_over_its_limit_is_retried_only_if_its_task_says_so(limits: Limits, kind: Kind) -> None:
    limits.start(kind)
    # One job is stopped by an exception, and the other is stuck where none can be raised.
    for way in ("loop", "sqlite"):
        assert limits.tasks.stuck_at_first.delay(way).result(timeout=60) == 3
    with pytest.raises(TaskTimeout):
        limits.tasks.stuck_and_not_retried.delay().result(timeout=60)
    assert len(limits.notes("runs")) == 1


@named(KINDS)
def test_limits_of_the_call_go_before_those_of_the_task(limits: Limits, kind: Kind) -> None:
    limits.start(kind)
    with pytest.raises(TaskTimeout, match=r"fails_in_time ran longer than its timeout of 0\.3 s"):
        limits.tasks.fails_in_time.options(timeout=0.3).delay("loop").result(timeout=60)
    job = limits.tasks.neighbour.options(timeout=0.3)
    assert job.task is limits.tasks.neighbour
    # One call lifts the task's own limit.
    waits = limits.tasks.returns_all_the_same.options(timeout=None, soft_timeout=0.2)
    assert waits.delay().result(timeout=60) == 1


@named(KINDS)
def test_a_soft_limit_is_an_error_that_a_task_may_catch(limits: Limits, kind: Kind) -> None:
    limits.start(kind)
    ways = ["await", "poll"] if kind is ASYNC else ["poll"]
    for way in ways:
        text = "the task has run longer than its soft_timeout"
        assert limits.tasks.winds_up.delay(way).result(timeout=60) == text
    with pytest.raises(SoftTimeout):
        limits.tasks.ignores_the_soft_limit.delay().result(timeout=60)


@named(KINDS)
def test_a_shield_keeps_a_soft_limit_off_until_its_end(limits: Limits, kind: Kind) -> None:
    limits.start(kind)
    with pytest.raises(SoftTimeout):
        limits.tasks.keeps_off.delay().result(timeout=60)
    assert (limits.notes("whole"), limits.notes("then"), limits.notes("never")) == ([""], [""], [])


@named(KINDS)
def test_a_job_that_was_stopped_has_failed_whatever_it_makes_of_that(limits: Limits, kind: Kind) -> None:
    limits.start(kind)
    for task in (limits.tasks.returns_all_the_same, limits.tasks.raises_another):
        with pytest.raises(TaskTimeout) as caught:
            task.delay().result(timeout=60)
    assert "while it cleaned up" in str(caught.value.__cause__)


@named(KINDS)
def test_what_a_task_has_returned_in_time_is_kept_however_long_it_takes_to_store(limits: Limits, kind: Kind) -> None:
    limits.start(kind, "--kill-grace", "30")
    assert type(limits.tasks.returns_in_time.delay().result(timeout=60)).__name__ == "Slow"


@named(KINDS)
def test_an_import_is_never_interrupted_halfway(limits: Limits, kind: Kind) -> None:
    # The module's last line belongs to the import; the job's code after the import may be interrupted.
    lines = "import time", "time.sleep(1)", "from limits import note", 'note("imported", "whole")'
    limits.project.write("slow_to_import.py", "\n".join(lines))
    worker = limits.start(kind, "--kill-grace", "30")
    with pytest.raises(TaskTimeout):
        limits.tasks.imports.delay().result(timeout=60)
    assert limits.notes("imported") == ["whole"]
    assert "did not end within" not in worker.output


@named(KINDS)
def test_a_limit_is_for_one_attempt_and_never_hits_another_job(limits: Limits, kind: Kind) -> None:
    """Jobs run for about as long as their limit allows, among others without limits."""
    worker = limits.start(kind, "--kill-grace", "30")
    count = 120 if kind is ISOLATED else 3_000
    limited = limits.tasks.about_as_long.options(timeout=0.003)
    warned = limits.tasks.about_as_long.options(soft_timeout=0.003)
    free = limits.tasks.about_as_long
    senders = list(islice(cycle([limited, free, warned, free]), count))
    jobs = [sender.delay(n, 0.0025 + 0.001 * (n % 7) / 7) for n, sender in enumerate(senders)]
    results: dict[int, object] = {}
    for number, job in enumerate(jobs):
        try:
            results[number] = job.result(timeout=120)
        except (TaskTimeout, SoftTimeout) as error:
            results[number] = type(error)
    interrupted = {int(number) for number in limits.notes("interrupted")}
    done = Counter(int(number) for number in limits.notes("done"))
    succeeded = {number for number, result in results.items() if result == number}
    assert len(interrupted) > count / 100, "the limits are too long for this test"
    assert interrupted <= {n for n, sender in enumerate(senders) if sender is not free}
    assert not interrupted & succeeded
    assert succeeded <= set(done) and set(done.values()) == {1}
    for number, sender in enumerate(senders):
        expected: tuple[object, ...] = {limited: (number, TaskTimeout), warned: (number, SoftTimeout)}.get(
            sender, (number,)
        )
        assert results[number] in expected
    assert "was lost" not in worker.output and "its thread" not in worker.output, worker.output
