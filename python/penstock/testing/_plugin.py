"""pytest plugin: fixtures, a marker, and a guard against tests that enqueue real jobs by mistake.

pytest loads it in every run, so it imports almost nothing before a test needs it.
"""

from __future__ import annotations

import os
import sys

import pytest

from penstock import _guard

TYPE_CHECKING = False

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from penstock._tasks.app import App
    from penstock.testing import Calls, CapturedCalls, Clock, Server, WorkerCalls


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addini(
        "penstock_guard",
        "refuse tests that would use a real broker and are not marked penstock_broker (default: true)",
        type="bool",
        default=True,
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "penstock_broker: lets apps of the test use their real brokers")
    if config.getini("penstock_guard"):
        config.pluginmanager.register(_Guard(), "penstock-guard")


class _Guard:
    """Allows an app to connect in this process only if it names its broker, or the test is marked."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._test: str | None = None
        self._is_marked = False
        # State of the surrounding run, if this run is a test of a plugin.
        self._before = _guard.may_connect
        _guard.may_connect = self._may_connect

    def pytest_unconfigure(self) -> None:
        _guard.may_connect = self._before

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        self._test = item.nodeid
        self._mark(item.get_closest_marker("penstock_broker") is not None)

    # Last, so that it runs after the teardown of the test's fixtures.
    @pytest.hookimpl(trylast=True)
    def pytest_runtest_teardown(self) -> None:
        self._test = None
        self._mark(False)

    def _mark(self, is_marked: bool) -> None:
        if is_marked != self._is_marked:
            self._is_marked = is_marked
            # Apps ask only when they connect, and would otherwise keep their existing connections.
            connection = sys.modules.get("penstock._connection")
            if connection is not None:
                connection.start_over()

    def _may_connect(self, app: App) -> None:
        # A forked child counts as another process, like any that a test starts by other means. A broker in memory is
        # not a real one, even if the app does not name it.
        is_named = app._given_url is not None or app.url.startswith("memory:")
        if self._is_marked or is_named or os.getpid() != self._pid:
            return
        from penstock.testing import BrokerNotAllowed

        culprit = self._test or "code outside of any test, such as a module that is being imported,"
        raise BrokerNotAllowed(
            f"{culprit} would use the real broker of {app!r}, and nothing allows that; nothing was sent. Give the"
            " test the fixture penstock_inline (jobs run at once), penstock_capture (they are recorded),"
            " penstock_worker (they run in threads) or penstock_server (in real processes). Or allow real brokers: mark"
            " it @pytest.mark.penstock_broker, give the App a url, or set penstock_guard = false in pytest's"
            " configuration"
        )


@pytest.fixture
def penstock_inline() -> Iterator[Calls]:
    """Run every job inside the call that enqueues it: ``penstock.testing.inline`` for all apps. Returns the calls."""
    from penstock.testing import inline

    with inline() as calls:
        yield calls


@pytest.fixture
def penstock_capture() -> Iterator[CapturedCalls]:
    """Record jobs without running them: ``penstock.testing.capture`` for all apps. Returns the calls."""
    from penstock.testing import capture

    with capture() as calls:
        yield calls


@pytest.fixture
def penstock_worker() -> Iterator[WorkerCalls]:
    """Run jobs in two threads: ``penstock.testing.worker`` for all apps. Returns the calls."""
    from penstock.testing import worker

    with worker() as calls:
        yield calls


@pytest.fixture
def penstock_clock() -> Clock:
    """Control the clock of all in-memory brokers, which delays, retries, schedules, expiry and kept results follow."""
    from penstock.testing import Clock

    return Clock()


@pytest.fixture
def penstock_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """Run a real broker process for the test, which all apps use. Start real workers with ``Server.start_worker``."""
    from penstock.testing import Server

    with Server(tmp_path / ".penstock") as server:
        # Also sets the URL for programs that the test starts.
        monkeypatch.setenv("PENSTOCK_URL", server.url)
        yield server
