"""Headers that calls get without naming them: those of the running job, and those of ``app.headers()``."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from penstock._tasks.app import App

# A job's own headers, which calls to all apps inherit, and for each app what its own blocks add. A variable for each
# app would never be freed.
_Here: TypeAlias = "tuple[Mapping[str, str], Mapping[App, Mapping[str, str]]]"

here: ContextVar[_Here | None] = ContextVar("penstock_headers", default=None)


def inherit(headers: Mapping[str, str]) -> None:
    """Give the calls of a job these headers, and none of the context around."""
    here.set((headers, {}) if headers else None)


@contextmanager
def adding(app: App, headers: Mapping[str, str]) -> Generator[None]:
    """Give calls of ``app`` in the block these headers; an inner block's go before an outer one's."""
    inherited, added = here.get() or ({}, {})
    token = here.set((inherited, {**added, app: {**added.get(app, {}), **headers}}))
    try:
        yield
    finally:
        here.reset(token)


def headers_for(app: App) -> dict[str, str]:
    """Return the headers that a call of ``app`` made here gets besides its own."""
    found = here.get()
    if found is None:
        return {}
    inherited, added = found
    return {**inherited, **added.get(app, {})}
