"""Sets ``__module__`` of public classes to ``penstock``, the module that users import."""

from __future__ import annotations

from typing import TypeVar

T = TypeVar("T", bound=type)


def public(cls: T) -> T:
    """Show a class as ``penstock.Name`` in messages, tracebacks, documentation and pickles.

    Python then looks up the annotations of its fields in ``penstock``. So a dataclass or a TypedDict needs them as
    objects, not as text: its module cannot use ``from __future__ import annotations``.
    """
    cls.__module__ = "penstock"
    return cls
