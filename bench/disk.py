"""The disk's own limit: a loop that appends a record and syncs it, on a file filled with zeros beforehand."""

from __future__ import annotations

import os
import statistics
import time
from pathlib import Path

RECORD = b"\x5a" * 300
FILE_BYTES = 16 << 20


def append_and_sync(directory: Path, seconds: float) -> dict[str, float]:
    """Time appends to a preallocated, zero-filled file, so that a sync doesn't also write its size and extents."""
    path = directory / "bare-sync"
    taken: list[float] = []
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        os.pwrite(descriptor, bytes(FILE_BYTES), 0)
        os.fsync(descriptor)
        offset = 0
        begun = now = time.perf_counter()
        while now - begun < seconds:
            os.pwrite(descriptor, RECORD, offset)
            os.fdatasync(descriptor)
            offset = (offset + len(RECORD)) % (FILE_BYTES - len(RECORD))
            before, now = now, time.perf_counter()
            taken.append(now - before)
    finally:
        os.close(descriptor)
        path.unlink()
    centiles = statistics.quantiles(taken, n=100, method="inclusive")
    return {"calls_per_s": len(taken) / (now - begun), "p50_us": centiles[49] * 1e6, "p99_us": centiles[98] * 1e6}


def is_memory(directory: Path) -> bool:
    """Return whether files in this directory live in memory, where a sync means nothing."""
    best, kind = "", ""
    for line in Path("/proc/mounts").read_text().splitlines():
        _, mount, filesystem, *_ = line.split()
        if directory.resolve().is_relative_to(mount) and len(mount) >= len(best):
            best, kind = mount, filesystem
    return kind in ("tmpfs", "ramfs")
