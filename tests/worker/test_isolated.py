"""Isolated slots: each job has a process of its own, which exits with the job."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import textwrap
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pytest
from project import Process, Project, eventually, needs, pidfd
from worker.kinds import notes, source

from penstock.errors import WorkerCrashed

SOURCE = source(
    """
    import asyncio, os, threading, time
    from penstock import App, current_job

    app = App("isolated", defaults={"slot": "isolated"})
    seen = []

    @NOTES

    @app.on_process_start
    def process_starts() -> None:
        note("start", os.getpid())

    @app.on_process_stop
    def process_stops() -> None:
        note("stop", os.getpid())

    @app.task
    def soils(number: int) -> tuple[list[int], int]:
        before = list(seen)
        seen.append(number)
        os.environ["SOILED"] = "yes"
        return before, os.getpid()

    @app.task
    async def awaits() -> int:
        await asyncio.sleep(0)
        return os.getpid()

    @app.task
    def stays(name: str) -> int:
        note("run", name)
        while not (here / "go").exists():
            time.sleep(0.005)
        return os.getpid()

    @app.task
    def leaves_a_thread() -> int:
        threading.Thread(target=threading.Event().wait).start()
        return os.getpid()

    @app.task(max_crashes=2)
    def dies() -> None:
        note("run", "guilty")
        os.kill(os.getpid(), 9)

    @app.task
    def parent() -> int:
        return os.getppid()

    @app.task(max_crashes=3)
    def dies_once(name: str) -> int:
        if current_job().crashes == 0:
            os.kill(os.getpid(), 9)
        return current_job().crashes

    @app.task(slot="process")
    def elsewhere() -> int:
        return os.getpid()
