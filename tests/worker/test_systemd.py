"""Notifications from a worker to the service manager that started it."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from project import Project, eventually

SOURCE = """
    import os
    from penstock import App

    app = App("service")

    @app.task
    def variables() -> list[str]:
        return sorted(name for name in os.environ if name in ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"))
"""


class Manager:
    """The socket of a service manager, with the received notifications."""

    def __init__(self, address: str) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(address)
        self.socket.settimeout(60)
        self.heard: list[str] = []

    def hear(self, text: str) -> str:
        """Wait for a line with this beginning; a line received earlier counts too."""
        while not (found := [line for line in self.heard if line.startswith(text)]):
            self.heard.append(self.socket.recv(4096).decode())
        return found[0]


@pytest.fixture(params=["a path", "an abstract name"])
def manager(project: Project, request: pytest.FixtureRequest) -> Iterator[tuple[Manager, str]]:
    name = str(project.directory / "notify")
    is_path = request.param == "a path"
    listening = Manager(name if is_path else f"\0{name}")
    with listening.socket:
        yield listening, name if is_path else f"@{name}"


def test_it_says_that_it_is_ready_that_it_lives_and_that_it_stops(
    project: Project, manager: tuple[Manager, str]
) -> None:
    listening, address = manager
    project.write("service.py", SOURCE)
    service = project.tasks("service.py")
    running = project.worker("service:app", "-c", "2", NOTIFY_SOCKET=address, WATCHDOG_USEC="200000")
    listening.hear("READY=1")
    assert "is connected and runs" in running.output
    assert listening.heard.count("READY=1") == 1
    job = service.variables.delay()
    assert listening.hear("STATUS=running service:app: ").endswith(f"broker: {project.url}")
    for _ in range(3):
        listening.heard.clear()
        listening.hear("WATCHDOG=1")
    assert job.result(timeout=30) == [], "jobs do not speak for the service"
    running.signal(signal.SIGTERM)
    listening.hear("STOPPING=1")
    assert running.wait(30) == 0
    assert "READY=1" not in listening.heard


def test_a_manager_that_does_not_read_holds_nothing_up(project: Project) -> None:
    project.write("service.py", SOURCE)
    service = project.tasks("service.py")
    address = str(project.directory / "notify")
    listening = Manager(address)
    with listening.socket, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probe:
        running = project.worker("service:app", "-c", "1", NOTIFY_SOCKET=address, WATCHDOG_USEC="2000")
        probe.setblocking(False)

        def is_full() -> bool:
            try:
                probe.sendto(b"STATUS=", address)
            except BlockingIOError:
                return True
            return False

        # Each try also takes up a place in the socket's queue.
        eventually(is_full, 60)
        assert service.variables.delay().result(timeout=30) == []
        running.signal(signal.SIGTERM)
        assert running.wait(30) == 0


def test_a_watchdog_of_another_process_and_a_manager_that_is_gone_are_left_alone(project: Project) -> None:
    project.write("service.py", SOURCE)
    service = project.tasks("service.py")
    gone = str(project.directory / "gone")
    running = project.worker("service:app", "-c", "1", NOTIFY_SOCKET=gone, WATCHDOG_USEC="1000")
    assert service.variables.delay().result(timeout=30) == []
    assert "WARN" not in running.output
    running.signal(signal.SIGTERM)
    assert running.wait(30) == 0
    listening = Manager(str(project.directory / "notify"))
    with listening.socket:
        other = project.worker(
            "service:app", "--burst",
            NOTIFY_SOCKET=str(project.directory / "notify"), WATCHDOG_USEC="1000", WATCHDOG_PID=str(os.getppid()),
        )  # fmt: skip
        assert other.wait(30) == 0
        listening.hear("STOPPING=1")
        assert "WATCHDOG=1" not in listening.heard
    Path(gone).unlink(missing_ok=True)
