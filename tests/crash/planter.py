"""Sends trees (trees.py), one after another, and writes each into the books before and after it.

    planter.py SEED FIRST

Several trees are in flight at any time. Runs until SIGTERM, and can be killed at any moment.
"""

from __future__ import annotations

import random
import signal
import sys
import threading
from collections import deque
from typing import Any

import tree_tasks
import trees
from tree_tasks import write

from penstock import BrokerUnavailable, CallTimeout, ResultTimeout
from penstock.errors import JobError

UNDER_WAY = 6
PATIENCE_S = 60


def main() -> None:
    seed, number = sys.argv[1], int(sys.argv[2])
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    under_way: deque[tuple[int, Any]] = deque()
    while not stop.is_set():
        step = tree_tasks.built(trees.draw(seed, number), random.Random(f"{seed} {number} written"))
        write("attempt", number=number)
        try:
            workflow = step.delay()
        except (BrokerUnavailable, CallTimeout) as error:
            write("maybe" if error.maybe_accepted else "refused", number=number)
        else:
            write("confirmed", number=number, id=workflow.id)
            under_way.append((number, workflow))
        number += 1
        while len(under_way) >= UNDER_WAY and not stop.is_set():
            first, workflow = under_way.popleft()
            try:
                workflow.result(PATIENCE_S)
            except ResultTimeout:
                write("stuck", number=first)
            except (JobError, tree_tasks.Boom):
                pass  # Judged at the end.


if __name__ == "__main__":
    main()
