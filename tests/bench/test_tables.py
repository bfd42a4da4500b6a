"""Figures in documents were measured, show their durability level, and are compared in the right direction."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from typing import Any

import pytest
import readme_table
import results
import run
import table
from results import Results


def measured() -> dict[str, Any]:
    """Return the results of two workloads in which one contestant fails."""
    found = Results()
    for drain in (90_000.0, 110_000.0, 100_000.0):
        found.add("no-op", "penstock", {"drain_per_s": drain, "end_to_end_per_s": 80_000.0, "enqueue_per_s": 400_000.0})
    for drain in (3_900.0, 4_000.0, 4_100.0):
        figures = {"drain_per_s": drain, "end_to_end_per_s": 3_500.0, "enqueue_per_s": 9_000.0}
        found.add("no-op", "dramatiq-everysec", figures)
    found.add("no-op", "celery", {"drain_per_s": 1.0, "end_to_end_per_s": 1.0, "enqueue_per_s": 1.0})
    found.fail("no-op", "celery", "no progress for 30 s\nits log")
    found.add("latency", "penstock", {"p50_ms": 0.4, "p99_ms": 1.0, "max_ms": 3.0})
    found.add("latency", "dramatiq-everysec", {"p50_ms": 5.0, "p99_ms": 10.0, "max_ms": 10.0})
    about = {
        "date": "2026-11-20",
        "machine": {"cores": 2, "cpu": "a CPU", "kernel": "6.1", "python": "3.11.7"},
        "sync": {"p50_us": 99.0, "p99_us": 171.0},
        "repeats": 3,
    }
    return dict(json.loads(json.dumps(found.as_json(about))))


def test_json_has_every_run_its_median_and_its_level() -> None:
    document = measured()
    assert document["schema"] == results.SCHEMA
    assert [workload["key"] for workload in document["workloads"]] == ["no-op", "latency"]
    ours = document["workloads"][0]["rows"][0]
    assert ours["contestant"] == "penstock"
    assert ours["figures"]["drain_per_s"] == {
        "median": 100_000.0,
        "min": 90_000.0,
        "max": 110_000.0,
        "runs": [90_000.0, 110_000.0, 100_000.0],
    }
    assert document["contestants"]["penstock"]["guarantee"] == "L3"
    assert document["contestants"]["dramatiq-everysec"]["guarantee"] == "L0+"


def test_a_failed_contestant_has_a_reason_and_no_figure() -> None:
    (celery,) = [row for row in measured()["workloads"][0]["rows"] if row["contestant"] == "celery"]
    assert celery["failure"] == "no progress for 30 s\nits log"
    assert "figures" not in celery


def test_full_tables() -> None:
    shown = table.full(measured())
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in shown.splitlines() if line[:1] == "|"]
    rows = {cells[0]: cells[1:] for cells in lines if len(cells) == 6}
    assert rows["Penstock"] == [
        "L3",
        "100,000 (90,000-110,000)",
        "80,000 (80,000-80,000)",
        "400,000 (400,000-400,000)",
        "",
    ]
    assert rows["dramatiq, Redis everysec"][-1] == "25x"
    assert rows["Celery, RabbitMQ"] == ["L0", "failed", "", "", ""]
    latency = {cells[0]: cells[1:] for cells in lines if len(cells) == 5}
    # Lower is better here, so the ratio is inverted.
    assert latency["dramatiq, Redis everysec"] == ["L0+", "5.00", "10.0", "12x"]
    assert "Celery, RabbitMQ failed: no progress for 30 s" in shown
    assert "append + fdatasync takes 99 µs (p99 171 µs)" in shown


def test_a_summary_has_few_rows_with_their_ranges() -> None:
    document = measured()
    document["contestants"]["saq-always"] = {"name": "SAQ, Redis always", "guarantee": "L3", "note": ""}
    rows = [line for line in table.summary(document).splitlines() if line.startswith("|")]
    assert [cell.strip() for cell in rows[2].strip("|").split("|")] == [
        "Penstock",
        "L3",
        "100,000 (90,000-110,000)",
        "",
        "",
        "0.40 ms",
        "",
    ]
    assert [row.split("|")[1].strip() for row in rows[2:]] == [
        "Penstock",
        "Celery, RabbitMQ",
        "dramatiq, Redis everysec",
    ]


def test_a_legend_explains_the_levels_that_are_shown_and_no_other() -> None:
    document = measured()
    everysec = table.legend(document, ["penstock", "dramatiq-everysec"])
    assert "**L0+** in the page cache, but not always at once" in everysec and "**L3** synced" in everysec
    assert "**L0** " not in everysec and "**L1** " not in everysec


@pytest.mark.parametrize(
    ("repeats", "shown"),
    [(1, "One run each."), (2, "Means of 2 runs in"), (3, "Medians of 3 runs in")],
)
def test_two_runs_have_no_median(repeats: int, shown: str) -> None:
    assert shown in table.conditions({**measured(), "repeats": repeats})


def test_documents_claim_no_more_runs_than_there_were() -> None:
    document = json.loads(results.LATEST.read_text())
    counts = {len(row["figures"][figure]["runs"]) for workload in document["workloads"] for row in workload["rows"]
              if "figures" in row for figure in row["figures"]}  # fmt: skip
    assert counts == {document["repeats"]}
    for name in readme_table.DOCUMENTS:
        outside = readme_table.MARKED.sub("", (readme_table.ROOT / name).read_text())
        assert not re.search(r"(median|mean) of (two|three|four|five|\d+) runs", outside), name
    page = (readme_table.ROOT / "docs/benchmarks.md").read_text()
    assert "Each measurement runs three times" in page and run.REPEATS == 3


@pytest.mark.parametrize(
    ("ours", "theirs", "more_is_better", "shown"),
    [
        (100_000, 4_000, True, "25x"),
        (0.5, 1.25, False, "2.5x"),
        (4_000, 8_000, True, "0.50x"),
        (2.0, 1.0, False, "0.50x"),
        (1_000, 1_001, True, "1.0x"),
    ],
)
def test_ratio_says_how_many_times_as_good_penstock_is(
    ours: float, theirs: float, more_is_better: bool, shown: str
) -> None:
    assert table.ratio(ours, theirs, more_is_better) == shown


def test_only_the_marked_part_of_a_document_is_written() -> None:
    document = "before\n<!-- bench: summary -->\nold\n<!-- bench: end -->\nafter\n"
    written = readme_table.rendered(document, measured())
    assert written.startswith("before\n<!-- bench: summary -->\n|")
    assert written.endswith("\n<!-- bench: end -->\nafter\n")
    assert "old" not in written
    assert readme_table.rendered(written, measured()) == written


def test_documents_show_the_latest_results() -> None:
    check = [sys.executable, readme_table.__file__, "--check"]
    outcome = subprocess.run(check, capture_output=True, text=True, timeout=30)
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr
