"""Judges the books of a test by force (books.py) once everything has been drained.

The checker is Jepsen's `total-queue` (attempted, acknowledged and delivered jobs, as multisets: which are lost,
unexpected, duplicated or recovered; https://github.com/jepsen-io/jepsen, jepsen.checker), with the further duties of a
task queue: jobs that are resurrected, forked, stuck, early, torn, out of order, or duplicated without a flag.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from pathlib import Path

# Producer, broker and task each round times down to a millisecond, and a restarted broker reads two clocks.
ROUNDING_MS = 2


@dataclass
class Run:
    """Run of a task's function."""

    job: str
    attempt: int
    crashes: int
    redelivered: bool
    at_ms: int
    name: str


@dataclass
class Verdict:
    # Counts for the report.
    attempted: int = 0
    acknowledged: int = 0
    delivered: int = 0
    recovered: int = 0
    """Jobs that ran although their producer got no answer, or an uncertain one."""
    duplicated: int = 0
    """Attempts that began more than once, each time except the first with a flag."""
    failed_calls: int = 0
    # Faults.
    lost: list[str] = field(default_factory=list)
    """Jobs that were acknowledged but never delivered."""
    unexpected: list[str] = field(default_factory=list)
    """Jobs that were delivered but never attempted, or delivered after a certain refusal."""
    resurrected: list[str] = field(default_factory=list)
    """Jobs that began again after their result was seen, or after a later attempt had begun."""
    forked: list[str] = field(default_factory=list)
    """Jobs that showed two results, or a result that none of their runs returned."""
    stuck: list[str] = field(default_factory=list)
    """Jobs that were accepted, but have no result after everything was healed and drained."""
    early: list[str] = field(default_factory=list)
    torn: list[str] = field(default_factory=list)
    """Batches of which only a part was accepted."""
    unflagged: list[str] = field(default_factory=list)
    """Jobs that began again although the task saw neither a crash nor a redelivery."""
    disordered: list[str] = field(default_factory=list)
    """Jobs that overtook earlier jobs of their producer (only where one slot runs all in turn)."""

    def faults(self) -> dict[str, list[str]]:
        found = {item.name: getattr(self, item.name) for item in fields(self)}
        return {name: value for name, value in found.items() if isinstance(value, list) and value}

    def __str__(self) -> str:
        counts = (
            f"attempted {self.attempted}, acknowledged {self.acknowledged}, delivered {self.delivered},"
            f" recovered {self.recovered}, duplicated {self.duplicated} (all flagged), failed calls {self.failed_calls}"
        )
        faults = self.faults()
        if not faults:
            return f"{counts}; nothing lost, unexpected, resurrected, forked, stuck, early or torn"
        told = "\n".join(f"{len(found)} {name}, such as: {'; '.join(found[:5])}" for name, found in faults.items())
        return f"{counts}\n{told}"


def judge(lines: Iterable[str], *, in_order: bool = False) -> Verdict:
    """Judge the books. ``in_order``: one slot ran all jobs, without delays, other priorities or deaths of processes
    that held jobs, so the first runs must follow each producer's calls. A label is PRODUCER/NUMBER."""
    verdict = Verdict()
    not_before: dict[str, int] = {}
    batches: defaultdict[str, list[str]] = defaultdict(list)
    job_of: dict[str, str] = {}
    ends: dict[str, str] = {}
    runs: defaultdict[str, list[Run]] = defaultdict(list)
    label_of: dict[str, str] = {}
    seen: dict[str, str] = {}
    last_of: dict[str, int] = {}

    for line in lines:
        kind, *words = line.split()
        match kind, words:
            case "attempt", [label, due_ms, batch]:
                not_before[label] = int(due_ms)
                batches[batch].append(label)
            case "confirmed", [label, job]:
                job_of[label] = job
                ends[label] = kind
            case (("maybe" | "refused"), [label]):
                ends[label] = kind
            case "begin", [label, job, attempt, crashes, redelivered, at_ms, name]:
                run = Run(job, int(attempt), int(crashes), redelivered == "1", int(at_ms), name)
                if label not in not_before:
                    verdict.unexpected.append(line)
                elif run.at_ms < not_before[label] - ROUNDING_MS:
                    verdict.early.append(f"{line}, {not_before[label] - run.at_ms} ms early")
                before = runs[label]
                if job in seen or (before and run.attempt < before[-1].attempt):
                    verdict.resurrected.append(line)
                if before and run.job != before[0].job:
                    verdict.forked.append(f"{label} is two jobs: {run.job}, {before[0].job}")
                again = [other for other in before if other.attempt == run.attempt]
                if again:
                    verdict.duplicated += 1
                    if not run.redelivered and run.crashes <= again[-1].crashes:
                        verdict.unflagged.append(line)
                if in_order and not before:
                    producer, _, number = label.rpartition("/")
                    if int(number) < last_of.get(producer, 0):
                        verdict.disordered.append(f"{label} began after {producer}/{last_of[producer]}")
                    last_of[producer] = int(number)
                before.append(run)
                label_of[job] = label
            case "seen", [job, name]:
                if seen.setdefault(job, name) != name:
                    verdict.forked.append(f"{job} showed {seen[job]} and {name}")
            case _:
                raise ValueError(f"the books have a line that means nothing: {line!r}")

    verdict.attempted = len(not_before)
    verdict.acknowledged = len(job_of)
    verdict.delivered = sum(map(len, runs.values()))
    verdict.failed_calls = sum(end != "confirmed" for end in ends.values())
    for label, job in job_of.items():
        if not runs[label]:
            verdict.lost.append(f"{label} {job}")
        elif runs[label][0].job != job:
            verdict.unexpected.append(f"{label} ran as {runs[label][0].job}, and was confirmed as {job}")
        label_of.setdefault(job, label)
    for label in not_before:
        if runs[label] and ends.get(label) != "confirmed":
            verdict.recovered += 1
            if ends.get(label) == "refused":
                verdict.unexpected.append(f"{label} was refused for sure, and ran")
    for job, label in label_of.items():
        if job not in seen:
            verdict.stuck.append(f"{label} {job}")
        elif seen[job] not in {run.name for run in runs[label]}:
            verdict.forked.append(f"{job} showed {seen[job]}, which none of its runs gave")
    for batch, labels in batches.items():
        accepted = [label for label in labels if runs[label]]
        if accepted and len(accepted) < len(labels):
            verdict.torn.append(f"{batch}: {len(accepted)} of {len(labels)}")
    return verdict


def judge_file(books: Path, *, in_order: bool = False) -> Verdict:
    verdict = judge(books.read_text().splitlines(), in_order=in_order)
    assert not verdict.faults(), str(verdict)
    return verdict
