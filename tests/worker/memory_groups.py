"""A control group with a limit of memory, in which a test starts its worker."""

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
    """The group of this process that accounts for memory, and whether it is of version 1."""
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
        # Nothing is swapped out, where there is something to swap to.
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
    """Make a group, or skip the test where this machine, CI's among them, does not let us."""
    own = _own_group()
    if os.geteuid() != 0 or own is None:
        pytest.skip("needs root and control groups, to limit the memory of a worker")
    directory, is_v1 = own
    if not is_v1:
        # A group with processes in it has none below that have limits, so it is made beside.
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
    """Remove a group; its last processes may be on their way out."""
    patience = time.monotonic() + 10
    while True:
        try:
            return directory.rmdir()
        except OSError:
            if time.monotonic() > patience:
                raise
            time.sleep(0.01)
