"""Waits for the results of confirmed jobs while brokers die, and writes down the first value it sees of each.

    reader.py BOOKS SEEN

Follows BOOKS as the producer writes it; SEEN gets `ID VALUE`.
"""

from __future__ import annotations

import signal
import sys
import threading

import tasks


def main() -> None:
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    with open(sys.argv[1]) as books, open(sys.argv[2], "w", buffering=1) as seen:
        begun = ""
        while not stop.is_set():
            # The last line may be only half written yet.
            *lines, begun = (begun + books.read()).split("\n")
            # The newest of what is there: a reader that lags would see results that are long settled.
            jobs = [line.split()[1] for line in lines if line.startswith("confirmed ")]
            for job in jobs[-1:]:
                seen.write(f"{job} {tasks.app.job(job).result()}\n")


if __name__ == "__main__":
    main()
