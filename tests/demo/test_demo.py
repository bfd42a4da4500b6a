"""`make demo`, with fewer files: its report is true, and it leaves nothing behind."""

from __future__ import annotations

import signal
import sys
import tempfile
from pathlib import Path

import pytest

# A standard library of a few files, so that a run takes no longer than the processes it starts.
SMALL = """
    import sys
    from pathlib import Path
    from penstock import _demo

    def source_files():
        return sorted(Path(_demo.__file__).parent.glob("*.py"))[:{files}] * {times}

    _demo.source_files = source_files
    sys.exit(_demo.main())
"""


@pytest.fixture
def leftovers(monkeypatch):
    """The demo's directories that are there now; in a place of this test alone."""
    with tempfile.TemporaryDirectory(prefix="p-") as place:
        yield Path(place)


def demo(project, leftovers, *, files=5, times=4):
    return project.start_python(SMALL.format(files=files, times=times), TMPDIR=str(leftovers))


def test_it_shows_both_ways_and_leaves_nothing(project, leftovers):
    run = demo(project, leftovers)
    assert run.wait(60) == 0, run.output
    assert "20 files" in run.output
    assert "both answers are equal" in run.output
    assert "most used identifiers" in run.output
    assert "\x1b" not in run.output, "a file gets no escape sequences"
    assert project.processes() == {}
    assert list(leftovers.iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_stopped_in_the_middle_it_still_leaves_nothing(project, leftovers, number):
    run = demo(project, leftovers, files=10, times=1000)
    run.wait_for_output("up after")
    run.signal(number)
    assert run.wait(60) == 130, run.output
    assert "stopped" in run.output
    assert "Traceback" not in run.output
    assert project.processes() == {}
    assert list(leftovers.iterdir()) == []


def test_different_answers_are_an_error(project, leftovers):
    source = SMALL.format(files=2, times=1).replace(
        "_demo.source_files =",
        "here = _demo.merge\n    merges = iter([(1, {'a': 1})])\n"
        "    _demo.merge = type('M', (), {'delay': here.delay, '__call__': lambda self, counts: next(merges)})()\n"
        "    _demo.source_files =",
    )
    run = project.start_python(source, TMPDIR=str(leftovers))
    assert run.wait(60) == 1, run.output
    assert "the two answers differ" in run.output


def test_the_command_is_there(project):
    assert project.run(sys.executable, "-c", "import penstock._demo").returncode == 0
