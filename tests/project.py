"""A user's project in a fresh directory, with every process that is started for it.

A test gets its own broker. It starts every process through `Project`, which ends each one by its id and
then fails the test if any process of the project is left.
"""

from __future__ import annotations

import importlib.util
import json
import os
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import textwrap
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import penstock

SCRIPTS = Path(sys.executable).parent
# The `penstock` command becomes this program, after a sixth of the CPU time that a worker takes to start.
PROGRAM = Path(penstock.__file__).parent / "_bin" / "penstock"
MARK = "PENSTOCK_TEST_PROJECT"


class TooSlow(AssertionError):
    """Something took longer than it may, which a machine with much else to do can cause as well as a defect.

    The test runs again, twice at most (pyproject.toml, `only_rerun`): a defect is as slow each time.
    """


class Project:
    """A directory with the user's files and, in `.penstock`, the data of its local broker."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.data = directory / ".penstock"
        self.url = f"local:{self.data}"
        self.mark = uuid.uuid4().hex
        # Processes inherit the mark, however far they detach themselves: it is how the last one is found.
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")},
            MARK: self.mark,
            "PENSTOCK_URL": self.url,
            "PATH": f"{SCRIPTS}{os.pathsep}{os.environ['PATH']}",
        }
        self.started: list[Process] = []
        self.apps: list[Any] = []

    def write(self, name: str, source: str) -> Path:
        """Write one file of the project."""
        path = self.directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(source))
        # Python recognises outdated bytecode by the size and the second of its source; tests write twice in one.
        Path(importlib.util.cache_from_source(path)).unlink(missing_ok=True)
        return path

    def start(self, *command: str | Path, cwd: Path | None = None, stdin: bool = False, **environment: str) -> Process:
        """Start a command in the project; it is ended with the test at the latest."""
        environment = {**self.environment, **environment}
        if command[0] == "penstock":
            command = (PROGRAM, *command[1:])
            environment["PENSTOCK_PYTHON"] = sys.executable
        process = Process(
            [str(word) for word in command],
            cwd=cwd or self.directory,
            environment=environment,
            output=self.directory / f"output-{len(self.started)}.txt",
            stdin=stdin,
        )
        self.started.append(process)
        return process

    def run(self, *command: str | Path, cwd: Path | None = None, timeout: float = 60, **environment: str) -> Process:
        """Run a command to its end, whatever its exit code."""
        process = self.start(*command, cwd=cwd, **environment)
        process.wait(timeout)
        return process

    def penstock(self, *arguments: str, **environment: str) -> Process:
        return self.run("penstock", *arguments, **environment)

    def python(self, source: str, *arguments: str, cwd: Path | None = None, **environment: str) -> str:
        """Run a script that must succeed; give what it printed."""
        script = self.write(f"script_{len(self.started)}.py", source)
        process = self.run(
            sys.executable, script, *arguments, cwd=cwd, **{"PYTHONPATH": str(self.directory), **environment}
        )
        assert process.returncode == 0, process.output
        return process.output

    def start_python(self, source: str, *arguments: str, stdin: bool = False, **environment: str) -> Process:
        script = self.write(f"script_{len(self.started)}.py", source)
        path = {"PYTHONPATH": str(self.directory), **environment}
        return self.start(sys.executable, script, *arguments, stdin=stdin, **path)

    def worker(self, app: str = "tasks:app", *options: str, **environment: str) -> Process:
        return self.start("penstock", "worker", app, *options, **environment)

    def tasks(self, name: str = "tasks.py") -> ModuleType:
        """Import a file of the project here, to enqueue from the test's own process."""
        specification = importlib.util.spec_from_file_location(Path(name).stem, self.directory / name)
        assert specification is not None and specification.loader is not None
        module = importlib.util.module_from_spec(specification)
        sys.modules[module.__name__] = module
        specification.loader.exec_module(module)
        self.apps.append(module.app)
        return module

    def status(self) -> dict[str, Any]:
        process = self.penstock("status", "--json")
        assert process.returncode == 0, process.output
        return dict(json.loads(process.output))

    def broker_pid(self) -> int | None:
        """The process that listens for this project, as the kernel tells it to who connects."""
        for path in (self.data / "broker.sock", self.spare_socket()):
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
                try:
                    connection.connect(str(path))
                except (FileNotFoundError, ConnectionRefusedError):
                    continue
                credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
                return int(struct.unpack("3i", credentials)[0])
        return None

    def spare_socket(self) -> Path:
        """Where a broker listens that found no room in its directory (crates/penstock-directory/src/paths.rs)."""
        fnv1a = 0xCBF29CE484222325
        for byte in os.fsencode(self.data.resolve()):
            fnv1a = (fnv1a ^ byte) * 0x100000001B3 % 2**64
        return Path(f"/dev/shm/penstock-{os.geteuid()}/{fnv1a:016x}.sock")

    def kill_broker(self) -> int:
        """kill -9, and wait until the process has gone."""
        pid = self.broker_pid()
        assert pid is not None, "no broker runs"
        with pidfd(pid) as ended:
            os.kill(pid, signal.SIGKILL)
            ended.wait(30)
        return pid

    def processes(self) -> dict[int, str]:
        """Every living process that was started for this project, by anybody: pid and command line."""
        found = {}
        for entry in Path("/proc").iterdir():
            if not entry.name.isdecimal():
                continue
            try:
                if f"{MARK}={self.mark}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                    found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
            except OSError:
                continue  # ended meanwhile, or not ours to look into
        return found

    @classmethod
    @contextmanager
    def fresh(cls) -> Iterator[Project]:
        # Not pytest's tmp_path: its length would push the socket out of the directory.
        project = cls(Path(tempfile.mkdtemp(prefix="penstock-")))
        try:
            yield project
        finally:
            project.clean_up()

    def end_all(self) -> None:
        # An app that is open would start the broker again.
        for app in self.apps:
            app.close()
        for process in reversed(self.started):
            process.end()
        pid = self.broker_pid()
        if pid is not None:
            os.kill(pid, signal.SIGCONT)
            self.kill_broker()

    def clean_up(self) -> None:
        self.end_all()
        for name in [path.stem for path in self.directory.glob("*.py")]:
            sys.modules.pop(name, None)
        # The children of a supervisor that was killed just now are on their way out.
        patience = time.monotonic() + 10
        while (left := self.processes()) and time.monotonic() < patience:
            time.sleep(0.01)
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        shutil.rmtree(self.directory)
        if sys.pycache_prefix:
            shutil.rmtree(f"{sys.pycache_prefix}{self.directory.resolve()}", ignore_errors=True)
        assert not left, f"processes left behind: {left}"


