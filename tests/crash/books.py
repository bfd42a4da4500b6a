"""The books of a test by force: what producers, tasks and readers did and saw, kept outside of Penstock.

One file, one event a line, each appended with one call: a kill -9 tears no line, and the order of the lines is an
order in which things happened (what is written before a call came before all that the call brought about).

    attempt LABEL NOT_BEFORE BATCH     a call begins; its job must not start before that time (ms; 0: at once);
                                       labels of one batch are accepted all together or not at all
    confirmed LABEL JOB                the call returned
    maybe LABEL, refused LABEL         it raised: the work may have been accepted, or surely was not
    begin LABEL JOB ATTEMPT CRASHES REDELIVERED NOW RUN
    seen JOB RUN                       somebody was given the job's result, which is the RUN that it is of
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
    """Called by a task first of all; gives a name that no other run has."""
    job = current_job()
    assert job is not None
    run = f"{label}:{uuid.uuid4().hex[:12]}"
    write("begin", label, job.id, job.attempt, job.crashes, int(job.redelivered), now_ms(), run)
    return run


def now_ms() -> int:
    return time.time_ns() // 1_000_000
