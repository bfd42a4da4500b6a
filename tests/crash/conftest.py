from __future__ import annotations

import pytest
from crash.cycles import Cycles


@pytest.fixture
def cycles(request: pytest.FixtureRequest) -> Cycles:
    return Cycles(request.node.name)
