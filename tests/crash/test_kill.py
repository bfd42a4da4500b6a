"""kill -9 of anything at any moment, under load: no confirmed job is lost, and none is settled twice."""

from __future__ import annotations

import time

import pytest
from crash.cycles import Cycles
from crash.storm import Storm, free_port
from project import Project

VICTIMS = {"broker": 8, "child": 4, "supervisor": 3, "producer": 2, "all": 3}


@pytest.mark.timeout(7200)
@pytest.mark.parametrize("kind", ["local", "server"])
def test_kills_of_anything_under_load_lose_and_double_nothing(kind: str, cycles: Cycles) -> None:
    """A long run is split into rounds, each with its own broker, then drained and judged."""
    for number, kills in enumerate(cycles.rounds(10, 500, each=25)):
        chance = cycles.chance(kind, number)
        url = None if kind == "local" else f"tcp://127.0.0.1:{free_port()}"
        with Project.fresh() as project:
            storm = Storm(project, chance, url)
            storm.begin()
            for _ in range(kills):
                storm.wait_for_confirms(30)
                # A random moment; a shorter wait would add more moments, but no other kinds of moments.
                time.sleep(chance.uniform(0, 2 if cycles.long else 0.8))
                storm.kill(chance.choices(list(VICTIMS), list(VICTIMS.values()))[0])
                storm.heal()
            verdict = storm.end()
            cycles.report(f"{kills} cycles, {storm.kills} processes killed; {verdict}")
            # The last calls of a killed producer have no outcome; every other call was confirmed.
            assert verdict.failed_calls == 0
            assert storm.kills >= kills
