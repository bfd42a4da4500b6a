"""kill -9 of the broker, twenty times under load: no confirmed job is lost, and none is settled twice."""

from __future__ import annotations

import mmap
import signal
import struct
import sys
from collections import Counter
from pathlib import Path

import pytest
from project import Process, eventually

KILLS = 20
THREADS = 8
HERE = Path(__file__).parent

TASKS = """
    import uuid
    from penstock import App

    app = App("crash")

    @app.task
    def draw(label: str) -> str:
        # Each run gives another value: a job that is settled twice shows two.
        return f"{label}:{uuid.uuid4().hex}"
"""


class Desk:
    """What the producer's threads are doing: calls begun, calls ended."""

    def __init__(self, path: Path) -> None:
        path.write_bytes(bytes(16 * THREADS))
        with path.open("r+b") as file:
            self.map = mmap.mmap(file.fileno(), 16 * THREADS)

    def in_flight(self) -> set[tuple[int, int]]:
        """(thread, call) of each call that has begun and not ended."""
        calls = list(struct.iter_unpack("QQ", self.map))
        return {(thread, begun) for thread, (begun, ended) in enumerate(calls) if begun > ended}

    def ended(self) -> int:
        return sum(ended for _, ended in struct.iter_unpack("QQ", self.map))


def wait_for_calls(desk: Desk, producer: Process, count: int) -> None:
    goal = desk.ended() + count
    eventually(lambda: desk.ended() >= goal or producer.returncode is not None, 30, lambda: producer.output)
    assert producer.returncode is None, producer.output


@pytest.mark.timeout(300)
def test_twenty_kills_under_load_lose_and_double_nothing(project):
    project.write("tasks.py", TASKS)
    books, seen = project.directory / "books.txt", project.directory / "seen.txt"
    books.touch()
    desk = Desk(project.directory / "desk")
    path = {"PYTHONPATH": str(project.directory)}
    producer = project.start(sys.executable, HERE / "producer.py", books, project.directory / "desk", **path)
    reader = project.start(sys.executable, HERE / "reader.py", books, seen, **path)
    worker = project.worker("tasks:app", "-c", "2")

    kills, brokers = 0, set()
    while kills < KILLS:
        # Under load again: the broker that is there now has confirmed a good number of jobs.
        wait_for_calls(desk, producer, 200)
        before = desk.in_flight()
        brokers.add(project.kill_broker())
        # It counts when a call that had begun before the kill had still not ended once the broker was dead.
        kills += bool(before & desk.in_flight())
    assert len(brokers) >= KILLS

    producer.signal(signal.SIGTERM)
    assert producer.wait(60) == 0, producer.output
    # Each next broker was up long before a call's deadline, and knew what it had been sent: no call failed.
    lines = books.read_text().splitlines()
    confirmed = [line.split()[1] for line in lines if line.startswith("confirmed ")]
    assert len(confirmed) == len(set(confirmed)) == len(lines) == desk.ended(), Counter(
        line.split()[0] for line in lines
    )

    # Every confirmed job has one result, and what was seen of it earlier is still what it says.
    results = dict(
        line.split()
        for line in project.python(
            """
            import sys
            from pathlib import Path
            import tasks
            for line in Path(sys.argv[1]).read_text().splitlines():
                if line.startswith("confirmed "):
                    job = line.split()[1]
                    print(job, tasks.app.job(job).result(timeout=60))
            """,
            str(books),
        ).splitlines()
    )
    assert results.keys() == set(confirmed)
    reader.signal(signal.SIGTERM)
    assert reader.wait(30) == 0, reader.output
    early = dict(line.split() for line in seen.read_text().splitlines())
    assert len(early) > KILLS, "the reader saw too little to judge by"
    assert early == {job: results[job] for job in early}
    # The value names the call, so no two jobs share a run, and none ran under another's id.
    labels = Counter(value.split(":")[0] for value in results.values())
    assert set(labels.values()) == {1}

    # What was accepted without a confirm has run as well; nothing waits and nothing is stuck.
    eventually(
        lambda: all(queue["ready"] == queue["delayed"] == queue["running"] == 0 for queue in project.status()["queues"])
    )
    worker.signal(signal.SIGTERM)
    assert worker.wait(30) == 0, worker.output
