"""Number of repetitions of a test by force: a few in `make test`, any number in `make crash CYCLES=1000`."""

from __future__ import annotations

import os
import random
from pathlib import Path


class Cycles:
    """Number of cycles: ``CYCLES=1000`` means each test's full number, and 500 half of it. Default: its quick
    number."""

    def __init__(self, test: str) -> None:
        self._test = test
        self._share = int(os.environ["CYCLES"]) / 1000 if "CYCLES" in os.environ else None
        # The same seed in each run, so that a failure means something broke; `make soak` draws others.
        self._seed = os.environ.get("SEED") or "1"

    @property
    def long(self) -> bool:
        return self._share is not None

    def of(self, quick: int, full: int) -> int:
        return quick if self._share is None else max(quick, round(full * self._share))

    def rounds(self, quick: int, full: int, each: int) -> list[int]:
        """Return the number of cycles of each round: ``each``, and the remainder in the last."""
        number = self.of(quick, full)
        return [each] * (number // each) + [number % each] * bool(number % each)

    def chance(self, *names: object) -> random.Random:
        """Return random numbers that ``SEED`` repeats: the actions and their times, but not the progress of
        processes."""
        words = " ".join(map(str, (self._seed, *names)))
        print(f"chance of {words!r}")
        return random.Random(words)

    def report(self, text: str) -> None:
        """Print a report, and append it to the file that ``CRASH_REPORT`` names, if any."""
        line = f"{self._test}: {text}"
        print(line)
        if "CRASH_REPORT" in os.environ:
            with Path(os.environ["CRASH_REPORT"]).open("a") as report:
                report.write(f"{line}\n")
