"""A disk that fails at any call: no more confirms, a clear exit, and the next broker has all confirmed jobs."""

from __future__ import annotations

import itertools
import signal
import time

import pytest
from crash.cycles import Cycles
from crash.disks import ForgetfulDisk, forgetful_disk
from crash.storm import Storm, kill_at_once
from project import Project, eventually, within

DISK_FAILED = 74
TASKS = "from penstock import App\napp = App('shop')\n@app.task\ndef work(): ...\n"
# Operation that fails, its error, and whether it fails forever from then on.
FAULTS = [
    ("sync", "EIO", False),
    ("write", "EIO", False),
    ("sync", "EIO", True),
    ("write", "ENXIO", True),
    ("create", "EIO", False),
    ("rename", "EIO", False),
    ("open", "EIO", False),
    ("read", "EIO", False),
]


@pytest.mark.timeout(7200)
def test_after_a_failed_call_nothing_is_confirmed_and_the_next_broker_has_everything(cycles: Cycles) -> None:
    """The k-th call from the broker's start fails, during recovery or under load.

    A power cut follows each fault. As on Linux, a failed sync leaves the page cache and the disk inconsistent: jobs
    that a broker confirmed after it, or read from the cache at its next start, would then be lost.
    """
    faults = itertools.cycle(FAULTS)
    came, ended = 0, 0
    for number, times in enumerate(cycles.rounds(10, 600, each=20)):
        chance = cycles.chance(number)
        with Project.fresh() as project, forgetful_disk(project, f"{chance.random()}") as disk:
            storm = Storm(project, chance, f"unix:{project.directory}/socket", disk.path / "data")
            storm.begin()
            for _ in range(times):
                storm.wait_for_confirms(10)
                kill_at_once([storm.server().pid])
                what, error, forever = next(faults)
                disk.fail(what, chance.randrange(1, chance.choice([6, 60, 200])), error, forever=forever)
                storm.heal()
                failed = wait_for_fault(storm, disk)
                came += failed
                ended += failed and storm.server().returncode is not None
                kill_at_once([storm.server().pid])
                disk.heal()
                disk.cut()
                disk.restore()
                storm.heal()
            verdict = storm.end()
            cycles.report(f"{times} faults set; {verdict}")
            assert verdict.failed_calls == 0
            kill_at_once([storm.server().pid])
    cycles.report(
        f"{came} faults came; {ended} ended a broker, each with {DISK_FAILED}, the others it could do without"
    )
    assert ended > 0


def wait_for_fault(storm: Storm, disk: ForgetfulDisk) -> bool:
    """Return whether the fault occurred, after which the broker exited as it should or kept confirming."""
    server, mark = storm.server(), storm.mark()
    eventually(lambda: disk.failed() or storm.confirms_since(mark) >= 60, 60, lambda: server.output)
    if not disk.failed():
        assert server.returncode is None, server.output
        return False
    # A call that the broker can do without: measuring the disk, or a spare segment.
    mark = storm.mark()
    eventually(lambda: server.returncode is not None or storm.confirms_since(mark) >= 20, 60, lambda: server.output)
    if server.returncode is not None:
        assert server.returncode == DISK_FAILED, server.output
        assert "panicked" not in server.output
        last = server.output.splitlines()[-1]
        assert "Check the disk" in last or "can't use" in last, server.output
        assert "confirmed" in last or "can't use" in last, server.output
    return True


def test_clients_are_told_that_the_disk_failed_and_that_the_work_may_have_been_accepted(project: Project) -> None:
    project.write("tasks.py", TASKS)
    with forgetful_disk(project, "told") as disk:
        url = f"unix:{project.directory}/socket"
        server = project.start("penstock", "server", "--listen", url, "--data", str(disk.path / "data"))
        server.wait_for_output("listening")
        client = project.start_python(
            """
            import sys, time, tasks
            from penstock import BrokerUnavailable
            tasks.work.delay()
            print("ready", flush=True)
            try:
                while True:
                    tasks.work.delay()
            except BrokerUnavailable as error:
                print(error.maybe_accepted, error)
            """,
            PENSTOCK_URL=url,
        )
        client.wait_for_output("ready")
        disk.fail("sync", 1)
        assert server.wait(30) == DISK_FAILED, server.output
        assert "could not sync" in server.output
        assert client.wait(30) == 0, client.output
        assert "no connection to" in client.output.splitlines()[-1]


