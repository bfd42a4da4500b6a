"""Moving the clock of a broker in memory."""

from __future__ import annotations

from datetime import UTC, datetime

from penstock._durations import Seconds, duration_ms
from penstock._tasks.app import App


def move_clock(app: App, by: Seconds) -> datetime:
    """Move the clock of ``app``'s broker on, and return its time (UTC). Whatever is due by then is due at once.

    ``by``: seconds or a timedelta, at least zero; a hundred years in all. A clock is never moved back.
    Raises ``NotOffered`` unless the app's broker is one in memory: within ``inline``, ``capture`` or ``worker``, or
    with the URL ``memory:``.
    """
    now_ms = app._connected().move_clock(duration_ms("by", by), app.call_timeout)
    return datetime.fromtimestamp(now_ms / 1000, UTC)
