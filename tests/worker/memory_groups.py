"""Control groups with a memory limit, in which a test can start its worker."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from project import Process, Project


def _own_group() -> tuple[Path, bool] | None:
    """Return the control group that accounts for this process's memory, and whether it is of version 1."""
    groups = [line.split(":", 2)[1:] for line in Path("/proc/self/cgroup").read_text().splitlines()]
    for controllers, path in groups:
        if "memory" in controllers.split(","):
            return Path("/sys/fs/cgroup/memory" + path), True
    for controllers, path in groups:
        if not controllers:
            return Path("/sys/fs/cgroup" + path), False
    return None


class MemoryGroup:
    def __init__(self, directory: Path, is_v1: bool, limit: int) -> None:
        self.directory = directory
        limits = {"memory.limit_in_bytes": limit} if is_v1 else {"memory.max": limit}
        # Limit swap too, so that nothing is swapped out on a machine with swap.
        no_swap = {"memory.memsw.limit_in_bytes": limit} if is_v1 else {"memory.swap.max": 0}
        for name, value in limits.items():
            (directory / name).write_text(str(value))
        for name, value in no_swap.items():
            with suppress(OSError):
                (directory / name).write_text(str(value))

    def worker(self, project: Project, app: str, *options: str) -> Process:
        enter = f'echo $$ > {self.directory}/cgroup.procs && exec "$@"'
        return project.start("sh", "-c", enter, "enter", "penstock", "worker", app, *options)


@contextmanager
def memory_group(limit: int) -> Iterator[MemoryGroup]:
    """Make a group, or skip the test where the machine doesn't allow it, as in CI."""
    own = _own_group()
    if os.geteuid() != 0 or own is None:
        pytest.skip("needs root and control groups, to limit the memory of a worker")
    directory, is_v1 = own
    if not is_v1:
        # A version 2 group with processes in it can't have limited children, so make this one below the root.
        directory = Path("/sys/fs/cgroup")
    made = directory / f"penstock-test-{uuid.uuid4().hex[:12]}"
    try:
        made.mkdir()
    except OSError as error:
        pytest.skip(f"needs a control group of its own, to limit the memory of a worker: {error}")
    try:
        try:
            group = MemoryGroup(made, is_v1, limit)
        except OSError as error:
            pytest.skip(f"needs control groups that limit memory: {error}")
        yield group
    finally:
        _remove(made)


def _remove(directory: Path) -> None:
    """Remove a group; its last processes may still be exiting."""
    patience = time.monotonic() + 10
    while True:
        try:
            return directory.rmdir()
        except OSError:
            if time.monotonic() > patience:
                raise
            time.sleep(0.01)
