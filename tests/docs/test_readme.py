"""The README's quickstart, word for word: its file, its two commands, their output, and its picture."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import terminal
from blocks import ROOT, blocks

README = ROOT / "README.md"


def test_the_quickstart(project):
    file = next(block for block in blocks(README, "python") if block.file)
    project.write(file.file, file.text)
    commands, shown = blocks(README, "sh")[0].text.splitlines(), blocks(README, "text")[0].text
    worker_command, script_command = (re.sub(r"\s+#.*", "", command) for command in commands)
    worker = project.start(*worker_command.split())
    run = project.run(*script_command.split(), timeout=60)
    assert run.returncode == 0, run.output
    assert run.output == shown
    assert worker.returncode is None, worker.output


def test_the_picture_shows_what_the_commands_print(project):
    picture = terminal.PICTURE.read_text()
    ElementTree.fromstring(picture)
    assert terminal.masked(terminal.quickstart(project)) == terminal.masked(picture), (
        "if the output has changed on purpose, run tests/docs/terminal.py"
    )
