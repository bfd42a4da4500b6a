"""What `import penstock` shows."""

from __future__ import annotations

import pickle
import subprocess
import sys
import typing

import pytest

import penstock


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
            # Frameworks look up annotations of fields in the module that a class says it is from.
            typing.get_type_hints(thing)


def test_the_command_is_not_kept_waiting_for_imports():
    script = "import sys; before = {*sys.modules}; import penstock._cli; print(*sorted({*sys.modules} - before))"
    output = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True, timeout=60)
    # Not even `typing` or `pathlib`, each of which takes several times as long as the command itself.
    assert output.stdout.split() == ["__future__", "penstock", "penstock._cli"]
