"""Temporary brokers and workers for the examples."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from processes import descendants, end_pids, running, tail, take_charge
from results import machine
from servers import free_port, wait_for_port
from table import markdown

from penstock import App

__all__ = ["free_port", "machine", "markdown", "running", "tail", "take_charge", "wait_for_port", "worker"]

PENSTOCK = str(Path(sys.executable).with_name("penstock"))


@contextlib.contextmanager
def worker(app: App, module: str, options: Sequence[str], directory: Path) -> Iterator[None]:
    """Run a worker within the block, with a broker whose data is in ``directory``."""
    os.environ["PENSTOCK_URL"] = f"local:{directory / 'penstock'}"
    directory.mkdir(parents=True, exist_ok=True)
    log = directory / "worker.log"
    before = descendants(os.getpid())
    try:
        with running([PENSTOCK, "worker", f"{module}:app", *options], log=log):
            yield
    except Exception:
        print(f"the worker's last lines:\n{tail(log)}", file=sys.stderr)
        raise
    finally:
        # Closed first, because a client that finds its broker dead starts another.
        app.close()
        # The orphaned broker became a child of this process, and would otherwise stay for a minute.
        end_pids(descendants(os.getpid(), apart_from=before))
