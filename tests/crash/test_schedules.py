"""kill -9 of broker and workers while schedules fire each second: each time has a job or none, as its policy says."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from crash.cycles import Cycles
from crash.storm import kill_at_once
from project import Process, Project, eventually

from penstock import App, ScheduleInfo

TASKS = """
    import os
    import time
    from pathlib import Path

    from penstock import App, current_job

    app = App("shop")
    ledger = Path(__file__).parent / "ledger"


    def note(word: str, schedule: str) -> None:
        line = f"{word} {schedule} {current_job().id} {time.time()}\\n"
        file = os.open(ledger, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(file, line.encode())
        os.close(file)


    @app.task(max_crashes=100)
    def poll(schedule: str, seconds: float) -> None:
        note("begin", schedule)
        time.sleep(seconds)
        note("end", schedule)
"""

# Seconds of a run, and the policies.
SCHEDULES: dict[str, tuple[float, dict[str, Any]]] = {
    "quick": (0.05, {}),
    "skip": (1.3, {"overlap": "skip"}),
    "queue": (1.3, {"overlap": "queue"}),
    "cancel": (1.3, {"overlap": "cancel_previous"}),
    "allow": (0.4, {"overlap": "allow", "catchup": "all"}),
    "lenient": (0.05, {"catchup": "skip"}),
}


@dataclass
class Run:
    job: str
    begun: float
    ended: float | None = None

    @property
    def time_ms(self) -> int:
        """Time for which the job was created: its id begins with it."""
        return int(self.job.replace("-", "")[:12], 16)


def runs_of(project: Project) -> dict[str, list[Run]]:
    found: dict[str, list[Run]] = {name: [] for name in SCHEDULES}
    open_runs: dict[str, Run] = {}
    for line in (project.directory / "ledger").read_text().splitlines():
        word, schedule, job, at = line.split()
        if word == "begin":
            open_runs[job] = Run(job, float(at))
            found[schedule].append(open_runs[job])
        elif job in open_runs:
            open_runs.pop(job).ended = float(at)
    return found


@pytest.mark.timeout(7200)
def test_each_time_is_decided_once_through_kills_of_anything(project: Project, cycles: Cycles) -> None:
    chance = cycles.chance("schedules")
    kills = cycles.of(8, 1000)
    project.write("tasks.py", TASKS)
    tasks = project.tasks()
    app: App = tasks.app
    first: dict[str, datetime] = {}
    for name, (seconds, policy) in SCHEDULES.items():
        app.schedules.set(name, tasks.poll.s(name, seconds), every=1, **policy)
        first[name] = schedule(app, name).next[0]
    hits: Counter[str] = Counter()
    worker = start(project)
    ledger = project.directory / "ledger"
    for _ in range(kills):
        # Wait until jobs run again, then until a random moment of a second, and sometimes much longer.
        wait_for_a_job(ledger, worker)
        time.sleep(chance.choice((chance.uniform(0, 1), chance.uniform(0, 1), chance.uniform(1, 3))))
        victim = chance.choice(("broker", "broker", "supervisor", "child", "broker and supervisor"))
        hits[victim] += 1
        victims: list[int | None] = []
        if "broker" in victim:
            victims.append(project.broker_pid())
        if "supervisor" in victim:
            victims.append(worker.pid)
        if "child" in victim:
            # Kills a child, or the zygote, whose death ends the worker.
            children = [pid for pid, words in project.processes().items() if "penstock._worker.zygote" in words]
            victims += chance.sample(children, min(1, len(children)))
        kill_at_once([pid for pid in victims if pid is not None])
        worker = alive(project, worker)
    # Another time has come, and all created jobs have ended.
    last = {name: decided(schedule(app, name)) for name in SCHEDULES}
    for name in SCHEDULES:
        eventually(lambda name=name: decided(schedule(app, name)) > last[name], 60)
        app.schedules.pause(name)

    def is_over() -> bool:
        nonlocal worker
        # A worker whose zygote was killed exits a little later.
        worker = alive(project, worker)
        return not any(schedule(app, name).running for name in SCHEDULES)

    eventually(is_over, 120, lambda: worker.output)
    runs = runs_of(project)
    for name, (_, policy) in SCHEDULES.items():
        info = schedule(app, name)
        start_ms = round(first[name].timestamp() * 1000)
        times = round((decided(info) - first[name]).total_seconds()) + 1
        made = {run.job for run in runs[name]}
        run_times = {run.time_ms for run in runs[name]}
        assert all((each - start_ms) % 1000 == 0 for each in run_times), (name, start_ms, sorted(run_times))
        assert len(run_times) == len(made), f"{name}: a time has had two jobs"
        # A time that waits for the end of the previous job may be the last one.
        assert info.fired + info.skipped + info.missed - times in ((0, -1) if info.queued else (0,)), (
            name,
            info,
            times,
        )
        if policy.get("overlap") == "cancel_previous":
            # A job may be cancelled before it has begun.
            assert len(made) <= info.fired, (name, info)
        else:
            assert len(made) == info.fired, (name, info, sorted(run_times))
        if policy.get("overlap") != "allow":
            one_at_a_time(name, runs[name])
    listed = {name: schedule(app, name) for name in SCHEDULES}
    words = ", ".join(f"{name} {info.fired}+{info.skipped}+{info.missed}" for name, info in listed.items())
    cycles.report(f"{kills} kills ({dict(hits)}); fired+skipped+missed: {words}")


def wait_for_a_job(ledger: Path, worker: Process) -> None:
    known = ledger.stat().st_size if ledger.exists() else 0
    eventually(lambda: ledger.exists() and ledger.stat().st_size > known, 60, lambda: worker.output)


def alive(project: Project, worker: Process) -> Process:
    """Return the worker, or a new one if it has exited."""
    return worker if worker.returncode is None else start(project)


def start(project: Project) -> Process:
    return project.worker("tasks:app", "-c", "3")


def schedule(app: App, name: str) -> ScheduleInfo:
    info = app.schedules.get(name)
    assert info is not None, f"schedule {name} is lost"
    return info


def decided(info: ScheduleInfo) -> datetime:
    """Return the last time that was decided."""
    times = [at for at in (info.last_at, info.skipped_at) if at is not None]
    return max(times, default=datetime.min.replace(tzinfo=info.next[0].tzinfo if info.next else None))


def one_at_a_time(name: str, runs: list[Run]) -> None:
    whole = sorted((run for run in runs if run.ended is not None), key=lambda run: run.begun)
    for before, after in pairwise(whole):
        assert before.job == after.job or (before.ended or 0) <= after.begun, f"{name}: {before} and {after} overlap"
