"""A shop whose tasks are steps: once with a real worker that all tests of a file share, and once inline."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from project import MARK, Project
from workflows.flow_shop import TASKS, FlowShop

from penstock.testing import inline


@pytest.fixture(scope="module")
def real() -> Iterator[FlowShop]:
    """Yield the shop with a broker and a worker of two processes."""
    with Project.fresh() as project, pytest.MonkeyPatch.context() as environment:
        environment.setenv("PENSTOCK_URL", project.url)
        environment.setenv(MARK, project.mark)
        project.write("flow_tasks.py", TASKS)
        module = project.tasks("flow_tasks.py")
        project.worker("flow_tasks:app", "-c", "2", "-Q", "default,second")
        yield FlowShop(project, module, is_real=True)


@pytest.fixture(params=["worker", "inline"])
def shop(request: pytest.FixtureRequest, real: FlowShop) -> Iterator[FlowShop]:
    if request.param == "worker":
        real.clear()
        yield real
    else:
        with inline(real.tasks.app):
            shop = FlowShop(real.project, real.tasks, is_real=False)
            shop.clear()
            yield shop
