"""A small disk of its own, which a test can fill."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from project import Project, needs

LARGE = 1 << 20


class SmallDisk:
    """A file system of its own. What the test itself puts on it is one file, the ballast."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.ballast = path / "ballast"

    def free_bytes(self) -> int:
        found = os.statvfs(self.path)
        return found.f_bavail * found.f_frsize

    def bytes(self) -> int:
        found = os.statvfs(self.path)
        return found.f_blocks * found.f_frsize

    def fill(self) -> None:
        """Leave nothing to anybody."""
        with self.ballast.open("ab", buffering=0) as file:
            for block in (LARGE, 4096):
                try:
                    while file.write(b"\0" * block):
                        # Some file systems only see then what it takes.
                        os.fsync(file)
                except OSError:
                    continue

    def make_room(self) -> None:
        self.ballast.unlink()


MAKE = {
    "ext4": ["mkfs.ext4", "-q", "-F", "-m", "0"],
    "xfs": ["mkfs.xfs", "-q"],
    "btrfs": ["mkfs.btrfs", "-q", "--mixed"],
}
# None can be smaller than 300 MB with XFS.
MEGABYTES = {"ext4": 64, "xfs": 320, "btrfs": 128}


@contextmanager
def disk_of(kind: str, project: Project) -> Iterator[SmallDisk]:
    """A real file system of this kind in a file, with the data of the project's local broker on it."""
    image, at = project.directory / "disk.img", project.directory / "disk"
    needs(os.geteuid() == 0, f"root, to mount a disk with {kind}")
    for program in (MAKE[kind][0], "mount", "umount"):
        needs(shutil.which(program), program)
    with image.open("wb") as file:
        file.truncate(MEGABYTES[kind] << 20)
    subprocess.run([*MAKE[kind], str(image)], check=True, capture_output=True, timeout=30)
    at.mkdir()
    mounted = subprocess.run(["mount", "-t", kind, "-o", "loop", str(image), str(at)], capture_output=True, timeout=30)
    needs(mounted.returncode == 0, f"a system that mounts {kind} ({mounted.stderr.decode().strip()})")
    project.data = at / "data"
    project.url = f"local:{project.data}"
    project.environment["PENSTOCK_URL"] = project.url
    try:
        yield SmallDisk(at)
    finally:
        project.end_all()
        subprocess.run(["umount", str(at)], check=True, timeout=30)
        image.unlink()


@contextmanager
def small_disk(image: Path, at: Path, megabytes: int = 64) -> Iterator[SmallDisk]:
    """A real ext4, in a file."""
    needs(os.geteuid() == 0, "root, to mount a disk that can be filled")
    for program in ("mkfs.ext4", "mount", "umount"):
        needs(shutil.which(program), program)
    with image.open("wb") as file:
        file.truncate(megabytes << 20)
    subprocess.run(["mkfs.ext4", "-q", "-F", "-m", "0", str(image)], check=True, timeout=30)
    at.mkdir()
    mounted = subprocess.run(["mount", "-o", "loop", str(image), str(at)], capture_output=True, timeout=30)
    needs(mounted.returncode == 0, f"a system that mounts ext4 ({mounted.stderr.decode().strip()})")
    try:
        yield SmallDisk(at)
    finally:
        subprocess.run(["umount", "--lazy", str(at)], check=True, timeout=30)
        image.unlink()
