"""A power cut at any moment. A kill -9 cannot test this, because the system keeps what a killed process wrote.

The broker's data is on a file system that loses unsynced pages, parts of pages, and names (forgetful_disk.py). All
confirmed jobs must be there when the power is back.
"""

from __future__ import annotations

import time

import pytest
from crash.cycles import Cycles
from crash.disks import forgetful_disk
from crash.storm import Storm, kill_at_once
from project import Project, eventually


@pytest.mark.timeout(7200)
def test_power_cuts_under_load_lose_nothing_that_was_confirmed(cycles: Cycles) -> None:
    forgotten = 0
    for number, cuts in enumerate(cycles.rounds(5, 300, each=10)):
        chance = cycles.chance(number)
        with Project.fresh() as project, forgetful_disk(project, f"{chance.random()}") as disk:
            storm = Storm(project, chance, f"unix:{project.directory}/socket", disk.path / "data")
            storm.begin()
            for _ in range(cuts):
                storm.wait_for_confirms(20)
                if chance.random() < 0.5:
                    time.sleep(chance.uniform(0, 0.3))
                    disk.cut()
                else:
                    # Between any two disk operations of the broker.
                    disk.cut(after=chance.randrange(1, 40))
                    eventually(disk.is_off, 30)
                kill_at_once([storm.server().pid])
                forgotten += disk.restore()
                if chance.random() < 0.3:
                    # And again while the next broker recovers, at any point.
                    disk.cut(after=chance.randrange(1, 12))
                    storm.heal()
                    eventually(lambda storm=storm: disk.is_off() or storm.server().returncode is not None, 30)
                    kill_at_once([storm.server().pid])
                    storm.server().wait()
                    forgotten += disk.restore()
                storm.heal()
            verdict = storm.end()
            cycles.report(f"{cuts} power cuts; {verdict}")
            assert verdict.failed_calls == 0
            kill_at_once([storm.server().pid])
    cycles.report(f"{forgotten} pages and names were forgotten in all")
    assert forgotten > 0, "the disk forgot nothing: the test shows nothing"


@pytest.mark.timeout(7200)
def test_a_power_cut_at_each_of_the_first_steps_of_a_journal_leaves_one_that_starts(cycles: Cycles) -> None:
    """Before the first confirm there is nothing to lose, but the next broker must cope with the remains."""
    with Project.fresh() as project, forgetful_disk(project, f"{cycles.chance().random()}") as disk:
        url = f"unix:{project.directory}/socket"
        for step in range(1, cycles.of(8, 40) + 1):
            data = disk.path / f"data-{step}"
            disk.cut(after=step)
            first = project.start("penstock", "server", "--listen", url, "--data", str(data))
            eventually(lambda first=first: disk.is_off() or "listening" in first.output, 30)
            kill_at_once([first.pid])
            first.wait()
            disk.restore()
            second = project.start("penstock", "server", "--listen", url, "--data", str(data))
            second.wait_for_output("listening")
            kill_at_once([second.pid])
            second.wait()
