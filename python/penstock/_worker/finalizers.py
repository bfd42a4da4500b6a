"""Keeps finalizers (``weakref.finalize``) of objects from before the fork from running when a child exits.

The zygote runs them when it exits. A child that ran them would remove a ``TemporaryDirectory`` of the loaded app while
other children use it. Also, SQLAlchemy registers a finalizer for each mapped class: running 300 takes a millisecond,
mostly for copying shared pages.
"""

from __future__ import annotations

import weakref
from typing import Any


class Registry(dict[Any, Any]):
    """Registry of finalizers that has those of before the fork as well, except when all are asked for at exit.

    A finalizer whose object ends in a child still runs there.
    """

    def __init__(self, inherited: dict[Any, Any]) -> None:
        super().__init__()
        self.inherited = inherited

    def __contains__(self, finalizer: object) -> bool:
        return super().__contains__(finalizer) or finalizer in self.inherited

    def get(self, finalizer: Any, default: Any = None) -> Any:
        return super().get(finalizer) or self.inherited.get(finalizer, default)

    def pop(self, finalizer: Any, default: Any = None) -> Any:
        return super().pop(finalizer, None) or self.inherited.pop(finalizer, default)


def keep_finalizers() -> None:
    """Set the finalizers aside, before the first fork.

    Does nothing in a version of Python that stores them differently.
    """
    registry = vars(weakref.finalize).get("_registry")
    if type(registry) is dict:
        weakref.finalize._registry = Registry(registry)  # type: ignore[attr-defined]


def take_finalizers_back() -> None:
    """Let the finalizers run when this process, the zygote, exits."""
    registry = vars(weakref.finalize).get("_registry")
    if type(registry) is Registry:
        weakref.finalize._registry = {**registry.inherited, **registry}  # type: ignore[attr-defined]
