"""Celery with its servers, installed and started like in the benchmark."""

from __future__ import annotations

import os
from pathlib import Path

from run import PEERS_VENV, celery_servers, peers_python
from servers import PACKAGES, install

__all__ = ["celery_python", "celery_servers", "install_celery"]


def install_celery() -> None:
    install()
    peers_python()


def celery_python() -> Path | None:
    """Return the interpreter that has Celery, if everything that Celery needs is installed."""
    installed = (PEERS_VENV / "installed").exists() and all(os.access(path, os.X_OK) for path in PACKAGES.values())
    return PEERS_VENV / "bin" / "python" if installed else None
