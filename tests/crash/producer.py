"""Enqueues jobs of all kinds from several threads, and writes each call into the books before and after it.

    producer.py NAME THREADS SEED

Runs until SIGTERM, then finishes each call that it has begun. It can be killed at any moment.
"""

from __future__ import annotations

import faulthandler
import random
import signal
import sys
import threading

import books
import tasks

from penstock import BrokerUnavailable, CallTimeout


def call(producer: str, number: int, chance: random.Random) -> None:
    """Make a call of a random kind."""
    label = f"{producer}/{number}"
    kind = chance.choices(["plain", "slow", "flaky", "delayed", "batch"], [6, 1, 1, 1, 1])[0]
    priority = chance.choice([4, 4, 9])
    labels, due_ms = [label], 0
    if kind == "batch":
        labels = [f"{label}.{item}" for item in range(5)]
    if kind == "delayed":
        wait_ms = chance.randrange(500)
        due_ms = books.now_ms() + wait_ms
    for item in labels:
        books.write("attempt", item, due_ms, label)
    try:
        match kind:
            case "plain":
                jobs = [tasks.work.options(priority=priority).delay(label)]
            case "slow":
                jobs = [tasks.slow.options(priority=priority).delay(label, chance.uniform(0.02, 0.2))]
            case "flaky":
                jobs = [tasks.flaky.delay(label)]
            case "delayed":
                jobs = [tasks.work.options(countdown=wait_ms / 1000).delay(label)]
            case _:
                jobs = tasks.work.map(labels)
    except (BrokerUnavailable, CallTimeout) as error:
        for item in labels:
            books.write("maybe" if error.maybe_accepted else "refused", item)
        return
    for item, job in zip(labels, jobs, strict=True):
        books.write("confirmed", item, job.id)


def main() -> None:
    name, threads, seed = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    # Shows where a hanging test waits.
    faulthandler.register(signal.SIGUSR1)

    def work(index: int) -> None:
        chance = random.Random(f"{seed} {name} {index}")
        number = 0
        while not stop.wait(chance.uniform(0, 0.04)):
            number += 1
            call(f"{name}.{index}", number, chance)

    working = [threading.Thread(target=work, args=(index,)) for index in range(threads)]
    for thread in working:
        thread.start()
    for thread in working:
        # In slices, because a signal that arrives just before a wait is only seen after it.
        while thread.is_alive():
            thread.join(0.2)


if __name__ == "__main__":
    main()
