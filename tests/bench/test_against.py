"""The comparison fails a slower build, passes any other, and computes the bound that its docstring defines."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import against
import pytest
import run


def test_the_bound_is_the_smallest_ratio_that_is_safe() -> None:
    places = {count: against.place_of_bound(count, 0.95) for count in (4, 5, 7, 8, 12, 20, 100)}
    # From sign-test tables, which count from the other end.
    assert places == {4: None, 5: 5, 7: 7, 8: 7, 12: 10, 20: 15, 100: 59}
    assert against.bound([1.09, 1.01, 1.02, 1.03, 1.04, 1.05, 1.06, 1.07]) == 1.07
    with pytest.raises(ValueError, match="4 pairs say nothing"):
        against.bound([1.0] * 4)


@pytest.mark.parametrize("count", [5, 12, 30])
def test_the_bound_holds_however_ratios_are_distributed(count: int) -> None:
    """In 95 of 100 runs the bound is at or above the true median; the next smaller ratio is less safe."""
    draw = random.Random(4)
    distributions = [
        lambda: draw.lognormvariate(0, 0.3),
        lambda: draw.uniform(0, 2),
        lambda: 1 + draw.expovariate(1) - 0.6931471805599453,  # skewed, with its median at 1
        lambda: 1 + draw.choice((-1, 1)) * draw.paretovariate(0.5),  # has no mean
    ]
    place = against.place_of_bound(count, 0.95)
    assert place is not None
    for distribution in distributions:
        runs = [sorted(distribution() for _ in range(count)) for _ in range(4_000)]
        held = sum(against.bound(ratios) >= 1 for ratios in runs) / len(runs)
        less = sum(ratios[place - 2] >= 1 for ratios in runs) / len(runs)
        assert held > 0.94
        assert less < 0.95


def noisy(ratio: float) -> list[tuple[float, float]]:
    draw = random.Random(9)
    machine = [draw.uniform(2, 4) for _ in range(12)]  # rates vary by a factor of two between pairs
    return [(cost, cost * ratio * draw.uniform(0.99, 1.01)) for cost in machine]


def test_only_a_build_that_costs_more_fails() -> None:
    parts = (*against.PARTS, against.CORE)
    text, passes = against.report({name: noisy(1.0) for name in parts})
    assert passes and "over" not in text
    for slower in parts:
        text, passes = against.report({name: noisy(1.05 if name == slower else 1.0) for name in parts})
        (line,) = [line for line in text.splitlines() if "over 1.03" in line]
        assert not passes and line.startswith(f"| {slower} ")
    # A median below the limit isn't enough: the bound must be below it too.
    wide = [(1.0, 1.0)] * 8 + [(1.0, 1.2)] * 4
    text, passes = against.report(dict.fromkeys(parts, wide))
    assert "|   1.000 |     1.200 | over 1.03 |" in text and not passes


def test_rates_are_shown_and_not_judged() -> None:
    pairs = {name: noisy(1.0) for name in (*against.PARTS, against.CORE)}
    text, passes = against.report(pairs | {"drain_per_s": noisy(0.5), "enqueue_per_s": noisy(0.5)})
    assert passes and "| start and drain, jobs/s " in text


def test_the_two_builds_take_turns(capsys: pytest.CaptureFixture[str]) -> None:
    old, new = (against.Build(name, Path(name), Path(name)) for name in ("old", "new"))
    order = []

    def measure(build: against.Build) -> dict[str, float]:
        order.append(build.name)
        return {"broker": 2.0 if build is old else 3.0}

    assert against.run_pairs(old, new, 2, [measure]) == {"broker": [(2.0, 3.0)] * 2}
    assert order == ["old", "new", "new", "old", "new", "old", "old", "new"]
    assert "broker 1.500" in capsys.readouterr().out


def test_the_first_build_has_no_advantage() -> None:
    old, new = (against.Build(name, Path(name), Path(name)) for name in ("old", "new"))
    costs = iter([1.4, 1.0, 1.0, 1.0, 1.4, 1.0, 1.0, 1.0])
    pairs = against.run_pairs(old, new, 2, [lambda build: {"broker": next(costs)}])
    ratios = [after / before for before, after in pairs["broker"]]
    assert ratios[0] * ratios[1] == pytest.approx(1)


def test_the_parts_of_this_build(tmp_path: Path) -> None:
    # The environment of this Python, which need not be the checkout's own.
    (tmp_path / ".venv").symlink_to(sys.prefix)
    this = against.Build("this", tmp_path, tmp_path)
    assert this.python.samefile(sys.executable)
    figures = against.parts(this, 5_000, tmp_path)
    assert set(figures) == {*against.PARTS, *against.RATES}
    assert all(value > 0 for value in figures.values())


def test_a_build_that_fails_says_why(tmp_path: Path) -> None:
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text("#!/bin/sh\necho no module named penstock >&2\nexit 3\n")
    python.chmod(0o755)
    with pytest.raises(RuntimeError, match="the old build failed: no module named penstock"):
        against.parts(against.Build("old", tmp_path, tmp_path), 10, tmp_path)


@pytest.mark.parametrize(
    ("make", "message"),
    [([], "is no checkout of Penstock"), (["crates/penstock-broker"], "is not built; run make build")],
)
def test_a_directory_without_a_build_is_refused(tmp_path: Path, make: list[str], message: str) -> None:
    for name in make:
        (tmp_path / name).mkdir(parents=True)
    command = [sys.executable, run.HERE / "run.py", "--against", tmp_path]
    outcome = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert outcome.returncode == 1 and message in outcome.stderr


def test_too_few_pairs_are_refused() -> None:
    command = [sys.executable, run.HERE / "run.py", "--against", ".", "--pairs", "4"]
    outcome = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert outcome.returncode == 1 and "fewer than 5 pairs have no 95% bound" in outcome.stderr


def test_a_comparison_that_fails_judges_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(build: against.Build, jobs: int, directory: Path) -> dict[str, float]:
        raise RuntimeError(f"the {build.name} build failed: no broker")

    monkeypatch.setattr(against, "find", lambda name, directory, target: against.Build(name, directory, directory))
    monkeypatch.setattr(against, "versions_of", lambda build: "3.11")
    monkeypatch.setattr(against, "parts", fail)
    with pytest.raises(SystemExit, match="the old build failed: no broker\nNothing was judged"):
        against.main(tmp_path, count=5, target=None, jobs=1, core_jobs=1, directory=tmp_path, output=None)


def test_exit_code_and_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(against, "find", lambda name, directory, target: against.Build(name, directory, directory))
    monkeypatch.setattr(against, "versions_of", lambda build: "3.11")
    monkeypatch.setattr(against, "core", lambda build, jobs: {"core": 1.0})
    for cost, code in ((1.0, 0), (1.1, 1)):
        monkeypatch.setattr(
            against,
            "parts",
            lambda build, jobs, directory, cost=cost: dict.fromkeys(
                against.PARTS, cost if build.name == "new" else 1.0
            ),
        )
        output = tmp_path / "pairs.json"
        outcome = against.main(tmp_path, count=5, target=None, jobs=1, core_jobs=1, directory=tmp_path, output=output)
        assert outcome == code
        assert json.loads(output.read_text())["client"] == [[1.0, cost]] * 5
