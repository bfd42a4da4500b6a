"""Each example does what its first lines say: one command for the worker, one for the script."""

from __future__ import annotations

import shutil

import pytest
from blocks import ROOT

EXAMPLES = {
    "webhooks": ["answer: 200", "attempts: 3"],
    "word_count": [],
}


def test_every_example_is_here():
    assert {path.stem for path in (ROOT / "examples").glob("*.py")} == EXAMPLES.keys()


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example(project, name):
    shutil.copy(ROOT / "examples" / f"{name}.py", project.directory)
    source = (project.directory / f"{name}.py").read_text()
    commands = [line[2:].split() for line in source.splitlines() if line.startswith("$ ")]
    assert commands == [["penstock", "worker", f"{name}:app"], ["python", f"{name}.py"]]
    project.start(*commands[0])
    run = project.run(*commands[1], timeout=60)
    assert run.returncode == 0, run.output
    assert run.output.strip()
    for line in EXAMPLES[name]:
        assert line in run.output
