"""Implicit headers of calls: inherited from the running job, or set by ``app.headers()``."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from penstock._tasks.app import App

# The headers of the running job, which calls to all apps inherit, and per app the headers that its blocks add. One
# variable holds them all, since a context variable per app would never be freed.
_Here: TypeAlias = "tuple[Mapping[str, str], Mapping[App, Mapping[str, str]]]"

here: ContextVar[_Here | None] = ContextVar("penstock_headers", default=None)


def inherit(headers: Mapping[str, str]) -> None:
    """Set the headers that calls of a job inherit, and drop those of the surrounding context."""
    here.set((headers, {}) if headers else None)


@contextmanager
def adding(app: App, headers: Mapping[str, str]) -> Generator[None]:
    """Add headers to calls of ``app`` in the block. An inner block overrides an outer one."""
    inherited, added = here.get() or ({}, {})
    token = here.set((inherited, {**added, app: {**added.get(app, {}), **headers}}))
    try:
        yield
    finally:
        here.reset(token)


def headers_for(app: App) -> dict[str, str]:
    """Return the implicit headers of a call of ``app`` made here."""
    found = here.get()
    if found is None:
        return {}
    inherited, added = found
    return {**inherited, **added.get(app, {})}
