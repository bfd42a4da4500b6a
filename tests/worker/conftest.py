from __future__ import annotations

import pytest
from project import Project
from worker.odd_shop import Shop


@pytest.fixture
def shop(project: Project) -> Shop:
    return Shop(project)
