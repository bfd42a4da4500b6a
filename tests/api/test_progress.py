"""Progress of jobs in test doubles, and its drawing."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Callable
from typing import Any

import pytest

from penstock import App, Progress, ResultTimeout, current_job
from penstock._jobs.progress import Drawing
from penstock.testing import capture, inline, worker


@pytest.fixture
def app() -> App:
    return App("shop")


def with_task(app: App) -> Any:
    @app.task
    def fetch(count: int) -> Progress | None:
        job = current_job()
        assert job is not None
        for number in range(count):
            job.progress(number + 1, count, "fetching")
        return app.job(job.id).progress()

    return fetch


@pytest.mark.parametrize("double", [inline, worker])
def test_doubles_keep_it_as_a_broker_does(double: Callable[..., Any], app: App) -> None:
    fetch = with_task(app)
    with double(app):
        job = fetch.delay(100)
        # The job itself sees it, too.
        assert job.result(timeout=30) == job.progress() == Progress(100, 100, "fetching")
        assert list(job.progress_updates()) == [Progress(100, 100, "fetching")]
        assert job.wait(progress=True) == "succeeded"
        assert app.job("0" * 32).progress() is None

        async def ask() -> tuple[Progress | None, list[Progress]]:
            return await job.aprogress(), [progress async for progress in job.progress_updates()]

        assert asyncio.run(ask()) == (Progress(100, 100, "fetching"), [Progress(100, 100, "fetching")])


def test_a_job_that_nothing_will_end_is_not_watched_for_ever(app: App) -> None:
    with capture(app):
        job = with_task(app).delay(1)
        with pytest.raises(ResultTimeout):
            list(job.progress_updates())
        with pytest.raises(ResultTimeout):
            job.wait(progress=True)


def test_a_long_message_is_shortened(app: App) -> None:
    @app.task
    def fetch() -> None:
        job = current_job()
        assert job is not None
        job.progress(1.5, None, "x" * 100_000)

    with inline(app):
        progress = fetch.delay().progress()
        assert progress is not None
        assert progress.done == 1.5 and progress.total is None and progress.fraction is None
        assert progress.message.endswith("x…") and 3500 < len(progress.message) < 4096


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_has_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    terminal = Terminal()
    drawing = Drawing("job 1", terminal)
    drawing.show(None)
    drawing.show(Progress(3, 10, "fetching \x1b[31mred\n"))
    drawing.show(None)
    drawing.end("succeeded")
    shown = terminal.getvalue().split("\r")
    assert shown[1] == "job 1: 0 s\x1b[K"
    bar = "#" * 9 + "-" * 21
    assert shown[2] == shown[3] == f"job 1 [{bar}] 3 of 10 (30 %): fetching  [31mred , 0 s\x1b[K"
    assert shown[4] == "job 1: succeeded after 0 s\x1b[K\n"
    monkeypatch.setenv("COLUMNS", "20")
    drawing.show(Progress(3, None, "fetching everything there is"))
    assert terminal.getvalue().endswith("\rjob 1: 3: fetching…\x1b[K")


def test_without_a_terminal_there_is_a_line_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("penstock._jobs.progress.time.monotonic", lambda: now)
    file = io.StringIO()
    drawing = Drawing("job 1", file)
    for step in range(25):
        drawing.show(Progress(step, 25, ""))
        now += 1
    drawing.end("failed")
    assert file.getvalue().splitlines() == [
        "job 1: 0 of 25 (0 %)",
        "job 1: 10 of 25 (40 %)",
        "job 1: 20 of 25 (80 %)",
        "job 1: failed after 25 s",
    ]
