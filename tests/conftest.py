"""Fixtures that every folder of tests can use."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from project import MARK, Project

# Whoever started the tests may have been started by `nohup`, and what ignores a hang-up says so to all
# that it starts: then workers would rightly ignore it too.
signal.signal(signal.SIGHUP, signal.SIG_DFL)


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