"""
)


@pytest.fixture
def tasks(project: Project):
    project.write("isolated.py", SOURCE)
    return project.tasks("isolated.py")


def worker(project: Project, *options: str) -> Process:
    return project.worker("isolated:app", "-c", "1", *options)


def test_each_job_has_a_process_of_its_own_that_stops_in_order(project: Project, tasks) -> None:
    running = worker(project, "--isolated", "3")
    soiled = [job.result(timeout=60) for job in tasks.soils.map(list(range(60)))]
    assert {tuple(before) for before, _ in soiled} == {()}
    pids = [pid for _, pid in soiled]
    pids += [tasks.awaits.delay().result(timeout=60) for _ in range(3)]
    assert len(set(pids)) == len(pids)
    assert tasks.elsewhere.delay().result(timeout=30) == tasks.elsewhere.delay().result(timeout=30)
    running.signal(signal.SIGTERM)
    assert running.wait(30) == 0, running.output
    assert Counter(notes(project, "start")) == Counter(notes(project, "stop"))
    assert set(map(str, pids)) < set(notes(project, "start"))
    assert "ERROR" not in running.output and "WARNING" not in running.output, running.output


def test_no_more_run_at_once_than_were_asked_for(project: Project, tasks) -> None:
    running = worker(project, "--isolated", "3")
    jobs = tasks.stays.map([str(number) for number in range(8)])
    eventually(lambda: len(notes(project, "run")) == 3, 30, lambda: running.output)
    assert tasks.elsewhere.delay().result(timeout=30)
    assert len(notes(project, "run")) == 3
    states = Counter(job.info().state for job in jobs)
    assert states == {"running": 3, "waiting": 5}, "the others wait at the broker, for any worker"
    (project.directory / "go").touch()
    assert len({job.result(timeout=60) for job in jobs}) == 8


def test_the_death_of_one_is_a_crash_of_its_job_alone(project: Project, tasks) -> None:
    running = worker(project, "--isolated", "2")
    beside = tasks.stays.delay("beside")
    eventually(lambda: notes(project, "run") == ["beside"], 30, lambda: running.output)
    with pytest.raises(WorkerCrashed, match="SIGKILL"):
        tasks.dies.delay().result(timeout=60)
    assert notes(project, "run") == ["beside", "guilty", "guilty"]
    (project.directory / "go").touch()
    assert beside.result(timeout=30) and beside.info().crashes == 0


def test_a_process_that_does_not_end_after_its_job_is_killed(project: Project, tasks) -> None:
    running = worker(project, "--isolated", "1")
    pids = [tasks.leaves_a_thread.delay().result(timeout=30)]
    pids.append(tasks.soils.delay(1).result(timeout=30)[1])
    assert len(set(pids)) == 2
    running.wait_for_output("did not exit within 3 s after it, and is killed")
    assert "an idle process was lost" not in running.output


def test_a_process_that_was_forked_and_has_no_job_yet_may_die(project: Project, tasks) -> None:
    project.write("isolated.py", SOURCE.replace('note("start", os.getpid())', "starts()"))
    project.write(
        "sitecustomize.py",
        """
        import builtins, os
        from pathlib import Path

        def starts() -> None:
            first = Path(__file__).parent / "first"
            if not first.exists():
                first.touch()
                os._exit(5)

        builtins.starts = starts
        """,
    )
    running = project.worker("isolated:app", "-c", "1", "--isolated", "1", PYTHONPATH=str(project.directory))
    assert tasks.soils.delay(1).result(timeout=60)[0] == []
    assert (project.directory / "first").exists(), running.output


def test_a_burst_and_a_stop_wait_for_isolated_jobs(project: Project, tasks) -> None:
    # With only isolated tasks, the worker has no process between two jobs.
    project.write("isolated.py", SOURCE.split('@app.task(slot="process")')[0])
    jobs = tasks.soils.map(list(range(10)))
    burst = worker(project, "--burst")
    assert burst.wait(60) == 0, burst.output
    assert [job.info().state for job in jobs] == ["succeeded"] * 10
    running = worker(project, "--isolated", "2")
    jobs = tasks.stays.map([str(number) for number in range(4)])
    eventually(lambda: len(notes(project, "run")) == 2, 30, lambda: running.output)
    with pidfd(running.pid) as ended:
        running.signal(signal.SIGTERM)
        running.wait_for_output("stopping")
        (project.directory / "go").touch()
        ended.wait(30)
    assert running.returncode == 0
    assert Counter(job.info().state for job in jobs) == {"succeeded": 2, "waiting": 2}


def test_processes_are_there_before_their_jobs(project: Project, tasks) -> None:
    running = worker(project, "--isolated", "3")
    eventually(lambda: len(notes(project, "start")) == 7, 30, lambda: running.output)
    ahead = set(notes(project, "start"))
    # The first job alone shows that its process was forked ahead: a later one may run in a successor.
    used = str(tasks.soils.delay(1).result(timeout=30)[1])
    assert used in ahead
    # A used process gets a successor, and so does a spare that is killed while it waits.
    eventually(lambda: len(notes(project, "start")) == 8, 30, lambda: running.output)
    lasting = str(tasks.elsewhere.delay().result(timeout=30))
    spare = next(pid for pid in notes(project, "start") if pid not in (used, lasting))
    with pidfd(int(spare)) as ended:
        os.kill(int(spare), signal.SIGKILL)
        ended.wait(30)
    eventually(lambda: len(notes(project, "start")) == 9, 30, lambda: running.output)
    assert tasks.soils.delay(1).result(timeout=30)[0] == []


def test_nothing_is_left_of_a_thousand_processes(project: Project, tasks) -> None:
    running = worker(project, "--isolated", "4")
    zygote = tasks.parent.delay().result(timeout=60)

    def descriptors() -> int:
        return sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in (running.pid, zygote))

    eventually(lambda: len(children(zygote)) == 9, 30)
    before = descriptors()
    # Some processes exit with their jobs, and others die in the middle of them.
    orderly, dying = tasks.soils.map(list(range(900))), tasks.dies_once.map([str(number) for number in range(100)])
    assert len({pid for _, pid in [job.result(timeout=300) for job in orderly]}) == 900
    assert {job.result(timeout=300) for job in dying} == {1}
    eventually(lambda: "Z" not in children(zygote) + children(running.pid), 30)
    eventually(lambda: len(children(zygote)) == 9, 30, lambda: str(children(zygote)))
    eventually(lambda: descriptors() <= before, 30)


def children(parent: int) -> list[str]:
    """Return the states of a process's children, including zombies."""
    states = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with suppress(OSError):
                state, its_parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
                states += [state] if int(its_parent) == parent else []
    return states


