"""Results as tables: Markdown, which also reads well in a terminal."""

from __future__ import annotations

from typing import Any

PENSTOCK = "penstock"


def number(value: float, unit: str) -> str:
    """Format a figure with at least three significant digits, and none that noise would change."""
    if unit.endswith("/s"):
        return f"{round(value, -1 if value >= 1_000 else 0):,.0f}" if value < 10_000 else f"{round(value, -2):,.0f}"
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def ratio(ours: float, theirs: float, more_is_better: bool) -> str:
    """Return how many times as good Penstock's figure is."""
    times = ours / theirs if more_is_better else theirs / ours
    return f"{times:.0f}x" if times >= 9.95 else f"{times:.1f}x" if times >= 0.995 else f"{times:.2f}x"


def markdown(header: list[str], rows: list[list[str]], left: int) -> str:
    """Return a table with aligned columns: the first ``left`` to the left, figures to the right."""
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]

    def line(cells: list[str]) -> str:
        padded = [
            cell.ljust(width) if column < left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ]
        return "| " + " | ".join(padded) + " |"

    rule = ["-" * width if column < left else "-" * (width - 1) + ":" for column, width in enumerate(widths)]
    return "\n".join([line(header), line(rule), *map(line, rows)])


def with_range(found: dict[str, Any], unit: str) -> str:
    """Format the median, followed by the range in parentheses when there were several runs."""
    shown = number(found["median"], unit)
    if len(found["runs"]) > 1:
        shown += f" ({number(found['min'], unit)}-{number(found['max'], unit)})"
    return shown


def workload_table(results: dict[str, Any], workload: dict[str, Any]) -> str:
    """Return one row per contestant: median and range of each figure, and Penstock's lead in the first figure."""
    figures = workload["figures"]
    rows_by_key = {row["contestant"]: row for row in workload["rows"]}
    ours = rows_by_key.get(PENSTOCK, {}).get("figures")
    body = []
    for row in workload["rows"]:
        contestant = results["contestants"][row["contestant"]]
        cells = [contestant["name"], contestant["guarantee"]]
        if "failure" in row:
            cells += ["failed"] + [""] * len(figures)
        else:
            cells += [with_range(row["figures"][figure["key"]], figure["unit"]) for figure in figures]
            first = figures[0]
            if ours and row["contestant"] != PENSTOCK:
                lead = ratio(
                    ours[first["key"]]["median"], row["figures"][first["key"]]["median"], first["more_is_better"]
                )
            else:
                lead = ""
            cells.append(lead)
        body.append(cells)
    header = ["", "level", *(f"{figure['title']}, {figure['unit']}" for figure in figures), "Penstock is"]
    return markdown(header, body, left=2)


def full(results: dict[str, Any]) -> str:
    """Return the tables of all workloads, with the conditions and the legend that explain them."""
    parts = [conditions(results)]
    for workload in results["workloads"]:
        parts.append(f"**{workload['title']}**")
        parts.append(workload_table(results, workload))
        failures = [
            f"- {results['contestants'][row['contestant']]['name']} failed: {row['failure'].splitlines()[0]}"
            for row in workload["rows"]
            if "failure" in row
        ]
        if failures:
            parts.append("\n".join(failures))
    parts.append(legend(results, list(results["contestants"])))
    return "\n\n".join(parts)


# Penstock, the queue that most people know, and the fastest peer: as most run it, and at Penstock's level.
SUMMARY_ROWS = [PENSTOCK, "celery", "dramatiq-everysec", "dramatiq-always"]
SUMMARY_COLUMNS = [
    ("no-op", "drain_per_s", "no-op jobs/s, 2 processes"),
    ("race", "finish_s", "20,000 jobs, 10 workers"),
    ("one", "calls_per_s", "one `delay()` at a time"),
    ("latency", "p50_ms", "call to result, p50"),
    ("memory-40", "pss_mb", "memory, 40 slots"),
]


def summary(results: dict[str, Any]) -> str:
    """Return the most telling rows, with one figure per workload: for a README."""
    found: dict[tuple[str, str], str] = {}
    for workload in results["workloads"]:
        units = {figure["key"]: figure["unit"] for figure in workload["figures"]}
        for row in workload["rows"]:
            for key, unit in units.items():
                if "figures" in row:
                    value = with_range(row["figures"][key], unit)
                    found[row["contestant"], f"{workload['key']}.{key}"] = (
                        value if unit.endswith("/s") else f"{value} {unit}"
                    )
                else:
                    found[row["contestant"], f"{workload['key']}.{key}"] = "failed"
    body = []
    rows = [key for key in SUMMARY_ROWS if key in results["contestants"]]
    for key in rows:
        contestant = results["contestants"][key]
        cells = [found.get((key, f"{workload}.{figure}"), "") for workload, figure, _ in SUMMARY_COLUMNS]
        if any(cells):
            body.append([contestant["name"], contestant["guarantee"], *cells])
    table = markdown(["", "level", *(title for _, _, title in SUMMARY_COLUMNS)], body, left=2)
    return f"{table}\n\n{legend(results, rows)}\n\n{conditions(results)}"


def legend(results: dict[str, Any], contestants: list[str]) -> str:
    """Explain the levels of these contestants."""
    shown = {results["contestants"][key]["guarantee"] for key in contestants}
    levels = "; ".join(f"**{level}** {meaning}" for level, meaning in results["guarantees"].items() if level in shown)
    return f"Level of a job whose enqueue call has returned: {levels}. Results are kept throughout."


def conditions(results: dict[str, Any]) -> str:
    machine, sync = results["machine"], results["sync"]
    text = (
        f"{results['date']}, {machine['cores']} cores of {machine['cpu']} shared by clients, brokers and workers, "
        f"Linux {machine['kernel']}, Python {machine['python']}; "
        f"a 300 B append + fdatasync takes {sync['p50_us']:.0f} µs (p99 {sync['p99_us']:.0f} µs). "
    )
    repeats = results["repeats"]
    if repeats == 1:
        return text + "One run each."
    # The median of two runs is their mean, so it isn't called a median.
    middle = "Means" if repeats == 2 else "Medians"
    return text + f"{middle} of {repeats} runs in interleaved order, with the range in parentheses."
