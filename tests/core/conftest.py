"""Fixtures for tests of the compiled client alone, against a real local broker."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
from project import Project, suspend

import penstock
from penstock import _core

PROGRAM = str(Path(penstock.__file__).with_name("_bin") / "penstock")


@pytest.fixture
def new_client(project: Project) -> Iterator[Callable[[], _core.Client]]:
    """Return a factory of clients of the project's broker; they are closed at the end of the test."""
    clients: list[_core.Client] = []

    def make() -> _core.Client:
        clients.append(_core.Client(project.url, program=PROGRAM, name="test"))
        return clients[-1]

    yield make
    for client in clients:
        client.close(5.0)


@pytest.fixture
def client(new_client: Callable[[], _core.Client]) -> _core.Client:
    return new_client()


@pytest.fixture
def stopped_broker(project: Project) -> Callable[[], AbstractContextManager[None]]:
    """Suspend the broker's process for a while: it exists, but does not answer."""

    @contextmanager
    def stop() -> Iterator[None]:
        pid = project.broker_pid()
        assert pid is not None
        suspend(pid)
        try:
            yield
        finally:
            os.kill(pid, signal.SIGCONT)

    return stop
