"""Names of Celery and RQ methods raise an error that names the equivalent here."""

from __future__ import annotations

import copy
import pickle
from inspect import getattr_static

import pytest

from penstock import App, Job, Workflow, _habits, chain, chord, group
from penstock._flows.steps import Partial
from penstock._tasks.task import Sender
from penstock.testing import inline

app = App("mill")


@app.task
def add(x: int, y: int) -> int:
    return x + y


@app.task
def total(numbers: list[int]) -> int:
    return sum(numbers)


def answer(of: object, name: str) -> str:
    with pytest.raises(AttributeError) as raised:
        getattr(of, name)
    assert (raised.value.name, raised.value.obj) == (name, of)
    return str(raised.value)


def test_a_name_of_celery_is_answered_with_the_name_here() -> None:
    with inline(app):
        job, workflow = add.delay(1, 2), group(add.s(1, 2)).delay()
        assert answer(job, "get") == "'Job' object has no attribute 'get': use result(timeout=...)"
        assert answer(workflow, "join").endswith("use result(), or results() for a group with failures")
        assert pickle.loads(pickle.dumps(job)) == job
        assert pickle.loads(pickle.dumps(workflow)) == workflow
    assert answer(add, "apply_async").endswith(": use task.options(countdown=...).delay(...)")
    assert answer(add.options(priority=1), "apply_async").startswith("'Sender' object has no attribute 'apply_async': ")
    assert answer(add.s(1, 2), "set").endswith(": use options(...), which returns a new call")
    assert answer(group(), "apply_async").startswith("'Group' object has no attribute 'apply_async': delay() sends it")
    assert answer(app, "send_task") == "'App' object has no attribute 'send_task': use app.send(name, ...)"


def test_any_other_name_is_answered_as_usual() -> None:
    assert answer(add, "dleay") == "'Task' object has no attribute 'dleay'"
    assert answer(add.s(1, 2), "nothing") == "'Signature' object has no attribute 'nothing'"
    assert not hasattr(app, "__wrapped__")
    assert copy.copy(add.s(1, 2)) == add.s(1, 2)


@pytest.mark.parametrize("kind", [App, Job, Partial, Sender, Workflow])
def test_each_name_is_answered_and_none_is_listed(kind: type) -> None:
    for name in _habits._BY_CLASS[kind.__name__]:
        assert isinstance(getattr_static(kind, name), _habits.Habit), name
    assert not {"get", "apply_async", "send_task"} & {*dir(add), *dir(add.s(1, 2)), *dir(app)}


def test_answers_cost_other_names_nothing() -> None:
    """A class with a ``__getattr__`` of its own looks up all its attributes the slow way."""
    for kind in (App, Job, Partial, Sender, Workflow):
        assert getattr_static(kind, "__getattr__", None) is None


def test_ways_of_celery_to_send_a_workflow_are_answered() -> None:
    with pytest.raises(
        TypeError, match=r"^a chain can't be called; send it with \.delay\(\), which returns a Workflow$"
    ):
        (add.s(1, 2) | add.s(3))()  # type: ignore[operator]
    with pytest.raises(TypeError, match=r"^a group can't be called"):
        group(add.s(1, 2))(3)  # type: ignore[operator]
    with pytest.raises(TypeError, match=r"^chord takes the group and the step after it: chord\(header, body\.s\(\)\)"):
        chord([add.s(1, 2)])(total.s())  # type: ignore[call-overload]
    with pytest.raises(TypeError, match=r"^chain takes steps, not a list of them; chain\(\*steps\) takes them$"):
        chain([add.s(1, 2), add.s(3)])  # type: ignore[call-overload]
    with pytest.raises(TypeError, match=r"^link takes steps, not a list of them; group\(\.\.\.\) makes one step"):
        add.s(1, 2).link([add.s(3)])  # type: ignore[arg-type]