HEAP = """
    import os
    from pathlib import Path
    from penstock import App

    app = App("heap", defaults={"slot": "isolated"})
    held = []

    @app.on_worker_start
    def fill() -> None:
        held.append([bytes(200) for _ in range(400_000)])

    @app.task
    def looks() -> dict[str, int]:
        shared = memory()
        # Imitates a job that uses the app's prepared data: it reads, and so changes reference counts, here and there.
        for each in held[0][::1000]:
            each.decode()
        return {**memory(), "large": shared["AnonHugePages"]}

    def memory() -> dict[str, int]:
        lines = Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]
        return {line.split(":")[0]: int(line.split()[1]) for line in lines}
"""


@pytest.mark.parametrize("slot", ["isolated", "process"])
def test_processes_share_huge_pages_and_own_no_more_than_without(project: Project, slot: str) -> None:
    """Memory is in KiB, as the kernel counts it."""
    project.write("heap.py", HEAP.replace('"isolated"', f'"{slot}"'))
    heap = project.tasks("heap.py")

    def measure(collapse: str) -> tuple[int, int]:
        running = project.worker("heap:app", "-c", "1", "--isolated", "1", PENSTOCK_COLLAPSE=collapse)
        found = [heap.looks.delay().result(timeout=60) for _ in range(8)]
        running.signal(signal.SIGTERM)
        assert running.wait(30) == 0, running.output
        own = sorted(each["Private_Dirty"] + each["Private_Clean"] for each in found)
        return found[0]["large"], own[len(own) // 2]

    (large, own), (large_without, own_without) = measure("1"), measure("0")
    needs(large > large_without, "a kernel that has MADV_COLLAPSE (Linux 6.1), and huge pages not used anyway")
    assert large > 40 * 1024, "most of a heap of 90 MB"
    assert own <= own_without + 1024


HOLES = """
    from penstock import App

    app = App("holes", defaults={"slot": "isolated"})
    SIZES = (100, 1_000)  # for Python's allocator, and for that of the C library
    held = []

    @app.on_worker_start
    def leave_holes() -> None:
        for size in SIZES:
            made = [bytes(size) for _ in range(20_000)]
            del made[::20]
            held.append(made)

    @app.task
    def pages() -> list[int]:
        made = [[bytes(size) for _ in range(500)] for size in SIZES]
        return [len({id(each) // 4096 for each in of_size}) for of_size in made]
"""


@pytest.mark.parametrize("slot", ["isolated", "process"])
def test_what_a_job_allocates_lies_together_whatever_holes_the_app_has_left(project: Project, slot: str) -> None:
    needs(hasattr(ctypes.CDLL(None), "mallinfo2"), "a C library that tells where its heap ends (glibc 2.33)")
    project.write("holes.py", HOLES.replace('"isolated"', f'"{slot}"'))
    holes = project.tasks("holes.py")

    def measure(collapse: str) -> list[int]:
        running = project.worker("holes:app", "-c", "1", "--isolated", "1", PENSTOCK_COLLAPSE=collapse)
        pages: list[int] = holes.pages.delay().result(timeout=60)
        running.signal(signal.SIGTERM)
        assert running.wait(30) == 0, running.output
        return pages

    small, large = measure("1")
    assert small < 50, "500 objects of 133 bytes need 17 pages"
    assert large < 170, "500 objects of 1,033 bytes need 127 pages"
    assert min(measure("0")) > 300, "each in another page"


SCATTERED = """
    import mmap
    from pathlib import Path
    from penstock import App

    app = App("scattered", defaults={"slot": "isolated"})
    held = [bytearray(b"x" * (8 << 20))]  # fits into huge pages wherever it lies

    @app.on_worker_start
    def fill() -> None:
        # Like an app that imports one library after another: mappings that stay, and objects in between.
        for _ in range(64):
            held.append([bytes(400) for _ in range(1_200)])
            held.append(mmap.mmap(-1, 1_200 << 10, prot=mmap.PROT_READ))

    @app.task
    def large() -> int:
        lines = Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]
        return {line.split(":")[0]: int(line.split()[1]) for line in lines}["AnonHugePages"]
"""


def test_the_heap_of_an_app_with_many_libraries_lies_in_huge_pages_too(project: Project) -> None:
    project.write("scattered.py", SCATTERED)
    scattered = project.tasks("scattered.py")

    def measure(collapse: str) -> int:
        running = project.worker("scattered:app", "-c", "1", "--isolated", "1", PENSTOCK_COLLAPSE=collapse)
        large: int = scattered.large.delay().result(timeout=60)
        running.signal(signal.SIGTERM)
        assert running.wait(30) == 0, running.output
        return large

    large, large_without = measure("1"), measure("0")
    needs(large > large_without, "a kernel that has MADV_COLLAPSE (Linux 6.1), and huge pages not used anyway")
    assert large > 28 * 1024, "most of 41 MB, in KiB"


WARM = """
    import gc, os, resource, weakref
    from pathlib import Path
    from penstock import App

    app = App("warm", defaults={"slot": "isolated"})
    here = Path(__file__).parent
    held = []

    class Kept:
        it = None

    Kept.it = Kept()

    @app.on_worker_start
    def fill() -> None:
        held.append([bytes(4000) for _ in range(2_000)])

    @app.on_process_start
    def starts() -> None:
        with (here / "starts").open("a") as notes:
            notes.write(f"{os.getpid()}\\n")

    @app.task
    def frees() -> list[bool]:
        # Drop an object of the loaded app, and one of the job's own. Return which of them are gone.
        class Own:
            pass
        own = Own()
        refs = [weakref.ref(Kept.it), weakref.ref(own)]
        Kept.it = own = None
        gc.collect()
        return [ref() is None for ref in refs]

    @app.task
    def counts_references() -> int:
        \"\"\"Return how many pages the job has had copied: one for each object, as it is counted.\"\"\"
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        taken = list(held[0])
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
"""


def test_a_process_that_waits_has_copied_what_jobs_write_to(project: Project) -> None:
    project.write("warm.py", WARM)
    warm = project.tasks("warm.py")
    running = project.worker("warm:app", "-c", "1", "--isolated", "1", PENSTOCK_IMMORTAL="0")
    fresh = warm.counts_references.delay().result(timeout=60)
    needs(fresh > 1_500, "a fork that copies pages one by one")

    def successors(jobs: int) -> None:
        # Two processes wait, one for the slot and one ahead.
        eventually(lambda: len((project.directory / "starts").read_text().split()) == 2 + jobs, 30)

    faults = []
    for jobs in range(1, 6):
        successors(jobs)
        faults.append(warm.counts_references.delay().result(timeout=60))
    # One of these processes was forked before any job had ended.
    assert sorted(faults)[-2] < fresh / 4, (faults, running.output)


# CPython 3.11 has no immortal objects, and how 3.14 marks them is not known here.
IMMORTAL = (3, 12) <= sys.version_info < (3, 14)


@pytest.mark.parametrize("slot", ["isolated", "process"])
def test_a_job_that_reads_the_loaded_app_copies_none_of_it_where_objects_can_be_immortal(
    project: Project, slot: str
) -> None:
    project.write("warm.py", WARM.replace('"isolated"', f'"{slot}"'))
    tasks = project.tasks("warm.py")

    def faults(**environment: str) -> int:
        running = project.worker("warm:app", "-c", "1", "--isolated", "1", **environment)
        found: int = tasks.counts_references.delay().result(timeout=60)
        # Only what was made before the forks is immortal.
        assert tasks.frees.delay().result(timeout=60) == [not (IMMORTAL and not environment), True]
        running.signal(signal.SIGTERM)
        assert running.wait(30) == 0, running.output
        return found

    counted = faults(PENSTOCK_IMMORTAL="0")
    needs(counted > 1_500, "a fork that copies pages one by one")
    if IMMORTAL:
        assert faults() < 100
    else:
        assert faults() > 1_500


def test_a_process_without_other_threads_is_known_to_have_one() -> None:
    code = """
        import threading
        from penstock._core import has_one_thread

        over = threading.Event()
        thread = threading.Thread(target=over.wait)
        found = [has_one_thread()]
        thread.start()
        found.append(has_one_thread())
        over.set()
        thread.join()
        print(found)
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    told = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert told == ("[True, False]\n" if sys.platform == "linux" else "[False, False]\n")
