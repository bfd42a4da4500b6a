"""Guard of real brokers, called before an app first connects in this process but not on later calls.

This is a separate module without imports, so the pytest plugin can load it without the rest of penstock.
"""

from __future__ import annotations

TYPE_CHECKING = False

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock._tasks.app import App

may_connect: Callable[[App], None] | None = None
"""Function called with the app. Raises if the app may not connect."""
