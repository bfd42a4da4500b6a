"""Waits for results of confirmed jobs while other processes die, and writes what it sees into the books.

reader.py          the newest confirmed job, again and again, until SIGTERM
reader.py all      every job in the books, once
"""

from __future__ import annotations

import os
import signal
import sys
import threading

import books
import tasks


def see(job: str, timeout: float | None) -> None:
    books.write("seen", job, tasks.app.job(job).result(timeout=timeout))


def see_all() -> None:
    with open(os.environ["BOOKS"]) as lines:
        words = [line.split() for line in lines]
    jobs = dict.fromkeys(word[2] for word in words if word[0] in ("confirmed", "begin"))
    for job in jobs:
        see(job, timeout=60)


def follow() -> None:
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    with open(os.environ["BOOKS"]) as lines:
        begun = ""
        while not stop.is_set():
            # The last line may be incomplete.
            *whole, begun = (begun + lines.read()).split("\n")
            confirmed = [line.split()[2] for line in whole if line.startswith("confirmed ")]
            if confirmed:
                # The newest job, because a reader that lags would see results that were settled long ago.
                see(confirmed[-1], timeout=None)
            else:
                stop.wait(0.005)


if __name__ == "__main__":
    see_all() if sys.argv[1:] == ["all"] else follow()
