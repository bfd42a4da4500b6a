"""Books of a test by force: a log of what producers, tasks and readers did and saw, kept outside of Penstock.

The books are one file with one event per line, each appended with one call. So a kill -9 tears no line, and the order
of the lines is an order in which things happened: a line written before a call precedes all effects of the call.

    attempt LABEL NOT_BEFORE BATCH     a call begins; its job must not start before that time (ms; 0: at once);
                                       labels of one batch are accepted all together or not at all
    confirmed LABEL JOB                the call returned
    maybe LABEL, refused LABEL         it raised: the work may have been accepted, or certainly was not
    begin LABEL JOB ATTEMPT CRASHES REDELIVERED NOW RUN
    seen JOB RUN                       somebody received the job's result, which names the RUN that produced it
"""

from __future__ import annotations

import os
import time
import uuid

from penstock import current_job

_files: dict[str, int] = {}


def write(*words: object) -> None:
    path = os.environ["BOOKS"]
    if path not in _files:
        _files[path] = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    os.write(_files[path], (" ".join(map(str, words)) + "\n").encode())


def begin(label: str) -> str:
    """Record the start of a run, and return a unique name for it. A task calls this first."""
    job = current_job()
    assert job is not None
    run = f"{label}:{uuid.uuid4().hex[:12]}"
    write("begin", label, job.id, job.attempt, job.crashes, int(job.redelivered), now_ms(), run)
    return run


def now_ms() -> int:
    return time.time_ns() // 1_000_000
