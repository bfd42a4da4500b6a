"""Mounts a forgetful disk (forgetful_disk.py) in a project."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from project import Project, eventually, needs

HERE = Path(__file__).parent


class ForgetfulDisk:
    def __init__(self, mounted_at: Path, process: subprocess.Popen[str]) -> None:
        self.path = mounted_at
        self._process = process

    def _do(self, command: str, /, **how: Any) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps({"do": command, **how}) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, "the disk's process has ended"
        return dict(json.loads(answer))

    def cut(self, after: int | None = None) -> None:
        """Cut the power at the ``after``-th next change, or now."""
        self._do("cut", **({} if after is None else {"after": after}))

    def restore(self) -> int:
        """Restore the power, and return how many pages and names were forgotten."""
        return int(self._do("restore")["forgotten"])

    def fail(self, what: str, at: int, error: str = "EIO", *, forever: bool = False) -> None:
        self._do("fail", what=what, at=at, error=error, forever=forever)

    def hurry(self) -> None:
        """Make each sync take as little time as it can."""
        self._do("hurry")

    def wait_for_calm(self, seconds: float) -> None:
        """Wait until there was no sync for this long."""
        syncs, since = -1, 0.0

        def is_calm() -> bool:
            nonlocal syncs, since
            now, time_s = int(self._do("look")["counts"].get("sync", 0)), time.monotonic()
            if now != syncs:
                syncs, since = now, time_s
            return time_s - since >= seconds

        eventually(is_calm)

    def hang(self) -> None:
        """Make each sync wait until the disk is healed."""
        self._do("hang")

    def is_hanging(self) -> bool:
        return int(self._do("look")["hanging"]) > 0

    def heal(self) -> int:
        """End all faults, and return how often something failed."""
        return int(self._do("heal")["failed"])

    def failed(self) -> int:
        return int(self._do("look")["failed"])

    def is_off(self) -> bool:
        return bool(self._do("look")["off"])


@contextmanager
def forgetful_disk(project: Project, seed: str, at: Path | None = None) -> Iterator[ForgetfulDisk]:
    """Mount the disk in the project's directory, or at a new directory."""
    needs(
        os.geteuid() == 0 and os.access("/dev/fuse", os.R_OK | os.W_OK), "root and /dev/fuse, for a disk that forgets"
    )
    directory = at or project.directory / "disk"
    directory.mkdir(parents=True)
    process = subprocess.Popen(
        [sys.executable, HERE / "forgetful_disk.py", directory, seed],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None and process.stdout.readline(), "it could not be mounted"
        yield ForgetfulDisk(directory, process)
    finally:
        # Processes that still use it get errors from here on.
        process.communicate(timeout=10)
        assert process.returncode == 0
