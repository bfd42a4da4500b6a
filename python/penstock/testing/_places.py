"""Replaces the connections of apps for the duration of a block."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager

from penstock._connection import Connection
from penstock._durations import is_a
from penstock._tasks import app as app_module
from penstock._tasks.app import App

# Connections that replace each app's own, with the innermost last.
_stacks: weakref.WeakKeyDictionary[App, list[Connection]] = weakref.WeakKeyDictionary()


@contextmanager
def connected(apps: Sequence[App], connect: Callable[[App], Connection]) -> Generator[None, None, None]:
    """Within the block, give each of these apps (by default all of this process) the connection made by ``connect``.

    Blocks may be nested, and may end in any order.
    """
    for app in apps:
        if not is_a(app, App):
            raise TypeError(f"expected an App, not {app!r}")
    replaced: list[tuple[App, Connection]] = []

    def replace(app: App) -> None:
        if not any(each is app for each, _ in replaced):
            connection = connect(app)
            replaced.append((app, connection))
            _stacks.setdefault(app, []).append(connection)
            _put_in_place(app)

    if not apps:
        app_module.on_made.append(replace)
    try:
        for app in apps or tuple(app_module.made):
            replace(app)
        yield
    finally:
        if not apps:
            app_module.on_made.remove(replace)
        for app, connection in replaced:
            # Compared by identity, because connections of the same broker are equal.
            _stacks[app] = [each for each in _stacks[app] if each is not connection]
            _put_in_place(app)


def is_replaced(app: App) -> bool:
    """Whether a block replaces the app's own connection."""
    return app in _stacks


def _put_in_place(app: App) -> None:
    """Shadow the method with the innermost connection in the instance, so that only tests pay for it, not
    ``delay()``."""
    if _stacks[app]:
        innermost = _stacks[app][-1]
        vars(app)["_connected"] = lambda: innermost
    else:
        vars(app).pop("_connected", None)
        del _stacks[app]
