"""kill -9 of broker, workers and creators at any moment: each workflow ends like a direct evaluation of it."""

from __future__ import annotations

import shutil
import tempfile
import time
from pathlib import Path

import pytest
from crash.cycles import Cycles
from crash.forest import Forest
from project import Project

VICTIMS = {"broker": 5, "worker": 3, "child": 3, "creator": 5}


@pytest.mark.timeout(14400)
def test_workflows_end_as_evaluated_whatever_is_killed_meanwhile(cycles: Cycles) -> None:
    """A long run is split into rounds, each with its own broker, whose trees all end and are judged."""
    totals: dict[str, int] = dict.fromkeys(VICTIMS, 0)
    for number, kills in enumerate(cycles.rounds(12, 1000, each=25)):
        chance = cycles.chance("forest", number)
        with Project.fresh() as project:
            forest = Forest(project, chance)
            forest.heal()
            for _ in range(kills):
                # While trees run.
                forest.wait_for("begin", chance.randrange(1, 40))
                what = chance.choices(list(VICTIMS), list(VICTIMS.values()))[0]
                if what == "creator" and chance.random() < 0.7:
                    # While one is being sent.
                    forest.wait_for("attempt", 1)
                    time.sleep(chance.uniform(0, 0.004))
                forest.kill(what)
                forest.heal()
            judgement = forest.end()
            for what, count in forest.kills.items():
                totals[what] += count
            cycles.report(f"seed {forest.seed}: {kills} kills ({dict(forest.kills)}); {judgement}")
            if judgement.faults:
                kept = Path(tempfile.gettempdir(), f"penstock-books-{forest.seed}")
                shutil.copy(forest.books, kept)
                cycles.report(f"the books are in {kept}")
            assert not judgement.faults, str(judgement)
    cycles.report(f"kills: {totals}")
