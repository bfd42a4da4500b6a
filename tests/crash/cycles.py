"""How often a test by force repeats: a few times in `make test`, as often as asked in `make crash CYCLES=1000`."""

from __future__ import annotations

import os
import random
from pathlib import Path


class Cycles:
    """``CYCLES=1000`` means each test's full number; half of that, half of it. Without it, its quick number."""

    def __init__(self, test: str) -> None:
        self._test = test
        self._share = int(os.environ["CYCLES"]) / 1000 if "CYCLES" in os.environ else None
        # The same in each run, so that what fails has been broken: `make soak` draws others.
        self._seed = os.environ.get("SEED") or "1"

    @property
    def long(self) -> bool:
        return self._share is not None

    def of(self, quick: int, full: int) -> int:
        return quick if self._share is None else max(quick, round(full * self._share))

    def rounds(self, quick: int, full: int, each: int) -> list[int]:
        """The same, dealt out to rounds of ``each``, and the rest."""
        number = self.of(quick, full)
        return [each] * (number // each) + [number % each] * bool(number % each)

    def chance(self, *names: object) -> random.Random:
        """Chance that ``SEED`` repeats: what is tried and when, though not how far the processes are by then."""
        words = " ".join(map(str, (self._seed, *names)))
        print(f"chance of {words!r}")
        return random.Random(words)

    def report(self, text: str) -> None:
        """For whoever reads the output, and into the file ``CRASH_REPORT`` if one is named."""
        line = f"{self._test}: {text}"
        print(line)
        if "CRASH_REPORT" in os.environ:
            with Path(os.environ["CRASH_REPORT"]).open("a") as report:
                report.write(f"{line}\n")
