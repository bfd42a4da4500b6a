from __future__ import annotations

import pytest
from crash.cycles import Cycles
from project import Project
from worker.odd_shop import Shop


@pytest.fixture
def cycles(request: pytest.FixtureRequest) -> Cycles:
    return Cycles(request.node.name)


@pytest.fixture
def shop(project: Project) -> Shop:
    return Shop(project)
