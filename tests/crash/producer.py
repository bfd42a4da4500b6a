"""Enqueues one job after another from several threads, and keeps the books outside of the broker.

    producer.py BOOKS DESK

BOOKS gets one line for each call that ended: `confirmed ID` or `maybe`. DESK is a file mapped by the test
too: for each thread, how many calls it has begun and how many have ended.
"""

from __future__ import annotations

import mmap
import signal
import struct
import sys
import threading

import tasks

from penstock import BrokerUnavailable, Timeout

THREADS = 8


def work(index: int, desk: mmap.mmap, books: int, stop: threading.Event) -> None:
    calls = 0
    while not stop.is_set():
        calls += 1
        struct.pack_into("Q", desk, 16 * index, calls)
        try:
            line = f"confirmed {tasks.draw.delay(f'{index}/{calls}').id}\n"
        except (BrokerUnavailable, Timeout) as error:
            line = "maybe\n" if error.maybe_accepted else "refused\n"
        # One write call a line, so that threads do not mix and a kill of this process tears nothing.
        books.write(line.encode())
        struct.pack_into("Q", desk, 16 * index + 8, calls)


def main() -> None:
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    with open(sys.argv[1], "ab", buffering=0) as books, open(sys.argv[2], "r+b") as file:
        desk = mmap.mmap(file.fileno(), 16 * THREADS)
        threads = [threading.Thread(target=work, args=(n, desk, books, stop)) for n in range(THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


if __name__ == "__main__":
    main()
