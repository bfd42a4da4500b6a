"""Project under load in which every process can be killed, with its books."""

from __future__ import annotations

import os
import random
import signal
import socket
import sys
from pathlib import Path

from crash.checker import Verdict, judge_file
from project import Process, Project, eventually, pidfd

HERE = Path(__file__).parent

TASKS = """
    import time

    import books
    from penstock import App

    # No call fails while its broker is killed: the next one is there long before this.
    app = App("crash", call_timeout=30)


    @app.task(max_crashes=255)
    def work(label: str) -> str:
        return books.begin(label)

    @app.task(max_crashes=255)
    def slow(label: str, seconds: float) -> str:
        run = books.begin(label)
        time.sleep(seconds)
        return run

    @app.task(max_crashes=255, retries=3, backoff=0.05)
    def flaky(label: str) -> str:
        from penstock import current_job

        run = books.begin(label)
        if current_job().attempt == 1:
            raise OSError("try again")
        return run
"""

# Or the signal came before the process had installed its handler; then it had not done anything yet.
IN_ORDER = (0, -signal.SIGTERM)


class Storm:
    """Producers, workers, a reader, and a broker: a hidden one (``local:``), or a server at ``server_url`` that clients
    and workers reach ``through`` another URL."""

    producers = 2
    threads = 4
    workers = ("-c2", "-c3")
    # Far longer than a busy machine delays a process.
    heartbeat_s = 3

    def __init__(
        self,
        project: Project,
        chance: random.Random,
        server_url: str | None = None,
        data: Path | None = None,
        through: str | None = None,
    ) -> None:
        self.project = project
        self.chance = chance
        self.seed = f"{chance.getrandbits(32):08x}"
        self.books = project.directory / "books"
        self.books.touch()
        self.kills = 0
        self._server_url = server_url
        self._data = data or project.directory / "server"
        self._server: Process | None = None
        project.write("tasks.py", TASKS)
        path = os.pathsep.join([str(project.directory), str(HERE)])
        project.environment.update(BOOKS=str(self.books), PYTHONPATH=path)
        if server_url:
            project.environment["PENSTOCK_URL"] = through or server_url
        self._born = 0
        self._producers: list[Process] = []
        self._workers: list[Process] = []

    def begin(self) -> None:
        self.heal()
        self.reader = self.project.start(sys.executable, HERE / "reader.py")

    def heal(self) -> None:
        """Restart every dead process, except the hidden broker, which its clients start."""
        if self._server_url and (self._server is None or self._server.returncode is not None):
            self._server = self.project.start(
                "penstock", "server", "--listen", self._server_url, "--data", str(self._data)
            )
        self._producers = [process for process in self._producers if process.returncode is None]
        while len(self._producers) < self.producers:
            self._born += 1
            name = f"p{self._born}"
            script = HERE / "producer.py"
            self._producers.append(self.project.start(sys.executable, script, name, str(self.threads), self.seed))
        self._workers = [process for process in self._workers if process.returncode is None]
        for slots in self.workers[len(self._workers) :]:
            self._workers.append(self.project.worker("tasks:app", slots, "--heartbeat", str(self.heartbeat_s)))

    def wait_for_confirms(self, count: int) -> None:
        """Wait until this many more calls were confirmed, so that the load is back."""
        mark = self.mark()
        eventually(
            lambda: self.confirms_since(mark) >= count,
            60,
            lambda: "\n".join(process.output for process in self._producers),
        )

    def server(self) -> Process:
        assert self._server is not None
        return self._server

    def mark(self) -> int:
        return self.books.stat().st_size

    def confirms_since(self, mark: int) -> int:
        with self.books.open("rb") as books:
            books.seek(mark)
            return books.read().count(b"\nconfirmed ")

    def broker_pid(self) -> int | None:
        if self._server_url:
            return None if self._server is None or self._server.returncode is not None else self._server.pid
        return self.project.broker_pid()

    def children(self) -> list[int]:
        """Return the processes of all workers except supervisors: zygotes and children."""
        return [pid for pid, command in self.project.processes().items() if "penstock._worker.zygote" in command]

    def kill(self, what: str) -> None:
        match what:
            case "broker":
                victims = [self.broker_pid()]
            case "supervisor":
                victims = [self.chance.choice(self._workers).pid]
            case "child":
                victims = self.chance.sample(self.children(), 1)
            case "producer":
                victims = [self.chance.choice(self._producers).pid]
            case _:
                processes = [*self._workers, *self._producers]
                victims = [self.broker_pid(), *self.children(), *(process.pid for process in processes)]
                self.chance.shuffle(victims)
        self.kills += len(kill_at_once([victim for victim in victims if victim is not None]))

    def end(self) -> Verdict:
        """Let everything finish, read the result of every job, and judge."""
        self.heal()
        for producer in self._producers:
            producer.signal(signal.SIGTERM)
        for producer in self._producers:
            assert end_of(producer) in IN_ORDER, producer.output
        self.reader.signal(signal.SIGTERM)
        assert self.reader.wait(60) == 0, self.reader.output
        eventually(self._is_empty, 90, lambda: str(self.project.status()["queues"]))
        every = self.project.run(sys.executable, HERE / "reader.py", "all", timeout=300)
        assert every.returncode == 0, every.output
        for worker in self._workers:
            worker.signal(signal.SIGTERM)
        for worker in self._workers:
            # A worker whose zygote was killed while loading the app failed to start, and says so.
            started = "runs tasks:app" in worker.output
            assert worker.wait() in (IN_ORDER if started else (*IN_ORDER, 1)), worker.output
        return judge_file(self.books)

    def _is_empty(self) -> bool:
        queues = self.project.status()["queues"]
        return all(queue["ready"] == queue["delayed"] == queue["running"] == 0 for queue in queues)


def end_of(process: Process) -> int:
    try:
        return process.wait(60)
    except AssertionError:
        process.signal(signal.SIGUSR1)
        eventually(lambda: "Thread" in process.output)
        raise AssertionError(f"it hangs: {process.output}") from None


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


def kill_at_once(pids: list[int]) -> list[int]:
    """Kill the processes with -9 in this order, wait until they are gone, and return those that still existed."""
    watches = []
    try:
        for pid in pids:
            try:
                watch = pidfd(pid)
            except ProcessLookupError:
                continue  # it died with another one
            watches.append((pid, watch))
            os.kill(pid, signal.SIGKILL)
        for _, watch in watches:
            watch.wait(60)
    finally:
        for _, watch in watches:
            os.close(watch.fd)
    return [pid for pid, _ in watches]
