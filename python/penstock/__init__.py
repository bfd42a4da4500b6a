"""A distributed task queue: durable by default, with nothing to install beside it.

from penstock import App

app = App("shop")

@app.task(retries=5)
def send(to: str, body: str) -> int: ...

job = send.delay("ada@example.org", "hello")
job.result(timeout=10)
"""

import sys

if sys.platform == "win32":
    raise ImportError("Penstock runs on Linux and macOS. On Windows, use it inside WSL 2.")

from penstock._app import App
from penstock._core import __version__
from penstock._current import CurrentJob, current_job
from penstock._job import AttemptError, Job, JobInfo, JobState
from penstock._options import JobOptions
from penstock._retries import Retry
from penstock._task import AsyncTask, Signature, Task, TaskOptions
from penstock.errors import (
    BrokerUnavailable,
    ClientClosed,
    DiskFull,
    InvalidConfiguration,
    JobCancelled,
    JobError,
    JobExpired,
    PayloadTooLarge,
    PenstockError,
    QueueFull,
    RemoteTraceback,
    ResultExpired,
    TaskError,
    Timeout,
    Unauthorized,
    UnknownTask,
    WorkerCrashed,
)

__all__ = [
    # Tasks and calls of them
    "App",
    "AsyncTask",
    "JobOptions",
    "Signature",
    "Task",
    "TaskOptions",
    # Jobs
    "AttemptError",
    "Job",
    "JobInfo",
    "JobState",
    # Inside a task
    "CurrentJob",
    "Retry",
    "current_job",
    # What went wrong: with the job
    "JobCancelled",
    "JobError",
    "JobExpired",
    "RemoteTraceback",
    "TaskError",
    "UnknownTask",
    "WorkerCrashed",
    # ... or on the way to it
    "BrokerUnavailable",
    "ClientClosed",
    "DiskFull",
    "InvalidConfiguration",
    "PayloadTooLarge",
    "PenstockError",
    "QueueFull",
    "ResultExpired",
    "Timeout",
    "Unauthorized",
    # This release
    "__version__",
]
