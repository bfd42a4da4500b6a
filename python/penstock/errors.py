"""All errors that Penstock raises. Each is a `PenstockError`.

Two questions decide what a caller does next, and the types answer them: did the job fail
(`JobError` and below), or could Penstock not tell or take it (everything else)? And may the work
have been accepted anyway (`maybe_accepted`, which all of them have)?
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
    """The base of all errors in this module.

    ``maybe_accepted`` is True when the call was sent and ended without an answer: a broker may have
    carried it out or may still do so, and enqueueing again could then run the job twice.
    """

    maybe_accepted: bool = False


class _CallError(PenstockError):
    """A call ended without a broker's answer."""

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
    """The job had not ended when the time of ``result(timeout=...)`` was up. It is not cancelled."""


class Unauthorized(_CallError):
    """The server requires a token: set ``PENSTOCK_TOKEN`` to the one it was started with."""


class InvalidConfiguration(_CallError, ValueError):
    """A URL, a directory or an option is wrong; the text says what and how to fix it."""


class ClientClosed(_CallError):
    """The call came after ``app.close()``, or was cut off by it; ``maybe_accepted`` is True if it had been sent."""


class QueueFull(PenstockError):
    """The queue is at its limit. The job was not accepted."""


class DiskFull(PenstockError):
    """The broker's disk is nearly full, or has no room for so large a call. Nothing of the call was accepted."""


class NotOffered(_CallError):
    """The broker is older than this client, its engine lacks the feature, or the feature is not built yet.

    Nothing was changed. The text says what to install, or which option to change.
    """


class NoSuchJob(PenstockError):
    """The broker holds no such job: it has ended, or it never was. Nothing was changed."""


class TooLate(PenstockError):
    """The job is past the point where this could be done to it. Nothing was changed."""


class JobExists(PenstockError):
    """Another job has the key of a unique call, which asked for this: ``on_conflict="raise"``. Nothing was enqueued.

    ``job_id`` is that job's; ``app.job(error.job_id)`` returns it.
    """

    def __init__(self, message: str = "", job_id: str = "") -> None:
        super().__init__(message, job_id)
        self.job_id = job_id

    def __str__(self) -> str:
        return str(self.args[0])


class WaitCycle(PenstockError):
    """A job waits for one that waits for it, or for itself: neither would ever end. The text names all jobs in between.

    Raised by the wait that closes the circle. None of the jobs was cancelled.
    """


class TooManyWaiting(PenstockError):
    """A job waits for one that can't be run: every slot of the workers is held by jobs that wait for others.

    As many as may have lent their slots (``--max-parked``). The job that is waited for is still enqueued.
    """


class PayloadTooLarge(_CallError, ValueError):
    """Arguments or a result are larger than the limit (16 MiB by default). Nothing was sent."""


class ResultExpired(PenstockError):
    """There is no result and none is on its way.

    It was never stored (``store_result=False``), has outlived ``result_ttl``, was evicted under its
    task's size cap, or the broker does not know the job.
    """


class JobError(PenstockError):
    """The job did not succeed. ``result()`` raises one of these, or the error the task raised."""


class TaskError(JobError):
    """The task raised an error that cannot be rebuilt here as its own type.

    That is so when this process has not imported the type, when it is not an ``Exception``, or when
    its arguments do not travel. ``type_name`` is the full name; the remote traceback is ``__cause__``.
    """

    def __init__(self, type_name: str, message: str) -> None:
        super().__init__(type_name, message)
        self.type_name = type_name
        self.message = message

    def __str__(self) -> str:
        return f"{self.type_name}: {self.message}" if self.message else self.type_name


class ArgumentMismatch(JobError, TypeError):
    """The job's arguments do not fit the task's signature in the worker that took it.

    They were enqueued by another version of the code. While another worker may be of that version
    (``App(version_grace=...)``), the job is tried again later; this error ends those tries.
    """


class UnknownTask(JobError):
    """No task of this name is in the worker's app. The text names the closest ones."""


class WorkerCrashed(JobError):
    """The worker process died while it ran the job, once more than ``max_crashes`` allows."""


class TaskTimeout(JobError, TimeoutError):
    """The job ran longer than its ``timeout``, and was stopped.

    It is retried only if the task's ``retry_on`` names it, or a base of it other than ``Exception``.
    """


class SoftTimeout(PenstockError, TimeoutError):
    """Raised inside a task that runs longer than its ``soft_timeout``, once an attempt, for it to wind up.

    As any error, it fails the attempt unless the task catches it.
    """

    def __str__(self) -> str:
        return super().__str__() or "the task has run longer than its soft_timeout"


class JobExpired(JobError):
    """The job was not started before its ``expires``, so it was never run to an end."""


class JobCancelled(JobError):
    """The job was purged or cancelled, or newer jobs took its place in a full queue."""


class GroupError(JobError):
    """A step did not succeed because of other jobs: too many members of its group, or a job before it, have failed.

    ``failed`` is the number of those jobs that are known, of at most 64, and ``failures`` has a ``Failure`` for each.
    The error of the first is ``__cause__``.
    """

    def __init__(self, message: str = "", failed: int = 0, failures: "tuple[Failure, ...]" = ()) -> None:
        # Failures are left out where they do not travel.
        super().__init__(message)
        self.failed = failed
        self.failures = failures


class CannotDecode(PenstockError):
    """A result holds a value of a class that is not known here, or that no longer fits its class.

    The text names the class, and the task whose module has to be imported.
    """


class RemoteTraceback(Exception):
    """The traceback from the worker, as text: the ``__cause__`` of the error that ``result()`` raises."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return "\n" + self.text


for _name in __all__:
    # `penstock.CallTimeout` is what users import and see, in tracebacks too.
    globals()[_name].__module__ = "penstock"
