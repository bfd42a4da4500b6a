"""Runs of each measurement, their medians, and the JSON that keeps them."""

from __future__ import annotations

import json
import os
import platform
import statistics
from pathlib import Path
from typing import Any

from plan import BY_KEY, GUARANTEES, WORKLOADS

SCHEMA = 1
LATEST = Path(__file__).parent / "results" / "latest.json"


class Results:
    """Figures of each contestant in each workload, run by run; or the reason why there are none."""

    def __init__(self) -> None:
        self.runs: dict[tuple[str, str], list[dict[str, float]]] = {}
        self.failures: dict[tuple[str, str], str] = {}
        self.parameters: dict[tuple[str, str], dict[str, float]] = {}

    def add(self, workload: str, contestant: str, figures: dict[str, float]) -> None:
        self.runs.setdefault((workload, contestant), []).append(figures)

    def fail(self, workload: str, contestant: str, reason: str) -> None:
        self.failures[workload, contestant] = reason

    def has_failed(self, workload: str, contestant: str) -> bool:
        return (workload, contestant) in self.failures

    def as_json(self, about: dict[str, Any]) -> dict[str, Any]:
        workloads = []
        for workload in WORKLOADS:
            rows = []
            for key in workload.contestants:
                here = (workload.key, key)
                if here not in self.runs and here not in self.failures:
                    continue
                row: dict[str, Any] = {"contestant": key, "parameters": self.parameters.get(here, {})}
                if here in self.failures:  # figures of earlier runs alone would pass for complete ones
                    row["failure"] = self.failures[here]
                else:
                    row["figures"] = {
                        name: summary([run[name] for run in self.runs[here]]) for name in self.runs[here][0]
                    }
                rows.append(row)
            if rows:
                figures = [vars(figure) for figure in workload.figures]
                workloads.append({"key": workload.key, "title": workload.title, "figures": figures, "rows": rows})
        named = {row["contestant"] for workload in workloads for row in workload["rows"]}
        contestants = {
            key: {"name": one.name, "guarantee": one.guarantee, "note": one.note}
            for key, one in BY_KEY.items()
            if key in named
        }
        return {"schema": SCHEMA, **about, "guarantees": GUARANTEES, "contestants": contestants, "workloads": workloads}


def summary(values: list[float]) -> dict[str, Any]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values), "runs": values}


def write(results: dict[str, Any], path: Path) -> None:
    path.parent.mkdir(exist_ok=True)
    unfinished = path.with_suffix(".tmp")
    unfinished.write_text(json.dumps(results, indent=1) + "\n")
    unfinished.replace(path)


def machine() -> dict[str, Any]:
    """Describe the machine as far as it explains a figure, without a name that identifies it."""
    cpuinfo = Path("/proc/cpuinfo").read_text().splitlines()
    model = next(
        (line.partition(":")[2].strip() for line in cpuinfo if line.startswith("model name")), platform.machine()
    )
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9),
        "kernel": ".".join(platform.release().split(".")[:2]),
        "python": platform.python_version(),
        "load_before": round(os.getloadavg()[0], 2),
    }
