"""Fixtures that every folder of tests can use."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from project import MARK, Project

# What ignores a signal passes that on to all that it starts: `nohup` ignores hang-ups, and a shell without job
# control lets what it starts in the background ignore Ctrl-C. Workers under test would rightly do so too.
for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGCHLD):
    signal.signal(number, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def project(monkeypatch: pytest.MonkeyPatch) -> Iterator[Project]:
    """A fresh project with a local broker of its own; this process enqueues to it too."""
    with Project.fresh() as project:
        monkeypatch.setenv("PENSTOCK_URL", project.url)
        # A broker that this very process starts carries the mark too.
        monkeypatch.setenv(MARK, project.mark)
        yield project


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--passed", type=Path, help="write the ids of the tests that passed to this file")


class Passed:
    def __init__(self, file: Path) -> None:
        self.file = file
        self.ids: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and report.passed:
            self.ids.append(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        self.file.write_text("".join(f"{test}\n" for test in sorted(self.ids)))


def pytest_configure(config: pytest.Config) -> None:
    # With several processes, the one that hands out the tests hears of all of them.
    if (file := config.getoption("--passed")) and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Passed(file))
