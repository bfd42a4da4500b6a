"""The module that public classes name as theirs: ``penstock``, which is what users import."""

from __future__ import annotations

from typing import TypeVar

T = TypeVar("T", bound=type)


def public(cls: T) -> T:
    """Show a class as ``penstock.Name`` in messages, tracebacks, documentation and pickles.

    Annotations of its fields are then looked up in ``penstock``, so a dataclass or a TypedDict needs them as objects,
    not as text: its module can't have ``from __future__ import annotations``.
    """
    cls.__module__ = "penstock"
    return cls