def test_a_broker_answers_while_its_disk_hangs_and_continues_afterwards(project: Project) -> None:
    """While the disk is quick, the loop's thread writes small batches itself.

    When the disk keeps it waiting, another one continues the loop.
    """
    project.write("tasks.py", TASKS)
    url = f"unix:{project.directory}/socket"
    project.environment["PENSTOCK_URL"] = url
    with forgetful_disk(project, "hangs") as disk:
        disk.hurry()
        command = ("penstock", "server", "--listen", url, "--data", str(disk.path / "data"))
        server = project.start(*command, PENSTOCK_LOG="debug")
        server.wait_for_output("listening")
        first = project.start_python("import tasks; tasks.work.delay()")
        assert first.wait(30) == 0, first.output
        # Records that nobody waits for come later, and are written by the writer's thread.
        disk.wait_for_calm(1)
        disk.hang()
        client = project.start_python(
            """
            import tasks
            print(tasks.work.delay().id, flush=True)
            for _ in range(20):
                tasks.work.delay()
            """
        )
        eventually(disk.is_hanging)
        server.wait_for_output("another thread continues the loop")
        for _ in range(3):
            with within(5, "the status"):
                assert project.status()["queues"][0]["ready"] == 2
        assert client.returncode is None
        assert not client.output, "it was confirmed before it was on disk"
        disk.heal()
        assert client.wait(30) == 0, client.output
        assert project.status()["queues"][0]["ready"] == 22
        # The loop is back in its own thread, and the broker ends as it should.
        server.signal(signal.SIGTERM)
        assert server.wait(30) == 0, server.output


def test_interrupted_calls_and_short_writes_are_no_failures(cycles: Cycles) -> None:
    chance = cycles.chance()
    with Project.fresh() as project, forgetful_disk(project, f"{chance.random()}") as disk:
        storm = Storm(project, chance, f"unix:{project.directory}/socket", disk.path / "data")
        storm.begin()
        for _ in range(cycles.of(10, 100)):
            what, error = chance.choice([("sync", "EINTR"), ("write", "EINTR"), ("short", "EIO")])
            disk.fail(what, chance.randrange(1, 20), error, forever=what == "short")
            wait_for_fault(storm, disk)
            assert storm.server().returncode is None
        disk.heal()
        disk.cut()
        kill_at_once([storm.server().pid])
        disk.restore()
        verdict = storm.end()
        cycles.report(str(verdict))
        kill_at_once([storm.server().pid])


def test_a_disk_that_can_not_be_read_is_no_torn_journal(project: Project, cycles: Cycles) -> None:
    """If a failed read counted as the end of the journal, the confirmed records behind it would be cut off."""
    project.write("tasks.py", TASKS)
    with forgetful_disk(project, "reads") as disk:
        url = f"unix:{project.directory}/socket"
        command = ("penstock", "server", "--listen", url, "--data", str(disk.path / "data"))
        server = project.start(*command)
        server.wait_for_output("listening")
        project.environment["PENSTOCK_URL"] = url
        project.python("import tasks\nfor _ in range(5):\n    tasks.work.delay()\n")
        kill_at_once([server.pid])
        server.wait()
        began = time.monotonic()
        for at in itertools.count(1):
            # Failing forever, because the system turns a single failure within a longer call into a short one.
            disk.fail("read", at, forever=True)
            server = project.start(*command)
            eventually(lambda: server.returncode is not None or "listening" in server.output, 30)  # noqa: B023
            if not disk.heal():
                break  # it reads less often
            assert server.wait(30) == DISK_FAILED, server.output
            assert "could not read" in server.output, server.output
        assert at > 2
        cycles.report(f"each of the {at - 1} reads of a start failed, in {time.monotonic() - began:.1f} s")
        assert project.status()["queues"][0]["ready"] == 5
        kill_at_once([server.pid])
