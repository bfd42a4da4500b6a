"""Errors that only tests raise."""

from __future__ import annotations

from penstock.errors import PenstockError


class BrokerNotAllowed(PenstockError):
    """A test would have used a real broker, and no fixture or marker allowed that. Nothing was sent."""
