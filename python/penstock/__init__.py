"""A distributed task queue: durable by default, with nothing else to install.

    from penstock import App

    app = App("shop")

    @app.task(retries=5)
    def send(to: str, body: str) -> int: ...

    job = send.delay("ada@example.org", "hello")
    job.result(timeout=10)

A worker runs it: ``penstock worker shop:app``. The pages in docs/ explain the rest.
"""

import sys

# Type checkers recognize this name. Importing `typing` would take most of the start time of the `penstock` command.
TYPE_CHECKING = False

if sys.platform == "win32":
    raise ImportError("Penstock runs on Linux and macOS. On Windows, use it inside WSL 2.")

if TYPE_CHECKING:
    from penstock._core import __version__
    from penstock._flows.failure import Failure
    from penstock._flows.graph import Graph, graph
    from penstock._flows.results import Results
    from penstock._flows.status import StepStatus, WorkflowCounts, WorkflowInfo, Workflows, WorkflowStatus
    from penstock._flows.steps import Chain, Chord, Group, Partial, Signature, Step, chain, chord, chunks, group
    from penstock._flows.workflow import PartialResults, Workflow
    from penstock._jobs.current import CurrentJob, current_job
    from penstock._jobs.failed import FailedJob, FailedJobs
    from penstock._jobs.info import AttemptError, JobInfo, JobState
    from penstock._jobs.interrupts import JobInterrupt, shield
    from penstock._jobs.job import Job
    from penstock._jobs.log_filter import JobLogFilter
    from penstock._jobs.progress import Progress, ProgressUpdates
    from penstock._jobs.waits import AsCompleted, Waited, aresults, as_completed, async_wait, results, wait
    from penstock._tasks.app import App
    from penstock._tasks.middleware import Call, Middleware
    from penstock._tasks.options import JobOptions, TaskOptions
    from penstock._tasks.retries import Retry
    from penstock._tasks.schedules import ScheduleInfo, Schedules
    from penstock._tasks.shared import shared_task
    from penstock._tasks.task import AsyncTask, Sender, Task
    from penstock._tasks.unique import Debounce, Unique
    from penstock._values.secrets import Secret
    from penstock.errors import (
        ArgumentMismatch,
        BrokerUnavailable,
        CallTimeout,
        CannotDecode,
        ClientClosed,
        DiskFull,
        GroupError,
        InvalidConfiguration,
        JobCancelled,
        JobError,
        JobExists,
        JobExpired,
        NoSuchJob,
        NotOffered,
        PayloadTooLarge,
        PenstockError,
        QueueFull,
        RemoteTraceback,
        ResultExpired,
        ResultTimeout,
        SoftTimeout,
        TaskError,
        TaskTimeout,
        TooLate,
        TooManyWaiting,
        Unauthorized,
        UnknownTask,
        WaitCycle,
        WorkerCrashed,
    )

__all__ = [
    # Tasks and their calls
    "App",
    "AsyncTask",
    "Call",
    "Debounce",
    "JobOptions",
    "Middleware",
    "Secret",
    "Sender",
    "Signature",
    "Task",
    "TaskOptions",
    "Unique",
    "shared_task",
    # Workflows
    "Chain",
    "Chord",
    "Failure",
    "Graph",
    "Group",
    "Partial",
    "PartialResults",
    "Results",
    "Step",
    "StepStatus",
    "Workflow",
    "WorkflowCounts",
    "WorkflowInfo",
    "WorkflowStatus",
    "Workflows",
    "chain",
    "chord",
    "chunks",
    "graph",
    "group",
    # Jobs
    "AttemptError",
    "FailedJob",
    "FailedJobs",
    "Job",
    "JobInfo",
    "JobState",
    "Progress",
    "ProgressUpdates",
    # Schedules
    "ScheduleInfo",
    "Schedules",
    # Waiting for many jobs
    "AsCompleted",
    "Waited",
    "aresults",
    "as_completed",
    "async_wait",
    "results",
    "wait",
    # Inside a task
    "CurrentJob",
    "JobInterrupt",
    "JobLogFilter",
    "Retry",
    "current_job",
    "shield",
    # Errors of jobs
    "ArgumentMismatch",
    "GroupError",
    "JobCancelled",
    "JobError",
    "JobExpired",
    "RemoteTraceback",
    "SoftTimeout",
    "TaskError",
    "TaskTimeout",
    "UnknownTask",
    "WorkerCrashed",
    # Errors on the way to a job
    "BrokerUnavailable",
    "CallTimeout",
    "CannotDecode",
    "ClientClosed",
    "DiskFull",
    "InvalidConfiguration",
    "JobExists",
    "NoSuchJob",
    "NotOffered",
    "PayloadTooLarge",
    "PenstockError",
    "QueueFull",
    "ResultExpired",
    "ResultTimeout",
    "TooLate",
    "TooManyWaiting",
    "Unauthorized",
    "WaitCycle",
    # This release
    "__version__",
]


_HOMES = (
    "_tasks.app", "_tasks.task", "_tasks.shared", "_jobs.job", "_jobs.info", "_jobs.waits", "_jobs.current",
    "_tasks.retries", "_tasks.options", "_values.secrets", "_jobs.failed", "_tasks.middleware", "_jobs.log_filter",
    "_jobs.interrupts", "_flows.steps", "_flows.graph", "_flows.workflow", "_flows.results", "_flows.failure",
    "_flows.status", "_tasks.schedules", "_jobs.progress", "_tasks.unique",
    "errors", "_core",
)  # fmt: skip


def __getattr__(name: str) -> object:
    # The `penstock` command starts through this package and must respond at once, so public names are imported on first
    # use.
    from importlib import import_module

    if name in __all__:
        for home in _HOMES:
            found = vars(import_module(f"penstock.{home}"))
            if name in found:
                globals()[name] = found[name]
                return found[name]
    if name == "errors":
        return import_module("penstock.errors")
    raise AttributeError(f"module 'penstock' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({"errors", *__all__})
