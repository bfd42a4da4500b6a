"""Retries: whether another attempt follows a failed one, and after which delay."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from penstock._durations import Seconds, duration_ms, is_a, is_int, is_number
from penstock._public import public

Retries: TypeAlias = int | Sequence[Seconds] | None
"""Number of retries, None for no limit, or a list with the delay before each."""

NO_LIMIT = 2**32 - 1
_MOST_DELAYS = 32


def checked_retries(value: Any) -> int | tuple[int, ...]:
    """Return the number of retries, or the milliseconds before each. Raises ``ValueError`` or ``TypeError``."""
    if value is None:
        return NO_LIMIT
    if is_int(value) and 0 <= value <= NO_LIMIT:
        return int(value)
    if is_a(value, (list, tuple)):
        if len(value) > _MOST_DELAYS:
            raise ValueError(f"retries has {len(value)} delays, but {_MOST_DELAYS} are the most")
        return tuple(duration_ms("a delay of retries", delay) for delay in value)
    raise ValueError(f"retries must be an integer from 0, None for no limit, or a list of delays, not {value!r}")


@public
class Retry(Exception):
    """Ends the attempt of a task that raises it, and asks for another: ``raise Retry(countdown=30)``.

    ``countdown`` is seconds or a timedelta; without it the task's backoff decides. Counts against ``retries`` like a
    failure. When no retry is left, the job fails with the error being handled (or named by ``from``), else with this
    one.
    """

    def __init__(self, reason: str = "", *, countdown: Seconds | None = None) -> None:
        if not is_a(reason, str):
            raise TypeError(
                f"the reason of a Retry must be a string, not {reason!r}; for a delay write Retry(countdown=...)"
            )
        super().__init__(reason)
        self.countdown_ms: int | None = None if countdown is None else duration_ms("countdown", countdown)


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Retries of a task. Methods take the ``retries`` of the call, or None if the call does not set them."""

    retries: int | tuple[int, ...] = 0
    backoff_ms: int = 1_000
    factor: float = 2.0
    jitter: float = 0.5
    cap_ms: int = 600_000
    retry_on: tuple[type[BaseException], ...] = (Exception,)
    no_retry_on: tuple[type[BaseException], ...] = ()

    def __post_init__(self) -> None:
        if not is_number(self.factor) or not 1 <= self.factor < math.inf:
            raise ValueError(f"backoff_factor must be a number of at least 1, not {self.factor!r}")
        if not is_number(self.jitter) or not 0 <= self.jitter <= 1:
            raise ValueError(f"jitter must be a number between 0 and 1, not {self.jitter!r}")

    def limit(self, retries: int | tuple[int, ...] | None) -> int | None:
        """Return the total number of retries; None for no limit."""
        count = self.retries if retries is None else retries
        if isinstance(count, tuple):
            return len(count)
        return None if count == NO_LIMIT else count

    def names(self, error: type[BaseException]) -> bool:
        """Whether ``retry_on`` names the error, or a base of it other than ``Exception``, which most tasks have."""
        named = tuple(kind for kind in self.retry_on if kind not in (Exception, BaseException))
        return issubclass(error, named) and not issubclass(error, self.no_retry_on)

    def delay_ms(self, error: BaseException, attempt: int, retries: int | tuple[int, ...] | None = None) -> int | None:
        """Return the delay after attempt ``attempt`` (from 0) failed with ``error``; None if no attempt follows."""
        limit = self.limit(retries)
        if limit is not None and attempt >= limit:
            return None
        if isinstance(error, Retry):
            return self._wait_ms(attempt, retries) if error.countdown_ms is None else error.countdown_ms
        if isinstance(error, self.retry_on) and not isinstance(error, self.no_retry_on):
            return self._wait_ms(attempt, retries)
        return None

    def _wait_ms(self, attempt: int, retries: int | tuple[int, ...] | None) -> int:
        delays = self.retries if retries is None else retries
        if isinstance(delays, tuple):
            # Exactly as given, without backoff and jitter: a listed delay is deliberate.
            return delays[attempt]
        try:
            longest_ms = min(self.cap_ms, self.backoff_ms * float(self.factor) ** attempt)
        except OverflowError:
            # The product is beyond every cap, unless the backoff is 0: then it stays 0.
            longest_ms = min(self.cap_ms, self.backoff_ms * self.cap_ms)
        # Imported here because only workers need it, and they have loaded it already.
        import random

        # Jobs that failed together must not be retried at the same moment.
        return round(longest_ms * (1 - self.jitter * random.random()))


def exception_types(name: str, value: Any) -> tuple[type[BaseException], ...]:
    types: Iterable[Any] = value if is_a(value, (tuple, list, set, frozenset)) else (value,)
    for item in types:
        if not (isinstance(item, type) and issubclass(item, BaseException)):
            raise TypeError(f"{name} must be an exception type or several, not {item!r}")
    return tuple(types)
