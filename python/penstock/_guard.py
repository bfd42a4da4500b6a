"""Guard of real brokers: asked before an app first connects in this process, and at no call after that.

A module of its own, which imports nothing, for the pytest plugin to be loaded without the rest of penstock.
"""

from __future__ import annotations

TYPE_CHECKING = False

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock._tasks.app import App

may_connect: Callable[[App], None] | None = None
"""Called with the app; raises if it may not connect."""
