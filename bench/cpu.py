"""CPU time of each part per no-op job, measured through the public API: ``.venv/bin/python bench/cpu.py [jobs]``.

Enqueues the jobs, starts a worker with two processes that drains them, and prints one line of JSON: microseconds per
job for each part, and both rates. ``bench/run.py --against`` runs it under the interpreters of two checkouts, so it
uses only names that every version has: ``App``, ``task``, ``map``, ``result()``, and the commands ``worker`` and
``status --json``. ``bench/where.py`` measures the same for each thread.
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
WARMING = 100
PENSTOCK = str(Path(sys.executable).with_name("penstock"))
WAIT_S = 60

app = App("bench")


@app.task
def noop(number: int) -> None: ...


def measure(count: int, directory: Path) -> dict[str, float]:
    noop.map(range(WARMING))  # starts the broker
    client = {os.getpid(): "client"}
    broker = {int(status()["broker"]["pid"]): "broker"}

    before, begun = cpu_seconds(client | broker), time.perf_counter()
    jobs = noop.map(range(count))
    enqueue_s = time.perf_counter() - begun
    enqueueing = cpu_seconds(client | broker) - before

    with running([PENSTOCK, "worker", "cpu:app", "-c", str(SLOTS)], log=directory / "worker.log", cwd=HERE) as worker:
        while not descendants(worker.pid):
            time.sleep(0.005)
        # The zygote is loading the app, and will then fork the children. The span covers the whole drain, from no job
        # run to all jobs run: children run far ahead of settled jobs, so no count in between would be exact.
        parts = broker | {worker.pid: "supervisor"}
        before, begun = cpu_seconds(parts), time.perf_counter()
        jobs[-1].result(timeout=WAIT_S)
        while finished() < count + WARMING:
            time.sleep(0.01)
        drain_s = time.perf_counter() - begun
        _zygote, *children = descendants(worker.pid)  # parents come first
        draining = cpu_seconds(parts | dict.fromkeys(children, "children")) - before
    if len(children) != SLOTS:
        raise RuntimeError(f"{len(children)} processes ran jobs, not {SLOTS}; see {directory / 'worker.log'}")
    return {
        "client": enqueueing["client"] / count * 1e6,
        "broker": (enqueueing["broker"] + draining["broker"]) / count * 1e6,
        "supervisor": draining["supervisor"] / count * 1e6,
        "children": draining["children"] / count * 1e6,
        "enqueue_per_s": count / enqueue_s,
        "drain_per_s": count / drain_s,
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
            # Closed first, because a client that finds its broker dead starts another.
            app.close()
            end_pids(descendants(os.getpid()))


if __name__ == "__main__":
    main()
