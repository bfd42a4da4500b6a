"""Pages to follow from top to bottom: their files are written and their commands run, in order.

A command is a line of a console block that begins with ``$``. Its expected output follows; ``…`` matches anything.
A ``penstock worker`` keeps running during the commands after it, until the next ``penstock worker``. A console block
without a command is the worker's output so far. ``pip install`` is skipped: it needs a network.

A file whose last line is ``# …`` keeps its old text from the first task on.
"""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass

import pytest
from blocks import ROOT
from project import Process, Project, eventually

WALKS = ["getting-started.md", "layout.md"]


@dataclass
class Step:
    """A file to write, a command and its output, or the worker's output so far."""

    line: int
    file: str = ""
    command: str = ""
    text: str = ""


def steps(page: str) -> list[Step]:
    text = (ROOT / "docs" / page).read_text()
    found: list[Step] = []
    for block in re.finditer(r"^```(python|console)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        line = text.count("\n", 0, block.start(2)) + 1
        if block[1] == "python":
            name = re.match(r"# ([\w/]+\.py)\n", block[2])
            assert name is not None, f"{page}:{line}: which file is that?"
            found.append(Step(line, file=name[1], text=block[2]))
            continue
        if not block[2].startswith("$ "):
            found.append(Step(line, text=block[2]))
        for command in re.finditer(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", block[2], re.MULTILINE):
            typed = re.sub(r"\s{2,}#.*", "", command[1])
            found.append(Step(line + block[2].count("\n", 0, command.start()), command=typed, text=command[2]))
    return found


def prints(expected: str, output: str) -> bool:
    """Whether the output matches the page, where ``…`` matches anything."""
    pattern = ".*".join(re.escape(part) for part in expected.strip().split("…"))
    return re.fullmatch(pattern, output.strip(), re.DOTALL) is not None


def test_an_ellipsis_is_anything_and_the_rest_is_exact():
    assert prints("… 2 tasks\n…", "INFO 2 tasks\nqueues: default\n")
    assert prints("hello", "hello\n")
    assert not prints("hello", "hello, Ada\n")
    assert not prints("… 2 tasks", "INFO 12 tasks, no more\n")


def written(project: Project, step: Step) -> str:
    if not step.text.endswith("# …\n"):
        return step.text
    before = (project.directory / step.file).read_text()
    return step.text.removesuffix("# …\n") + before[before.index("\n\n@app.task") :]


def wait_for(worker: Process, step: Step) -> None:
    eventually(lambda: prints(step.text, worker.output), 30, lambda: worker.output)


@pytest.mark.parametrize("page", WALKS)
def test_a_walk(project: Project, page: str):
    worker: Process | None = None
    environment: dict[str, str] = {}
    for step in steps(page):
        where = f"docs/{page}:{step.line}: {step.command}"
        if step.file:
            project.write(step.file, written(project, step))
        elif not step.command:
            assert worker is not None
            wait_for(worker, step)
        elif step.command.startswith("python -m pip install "):
            pass
        elif step.command.startswith("penstock worker "):
            if worker is not None:
                worker.signal(signal.SIGINT)
                assert worker.wait() == 0, worker.output
            worker = project.start(*step.command.split())
            wait_for(worker, step)
        elif step.command.startswith("export "):
            name, value = step.command.removeprefix("export ").split("=", 1)
            environment[name] = value.replace("/srv/shop", str(project.directory))
        else:
            run = project.run(*step.command.split(), **environment)
            assert run.returncode == 0, f"{where}\n{run.output}"
            assert prints(step.text, run.output), f"{where}\n{run.output}"
