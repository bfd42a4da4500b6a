"""CPU time of a job by thread: ``.venv/bin/python bench/where.py [jobs]``.

Enqueues no-op jobs and lets a worker with two processes drain them. Divides the CPU time of each thread, as the kernel
counts it, by the number of jobs in that span. The span leaves out the start and the end. perf shows how a thread spends
its time; docs/internals/profile.md has the commands.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import table
from processes import cpu_seconds_by_thread, descendants, end_pids, running, take_charge

SLOTS = 2


def report(title: str, jobs: int, seconds: float, spent: Counter[str]) -> None:
    rows = [[name, f"{used / jobs * 1e6:.2f}"] for name, used in spent.most_common() if used / jobs > 1e-8]
    rows.append(["all", f"{spent.total() / jobs * 1e6:.2f}"])
    print(f"\n{title}: {jobs:,} jobs in {seconds:.2f} s, {jobs / seconds:,.0f} jobs/s\n")
    print(table.markdown(["process: thread", "CPU, µs a job"], rows, left=1))


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 300_000
    take_charge()
    with tempfile.TemporaryDirectory(prefix="penstock-bench-", ignore_cleanup_errors=True) as name:
        os.environ["PENSTOCK_URL"] = f"local:{name}/data"
        sys.path.insert(0, str(Path(__file__).parent))
        from contestants import penstock_peer as penstock

        try:
            penstock.enqueue(100)
            broker = int(penstock.broker.status(10)["broker_pid"])
            roles = {os.getpid(): "client", broker: "broker"}
            before, begun = cpu_seconds_by_thread(roles), time.perf_counter()
            penstock.enqueue(count)
            report("Bulk enqueue", count, time.perf_counter() - begun, cpu_seconds_by_thread(roles) - before)

            with running(penstock.worker(SLOTS), log=Path(name) / "worker.log", cwd=Path(__file__).parent) as worker:
                finished = wait_until(penstock, count + 100, count // 5)
                roles = {broker: "broker", worker.pid: "supervisor"}
                # The zygote comes first, because it forked the others.
                for place, pid in enumerate(descendants(worker.pid)):
                    roles[pid] = "zygote" if place == 0 else f"child {place}"
                before, begun = cpu_seconds_by_thread(roles), time.perf_counter()
                jobs = wait_until(penstock, count + 100, count * 9 // 10) - finished
                report("Drain", jobs, time.perf_counter() - begun, cpu_seconds_by_thread(roles) - before)
        finally:
            # Closed first, because a client that finds its broker dead starts another.
            penstock.app.close()
            penstock.broker.close(1)
            end_pids(descendants(os.getpid()))


def wait_until(penstock: object, enqueued: int, wanted: int) -> int:
    while (finished := enqueued - penstock.unfinished(enqueued)) < wanted:  # type: ignore[attr-defined]
        time.sleep(0.02)
    return finished


if __name__ == "__main__":
    main()
