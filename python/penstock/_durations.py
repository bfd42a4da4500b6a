"""Checks of numbers and times in user input (seconds, a timedelta, or a datetime)."""

from __future__ import annotations

import math
from datetime import datetime, timedelta
from typing import TypeAlias

Seconds: TypeAlias = float | timedelta

# 100 years. A longer time means that somebody confused units.
_LONGEST_S = 3_155_760_000


def duration_ms(name: str, value: Seconds) -> int:
    """Return milliseconds. Raises ``TypeError`` or ``ValueError``, naming the option."""
    seconds = _seconds(name, value)
    # The comparison is false for NaN as well.
    if not 0 <= seconds <= _LONGEST_S:
        raise ValueError(f"{name} must be between 0 seconds and 100 years, not {value!r}")
    return round(seconds * 1000)


def due_ms(name: str, value: Seconds | datetime | None) -> tuple[int | None, int | None]:
    """Return (milliseconds from now, milliseconds since the epoch); at most one is set. Raises as ``duration_ms``."""
    if value is None:
        return None, None
    if isinstance(value, datetime):
        return None, epoch_ms(name, value)
    if not isinstance(value, timedelta) and not is_number(value):
        raise TypeError(f"{name} must be seconds, a timedelta or a datetime, not {value!r}")
    return duration_ms(name, value), None


def epoch_ms(name: str, value: datetime) -> int:
    """Return milliseconds since the epoch. Raises ``TypeError`` or ``ValueError``, naming the option."""
    if not is_a(value, datetime):
        raise TypeError(f"{name} must be a datetime, not {value!r}")
    if value.tzinfo is None:
        raise ValueError(f"{name} must have a time zone: datetime.now(timezone.utc) instead of datetime.now()")
    return max(0, round(value.timestamp() * 1000))


def timeout_s(name: str, value: Seconds | None) -> float | None:
    """Return seconds, or None for no limit. 0 or less means that the time is up; over 100 years means no limit."""
    if value is None:
        return None
    seconds = _seconds(name, value)
    if math.isnan(seconds):
        raise ValueError(f"{name} must be seconds or a timedelta, not {value!r}")
    return seconds if seconds <= _LONGEST_S else None


def _seconds(name: str, value: Seconds) -> float:
    if isinstance(value, timedelta):
        return value.total_seconds()
    if not is_number(value):
        raise TypeError(f"{name} must be seconds or a timedelta, not {value!r}")
    try:
        return float(value)
    except OverflowError:
        return math.copysign(math.inf, value)


def is_a(value: object, kind: type | tuple[type, ...]) -> bool:
    """Like ``isinstance``, for user input. Type checkers trust the annotations and would call the check redundant."""
    return isinstance(value, kind)


def is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
