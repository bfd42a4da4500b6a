"""Contents of `import penstock`."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import pickle
import re
import subprocess
import sys
import types
import typing
from pathlib import Path

import pytest

import penstock
from penstock import testing


def test_everything_public_is_there():
    for name in penstock.__all__:
        assert getattr(penstock, name) is not None
    assert set(penstock.__all__) <= set(dir(penstock))
    assert len(set(penstock.__all__)) == len(penstock.__all__)
    assert penstock.errors.CallTimeout is penstock.CallTimeout
    with pytest.raises(AttributeError, match="module 'penstock' has no attribute 'Celery'"):
        penstock.Celery  # type: ignore[attr-defined]  # noqa: B018


def test_every_error_is_public_and_of_one_family():
    for name in penstock.errors.__all__:
        error = getattr(penstock, name)
        assert issubclass(error, penstock.PenstockError) or error is penstock.RemoteTraceback


def test_public_classes_are_shown_under_the_name_they_are_imported_by():
    for name in penstock.__all__:
        thing = getattr(penstock, name)
        if isinstance(thing, type):
            assert f"{thing.__module__}.{thing.__qualname__}" == f"penstock.{name}"
            assert pickle.loads(pickle.dumps(thing)) is thing
            # Frameworks look up annotations of fields in the module that a class names it is from.
            typing.get_type_hints(thing)


# Public calls that ask no broker, or that are usable in event loops through `async for` or `async with`.
ASKS_NOBODY = {
    "App": {
        "add",
        "check",
        "codec",
        "failed",
        "headers",
        "job",
        "on_process_start",
        "on_process_stop",
        "on_slot_start",
        "on_slot_stop",
        "on_worker_start",
        "periodic",
        "replace",
        "remote_task",
        "task",
        "use",
        "workflow",
        "workflows",
    },
    "Sender": {"map_reduce", "options", "s", "si"},
    "Task": {"job", "map_reduce", "options", "s", "si"},
    "AsyncTask": {"job", "map_reduce", "options", "s", "si"},
    **{name: {"link", "link_error", "options"} for name in ("Partial", "Step", "Signature", "Chain", "Group", "Chord")},
    "Graph": {"add", "link", "link_error", "options"},
    # `count` and `index` are inherited from Sequence, and read the items like a loop does.
    "Results": {"count", "index"},
    "Job": {"progress_updates"},
    "Workflow": {"as_completed"},
    "JobLogFilter": {"filter"},
    "penstock": {"as_completed", "chain", "chord", "chunks", "current_job", "graph", "group", "shared_task"},
}
# `await` is a keyword, so no function can have that name.
IRREGULAR = {"wait": "async_wait"}


def test_whatever_asks_a_broker_has_an_asynchronous_twin():
    pairs = 0
    for home in [penstock, *(getattr(penstock, name) for name in penstock.__all__)]:
        if isinstance(home, type) and (
            issubclass(home, (BaseException, tuple, dict)) or dataclasses.is_dataclass(home)
        ):
            continue
        if not isinstance(home, (type, types.ModuleType)):
            continue
        public = penstock.__all__ if home is penstock else [name for name in dir(home) if not name.startswith("_")]
        calls = {name for name in public if inspect.isfunction(getattr(home, name))}
        twins = {name for name in calls if inspect.iscoroutinefunction(getattr(home, name))}
        expected = {IRREGULAR.get(name, f"a{name}") for name in calls - twins - ASKS_NOBODY.get(home.__name__, set())}
        if home is not penstock.JobState:
            assert twins == expected, home
        pairs += len(twins)
        for twin in twins:
            name = next((name for name, irregular in IRREGULAR.items() if irregular == twin), twin[1:])
            one, other = (list(inspect.signature(getattr(home, each)).parameters.values()) for each in (name, twin))
            assert [(each.name, each.kind, each.default) for each in one] == [
                (each.name, each.kind, each.default) for each in other
            ], (home, name)
    assert pairs >= 20


def test_no_property_asks_a_broker(monkeypatch):
    """`Job.state` used to ask twice, and nothing said so."""
    app = penstock.App("shop", "memory:properties")
    monkeypatch.setattr(app, "_connected", lambda: pytest.fail("a property asks the broker"))
    task = app.task(name="shop.send")(lambda: None)
    things = (app, task, task.options(queue="x"), task.s(), app.job("0" * 32), app.workflow("0" * 32))
    for thing in (*things, penstock.group(task.si()), penstock.chord([task.si()], task.si())):
        for name in dir(thing):
            if not name.startswith("_"):
                getattr(thing, name)


def test_the_command_is_not_kept_waiting_for_imports():
    script = "import sys; before = {*sys.modules}; import penstock._cli; print(*sorted({*sys.modules} - before))"
    output = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True, timeout=60)
    # Not even `typing` or `pathlib`: importing either takes several times as long as the command itself.
    assert output.stdout.split() == ["__future__", "penstock", "penstock._cli"]


def test_an_app_is_made_without_modules_that_few_programs_need():
    late = {"asyncio", "difflib", "fractions", "hashlib", "ipaddress", "pathlib", "random", "zoneinfo"}
    script = "import sys; from penstock import App; App('shop').task(print); print(*sys.modules)"
    output = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True, timeout=60)
    assert late & {*output.stdout.split()} == set()


def test_each_folder_imports_only_those_above_it_in_the_list():
    package = Path(penstock.__file__).parent
    text = (Path(__file__).parents[2] / "ARCHITECTURE.md").read_text().partition("folder of `python/penstock`")[2]
    folders = re.findall(r"^\| `(\w+)` \|", text.partition("## ")[0], re.MULTILINE)
    assert {*folders} == {file.parent.name for file in package.glob("*/__init__.py")}
    upward = []
    for place, folder in enumerate(folders):
        for file in (package / folder).glob("*.py"):
            # Only the top level counts: imports under TYPE_CHECKING or in functions do not run with the module.
            for statement in ast.parse(file.read_text()).body:
                if isinstance(statement, ast.ImportFrom):
                    home = (statement.module or "").split(".")
                    if home[0] == "penstock" and home[1:2] and home[1] in folders[place + 1 :]:
                        upward.append(f"{folder}/{file.name}: {statement.module}")
    assert upward == []


def test_what_is_for_users_tests_is_imported_when_it_is_asked_for():
    for name in testing.__all__:
        found = getattr(testing, name)
        if isinstance(found, type):
            assert found.__module__ == "penstock.testing"
    assert {*testing.__all__} == {*dir(testing)}
    with pytest.raises(AttributeError, match=r"module 'penstock.testing' has no attribute 'outline'"):
        testing.outline  # noqa: B018
