"""A worker reports tasks that wait in processes of their own when a thread would do."""

from __future__ import annotations

from worker.odd_shop import Shop

WAITS = "of its time waiting, with a process to itself: --threads N"


def test_a_task_that_waits_in_processes_is_named_once_with_what_to_do(shop: Shop) -> None:
    worker = shop.ready_worker("-c", "2")
    for job in [shop.tasks.sleep.delay(0.01) for _ in range(100)]:
        job.result(timeout=30)
    named = [line for line in worker.output.splitlines() if WAITS in line]
    assert len(named) == 1, worker.output
    assert " INFO " in named[0] and ".sleep spends 9" in named[0]


def test_nothing_is_said_of_tasks_that_compute_or_ask_for_processes(shop: Shop) -> None:
    worker = shop.ready_worker("-c", "2")
    jobs = [shop.tasks.compute.delay(0.01) for _ in range(50)]
    jobs += [shop.tasks.sleep_in_process.delay(0.01) for _ in range(50)]
    for job in jobs:
        job.result(timeout=30)
    assert WAITS not in worker.output
