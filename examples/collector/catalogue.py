"""Objects to collect, and the latencies of the service, all computed from the numbers here."""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass(frozen=True)
class Catalogue:
    pages: int
    objects: int
    """Number of objects on each page."""
    least_ms: float
    most_ms: float
    seed: int

    def latency_s(self, path: str) -> float:
        return random.Random(f"{self.seed} {path}").uniform(self.least_ms, self.most_ms) / 1e3

    def listing(self, page: int) -> list[int]:
        return list(range(page * self.objects, (page + 1) * self.objects))

    def answer(self, path: str) -> object:
        """Return the service's answer for a path. Raises KeyError if there is none."""
        kind, _, number = path.strip("/").partition("/")
        if kind == "pages":
            return self.listing(int(number))
        if kind == "objects":
            return {"object": int(number), "size": random.Random(int(number)).randrange(1_000_000)}
        raise KeyError(path)

    def waits_s(self, pages: int) -> float:
        """Return the sum of the latencies of the first pages and their objects."""
        return sum(sum(self._latencies_s(page)) for page in range(pages))

    def critical_path_s(self) -> float:
        """Return the time of the slowest page if nothing ever waits for a slot: its list, then its slowest object."""
        return max(first + max(others) for first, *others in map(self._latencies_s, range(self.pages)))

    def limit_s(self, slots: int) -> float:
        """Return a time that no order of the requests can beat."""
        return max(self.critical_path_s(), self.waits_s(self.pages) / slots)

    def _latencies_s(self, page: int) -> list[float]:
        return [self.latency_s(path) for path in (f"/pages/{page}", *(f"/objects/{n}" for n in self.listing(page)))]
