"""Small disks that a test can fill."""

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
    """A separate file system. The test's own data on it is one file, the ballast."""

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
        """Use up all free space."""
        with self.ballast.open("ab", buffering=0) as file:
            for block in (LARGE, 4096):
                try:
                    while file.write(b"\0" * block):
                        # Some file systems account for the space only at this point.
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
# XFS needs at least 300 MB.
MEGABYTES = {"ext4": 64, "xfs": 320, "btrfs": 128}


@contextmanager
def disk_of(kind: str, project: Project) -> Iterator[SmallDisk]:
    """Mount a real file system of this kind from a file, and keep the project's local broker's data on it."""
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
    """Mount a real ext4 file system from a file."""
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
