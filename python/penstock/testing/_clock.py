"""Moves the clock of brokers in memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from penstock._durations import Seconds, duration_ms, epoch_ms
from penstock._tasks import app as app_module
from penstock._tasks.app import App
from penstock.errors import PenstockError
from penstock.testing._places import is_replaced

if TYPE_CHECKING:
    from penstock import _core
    from penstock._connection import Connection


def move_clock(app: App, by: Seconds) -> datetime:
    """Advance the clock of ``app``'s broker, and return its time in UTC. Everything due by then becomes due at once.

    ``by``: seconds or a timedelta, at least 0, and at most a hundred years in total. A clock never moves back.

    Schedules declared in code do not take part unless the test uses ``Clock`` or ``App.schedules``. Raises
    ``NotOffered`` unless the app's broker is in memory: within ``inline``, ``capture`` or ``worker``, or with the URL
    ``memory:``.
    """
    return _moment(_move(app._connected(), duration_ms("by", by), app.call_timeout))


class Clock:
    """Clock of all in-memory brokers of the test's apps: the fixture ``penstock_clock``.

    These are the brokers of ``inline``, ``capture`` and ``worker``, or else of apps with the URL ``memory:``.

    Delays, retries, expiry, the lifetime of results, and schedules follow this clock, including schedules declared with
    ``@app.periodic``. Time passes as in production: the times of schedules come one after another, and within
    ``inline`` each job ends before the next time comes. Python's own clock does not move.
    """

    def now(self) -> datetime:
        """Return the time of the clock, in UTC."""
        return _moment(max(_now_ms(connection) for _, connection in _in_memory()))

    def start_at(self, when: datetime) -> None:
        """Set the clock before the test begins, skipping the times of schedules up to ``when``.

        ``when``: a datetime with a time zone. Raises ``ValueError`` if it is in the past, or if the clock was moved
        before.
        """
        until_ms, found = epoch_ms("when", when), _in_memory()
        if any(_has_moved(connection) for _, connection in found):
            raise ValueError("call start_at before the clock is moved and before schedules are used")
        for _, connection in found:
            left_ms = _left_ms(connection, until_ms, when)
            if hasattr(connection, "bench"):
                connection.move_clock(left_ms, _ANSWERS_WITHIN_S)
            else:
                connection._client.move_clock(left_ms, _ANSWERS_WITHIN_S)

    def move(self, by: Seconds) -> datetime:
        """Advance the clock, and return its time. ``by``: seconds or a timedelta, at most a hundred years in total."""
        by_ms = duration_ms("by", by)
        return _moment(max(_move_all(app, connection, by_ms) for app, connection in _in_memory()))

    def move_to(self, when: datetime) -> datetime:
        """Like ``move``, up to ``when``. Raises ``ValueError`` if that has passed: the clock never moves back."""
        until_ms = epoch_ms("when", when)
        left = [(*each, _left_ms(each[1], until_ms, when)) for each in _in_memory()]
        return _moment(max(_move_all(app, connection, left_ms) for app, connection, left_ms in left))


# The broker is private to this process and nearly idle, so only a stalled machine takes longer.
_ANSWERS_WITHIN_S = 60.0


def _in_memory() -> Sequence[tuple[App, Connection]]:
    """Return one app for each broker in memory.

    If brokers are replaced for a test, only those count, because other apps of the process are not the test's.
    """
    found: dict[object, tuple[App, Connection]] = {}
    all_apps = sorted(app_module.made, key=lambda app: app.name)
    replaced = [app for app in all_apps if is_replaced(app)]
    for app in replaced or all_apps:
        if replaced or app.url.startswith("memory:"):
            connection = app._connected()
            if is_movable(connection):
                found.setdefault(connection, (app, connection))
    if not found:
        raise PenstockError(
            "no app here has a broker in memory whose clock could be moved: use penstock_inline, penstock_capture or"
            " penstock_worker, or an App with the URL memory:"
        )
    return list(found.values())


def is_movable(connection: Connection) -> bool:
    return connection._client.broker().startswith("memory:")


def _has_moved(connection: Connection) -> bool:
    bench = getattr(connection, "bench", None)
    return bench is not None and bench.has_schedules


def _move_all(app: App, connection: Connection, by_ms: int) -> int:
    """Advance the clock, with the schedules of all apps of this broker."""
    bench = getattr(connection, "bench", None)
    if bench is not None:
        bench.declare(_ANSWERS_WITHIN_S)
    else:
        for declaration in app._declarations(0):
            connection._client.declare_schedule(declaration, _ANSWERS_WITHIN_S)
    return _move(connection, by_ms, app.call_timeout)


def _move(connection: Connection, by_ms: int, timeout_s: float) -> int:
    if hasattr(connection, "bench"):
        return connection.move_clock(by_ms, timeout_s)
    return pass_time(connection._client, by_ms, timeout_s)


def pass_time(client: _core.Client, by_ms: int, timeout_s: float, at_each: Callable[[], None] = lambda: None) -> int:
    """Advance a clock from one time of a schedule to the next, and call ``at_each`` after each that created a job."""
    now_ms = client.move_clock(0, timeout_s, by_schedules=True)
    until_ms = now_ms + by_ms
    at_each()
    while by_ms > 0:
        now_ms = client.move_clock(by_ms - 1, timeout_s, by_schedules=True)
        at_each()
        # Jobs may have moved the clock, too: a retry within inline() does.
        now_ms = max(now_ms, client.move_clock(0, timeout_s, by_schedules=True)) if now_ms < until_ms else now_ms
        by_ms = until_ms - now_ms
    return now_ms


def _now_ms(connection: Connection) -> int:
    return connection._client.move_clock(0, _ANSWERS_WITHIN_S)


def _left_ms(connection: Connection, until_ms: int, when: datetime) -> int:
    now_ms = _now_ms(connection)
    if until_ms < now_ms:
        raise ValueError(f"the clock shows {_moment(now_ms)}, and never moves back to {when}")
    return until_ms - now_ms


def _moment(ms: int) -> datetime:
    return datetime.fromtimestamp(ms / 1000, UTC)
