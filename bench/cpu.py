"""What a no-op job costs each part in CPU time, through the public API alone: ``.venv/bin/python bench/cpu.py [jobs]``.

Hands in so many jobs, lets a worker with two processes drain them, and prints one line of JSON: microseconds a job for
each part, and the two rates. ``bench/run.py --against`` runs it under the interpreters of two checkouts in turn, so it
uses only what every version has: ``App``, ``task``, ``map``, ``result()``, and the commands ``worker`` and
``status --json``. ``bench/where.py`` has the same by thread.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from processes import cpu_seconds, descendants, end_pids, running, take_charge

from penstock import App

HERE = Path(__file__).parent
SLOTS = 2
PENSTOCK = str(Path(sys.executable).with_name("penstock"))
WAIT_S = 60

app = App("bench")


@app.task
def noop(number: int) -> None: ...


def measure(count: int, directory: Path) -> dict[str, float]:
    noop.map(range(100))  # starts the broker
    client = {os.getpid(): "client"}
    broker = {int(status()["broker"]["pid"]): "broker"}

    before, begun = cpu_seconds(client | broker), time.perf_counter()
    jobs = noop.map(range(count))
    enqueue_s = time.perf_counter() - begun
    enqueueing = cpu_seconds(client | broker) - before

    with running([PENSTOCK, "worker", "cpu:app", "-c", str(SLOTS)], log=directory / "worker.log", cwd=HERE) as worker:
        jobs[count // 5].result(timeout=WAIT_S)
        # The children and the zygote that forked them.
        while len(below := descendants(worker.pid)) <= SLOTS:
            time.sleep(0.01)
        parts = broker | {worker.pid: "supervisor"} | dict.fromkeys(below, "children")
        before, begun, finished_before = cpu_seconds(parts), time.perf_counter(), finished()
        jobs[count * 9 // 10].result(timeout=WAIT_S)
        drain_s = time.perf_counter() - begun
        draining, drained = cpu_seconds(parts) - before, finished() - finished_before
    if drained < count // 4:
        raise RuntimeError(f"{count:,} jobs were almost done when all of the worker's processes ran: take more")
    return {
        "client": enqueueing["client"] / count * 1e6,
        "broker": (enqueueing["broker"] / count + draining["broker"] / drained) * 1e6,
        "supervisor": draining["supervisor"] / drained * 1e6,
        "children": draining["children"] / drained * 1e6,
        "enqueue_per_s": count / enqueue_s,
        "drain_per_s": drained / drain_s,
    }


def status() -> dict[str, Any]:
    shown = subprocess.run([PENSTOCK, "status", "--json"], check=True, capture_output=True, timeout=WAIT_S)
    answer: dict[str, Any] = json.loads(shown.stdout)
    return answer


def finished() -> int:
    found = status()
    return int(found["results"]) + int(found["evicted"])


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 200_000
    take_charge()
    with tempfile.TemporaryDirectory(prefix="penstock-bench-", ignore_cleanup_errors=True) as name:
        os.environ["PENSTOCK_URL"] = f"local:{name}/data"
        try:
            print(json.dumps(measure(count, Path(name))))
        finally:
            # First, since a client that finds its broker dead starts another.
            app.close()
            end_pids(descendants(os.getpid()))


if __name__ == "__main__":
    main()
