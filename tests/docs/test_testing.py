"""docs/testing.md as a user's own tests: each file passes, and the forgetful one fails as the page says."""

from __future__ import annotations

import re
import sys

import pytest
from blocks import ROOT, blocks

PAGE = ROOT / "docs" / "testing.md"
CONFIGURATION = "[pytest]\nasyncio_mode = auto\nasyncio_default_fixture_loop_scope = function\n"


def run(project, *files: str):
    project.write("pytest.ini", CONFIGURATION)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "error", *files]
    return project.run(*command, PYTHONPATH=str(project.directory), timeout=90)


@pytest.fixture
def files(project):
    """Write the page's files, except its conftest.py."""
    found = {block.file: block.text for block in blocks(PAGE, "python")}
    assert None not in found
    for name, text in found.items():
        if name != "conftest.py":
            project.write(name, text)
    return found


def test_the_tests_of_the_page_pass(project, files):
    names = [name for name in files if name.startswith("test_") and name != "test_forgetful.py"]
    assert len(names) == 7
    process = run(project, *names)
    assert process.returncode == 0, process.output
    assert sum(text.count("def test_") for name, text in files.items() if name in names) == int(
        re.findall(r"(\d+) passed", process.output)[0]
    )


def test_the_forgetful_test_fails_as_the_page_says(project, files):
    said = next(block.text for block in blocks(PAGE, "text") if "BrokerNotAllowed" in block.text)
    process = run(project, "test_forgetful.py")
    assert "1 failed" in process.output
    begins = said.replace("local:.penstock", project.url).replace("\n", " ").partition(" …")[0]
    assert begins in re.sub(r"\s+", " ", re.sub(r"(?m)^E +", "", process.output)), process.output


@pytest.mark.parametrize("name", ["conftest.py", "pytest.ini"])
def test_both_remedies_of_the_page_help_it(project, files, name):
    if name == "pytest.ini":
        (text,) = (block.text for block in blocks(PAGE, "ini"))
        project.write("pytest.ini", text)
        process = project.run(
            sys.executable, "-m", "pytest", "-q", "test_forgetful.py", PYTHONPATH=str(project.directory)
        )
    else:
        project.write(name, files[name])
        process = run(project, "test_forgetful.py")
    assert process.returncode == 0, process.output


def test_the_message_of_the_page_is_the_one_that_is_shown(project, files):
    said = next(block.text for block in blocks(PAGE, "text") if "These calls were enqueued" in block.text)
    script = """
        import shop
        from penstock.testing import capture

        with capture() as calls:
            shop.sign_up("ada@example.org")
            try:
                calls.assert_enqueued("shop.send", args=("bob@example.org",))
            except AssertionError as error:
                print(error)
    """
    assert project.python(script) == said


def test_the_test_of_the_page_on_schedules_passes(project):
    for block in blocks(ROOT / "docs" / "schedules.md", "python"):
        if block.file:
            project.write(block.file, block.text)
    process = run(project, "test_clean_up.py")
    assert process.returncode == 0, process.output
