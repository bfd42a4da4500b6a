"""Bare forks of the same heap without a queue: the limit for jobs that each have their own process.

A separate program loads the app, freezes its heap and moves it into huge pages, like Penstock's zygote. It reads orders
from standard input. ``ahead N`` runs N jobs one after another, each in a process that was forked before the order.
``loop N SLOTS`` forks, runs and reaps N processes, at most SLOTS at once. The answer is a line of seconds.
"""

from __future__ import annotations

import ctypes
import gc
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

HUGE_BYTES = 2 << 20
MADV_COLLAPSE = 25

_slots = 1
_program: subprocess.Popen[str] | None = None
_done = 0


def clear() -> None:
    """Do nothing: nothing is kept."""


def worker(slots: int) -> list[str]:
    global _slots
    _slots = slots
    # The harness needs a process to watch. The first call starts the one that forks, with its own pipes.
    return [sys.executable, "-c", "import signal; signal.pause()"]


def program() -> subprocess.Popen[str]:
    global _program
    if _program is None:
        command = [sys.executable, "-m", "contestants.bare_fork_peer"]
        _program = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert _program.stdout is not None
        _program.stdout.readline()  # its first line: the app is loaded
    return _program


def ask(order: str) -> list[float]:
    running = program()
    assert running.stdin is not None and running.stdout is not None
    running.stdin.write(order + "\n")
    running.stdin.flush()
    return [float(word) for word in running.stdout.readline().split()]


def enqueue(count: int) -> None:
    """Run all jobs, as many at once as the measurement has slots."""
    global _done
    ask(f"loop {count} {_slots}")
    _done += count


def unfinished(enqueued: int) -> int:
    return enqueued - _done


def round_trips(count: int) -> list[float]:
    global _done
    _done += count
    return ask(f"ahead {count}")


def main() -> None:
    from contestants import heavy

    gc.collect()
    gc.freeze()
    collapse_heap()
    print("loaded", flush=True)
    for line in sys.stdin:
        what, *numbers = line.split()
        if what == "ahead":
            found = ahead(heavy.work, int(numbers[0]))
        else:
            found = [loop(heavy.work, *map(int, numbers))]
        print(*found, flush=True)


def collapse_heap() -> None:
    """Move the touched private memory of this process into pages of 2 MiB, if the kernel can."""
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, mode, _, _, inode, *name = line.split()
        if (mode, inode) == ("rw-p", "0") and name in ([], ["[heap]"]):
            start, end = (int(address, 16) for address in addresses.split("-"))
            for chunk in range(-(-start // HUGE_BYTES) * HUGE_BYTES, end - HUGE_BYTES + 1, HUGE_BYTES):
                madvise(chunk, HUGE_BYTES, MADV_COLLAPSE)


def ahead(work: Callable[[int], int], count: int) -> list[float]:
    """Return each job's seconds from order to answer. The next process is forked after the previous one answers."""
    taken = []
    for number in range(count):
        asks, hears = os.pipe(), os.pipe()
        pid = os.fork()
        if pid == 0:
            os.read(asks[0], 1)
            os.write(hears[1], str(work(number)).encode())
            os._exit(0)
        time.sleep(0.01)  # by now it waits at its pipe, like a spare
        begun = time.perf_counter()
        os.write(asks[1], b"x")
        os.read(hears[0], 100)
        taken.append(time.perf_counter() - begun)
        os.waitpid(pid, 0)
        for descriptor in (*asks, *hears):
            os.close(descriptor)
    return taken


def loop(work: Callable[[int], int], count: int, slots: int) -> float:
    """Return the seconds to fork, run and reap ``count`` processes, ``slots`` at a time."""
    begun = time.perf_counter()
    running = 0
    for number in range(count):
        if running == slots:
            os.wait()
            running -= 1
        if os.fork() == 0:
            work(number)
            os._exit(0)
        running += 1
    for _ in range(running):
        os.wait()
    return time.perf_counter() - begun


if __name__ == "__main__":
    main()
