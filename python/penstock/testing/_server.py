"""Broker and worker processes for end-to-end tests."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import TracebackType

from penstock._connection import Connection, new_connection, penstock_program
from penstock._durations import Seconds, timeout_s
from penstock._tasks.app import App
from penstock.errors import PenstockError
from penstock.testing._places import connected

_CONNECTED = " is connected and runs "
# A stopping worker waits 25 s for its jobs by default.
_STOPS_WITHIN_S = 40.0


class Server:
    """Real broker in a directory, which all apps of this process use within the ``with`` block.

    The first call that needs the broker starts it. The end of the block stops the workers and the broker.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        """``directory``: directory of the broker's files, created if necessary."""
        self.directory: Path = Path(directory).absolute()
        self._workers: list[ServerWorker] = []
        self._connection: Connection | None = None
        self._stack = contextlib.ExitStack()

    @property
    def url(self) -> str:
        return f"local:{self.directory}"

    def start_worker(self, app: App | str, *arguments: str, timeout: Seconds = 30.0) -> ServerWorker:
        """Start ``penstock worker`` for an app, and return once it takes jobs.

        ``app``: the app, or its location such as ``"shop:app"``, in an importable module. ``arguments``: arguments of
        the command, such as ``"--concurrency", "4"``; by default it runs one job at a time. The worker imports modules
        from where this process does. ``timeout``: seconds or a timedelta. Raises ``PenstockError`` with the worker's
        output if it exits, or is not ready in time.
        """
        place = app if isinstance(app, str) else _place_of(app)
        options = arguments if {"-c", "--concurrency"} & {*arguments} else ("--concurrency", "1", *arguments)
        worker = ServerWorker(["worker", place, *options], self.url)
        self._workers.append(worker)
        worker._wait_until_connected(timeout_s("timeout", timeout))
        return worker

    def __enter__(self) -> Server:
        connection = new_connection(self.url, None, f"tests@{os.getpid()}")
        self._stack.callback(self._stop)
        self._stack.callback(connection.close, 5.0)
        self._stack.enter_context(connected((), lambda app: connection))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stack.close()

    def _stop(self) -> None:
        try:
            for worker in self._workers:
                worker.stop()
        finally:
            # Otherwise it would exit a minute after its last client disconnects.
            command = [_program(), "broker", "stop", "--url", self.url]
            subprocess.run(command, capture_output=True, timeout=_STOPS_WITHIN_S, check=False)


class ServerWorker:
    """Worker process started by ``Server.start_worker``."""

    def __init__(self, command: list[str], url: str) -> None:
        self._lines: list[str] = []
        self._news = threading.Condition()
        self._has_ended = False
        environment = {
            **os.environ,
            "PENSTOCK_URL": url,
            "PENSTOCK_PYTHON": sys.executable,
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        }
        self.process: subprocess.Popen[str] = subprocess.Popen(
            [_program(), *command],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        self._reader = threading.Thread(target=self._read, name="penstock worker output", daemon=True)
        self._reader.start()

    @property
    def output(self) -> str:
        """Output of the worker and its tasks so far, as text."""
        with self._news:
            return "".join(self._lines)

    def stop(self) -> str:
        """Let running jobs finish, wait until the worker has exited, and return its output."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(_STOPS_WITHIN_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self._reader.join(_STOPS_WITHIN_S)
        return self.output

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as output:
            for line in output:
                with self._news:
                    self._lines.append(line)
                    self._news.notify_all()
        with self._news:
            self._has_ended = True
            self._news.notify_all()

    def _wait_until_connected(self, limit_s: float | None) -> None:
        until = None if limit_s is None else time.monotonic() + limit_s
        with self._news:
            while not any(_CONNECTED in line for line in self._lines):
                left_s = None if until is None else until - time.monotonic()
                if self._has_ended or (left_s is not None and left_s <= 0):
                    what = "exited" if self._has_ended else f"was not connected after {limit_s:g} s"
                    raise PenstockError(f"the worker {what}; it wrote:\n{''.join(self._lines)}")
                self._news.wait(left_s)


def _program() -> str:
    program = penstock_program()
    if program is None:
        raise PenstockError("the penstock executable is missing; reinstall penstock")
    return program


def _place_of(app: App) -> str:
    """Return where a worker finds this app: an importable module, and the app's name in it."""
    for module_name, module in [*sys.modules.items()]:
        if module_name != "__main__" and getattr(module, "__spec__", None) is not None:
            for name, value in [*vars(module).items()]:
                if value is app:
                    return f"{module_name}:{name}"
    raise PenstockError(
        f"no module has {app!r} at its top level, where a worker could import it; give its location as 'module:name'"
    )
