"""Errors that Penstock raises. Each is a ``PenstockError``.

Two questions decide what a caller does next, and the types answer them. Did the job fail (``JobError`` and its
subclasses), or could Penstock not accept or report it (everything else)? And may the work have been accepted anyway
(``maybe_accepted``, an attribute of all of them)?
"""

TYPE_CHECKING = False

if TYPE_CHECKING:
    from penstock._flows.failure import Failure

__all__ = [
    "ArgumentMismatch",
    "BrokerUnavailable",
    "CallTimeout",
    "CannotDecode",
    "ClientClosed",
    "DiskFull",
    "GroupError",
    "InvalidConfiguration",
    "JobCancelled",
    "JobError",
    "JobExists",
    "JobExpired",
    "NoSuchJob",
    "NotOffered",
    "PayloadTooLarge",
    "PenstockError",
    "QueueFull",
    "RemoteTraceback",
    "ResultExpired",
    "ResultTimeout",
    "SoftTimeout",
    "TaskError",
    "TaskTimeout",
    "TooLate",
    "TooManyWaiting",
    "Unauthorized",
    "UnknownTask",
    "WaitCycle",
    "WorkerCrashed",
]


class PenstockError(Exception):
    """Base of all errors in this module.

    ``maybe_accepted`` is True when the call was sent but got no answer. A broker may have carried it out, or may still
    do so, and enqueueing again could then run the job twice.
    """

    maybe_accepted: bool = False


class _CallError(PenstockError):
    """A call returned without a broker's answer."""

    def __init__(self, message: str = "", maybe_accepted: bool = False) -> None:
        super().__init__(message, maybe_accepted)
        self.maybe_accepted = maybe_accepted

    def __str__(self) -> str:
        return str(self.args[0])


class BrokerUnavailable(_CallError):
    """No broker answered within the deadline. ``maybe_accepted`` is True when the request had been sent."""


class CallTimeout(_CallError, TimeoutError):
    """The broker is connected, but did not answer within ``App(call_timeout=...)``.

    ``maybe_accepted`` is True when it may still carry out the request.
    """


class ResultTimeout(_CallError, TimeoutError):
    """The job did not end within the ``timeout`` of ``result()``. It was not cancelled."""


class Unauthorized(_CallError):
    """The token is missing or wrong: set ``PENSTOCK_TOKEN`` to the one that the server was started with."""


class InvalidConfiguration(_CallError, ValueError):
    """A URL, a directory or an option is wrong. The message says which one, and how to fix it."""


class ClientClosed(_CallError):
    """The call came after ``app.close()`` or was interrupted by it. ``maybe_accepted`` is True if it had been sent."""


class QueueFull(PenstockError):
    """The queue is at its limit. The job was not accepted."""


class DiskFull(PenstockError):
    """The broker's disk is nearly full, or has no room for a call of this size. No part of the call was accepted."""


class NotOffered(_CallError):
    """The broker is older than this client, its engine lacks the feature, or the feature is not built yet.

    Nothing was changed. The message says what to install, or which option to change.
    """


class NoSuchJob(PenstockError):
    """The broker holds no such job: it has ended, or it never existed. Nothing was changed."""


class TooLate(PenstockError):
    """The job has advanced too far for this operation. Nothing was changed."""


class JobExists(PenstockError):
    """Another job holds the key of a unique call with ``on_conflict="raise"``.

    Nothing was enqueued. ``job_id`` is the id of that job; ``app.job(error.job_id)`` returns it.
    """

    def __init__(self, message: str = "", job_id: str = "") -> None:
        super().__init__(message, job_id)
        self.job_id = job_id

    def __str__(self) -> str:
        return str(self.args[0])


class WaitCycle(PenstockError):
    """A job waits for itself, directly or through other jobs, so none of them would ever end.

    The message names all jobs of the cycle. Raised by the wait that closes it. None of the jobs was cancelled.
    """


class TooManyWaiting(PenstockError):
    """A job waits for another that cannot run, because jobs that wait for others hold every slot of the workers.

    The workers have already lent as many slots as ``--max-parked`` allows. The awaited job is still enqueued.
    """


class PayloadTooLarge(_CallError, ValueError):
    """Arguments or a result are larger than the limit (16 MiB by default). Nothing was sent."""


class ResultExpired(PenstockError):
    """There is no result, and none is to come.

    It was never stored (``store_result=False``), has outlived its ``result_ttl``, was evicted under its task's size
    cap, or the broker does not know the job.
    """


class JobError(PenstockError):
    """The job did not succeed. ``result()`` raises one of these, or the error the task raised."""


class TaskError(JobError):
    """The task raised an error that cannot be rebuilt here as its own type.

    Either this process has not imported the type, the type is not an ``Exception``, or its arguments cannot be
    serialized. ``type_name`` is its full name; the remote traceback is ``__cause__``.
    """

    def __init__(self, type_name: str, message: str) -> None:
        super().__init__(type_name, message)
        self.type_name = type_name
        self.message = message

    def __str__(self) -> str:
        return f"{self.type_name}: {self.message}" if self.message else self.type_name


class ArgumentMismatch(JobError, TypeError):
    """The job's arguments do not fit the task's signature in the worker that took it.

    Another version of the code enqueued them. During ``App(version_grace=...)``, while a worker of that version may
    still run, the job is tried again later. This error is raised when that time is over.
    """


class UnknownTask(JobError):
    """The worker's app has no task of this name. The message lists the most similar names."""


class WorkerCrashed(JobError):
    """The worker process died while running the job, as often as ``max_crashes`` allows."""


class TaskTimeout(JobError, TimeoutError):
    """The job ran longer than its ``timeout`` and was stopped.

    It is retried only if the task's ``retry_on`` names this class, or a base class other than ``Exception``.
    """


class SoftTimeout(PenstockError, TimeoutError):
    """Raised once per attempt inside a task that runs longer than its ``soft_timeout``, so that it can clean up.

    Like any error, it fails the attempt unless the task catches it.
    """

    def __str__(self) -> str:
        return super().__str__() or "the task has run longer than its soft_timeout"


class JobExpired(JobError):
    """The job did not start before it expired (``expires``), so it never completed."""


class JobCancelled(JobError):
    """The job was purged or cancelled, or newer jobs took its place in a full queue."""


class GroupError(JobError):
    """A step did not succeed because of other jobs: too many members of its group, or an earlier job, failed.

    ``failed`` is the number of those jobs that are known (at most 64), and ``failures`` has a ``Failure`` for each.
    ``__cause__`` is the error of the first one.
    """

    def __init__(self, message: str = "", failed: int = 0, failures: "tuple[Failure, ...]" = ()) -> None:
        # A rebuilt error has no failures when they could not be serialized.
        super().__init__(message)
        self.failed = failed
        self.failures = failures


class CannotDecode(PenstockError):
    """A result holds a value whose class is not known here, or that no longer fits its class.

    The message names the class, and the task whose module has to be imported.
    """


class RemoteTraceback(Exception):
    """Traceback from the worker, as text: the ``__cause__`` of the error that ``result()`` raises."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return "\n" + self.text


for _name in __all__:
    # Users import `penstock.CallTimeout`, so tracebacks should show that name, too.
    globals()[_name].__module__ = "penstock"
