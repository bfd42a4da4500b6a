"""`format-1/`: a complete journal of format 1, written by a program of that version (see make_format_1.py)."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

from project import wall_clock

FIXTURE = Path(__file__).with_name("format-1")
# Results, failed jobs and sessions age, so open the journal five minutes after it was made.
OPENED = "@2026-01-15 12:05:00"


@dataclass(frozen=True)
class Known:
    """A line of `jobs.txt`."""

    id: str
    state: str | None
    """State of the message, or None if the broker holds no such message."""
    ended: str | None
    queue: str
    task: str
    attempt: int
    crashes: int
    what: str


def jobs() -> list[Known]:
    known = []
    for line in (FIXTURE / "jobs.txt").read_text().splitlines():
        if line.startswith("#"):
            continue
        job, state, ended, queue, task, attempt, crashes, what = line.split(" ", 7)
        count = (0, 0) if attempt == "-" else (int(attempt), int(crashes))
        held, end = None if state == "unknown" else state, None if ended == "-" else ended
        known.append(Known(job, held, end, queue, task, *count, what))
    assert len(known) == 27
    return known


def unpack(data: Path) -> None:
    """Make `data` a broker's directory as the old program left it."""
    data.mkdir(mode=0o700)
    subprocess.run(["tar", "-C", data, "-xzf", FIXTURE / "journal.tar.gz"], check=True)


def at_the_time() -> dict[str, str]:
    """Return the environment of a process that runs when the journal was young."""
    return {**wall_clock(OPENED), "TZ": "UTC"}
