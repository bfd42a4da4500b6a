"""Checks of user input: all numbers and lengths of time (seconds or a timedelta)."""

from __future__ import annotations

import math
from datetime import timedelta
from typing import TypeAlias

Seconds: TypeAlias = float | timedelta

# 100 years: beyond it a unit was mistaken.
_LONGEST_S = 3_155_760_000


def duration_ms(name: str, value: Seconds) -> int:
    """Return milliseconds; ``TypeError`` or ``ValueError`` says what is wrong with the option ``name``."""
    seconds = _seconds(name, value)
    # The comparison is false for NaN as well.
    if not 0 <= seconds <= _LONGEST_S:
        raise ValueError(f"{name} must be between 0 seconds and 100 years, not {value!r}")
    return round(seconds * 1000)


def timeout_s(name: str, value: Seconds | None) -> float | None:
    """Return seconds, or None for no limit. A time that is over is 0 or less; more than 100 years is no limit."""
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
    """Like ``isinstance``, for user input: type checkers believe the annotations, so to them it needs no check."""
    return isinstance(value, kind)


def is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
