"""The objects that are collected, and how long the service takes to answer: all of it follows from the numbers here."""

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
        """What the service answers. Raises KeyError where there is nothing."""
        kind, _, number = path.strip("/").partition("/")
        if kind == "pages":
            return self.listing(int(number))
        if kind == "objects":
            return {"object": int(number), "size": random.Random(int(number)).randrange(1_000_000)}
        raise KeyError(path)

    def waits_s(self, pages: int) -> float:
        """Sum of the latencies of the first pages and their objects."""
        return sum(sum(self._latencies_s(page)) for page in range(pages))

    def critical_path_s(self) -> float:
        """Time that the slowest page takes even if nothing ever waits for a slot: its list, then its slowest object."""
        return max(first + max(others) for first, *others in map(self._latencies_s, range(self.pages)))

    def limit_s(self, slots: int) -> float:
        """Time that no order of the requests can beat."""
        return max(self.critical_path_s(), self.waits_s(self.pages) / slots)

    def _latencies_s(self, page: int) -> list[float]:
        return [self.latency_s(path) for path in (f"/pages/{page}", *(f"/objects/{n}" for n in self.listing(page)))]
