"""Errors that only tests raise."""

from __future__ import annotations

from penstock.errors import PenstockError


class BrokerNotAllowed(PenstockError):
    """A test tried to use a real broker without a fixture or marker that allows it. Nothing was sent."""
