"""What a worker's children log where the app has not set up logging itself."""

from __future__ import annotations

import json
import logging
import time

# As the worker itself, which is not Python, calls them.
LEVELS = {"WARNING": "WARN", "CRITICAL": "ERROR"}


def log_to_stderr(level: str, style: str) -> None:
    """Let the loggers of penstock write to stderr: lines like the worker's own, or JSON."""
    handler = UnlessConfigured()
    handler.setFormatter(Json() if style == "json" else Text())
    logger = logging.getLogger("penstock")
    logger.addHandler(handler)
    if level != "WARNING":
        logger.setLevel(level)


class UnlessConfigured(logging.StreamHandler):  # type: ignore[type-arg]
    """Steps back as soon as the app has a handler of its own, whenever that is."""

    def filter(self, record: logging.LogRecord) -> bool:
        return not logging.root.handlers and bool(super().filter(record))


def timestamp(record: logging.LogRecord) -> str:
    seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
    return f"{seconds}.{int(record.created * 1_000_000) % 1_000_000:06}Z"


class Text(logging.Formatter):
    def formatMessage(self, record: logging.LogRecord) -> str:
        return f"{timestamp(record)} {LEVELS.get(record.levelname, record.levelname):>5} {record.message}"


class Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = {
            "timestamp": timestamp(record),
            "level": LEVELS.get(record.levelname, record.levelname),
            "message": record.getMessage(),
            "target": record.name,
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)
