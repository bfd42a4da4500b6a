"""A small disk of its own, which a test can fill."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

LARGE = 1 << 20


class SmallDisk:
    """A file system of its own. What the test itself puts on it is one file, the ballast."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.ballast = path / "ballast"

    def free_bytes(self) -> int:
        found = os.statvfs(self.path)
        return found.f_bavail * found.f_frsize

    def fill(self) -> None:
        """Leave nothing to anybody."""
        with self.ballast.open("ab") as file:
            for block in (LARGE, 4096):
                try:
                    while True:
                        file.write(bytes(block))
                        file.flush()
                except OSError:
                    continue

    def make_room(self) -> None:
        self.ballast.unlink()


@contextmanager
def small_disk(image: Path, at: Path, megabytes: int = 64) -> Iterator[SmallDisk]:
    """A real ext4, in a file. Mounting needs root, as in CI; without it, this fails and says so."""
    assert os.geteuid() == 0, "filling a real disk needs root, to mount one: run these tests as root"
    for program in ("mkfs.ext4", "mount", "umount"):
        assert shutil.which(program), f"filling a real disk needs {program}"
    with image.open("wb") as file:
        file.truncate(megabytes << 20)
    subprocess.run(["mkfs.ext4", "-q", "-F", "-m", "0", str(image)], check=True, timeout=30)
    at.mkdir()
    subprocess.run(["mount", "-o", "loop", str(image), str(at)], check=True, timeout=30)
    try:
        yield SmallDisk(at)
    finally:
        subprocess.run(["umount", "--lazy", str(at)], check=True, timeout=30)
        image.unlink()
