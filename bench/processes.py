"""The benchmark's processes: each is stopped by its id, with all its descendants, whatever happens."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

PR_SET_CHILD_SUBREAPER = 36


def take_charge() -> None:
    """Make sure that no process we start can outlive us.

    Descendants whose own parent exits become our children, so that none slips out of the tree. SIGTERM runs every
    ``finally``, like Ctrl-C.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    # A shell without job control starts background processes with Ctrl-C ignored, and their children inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def descendants(root: int, apart_from: Collection[int] = ()) -> list[int]:
    """Return the living processes below ``root``, parents before children.

    Those of ``apart_from`` are left out, with all that they have started: a server starts processes at any time, and
    PostgreSQL ends every connection and empties its unlogged tables when one of them is killed.
    """
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                # The name in parentheses may contain anything: the fields begin after the last parenthesis.
                state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
                if state != "Z":
                    children.setdefault(int(parent), []).append(int(entry.name))
    found: list[int] = []
    waiting = [root]
    while waiting:
        below = [pid for pid in children.get(waiting.pop(0), []) if pid not in apart_from]
        found += below
        waiting += below
    return found


def end(process: subprocess.Popen[bytes], grace_s: float = 5.0) -> None:
    """Send SIGTERM and, after a grace, SIGKILL to the process and its descendants; return when all are gone."""
    family = [process.pid, *descendants(process.pid)]
    if process.poll() is None:
        process.terminate()
    if not have_gone(process, family, grace_s):
        family = list(dict.fromkeys([*descendants(process.pid), *family]))
        end_pids(family)
        have_gone(process, family, 5.0)


def have_gone(process: subprocess.Popen[bytes], family: Sequence[int], within_s: float) -> bool:
    deadline = time.monotonic() + within_s
    while process.poll() is None or any(map(is_alive, family)):  # the poll reaps it; unreaped, it stays a zombie
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)  # most are not our children, so there is no event to await
    return True


def end_pids(pids: Iterable[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@contextlib.contextmanager
def running(
    command: Sequence[str],
    *,
    log: Path,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    grace_s: float = 5.0,
) -> Iterator[subprocess.Popen[bytes]]:
    """Run ``command`` for the length of the block, its output in ``log``."""
    with log.open("ab") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=env,
            cwd=cwd,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        end(process, grace_s)


def cpu_seconds_by_thread(roles: Mapping[int, str]) -> Counter[str]:
    """Return the CPU time that each role's threads have used, by name."""
    spent: Counter[str] = Counter()
    for pid, role in roles.items():
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has just exited
                name = (thread / "comm").read_text().strip()
                spent[f"{role}: {name}"] += int((thread / "schedstat").read_text().split()[0]) / 1e9
    return spent


def cpu_seconds(roles: Mapping[int, str]) -> Counter[str]:
    """Return the CPU time that each role has used."""
    spent: Counter[str] = Counter()
    for thread, seconds in cpu_seconds_by_thread(roles).items():
        spent[thread.partition(":")[0]] += seconds
    return spent


def tail(log: Path, lines: int = 8) -> str:
    """Return the last lines of a log, which the reason of a failure quotes."""
    try:
        return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])
    except OSError:
        return ""


def proportional_set_size_bytes(pids: Sequence[int]) -> int:
    """Return the PSS, which divides shared pages among their users; RSS would count them once per fork."""
    total = 0
    for pid in pids:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
                if line.startswith("Pss:"):
                    total += int(line.split()[1]) * 1024
    return total
