"""Fixtures shared by all folders of tests."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import hypothesis.configuration
import pytest
from guarantees import SKIPPED
from project import MARK, Project

ROOT = Path(__file__).parent.parent

# Each run uses the same examples, so that a failure means something broke; `make soak` draws others.
hypothesis.configuration.set_hypothesis_home_dir(ROOT / ".ran" / "hypothesis")
hypothesis.settings.register_profile("fixed", derandomize=True, database=None)
hypothesis.settings.register_profile("drawn", database=None, max_examples=2_000)
hypothesis.settings.load_profile("fixed")

# Ignored signals are inherited: `nohup` ignores hang-ups, and a shell without job control makes background jobs ignore
# Ctrl-C. Workers under test would rightly ignore them, too.
for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGCHLD):
    signal.signal(number, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def project(monkeypatch: pytest.MonkeyPatch) -> Iterator[Project]:
    """Provide a fresh project with its own local broker, to which this process can also enqueue."""
    with Project.fresh() as project:
        monkeypatch.setenv("PENSTOCK_URL", project.url)
        # A broker that this process starts carries the mark, too.
        monkeypatch.setenv(MARK, project.mark)
        yield project


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--passed", type=Path, help="write the ids of the tests that passed, or were skipped, to this file"
    )


class Passed:
    def __init__(self, file: Path) -> None:
        self.file = file
        self.lines: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and report.passed:
            self.lines.append(f"{report.nodeid}\n")
        elif report.skipped:
            self.lines.append(f"{SKIPPED}{report.nodeid}\n")

    def pytest_sessionfinish(self) -> None:
        self.file.write_text("".join(sorted(self.lines)))


class Checkout:
    """Fails a run whose tests wrote into the checkout, except to files that git ignores or that are allowed."""

    def __init__(self) -> None:
        self.before = self.files()
        self.changed: list[str] = []

    @staticmethod
    def files() -> dict[str, tuple[int, int]]:
        found = {}
        for place, folders, names in os.walk(ROOT):
            if place == str(ROOT):
                # Files of the build, and those that runs leave there on purpose.
                folders[:] = [name for name in folders if name not in {".git", ".venv", "target", ".ran"}]
            for name in names:
                state = os.lstat(os.path.join(place, name))
                found[os.path.relpath(os.path.join(place, name), ROOT)] = (state.st_mtime_ns, state.st_size)
        return found

    # Runs after all others, because the list of passed tests is written then.
    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        self.changed = sorted(name for name, _ in self.before.items() ^ self.files().items())
        if self.changed and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.changed:
            terminalreporter.section("tests have changed the checkout", red=True)
            terminalreporter.line("\n".join(dict.fromkeys(self.changed)))


def pytest_configure(config: pytest.Config) -> None:
    # With several processes, the one that distributes the tests receives all reports.
    if hasattr(config, "workerinput"):
        return
    if file := config.getoption("--passed"):
        config.pluginmanager.register(Passed(file))
    # Outside of CI somebody may edit the files while the tests run.
    if os.environ.get("CI") == "true":
        config.pluginmanager.register(Checkout())
