"""kill -9 of a local broker in use: the next one is up within a second and nothing is lost."""

from __future__ import annotations

import time

import pytest
from project import eventually

WAITING = 100_000

TASKS = """
    import time
    from pathlib import Path
    from penstock import App

    app = App("shop")

    @app.task
    def double(number: int) -> int:
        return 2 * number

    @app.task(queue="parked", store_result=False)
    def later(number: int) -> None:
        raise AssertionError("nobody serves this queue")

    @app.task(queue="long")
    def long(directory: str) -> str:
        place = Path(directory)
        with (place / "runs").open("a") as runs:
            runs.write("run\\n")
        while not (place / "enough").exists():
            time.sleep(0.01)
        return "done"
"""


@pytest.mark.timeout(180)
def test_with_a_hundred_thousand_jobs_waiting(project):
    project.write("tasks.py", TASKS)
    tasks = project.tasks()
    worker = project.worker("tasks:app", "-c", "2", "-Q", "default,long")
    for start in range(0, WAITING, 10_000):
        tasks.later.map(range(start, start + 10_000))
    long = tasks.long.delay(str(project.directory))
    eventually((project.directory / "runs").exists, 30, lambda: worker.output)

    producer = project.start_python(
        """
        from pathlib import Path
        import tasks
        confirmed = []
        while not Path("enough").exists():
            confirmed.append(tasks.double.delay(len(confirmed)))
            if len(confirmed) == 100:
                print("under way", flush=True)
        results = [job.result(timeout=30) for job in confirmed]
        assert results == [2 * number for number in range(len(confirmed))], "lost or mixed up"
        print("all there")
        """
    )
    producer.wait_for_output("under way")

    # From the kill to the next confirm: a start, a recovery of all waiting jobs, a commit.
    gaps = []
    for number in range(12):
        project.kill_broker()
        began = time.monotonic()
        assert tasks.double.delay(number).id
        gaps.append(time.monotonic() - began)
        # The machine is shared with other tests, so only the fastest attempt has to meet the bound.
        if len(gaps) >= 3 and min(gaps) < 1:
            break
    assert min(gaps) < 1, gaps

    (project.directory / "enough").touch()
    assert long.result(timeout=30) == "done"
    assert (project.directory / "runs").read_text() == "run\n", "a running job was run again"
    producer.wait(60)
    assert "all there" in producer.output, producer.output

    ready = {queue["name"]: queue["ready"] for queue in project.status()["queues"]}
    assert ready["parked"] == WAITING
    assert worker.returncode is None, worker.output
