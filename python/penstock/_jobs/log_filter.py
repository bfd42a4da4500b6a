"""Log filter that adds the running job to log records."""

from __future__ import annotations

import logging

from penstock._jobs.current import format_id, running
from penstock._public import public


@public
class JobLogFilter(logging.Filter):
    """Adds ``job_id`` and ``task`` of the job that logs to each record; empty strings outside of a job.

    Add it to a handler, because filters of a logger do not see records of its child loggers:
    ``handler.addFilter(JobLogFilter())``, with ``"%(task)s %(job_id)s %(message)s"`` as the format.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        current = running.get()
        record.job_id = format_id(current[0]) if current else ""
        record.task = current[5].name if current else ""
        return True
