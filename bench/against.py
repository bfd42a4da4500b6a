"""Decide whether this build costs more than another: ``bench/run.py --against DIR``, or ``make bench-against DIR=…``.

Rates swing by a factor of two between runs of one build, so a change is judged on CPU time per job: of each part with
real processes, and of the core alone. The old and the new build take turns on the same machine in the same minutes.
Only the ratio within a pair counts, and each side of a pair is the mean of two runs.

**The bound.** The sorted ratios of the pairs bound their median without any assumption about their distribution. Each
ratio is below the median with probability one half, so the number of ratios below it is binomial. The k-th smallest
ratio is at or above the median with probability P(Binomial(n, 1/2) <= k - 1). The bound is the smallest ratio for which
that is at least 95 %. This is the one-sided confidence limit of the sign test (W. J. Conover, Practical Nonparametric
Statistics, 3rd edition, section 3.2; H. A. David and H. N. Nagaraja, Order Statistics, 3rd edition, section 7.1). With
12 pairs it is the tenth ratio, with 20 the fifteenth. With fewer than 8 it is the largest, with fewer than 5 none.
"""

from __future__ import annotations

import json
import math
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import table
from processes import descendants, end, end_pids, tail

HERE = Path(__file__).parent
ROOT = HERE.parent
PAIRS = 12
FEWEST_PAIRS = 5
CONFIDENCE = 0.95
MOST = 1.03
LIMIT_S = 120  # one measurement
JOBS = 200_000
CORE_JOBS = 1_000_000

PARTS = ("broker", "supervisor", "children", "client")
CORE = "core"
RATES = {"enqueue_per_s": "enqueue, jobs/s", "drain_per_s": "start and drain, jobs/s"}


def bound(ratios: Sequence[float], confidence: float = CONFIDENCE) -> float:
    """Return the upper end of a one-sided confidence interval for the median of the ratios' distribution."""
    place = place_of_bound(len(ratios), confidence)
    if place is None:
        raise ValueError(f"{len(ratios)} pairs say nothing with a confidence of {confidence:.0%}")
    return sorted(ratios)[place - 1]


def place_of_bound(count: int, confidence: float) -> int | None:
    """Return the position, from 1, of the sorted ratio that bounds the median of ``count`` ratios."""
    below = 0
    for place in range(1, count + 1):
        below += math.comb(count, place - 1)  # cases of 2^count with at most place - 1 ratios below the median
        if below >= confidence * 2**count:
            return place
    return None


@dataclass(frozen=True)
class Verdict:
    """Medians and ratios of one part, over all pairs."""

    name: str
    old: float  # medians
    new: float
    ratio: float
    bound: float

    @property
    def passes(self) -> bool:
        return self.bound <= MOST


def judge(name: str, pairs: Sequence[tuple[float, float]]) -> Verdict:
    ratios = [new / old for old, new in pairs]
    old, new = (statistics.median(values) for values in zip(*pairs, strict=True))
    return Verdict(name, old, new, statistics.median(ratios), bound(ratios))


@dataclass(frozen=True)
class Build:
    """A built checkout with its own ``.venv``."""

    name: str
    directory: Path
    throughput: Path

    @property
    def python(self) -> Path:
        return self.directory / ".venv" / "bin" / "python"


def find(name: str, directory: Path, target: str | None) -> Build:
    """Refuse a checkout that is not built. Build the core's example there, which ``make build`` leaves out."""
    directory = directory.resolve()
    python = directory / ".venv" / "bin" / "python"
    if not (directory / "crates" / "penstock-broker").is_dir():
        raise SystemExit(f"--against: {directory} is no checkout of Penstock")
    if not python.with_name("penstock").exists():
        raise SystemExit(f"--against: {directory} is not built; run make build there")
    return Build(name, directory, build_core(directory, target))


def build_core(directory: Path, target: str | None) -> Path:
    print(f"building the core's example in {directory} ...", flush=True)
    command = ["cargo", "build", "--release", "--package", "penstock-broker", "--example", "throughput"]
    env = {**os.environ, "CARGO_TARGET_DIR": target or str(directory / "target")}
    answer = subprocess.run(
        [*command, "--message-format", "json-render-diagnostics"], cwd=directory, env=env, stdout=subprocess.PIPE
    )
    if answer.returncode != 0:
        raise SystemExit(f"--against: {' '.join(command)} failed in {directory}")
    for line in answer.stdout.splitlines():
        artifact = json.loads(line)
        if artifact.get("executable") and artifact["target"]["name"] == "throughput":
            return Path(artifact["executable"])
    raise SystemExit(f"--against: cargo built no throughput in {directory}")


def versions_of(build: Build) -> str:
    """Return the interpreter's version. With two different ones, the comparison would be of Pythons, not builds."""
    command = [build.python, "-c", "import sys; print(sys.version)"]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=LIMIT_S).stdout.strip()


