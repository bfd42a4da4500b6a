"""Planters, workers and a broker, all of which can be killed, and a judge of their books (tree_tasks.py)."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from crash import trees
from crash.storm import IN_ORDER, free_port, kill_at_once
from project import Process, Project, eventually

HERE = Path(__file__).parent

# Range of tree numbers for each planter.
EACH = 100_000


class Forest:
    workers = ("-c2", "-c1")
    # Far longer than a busy machine delays a process.
    heartbeat_s = 2

    def __init__(self, project: Project, chance: random.Random) -> None:
        self.project = project
        self.chance = chance
        self.seed = f"{chance.getrandbits(32):08x}"
        self.books = project.directory / "books"
        self.books.touch()
        self.kills: Counter[str] = Counter()
        self._url = f"tcp://127.0.0.1:{free_port()}"
        self._planters = 0
        self._workers: list[Process] = []
        self._server: Process | None = None
        self._planter: Process | None = None
        path = os.pathsep.join([str(project.directory), str(HERE)])
        project.environment.update(BOOKS=str(self.books), PYTHONPATH=path, PENSTOCK_URL=self._url)

    def heal(self) -> None:
        """Restart every dead process."""
        if self._server is None or self._server.returncode is not None:
            data = self.project.directory / "server"
            self._server = self.project.start("penstock", "server", "--listen", self._url, "--data", str(data))
        self._workers = [process for process in self._workers if process.returncode is None]
        for slots in self.workers[len(self._workers) :]:
            self._workers.append(self.project.worker("tree_tasks:app", slots, "--heartbeat", str(self.heartbeat_s)))
        if self._planter is None or self._planter.returncode is not None:
            script, first = HERE / "planter.py", self._planters * EACH
            self._planter = self.project.start(sys.executable, script, self.seed, str(first))
            self._planters += 1

    def wait_for(self, event: str, count: int) -> None:
        """Wait until this many more of these events are in the books."""
        size = self.books.stat().st_size
        needle = f'"event": "{event}"'.encode()

        def happened() -> int:
            with self.books.open("rb") as books:
                books.seek(size)
                return books.read().count(needle)

        eventually(lambda: happened() >= count, 90, self._outputs)

    def kill(self, what: str) -> None:
        match what:
            case "broker":
                assert self._server is not None
                pids = [self._server.pid]
            case "worker":
                pids = [self.chance.choice(self._workers).pid]
            case "child":
                processes = self.project.processes().items()
                children = [pid for pid, command in processes if "penstock._worker.zygote" in command]
                pids = self.chance.sample(children, min(1, len(children)))
            case _:
                assert self._planter is not None
                pids = [self._planter.pid]
        self.kills[what] += len(kill_at_once(pids))

    def end(self) -> Judgement:
        """Let all trees end, read the result of each, and judge."""
        self.heal()
        assert self._planter is not None
        self._planter.signal(signal.SIGTERM)
        assert self._planter.wait(120) in IN_ORDER, self._outputs()
        eventually(self._is_quiet, 120, lambda: f"{self.project.status()['queues']} {self._outputs()}")
        harvest = self.project.run(sys.executable, HERE / "harvest.py", timeout=600)
        assert harvest.returncode == 0, harvest.output
        for worker in self._workers:
            worker.signal(signal.SIGTERM)
        for worker in self._workers:
            # A worker whose zygote was killed while loading the app failed to start, and says so.
            started = "runs tree_tasks:app" in worker.output
            assert worker.wait() in (IN_ORDER if started else (*IN_ORDER, 1)), worker.output
        return judge(self.seed, self.books.read_text().splitlines())

    def _is_quiet(self) -> bool:
        queues = self.project.status()["queues"]
        return all(queue["ready"] == queue["delayed"] == queue["running"] == 0 for queue in queues)

    def _outputs(self) -> str:
        processes = [process for process in (self._server, self._planter, *self._workers) if process is not None]
        return "\n".join(process.output[-2000:] for process in processes)


@dataclass
class Judgement:
    confirmed: int = 0
    not_at_all: int = 0
    """Trees of killed planters that were not sent at all."""
    unconfirmed: int = 0
    """Trees of killed planters that ran."""
    succeeded: int = 0
    failed: int = 0
    runs: int = 0
    again: int = 0
    """Number of repeated runs of an attempt."""
    faults: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        counts = (
            f"{self.confirmed} trees confirmed, {self.unconfirmed} ran unconfirmed, {self.not_at_all} not at all;"
            f" {self.succeeded} succeeded, {self.failed} failed; {self.runs} runs, {self.again} of them again"
        )
        if not self.faults:
            return f"{counts}; all as evaluated, nothing settled twice or half sent"
        return "\n".join([counts, f"{len(self.faults)} faults:", *self.faults[:10]])


def judge(seed: str, lines: Iterable[str]) -> Judgement:
    """Compare the books with the evaluator's answer for each tree."""
    judgement = Judgement()
    books: dict[int, list[tuple[int, dict[str, Any]]]] = defaultdict(list)
    for place, line in enumerate(lines):
        entry = json.loads(line)
        number = entry["number"] if "number" in entry else int(entry["label"].partition(".")[0])
        books[number].append((place, entry))
    for number, entries in sorted(books.items()):
        tree = trees.draw(seed, number)
        judge_tree(judgement, number, trees.evaluate(tree), entries)
    return judgement