class Process:
    """A started command, its output in a file, so that a detached descendant cannot keep a pipe open."""

    def __init__(
        self, command: list[str], cwd: Path, environment: dict[str, str], output: Path, *, stdin: bool = False
    ) -> None:
        self.file = output
        with output.open("wb") as file:
            self.popen = subprocess.Popen(
                [shutil.which(command[0], path=environment["PATH"]) or command[0], *command[1:]],
                cwd=cwd,
                env=environment,
                stdin=subprocess.PIPE if stdin else subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
            )
        self.pid = self.popen.pid

    @property
    def output(self) -> str:
        return self.file.read_text(errors="replace")

    @property
    def returncode(self) -> int | None:
        return self.popen.poll()

    def wait(self, timeout: float = 60) -> int:
        try:
            return self.popen.wait(timeout)
        except subprocess.TimeoutExpired:
            raise TooSlow(f"{self.popen.args} still runs after {timeout} s:\n{self.output}") from None

    def write(self, text: str) -> None:
        assert self.popen.stdin is not None
        self.popen.stdin.write(text.encode())
        self.popen.stdin.flush()

    def close_input(self) -> None:
        assert self.popen.stdin is not None
        self.popen.stdin.close()

    def signal(self, number: signal.Signals) -> None:
        self.popen.send_signal(number)

    def wait_for_output(self, text: str, timeout: float = 60) -> str:
        """Wait until the process has printed ``text``."""
        eventually(lambda: text in self.output or self.returncode is not None, timeout, lambda: self.output)
        assert text in self.output, self.output
        return self.output

    def end(self) -> None:
        if self.popen.stdin is not None:
            self.popen.stdin.close()
        if self.popen.poll() is None:
            self.popen.send_signal(signal.SIGCONT)
            self.popen.terminate()
            try:
                self.popen.wait(20)
            except subprocess.TimeoutExpired:
                self.popen.kill()
                self.popen.wait()


class pidfd:
    """The end of a process that is not our child, as an event."""

    def __init__(self, pid: int) -> None:
        self.fd = os.pidfd_open(pid)

    def __enter__(self) -> pidfd:
        return self

    def __exit__(self, *exception: object) -> None:
        os.close(self.fd)

    def wait(self, timeout: float) -> None:
        if not select.select([self.fd], [], [], timeout)[0]:
            raise TooSlow(f"the process still runs after {timeout} s")


def needs(found: object, what: str) -> None:
    """Skip the test where this machine lacks something. Fail it in CI, which has everything."""
    if not found:
        assert os.environ.get("CI") != "true", f"CI must have what this test needs: {what}"
        pytest.skip(f"needs {what}")


def wall_clock(setting: str) -> dict[str, str]:
    """The environment of a process whose clock on the wall is set, such as "+1h" or "@2026-01-15 12:05:00".

    Its steady clock is the true one: a wait with a deadline on that ends by the kernel's. The process is no child of
    the program `faketime`, which would have to be killed, too.
    """
    needs(shutil.which("faketime"), "faketime (Debian: apt-get install faketime)")
    # A killed process leaves its share, and libfaketime ends the next process that has the same number with
    # "shm_open failed: File exists".
    for shared in Path("/dev/shm").glob("*faketime_*_*"):
        if not Path("/proc", shared.name.rpartition("_")[2]).exists():
            shared.unlink(missing_ok=True)
    preload = subprocess.run(["faketime", "now", "printenv", "LD_PRELOAD"], check=True, capture_output=True, text=True)
    return {"LD_PRELOAD": preload.stdout.strip(), "FAKETIME": setting, "FAKETIME_DONT_FAKE_MONOTONIC": "1"}


def eventually(condition: Callable[[], object], timeout: float = 60, explain: Callable[[], str] = str) -> None:
    """Wait until a condition holds that other processes bring about and nothing announces."""
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() >= deadline:
            raise TooSlow(f"not within {timeout} s {explain()}")
        time.sleep(0.005)


def suspend(pid: int) -> None:
    """Stop a process until SIGCONT, and wait until each of its threads stands still: one after another does."""

    def stands_still() -> bool:
        states = [stat.read_text().rpartition(")")[2].split()[0] for stat in Path(f"/proc/{pid}/task").glob("*/stat")]
        return set(states) == {"T"}

    os.kill(pid, signal.SIGSTOP)
    eventually(stands_still)


@contextmanager
def within(seconds: float, what: str = "it") -> Iterator[None]:
    """Bound the time of the block; a longer one is `TooSlow`."""
    began = time.monotonic()
    yield
    is_quick(time.monotonic() - began, seconds, what)


def is_quick(took_s: float, most_s: float, what: str = "it") -> None:
    if took_s >= most_s:
        raise TooSlow(f"{what} took {took_s:.3f} s, and may take {most_s} s")
