"""A project whose tasks misbehave in every way, and record each run outside of Penstock."""

from __future__ import annotations

from collections import Counter
from types import ModuleType

from project import Process, Project, eventually

TASKS = """
    import builtins
    import contextlib
    import ctypes
    import os
    import resource
    import signal
    import socket
    import subprocess
    import sys
    import threading
    import time
    from pathlib import Path

    from penstock import App, current_job

    app = App("shop")
    here = Path(__file__).parent


    def note(text: str) -> None:
        with (here / "runs.txt").open("a") as file:
            file.write(f"{text}\\n")


    def wait_for(name: str) -> None:
        while not (here / name).exists():
            time.sleep(0.005)


    @app.task
    def run(label: str) -> str:
        note(label)
        return label

    @app.task
    def tiny(number: int) -> int:
        return number

    @app.task
    def sleep(seconds: float) -> None:
        time.sleep(seconds)

    @app.task(slot="process")
    def sleep_in_process(seconds: float) -> None:
        time.sleep(seconds)

    @app.task
    def compute(seconds: float) -> None:
        until = time.thread_time() + seconds
        while time.thread_time() < until:
            pass

    @app.task
    def pid() -> int:
        return os.getpid()

    @app.task
    def begin_and_wait(label: str) -> int:
        note(f"{label} {os.getpid()}")
        wait_for(label)
        note(f"{label} ended")
        return os.getpid()

    @app.task(max_crashes=1)
    def die(how: str) -> None:
        note(f"die {how}")
        deaths[how]()

    @app.task
    def die_twice(how: str) -> int:
        note(f"die {how}")
        with (here / f"starts of {how}.txt").open("a") as file:
            file.write(f"{time.time()}\\n")
        crashes = (here / "runs.txt").read_text().count(f"die {how}")
        if crashes < 3:
            deaths[how]()
        return crashes


    @app.task(max_crashes=9)
    def die_often(how: str) -> None:
        deaths[how]()


    def segfault() -> None:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        ctypes.string_at(0)

    def abort() -> None:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.abort()

    deaths = {
        "segfault": segfault,
        "abort": abort,
        "exit 3": lambda: os._exit(3),
        "exit 0": lambda: os._exit(0),
        "kill -9": lambda: os.kill(os.getpid(), signal.SIGKILL),
        "sigterm by default": lambda: (
            signal.signal(signal.SIGTERM, signal.SIG_DFL), os.kill(os.getpid(), signal.SIGTERM)
        ),
    }


    @app.task
    def echo(data: bytes) -> bytes:
        return data

    @app.task
    def forks() -> str:
        pid = os.fork()
        if pid == 0:
            # A common mistake: the fork returns from the task as well.
            return "from the fork"
        os.waitpid(pid, 0)
        return "from the task"

    @app.task
    def runs_a_program() -> str:
        return subprocess.run(["echo", "hello"], capture_output=True, text=True, check=True).stdout

    @app.task
    def ends_a_program() -> int:
        process = subprocess.Popen(["sleep", "600"])
        process.terminate()
        return process.wait(10)

    @app.task
    def open_descriptors_of_a_program() -> list[str]:
        listed = subprocess.run(["ls", "/proc/self/fd"], capture_output=True, text=True, check=True).stdout
        return listed.split()

    @app.task
    def floods_stdout(lines: int) -> None:
        for number in range(lines):
            print(f"line {number} of the flood")

    @app.task
    def reads_stdin() -> str:
        return sys.stdin.read()

    @app.task
    def recurses(depth: int) -> int:
        return recurses(depth + 1)

    @app.task
    def exits() -> None:
        sys.exit("not like this")

    @app.task
    def signals_itself() -> str:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.01)
        return "still here"

    @app.task
    def leaves_an_alarm(label: str) -> int:
        # The task has forgotten its own timeout, and leaves a thread that never ends.

        def ring(number, frame):
            raise TimeoutError("the forgotten alarm")

        def ring_once_told():
            wait_for(label)
            os.kill(os.getpid(), signal.SIGALRM)
            threading.Event().wait()

        signal.signal(signal.SIGALRM, ring)
        threading.Thread(target=ring_once_told).start()
        return os.getpid()

    @app.task(max_crashes=1)
    def breaks_the_interpreter() -> None:
        threading.Thread(target=threading.Event().wait).start()
        builtins.len = None

    @app.task(max_crashes=1)
    def damages_its_outcomes() -> None:
        # Imitates C code that overruns a buffer: garbage where the supervisor reads outcomes.
        note(f"damages {os.getpid()}")
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(name))) as found:
                if found.type == socket.SOCK_STREAM:
                    found.send(b"\\xff" * 4096)
        threading.Event().wait()

    @app.task
    def attempts() -> tuple[int, int]:
        job = current_job()
        return job.attempt, job.crashes
"""


class Shop:
    """The project and its tasks, with helpers to enqueue them."""

    def __init__(self, project: Project) -> None:
        self.project = project
        self.runs_file = project.directory / "runs.txt"
        self.runs_file.touch()
        project.write("tasks.py", TASKS)
        self.tasks: ModuleType = project.tasks()

    def worker(self, *options: str) -> Process:
        return self.project.worker("tasks:app", *options)

    def ready_worker(self, *options: str) -> Process:
        """Start a worker, and return it once it has run a job."""
        worker = self.worker(*options)
        self.tasks.tiny.delay(0).result(timeout=30)
        return worker

    def runs(self) -> list[str]:
        return self.runs_file.read_text().splitlines()

    def times_run(self) -> Counter[str]:
        return Counter(self.runs())

    def pid_of(self, label: str) -> int:
        """Wait until ``begin_and_wait(label)`` has begun; return the id of the process that runs it."""

        def found() -> list[str]:
            return [run for run in self.runs() if run.startswith(f"{label} ") and run.split()[-1].isdecimal()]

        eventually(found, 30)
        return int(found()[-1].split()[-1])

    def release(self, label: str) -> None:
        """Let ``begin_and_wait(label)`` return."""
        (self.project.directory / label).touch()

    def zygote_pid(self) -> int:
        # Its children have the same command line, but the zygote is their parent.
        found = [pid for pid, command in self.project.processes().items() if "penstock._worker.zygote" in command]
        return next(pid for pid in found if parent_of(pid) not in found)


def parent_of(pid: int) -> int:
    with open(f"/proc/{pid}/stat") as file:
        return int(file.read().rpartition(")")[2].split()[1])
