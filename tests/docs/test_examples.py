"""Each example runs as its first lines say: one command for the worker and one for the script, or one for both."""

from __future__ import annotations

import importlib.util
import re
import shutil
import sys
from glob import glob
from pathlib import Path
from xml.etree import ElementTree

import pytest
from blocks import ROOT
from project import Process, Project, TooSlow, needs

EXAMPLES = {
    "webhooks": ["answer: 200", "attempts: 3"],
    "word_count": [],
}


def test_every_example_is_here():
    assert {path.stem for path in (ROOT / "examples").glob("*.py")} == EXAMPLES.keys()
    assert {path.parent.name for path in (ROOT / "examples").glob("*/__main__.py")} == {
        "breakdown",
        "collector",
        "poller",
    }


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


def measure(project: Project, name: str, *options: str) -> tuple[Process, str]:
    """Run an example that starts everything it needs; return the process and its picture."""
    written = [project.directory / f"{name}.svg", project.directory / f"{name}.html"]
    outputs = [word for path in written for word in ("--output", str(path))]
    run = project.run(sys.executable, "-m", f"examples.{name}", *options, *outputs, cwd=ROOT, timeout=100)
    assert run.returncode == 0, run.output
    picture = written[0].read_text()
    ElementTree.fromstring(picture)
    stands_alone(written[1], picture)
    return run, picture


def stands_alone(page: Path, picture: str) -> None:
    """Check that a page contains its picture and loads nothing."""
    text = page.read_text()
    assert picture in text
    assert not re.search(r"<(script|link|img)|@import|url\(", text)


def test_each_way_of_the_collector_is_faster_than_the_one_before(project):
    sizes = ["--pages", "6", "--objects", "60", "--slots", "30", "--latency", "20", "60", "--serial-pages", "1"]
    run, picture = measure(project, "collector", *sizes)
    figures = re.findall(r"^\| (.*?) +\| +([\d.]+) \| +[\d.]+ \| +[\d.]+ \|$", run.output, re.MULTILINE)
    assert [name for name, _ in figures] == [
        "serial (1 of 6 pages, scaled)", "a job a page", "a group a page", "overlapping chords", "limit",
    ]  # fmt: skip
    # No order of the requests beats the limit; but a busy machine may delay any of them.
    seconds = [float(figure) for _, figure in figures]
    assert min(seconds) == seconds[-1], run.output
    if seconds != sorted(seconds, reverse=True):
        raise TooSlow(run.output)
    # The chart never shows more concurrent requests than slots.
    used = [int(rows) for rows in re.findall(r"\((\d+) of 30 slots\)", picture)]
    assert len(used) == 3 and max(used) <= 30


def test_the_breakdown_makes_the_same_page_in_each_way(project):
    needs(importlib.util.find_spec("psycopg"), "psycopg (requirements/dev.txt)")
    needs(glob("/usr/lib/postgresql/*/bin/postgres") or shutil.which("postgres"), "PostgreSQL (Debian: postgresql)")
    sizes = ["--countries", "12", "--slots", "4", "--clients", "1,3", "--requests", "6"]
    data = ["--one-ms", "0", "--union-ms", "0"]
    run, picture = measure(project, "breakdown", *sizes, *data, "--ways", "threads,group,union")
    assert "43,680 sales: 12 countries, 40 apps, 91 days." in run.output, run.output
    row = r"^\| (\S.*?) +\| +(\d+) \| +(\d+)" + r" \| +([\d,]+)" * 5 + r" \|$"
    figures = re.findall(row, run.output, re.MULTILINE)
    names = ["threads", "Penstock's group", "one UNION"]
    assert [(name, clients) for name, clients, *_ in figures] == [
        (name, clients) for clients in ("1", "3") for name in names
    ]
    for _, clients, requests, *quantiles in figures:
        assert requests == {"1": "6", "3": "6"}[clients]
        assert sorted(quantiles, key=milliseconds) == quantiles
    # The page's white background, one violin per figure, and a legend.
    assert picture.count('z" fill="#') == 1 + len(figures) + len({name for name, *_ in figures})


def test_a_poll_piles_up_only_where_it_may_overlap_itself(project):
    run, picture = measure(project, "poller", "--seconds", "16", "--slow", "2", "12", "--slow-takes", "2.5")
    row = r"^\| `(\w+)` +" + r"\| +(\d+) " * 4 + r"\|$"
    figures = {name: list(map(int, numbers)) for name, *numbers in re.findall(row, run.output, re.MULTILINE)}
    assert figures.keys() == {"skip", "queue", "allow"}, run.output
    polls, skipped, most, _ = zip(*figures.values(), strict=True)
    assert most[0] == most[1] == 1 and most[2] >= 4, run.output
    assert skipped[0] >= 3 and skipped[2] == 0, run.output
    if polls[2] < 14:
        raise TooSlow(run.output)
    # Status shows that all its slots are busy and that other jobs wait.
    queue = re.search(r"^allow +(\d+) +0 +4 ", run.output, re.MULTILINE)
    assert queue is not None and int(queue[1]) == most[2] - 4, run.output
    assert picture.count("<path") == 2 + len(figures) + len(re.findall(r'text-anchor="end"', picture))


def milliseconds(figure: str) -> int:
    return int(figure.replace(",", ""))
