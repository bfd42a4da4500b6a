"""The pages are true: their Python runs, their commands exist, and their links resolve."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from urllib.parse import unquote

import pytest
from blocks import PAGES, ROOT, chapters
from test_walks import WALKS


def named(pages: list[Path]) -> list[object]:
    return [pytest.param(page, id=str(page.relative_to(ROOT))) for page in pages]


def all_chapters() -> list[object]:
    pages = [page for page in PAGES if page.name not in {"README.md", *WALKS}]
    return [
        pytest.param(chapter, id=f"{page.name}: {', '.join(chapter.files)}")
        for page in pages
        for chapter in chapters(page)
    ]


@pytest.mark.parametrize("chapter", all_chapters())
def test_the_python_of_a_page_runs(project, chapter):
    for name, source in chapter.files.items():
        project.write(name, source)
        project.worker(f"{name.removesuffix('.py')}:app", "-c", "2")
    run = project.start_python(chapter.script)
    assert run.wait(60) == 0, f"lines as on the page:\n{run.output}"


@pytest.mark.parametrize("page", named(PAGES))
def test_the_commands_of_a_page_exist(project, page):
    for command in sorted(set(commands(page.read_text()))):
        # The program checks everything before --help: commands, options and their values.
        run = project.penstock(*shlex.split(command), "--help")
        assert run.returncode == 0, f"{page.name} has `penstock {command}`:\n{run.output}"


def commands(text: str) -> list[str]:
    """Find the arguments of `penstock` on separate lines, in unit files, and in lists of words."""
    lines = r"^(?:    |\$ )?(?:\w+=\S+ )*penstock (?=\w+\b)([^\n#>|]*)|^ExecStart=\S*/penstock (.*)$"
    found = [typed or started for typed, started in re.findall(lines, text, re.MULTILINE)]
    found += [words.replace(",", " ") for words in re.findall(r"\[\"?penstock\"?, ([^\]]*)\]", text)]
    return [re.sub(r"\bID\b", "0" * 32, command) for command in found]


@pytest.mark.parametrize("page", named([*PAGES, ROOT / "ARCHITECTURE.md"]))
def test_the_links_of_a_page_lead_somewhere(page):
    for target in re.findall(r"\]\((?!\w+:)([^)#\s]+)", page.read_text()):
        assert (page.parent / unquote(target)).exists(), f"{page.name} links to {target}"


def test_every_page_is_in_the_list():
    listed = set(re.findall(r"\]\(([^)]+\.md)\)", (ROOT / "docs/README.md").read_text()))
    pages = {str(page.relative_to(ROOT / "docs")) for page in PAGES[1:]} - {"README.md"}
    assert pages <= listed


def test_the_verbs_of_make_are_listed(project):
    run = project.run("make", "--no-print-directory", cwd=ROOT)
    for verb in ("build", "demo", "test", "lint", "simulate", "bench", "docs"):
        assert re.search(rf"^  make {verb} +\w", run.output, re.MULTILINE), run.output