def judge_tree(
    judgement: Judgement, number: int, verdict: trees.Verdict, entries: list[tuple[int, dict[str, Any]]]
) -> None:
    def fault(text: str) -> None:
        judgement.faults.append(f"tree {number}: {text}")

    events: dict[str, list[dict[str, Any]]] = defaultdict(list)
    begins: dict[str, list[tuple[int, dict[str, Any]]]] = defaultdict(list)
    saw: list[tuple[int, str, str]] = []
    for place, entry in entries:
        events[entry["event"]].append(entry)
        if entry["event"] == "begin":
            begins[entry["label"]].append((place, entry))
        saw += [(place, label, run) for label, run in entry.get("saw", ())]
    judgement.runs += len(events["begin"])
    if not events["attempt"]:
        fault("it ran, and nobody sent it")
        return
    if not events["confirmed"]:
        if events["refused"] and begins:
            fault("it was refused for sure, and ran")
        if not begins and (verdict.calls or verdict.reduces):
            judgement.not_at_all += 1
            return
        judgement.unconfirmed += 1
    else:
        judgement.confirmed += 1
    for label in begins.keys() - verdict.calls.keys() - verdict.reduces.keys():
        fault(f"{label} ran, and must not: {begins[label][0][1]}")
    for label in verdict.calls.keys() - begins.keys():
        fault(f"{label} did not run")
    for label, ran in verdict.calls.items():
        judgement.again += judge_call(fault, label, ran, begins.get(label, []))
    for label, all_run in verdict.reduces.items():
        if all_run and label not in begins:
            fault(f"{label}, a reduce, did not run")
    judge_runs(fault, begins, saw)
    if events["confirmed"]:
        judge_result(fault, verdict, events)
        judgement.succeeded += bool(events["result"])
        judgement.failed += bool(events["failed"])


def judge_call(fault: Any, label: str, ran: trees.Ran, begins: list[tuple[int, dict[str, Any]]]) -> int:
    """Judge the runs of a call. Returns the number of attempts that began again."""
    jobs: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for _, entry in begins:
        jobs[entry["job"]].append(entry)
    if begins and len(jobs) != ran.jobs:
        fault(f"{label} was {len(jobs)} jobs, not {ran.jobs}")
    again = 0
    for runs in jobs.values():
        attempts = [entry["attempt"] for entry in runs]
        again += len(attempts) - len(set(attempts))
        if sorted(set(attempts)) != list(range(1, ran.attempts + 1)):
            fault(f"{label} had the attempts {attempts}, not {ran.attempts}")
        if attempts != sorted(attempts):
            fault(f"{label} had its attempts in the order {attempts}")
    for _, entry in begins:
        named = {name for text in entry["failures"] for name in trees.named_in(text)}
        if not named <= ran.roots:
            fault(f"{label} got the failures {sorted(named)}, not {sorted(ran.roots)}")
        if bool(entry["failures"]) != bool(ran.roots):
            fault(f"{label} got the failures {entry['failures']}, not {sorted(ran.roots)}")
        if ran.value is not None and not ran.value.startswith(label + ":"):
            continue  # A leaf, which gets no values.
        pad = int(ran.value.rpartition("+")[2]) if ran.value else 0
        if ran.value is not None and trees.pure(label, ran.attempts, entry["given"], pad) != ran.value:
            fault(f"{label} was given {entry['given']}")
    return again


def judge_runs(
    fault: Any, begins: dict[str, list[tuple[int, dict[str, Any]]]], saw: list[tuple[int, str, str]]
) -> None:
    """Check that a job was settled once: all readers saw the result of one run, and it did not run again."""
    # An errback of several members, or a reduce, is several jobs with one label; a chunk is one job with several
    # labels.
    run_of = {entry["run"]: (label, entry["job"], place) for label in begins for place, entry in begins[label]}
    read: dict[tuple[str, str], set[str]] = defaultdict(set)
    first: dict[tuple[str, str], int] = {}
    for place, label, run in saw:
        if run not in run_of:
            fault(f"{label} has a result of no run: {run}")
            continue
        call = run_of[run][:2]
        read[call].add(run)
        first.setdefault(call, place)
    for label, job, place in run_of.values():
        runs = read[label, job]
        if len(runs) > 1:
            fault(f"{label} has {len(runs)} results: {runs}")
        if runs and place > first[label, job]:
            fault(f"{label} began again after its result was read")


def judge_result(fault: Any, verdict: trees.Verdict, events: dict[str, list[dict[str, Any]]]) -> None:
    expected = verdict.result
    for stuck in events["stuck"]:
        fault(f"it did not end: {stuck}")
    if isinstance(expected, trees.Failed):
        for entry in events["result"]:
            fault(f"it has the result {entry['value']}, and must fail for {sorted(expected.roots)}")
        for entry in events["failed"]:
            if not set(entry["labels"]) <= expected.roots or not entry["count"]:
                fault(f"it failed for {entry['labels']}, not for {sorted(expected.roots)}: {entry['told']}")
        return
    for entry in events["failed"]:
        fault(f"it failed, and must not: {entry['told']}")
    for entry in events["result"]:
        if entry["value"] != trees.shown(expected):
            fault(f"it has the result {entry['value']}, not {trees.shown(expected)}")
    if not events["result"] and not events["failed"] and not events["stuck"]:
        fault("nobody has read its result")
