"""Logging in a worker's children, unless the app sets up logging itself."""

from __future__ import annotations

import json
import logging
import time

from penstock._jobs.log_filter import JobLogFilter

# Level names of the worker itself, which is not Python.
LEVELS = {"WARNING": "WARN", "CRITICAL": "ERROR"}


def log_to_stderr(level: str, style: str) -> None:
    """Write records without a handler to stderr, as lines like the worker's own or as JSON, with the job that logs
    them.

    ``level`` applies to the app's loggers, unless the app has set one. Like the worker, Penstock's own loggers say one
    level less, because a line for each job is useful only for debugging.
    """
    handler = UnlessConfigured()
    handler.setFormatter(Json() if style == "json" else Text())
    handler.addFilter(JobLogFilter())
    logger = logging.getLogger("penstock")
    logger.addHandler(handler)
    # The default leaves an app's own configuration alone.
    if level != "INFO" or not logging.root.handlers:
        logger.setLevel({"DEBUG": "INFO", "INFO": "WARNING"}.get(level, level))
    # Used for records without a handler. Python's default shows a bare message, without a time or a job.
    logging.lastResort = handler
    if not logging.root.handlers and logging.root.level == logging.WARNING:
        logging.root.setLevel(level)


class UnlessConfigured(logging.StreamHandler):  # type: ignore[type-arg]
    """Handler that is silent as soon as the app has its own handler."""

    def filter(self, record: logging.LogRecord) -> bool:
        return not logging.root.handlers and bool(super().filter(record))


def timestamp(record: logging.LogRecord) -> str:
    seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
    return f"{seconds}.{int(record.created * 1_000_000) % 1_000_000:06}Z"


def job_of(record: logging.LogRecord) -> dict[str, str]:
    """Return the non-empty fields that ``JobLogFilter`` has set."""
    fields = {name: getattr(record, name, "") for name in ("task", "job_id")}
    return {name: value for name, value in fields.items() if value}


class Text(logging.Formatter):
    def formatMessage(self, record: logging.LogRecord) -> str:
        job = " ".join(job_of(record).values())
        message = f"{job}: {record.message}" if job else record.message
        return f"{timestamp(record)} {LEVELS.get(record.levelname, record.levelname):>5} {message}"


class Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = {
            "timestamp": timestamp(record),
            "level": LEVELS.get(record.levelname, record.levelname),
            "message": record.getMessage(),
            "target": record.name,
            **job_of(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)
