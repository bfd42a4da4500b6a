"""The job that a line of a log belongs to."""

from __future__ import annotations

import logging

from penstock._jobs.current import format_id, running
from penstock._public import public


@public
class JobLogFilter(logging.Filter):
    """Adds ``job_id`` and ``task`` to each record, of the job that logs it; empty texts outside of one.

    Add it to a handler, not to a logger, whose filters see nothing of the loggers below it:
    ``handler.addFilter(JobLogFilter())``, and ``"%(task)s %(job_id)s %(message)s"`` as its format.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        current = running.get()
        record.job_id = format_id(current[0]) if current else ""
        record.task = current[5].name if current else ""
        return True
