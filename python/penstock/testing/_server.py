"""A broker and workers that are processes, for tests from end to end."""

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
# A worker that was told to stop waits 25 s for its jobs by default.
_STOPS_WITHIN_S = 40.0


class Server:
    """A real broker of a directory, and the brokers' place of all apps of this process within the ``with``.

    The broker is started by the first call that needs it. At the end of the block workers and broker are stopped.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        """``directory``: where the broker keeps its files; made if need be."""
        self.directory: Path = Path(directory).absolute()
        self._workers: list[ServerWorker] = []
        self._connection: Connection | None = None
        self._stack = contextlib.ExitStack()

    @property
    def url(self) -> str:
        return f"local:{self.directory}"

    def start_worker(self, app: App | str, *arguments: str, timeout: Seconds = 30.0) -> ServerWorker:
        """Start ``penstock worker`` for an app, and return once it takes jobs.

        ``app``: the app, or its place such as ``"shop:app"``; its module must be one that can be imported.
        ``arguments``: of the command, such as ``"--concurrency", "4"``; by default one job runs at once. Modules are
        found where this process finds them. Raises ``PenstockError`` with the worker's output when it ends, or is not
        there after this many seconds (or a timedelta).
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
            # Without this it would exit a minute after its last client.
            command = [_program(), "broker", "stop", "--url", self.url]
            subprocess.run(command, capture_output=True, timeout=_STOPS_WITHIN_S, check=False)


class ServerWorker:
    """A worker process that ``Server.start_worker`` has started."""

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
        """Output of the worker and its tasks so far."""
        with self._news:
            return "".join(self._lines)

    def stop(self) -> str:
        """Let running jobs end, wait until the worker has exited, and return its output."""
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
                    what = "ended" if self._has_ended else f"was not connected after {limit_s:g} s"
                    raise PenstockError(f"the worker {what}; it wrote:\n{''.join(self._lines)}")
                self._news.wait(left_s)


def _program() -> str:
    program = penstock_program()
    if program is None:
        raise PenstockError("the penstock executable is not there; install penstock again")
    return program


def _place_of(app: App) -> str:
    """Return the place where a worker finds this app: a module that can be imported, and its name there."""
    for module_name, module in [*sys.modules.items()]:
        if module_name != "__main__" and getattr(module, "__spec__", None) is not None:
            for name, value in [*vars(module).items()]:
                if value is app:
                    return f"{module_name}:{name}"
    raise PenstockError(
        f"no module has {app!r} at its top level, where a worker could import it; give its place as 'module:name'"
    )