def parts(build: Build, jobs: int, directory: Path) -> dict[str, float]:
    """Run this checkout's script under the other's interpreter, so that both builds are measured alike."""
    log = directory / f"{build.name}.log"
    env = {**os.environ, "TMPDIR": str(directory)}
    env.pop("PENSTOCK_URL", None)
    before = descendants(os.getpid())
    with log.open("ab") as errors:
        process = subprocess.Popen(
            [build.python, HERE / "cpu.py", str(jobs)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            env=env,
            cwd=HERE,
        )
    try:
        answer, _ = process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"the {build.name} build: no result within {LIMIT_S} s") from None
    finally:
        end(process, grace_s=0.5)
        end_pids(descendants(os.getpid(), apart_from=before))
    if process.returncode != 0:
        raise RuntimeError(f"the {build.name} build failed: {tail(log) or 'nothing in its log'}")
    return {str(name): float(value) for name, value in json.loads(answer.splitlines()[-1]).items()}


def core(build: Build, jobs: int) -> dict[str, float]:
    ran = subprocess.run([build.throughput, str(jobs)], capture_output=True, text=True, timeout=LIMIT_S)
    found = re.search(r"(\d+) ns a job", ran.stdout)
    if ran.returncode != 0 or found is None:
        raise RuntimeError(f"the core of the {build.name} build failed: {ran.stderr.strip() or ran.stdout.strip()}")
    return {CORE: int(found[1]) / 1000}


Measure = Callable[[Build], Mapping[str, float]]
Pairs = dict[str, list[tuple[float, float]]]


def run_pairs(old: Build, new: Build, count: int, measures: Sequence[Measure]) -> Pairs:
    """Run each measure of a pair twice on both builds, alternately as ABBA and BAAB, and take the means.

    The order matters. A broker that ran right after the previous measure took up to 1.4 times the CPU of the same build
    one run later: over 12 pairs of 200,000 jobs, the order alone gave ratios of 0.76 to 1.47.
    """
    found: Pairs = {}
    for pair in range(count):
        begun = time.monotonic()
        first, second = (old, new) if pair % 2 == 0 else (new, old)
        ratios = []
        for measure in measures:
            runs: dict[str, list[Mapping[str, float]]] = {old.name: [], new.name: []}
            for build in (first, second, second, first):
                runs[build.name].append(measure(build))
            for name in runs[old.name][0]:
                before, after = (statistics.fmean(run[name] for run in runs[build.name]) for build in (old, new))
                found.setdefault(name, []).append((before, after))
                if name not in RATES:
                    ratios.append(f"{name} {after / before:.3f}")
        print(f"{pair + 1}/{count} {', '.join(ratios)}  [{time.monotonic() - begun:.1f} s]", flush=True)
    return found


def report(pairs: Pairs) -> tuple[str, bool]:
    """Return the tables, and whether every part passes."""
    verdicts = [judge(name, pairs[name]) for name in (*PARTS, CORE) if name in pairs]
    rows = [
        [
            one.name,
            f"{one.old:.2f}",
            f"{one.new:.2f}",
            f"{one.ratio:.3f}",
            f"{one.bound:.3f}",
            "pass" if one.passes else f"over {MOST}",
        ]
        for one in verdicts
    ]
    header = ["CPU, µs a job", "old", "new", "new/old", f"{CONFIDENCE:.0%} bound", ""]
    rates = [
        [
            title,
            *(table.number(statistics.median(side), "jobs/s") for side in zip(*pairs[key], strict=True)),
            f"{statistics.median(new / old for old, new in pairs[key]):.3f}",
        ]
        for key, title in RATES.items()
        if key in pairs
    ]
    count = len(next(iter(pairs.values())))
    text = f"{count} pairs; medians, and of new/old the median of the pairs with its one-sided bound.\n\n"
    text += table.markdown(header, rows, left=1)
    if rates:
        text += "\n\nNot judged:\n\n" + table.markdown(["rates", "old", "new", "new/old"], rates, left=1)
    return text, all(one.passes for one in verdicts)


def load() -> str:
    return f"{os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"


def main(
    other: Path, *, count: int, target: str | None, jobs: int, core_jobs: int, directory: Path, output: Path | None
) -> int:
    if count < FEWEST_PAIRS:
        raise SystemExit(f"--pairs {count}: fewer than {FEWEST_PAIRS} pairs have no {CONFIDENCE:.0%} bound")
    old = find("old", other, target)
    new = find("new", ROOT, os.environ.get("CARGO_TARGET_DIR"))
    if versions_of(old) != versions_of(new):
        raise SystemExit(f"--against: {old.python} and {new.python} are different Pythons; make both .venv with one")
    try:
        pairs = run_pairs(
            old, new, count, [lambda build: parts(build, jobs, directory), lambda build: core(build, core_jobs)]
        )
    except (RuntimeError, subprocess.TimeoutExpired) as failure:
        raise SystemExit(
            f"--against: {failure}\nNothing was judged. Is the machine busy? Its load is {load()}."
        ) from None
    text, passes = report(pairs)
    if output:
        output.write_text(json.dumps(pairs, indent=1) + "\n")
    print(f"\n{text}", file=sys.stdout, flush=True)
    return 0 if passes else 1
