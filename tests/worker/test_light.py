"""Waiting slots use little memory, in their own process and in the supervisor."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest
from project import Process, Project

APP = """
    import asyncio, time
    from penstock import App

    app = App("light")

    @app.task(slot="async")
    async def on_a_loop() -> None:
        await asyncio.sleep(0.02)

    @app.task(slot="thread")
    def in_a_thread() -> None:
        time.sleep(0.02)
"""
JOBS = 1_200
FEWER, MORE = 100, 1_100
HUGE_PAGE_BYTES = 2 << 20


def descendants(pid: int) -> list[int]:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *(found for child in children for found in descendants(int(child)))]


def bytes_of(field: str, pids: list[int]) -> int:
    rolled_up = "".join(Path(f"/proc/{pid}/smaps_rollup").read_text() for pid in pids)
    return sum(1024 * int(kilobytes) for kilobytes in re.findall(rf"^{field}: +([0-9]+) kB", rolled_up, re.MULTILINE))


@pytest.fixture
def light(project: Project) -> Project:
    project.write("light.py", APP)
    # A broker started by the worker would count towards its memory.
    server = project.start("penstock", "server", "--listen", f"unix:{project.directory}/socket", "--data", project.data)
    server.wait_for_output("listening")
    project.environment["PENSTOCK_URL"] = f"unix:{project.directory}/socket"
    return project


def after_many_jobs(light: Project, task: str, *options: str) -> Process:
    worker = light.worker("light:app", *options)
    program = f"import light; [job.result(timeout=120) for job in light.{task}.starmap([()] * {JOBS})]"
    run = light.run("python", "-c", program, timeout=180)
    assert run.returncode == 0, f"{run.output}\n{worker.output}"
    return worker


@pytest.mark.parametrize(
    ("task", "option", "most_bytes"), [("on_a_loop", "--async", 8_000), ("in_a_thread", "--threads", 64_000)]
)
def test_a_slot_more_takes_little_memory(light: Project, task: str, option: str, most_bytes: int) -> None:
    taken = []
    for slots in (FEWER, MORE):
        worker = after_many_jobs(light, task, "-c", "1", option, str(slots))
        taken.append(bytes_of("Pss", descendants(worker.pid)))
        worker.signal(signal.SIGTERM)
        assert worker.wait() == 0, worker.output
    assert taken[1] - taken[0] <= (MORE - FEWER) * most_bytes


def test_a_supervisor_has_no_huge_pages(light: Project) -> None:
    fewer = after_many_jobs(light, "on_a_loop", "--async", "4")
    # Three exist before the supervisor can opt out of huge pages; fewer if the kernel has none available.
    at_its_start = max(bytes_of("AnonHugePages", [fewer.pid]), 3 * HUGE_PAGE_BYTES)
    fewer.signal(signal.SIGTERM)
    assert fewer.wait() == 0, fewer.output
    worker = after_many_jobs(light, "on_a_loop", "--async", "400")
    assert bytes_of("AnonHugePages", [worker.pid]) <= at_its_start + HUGE_PAGE_BYTES
