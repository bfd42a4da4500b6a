"""When a failed attempt is followed by another, and how much later."""

from __future__ import annotations

import random
from dataclasses import dataclass
from datetime import timedelta

from penstock._options import Seconds, duration_ms


class Retry(Exception):
    """Raise it in a task to end this attempt and ask for another: ``raise Retry(countdown=30)``.

    Not an error but an outcome. Without ``countdown`` (seconds or a timedelta) the task's backoff
    decides. It counts against ``retries`` like a failure does; when none is left, the job fails with
    the error that was being handled (or named by ``from``), else with this one.
    """

    def __init__(self, reason: str = "", *, countdown: Seconds | None = None) -> None:
        super().__init__(reason)
        self.countdown_ms = None if countdown is None else duration_ms("countdown", countdown)


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    retries: int = 0
    backoff_s: float = 1.0
    factor: float = 2.0
    jitter: float = 0.5
    cap_s: float = 600.0
    retry_on: tuple[type[BaseException], ...] = (Exception,)
    dont_retry_on: tuple[type[BaseException], ...] = ()

    def __post_init__(self) -> None:
        if isinstance(self.retries, bool) or not isinstance(self.retries, int) or self.retries < 0:
            raise ValueError(f"retries must be an integer from 0, not {self.retries!r}")
        if not self.factor >= 1:
            raise ValueError(f"backoff_factor must be at least 1, not {self.factor!r}")
        if not 0 <= self.jitter <= 1:
            raise ValueError(f"jitter must be between 0 and 1, not {self.jitter!r}")

    def delay_ms(self, error: BaseException, attempt: int) -> int | None:
        """How long after attempt ``attempt`` (from 0) failed with ``error`` the next is due; None: never."""
        if attempt >= self.retries:
            return None
        if isinstance(error, Retry):
            return self._backoff_ms(attempt) if error.countdown_ms is None else error.countdown_ms
        if isinstance(error, self.retry_on) and not isinstance(error, self.dont_retry_on):
            return self._backoff_ms(attempt)
        return None

    def _backoff_ms(self, attempt: int) -> int:
        # 2.0 ** 1024 overflows; no sensible cap is reached later than this.
        longest_s = min(self.cap_s, self.backoff_s * self.factor ** min(attempt, 64))
        # Jobs that failed together must not come back together.
        return round(longest_s * 1000 * (1 - self.jitter * random.random()))


def exception_types(name: str, value: object) -> tuple[type[BaseException], ...]:
    types = value if isinstance(value, (tuple, list, set, frozenset)) else (value,)
    for item in types:
        if not (isinstance(item, type) and issubclass(item, BaseException)):
            raise TypeError(f"{name} must be an exception type or several, not {item!r}")
    return tuple(types)


def seconds(name: str, value: Seconds) -> float:
    if isinstance(value, timedelta):
        return value.total_seconds()
    return duration_ms(name, value) / 1000
