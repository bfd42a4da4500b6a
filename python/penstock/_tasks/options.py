"""Options of a job, checked where they are given."""

# No `from __future__ import annotations`: see `_public.py`.
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from datetime import datetime, timedelta
from typing import Any, Literal, TypeAlias, TypedDict

from penstock import _core
from penstock._durations import Seconds, due_ms, duration_ms, epoch_ms, is_a, is_int, is_number
from penstock._public import public
from penstock._tasks.retries import Retries, checked_retries
from penstock._tasks.unique import Debounce, Rule, Unique, rule_of
from penstock.errors import NotOffered

Durability: TypeAlias = Literal["replicated", "disk", "os", "none"]
Slot: TypeAlias = Literal["process", "thread", "async", "isolated"]


@public
class TaskOptions(TypedDict, total=False):
    """Options of ``@app.task(...)``. Times are seconds or a timedelta unless noted."""

    name: str
    """Name of the task in messages. Default: ``module.qualname`` of the function."""
    queue: str
    """Queue of the task's jobs. Default: ``"default"``."""
    priority: int
    """Number from 0 to 9, higher first. Default: 4."""
    expires: Seconds | None
    """Time after which a job is not started any more. Default: never."""
    result_ttl: Seconds
    """Time for which a result is kept. Default: 24 hours."""
    store_result: bool
    """Whether to store results. Default: True."""
    durability: Durability
    """``"disk"``, ``"os"`` or ``"none"``: see ``JobOptions``. Default: ``"disk"``."""
    retries: Retries
    """Number of attempts that may follow a failed one; None for no limit. Or a list of up to 32 delays, one before each
    retry, instead of ``backoff``. Default: 0."""
    backoff: Seconds
    """Delay before the first retry. Default: 1."""
    backoff_factor: float
    """Factor by which the delay grows with each further retry. Default: 2."""
    max_backoff: Seconds
    """Longest delay before a retry. Default: 600."""
    jitter: float
    """Random share of a delay, from 0 to 1. Default: 0.5, for a delay between half and all of the backoff."""
    retry_on: type[BaseException] | Iterable[type[BaseException]]
    """Errors after which to retry. Default: every ``Exception``."""
    no_retry_on: type[BaseException] | Iterable[type[BaseException]]
    """Errors among ``retry_on`` after which not to retry. Default: none."""
    max_crashes: int
    """Number of crashes of its worker process after which a job fails; with 1 it never runs again. Default: 3."""
    timeout: Seconds | None
    """Longest time that an attempt may run. A longer one is stopped and fails with ``TaskTimeout``. Default: no
    limit."""
    soft_timeout: Seconds | None
    """Time after which ``SoftTimeout`` is raised in an attempt, so that it can clean up; less than ``timeout``.
    Default: never."""
    unique: Literal["waiting", "done"] | timedelta | Unique | None
    """Period for which calls with the same arguments are one job: until a worker takes it (``"waiting"``), until it has
    ended (``"done"``), for a time (a timedelta), or a ``Unique(...)``. Default: each call is a job."""
    debounce: Seconds | Debounce | None
    """Time without another call after which the job of the last call is due, or a ``Debounce(...)``. Default: none."""
    on_crash: Literal["retry", "fail"]
    """``"retry"`` (the default), or ``"fail"`` to never run a job again after its worker process died: at most once."""
    slot: Slot
    """Kind of slot that runs its jobs: ``"process"``, ``"thread"``, ``"async"``, or ``"isolated"``, which is a process
    for each job. Default: ``"async"``, the event loop, for an ``async def``; for other functions a thread where the
    worker has threads (``--threads``), else a process."""


@public
class JobOptions(TypedDict, total=False):
    """Options of ``task.options(...)``. Times are seconds or a timedelta unless noted."""

    queue: str
    """Queue of the job. Default: the task's queue, else ``"default"``."""
    priority: int
    """Number from 0 to 9, higher first. Default: 4."""
    countdown: Seconds
    """Time from now until the job is due. The broker holds it; no worker waits. Default: 0."""
    eta: datetime
    """Time at which the job is due by the wall clock, as a datetime with a time zone. Excludes ``countdown``."""
    expires: Seconds | datetime | None
    """Time after which the job is not started any more and ends as expired, or a datetime. Default: never."""
    result_ttl: Seconds
    """Time for which the result is kept. Default: 24 hours."""
    store_result: bool
    """Whether to store the result. Default: True."""
    durability: Durability
    """Failure that an accepted job survives: ``"disk"`` (the default) a power cut, ``"os"`` a ``kill -9`` of the
    broker, ``"none"`` no failure."""
    retries: Retries
    """Number of attempts that may follow a failed one, or the delay before each, as for ``@app.task``. Default: the
    task's own, in the worker's version of the task."""
    timeout: Seconds | None
    """Longest time that an attempt may run; None for no limit. Default: the task's."""
    soft_timeout: Seconds | None
    """Time after which ``SoftTimeout`` is raised in an attempt; None for never. Default: the task's."""
    unique: Literal["waiting", "done"] | timedelta | Unique | None
    """Period for which calls with the same arguments are one job, as for ``@app.task``; None for never. Default: the
    task's."""
    idempotency_key: str | None
    """Key for which calls of the task are one job, whose result is kept, for 24 hours after the first call. Default:
    none."""
    debounce: Seconds | Debounce | None
    """Time without another call after which the job is due, as for ``@app.task``; None for no debouncing. Default: the
    task's."""
    headers: Mapping[str, str]
    """Names and values sent with the arguments, such as a trace or a tenant: at most 4 KiB in all. The task reads them
    as ``current_job().headers``, and jobs that it enqueues inherit them."""


@dataclass(frozen=True, slots=True)
class Options:
    """Complete options of a job; ``with_changes`` returns a changed copy."""

    task: str
    max_crashes: int
    queue: str = "default"
    priority: int = 4
    countdown: Seconds | None = None
    eta: datetime | None = None
    expires: Seconds | datetime | None = None
    result_ttl: Seconds = 86_400.0
    store_result: bool = True
    durability: Durability = "disk"
    retries: int | tuple[int, ...] | None = None
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    timeout: Seconds | None = None
    soft_timeout: Seconds | None = None
    unique: Any = None
    idempotency_key: str | None = None
    debounce: Any = None

    def with_changes(self, changes: Mapping[str, Any]) -> "Options":
        refuse_unknown(changes, _JOB_OPTIONS, "options()")
        changed = replace(self, **changes)
        if "retries" in changes:
            changed = replace(changed, retries=checked_retries(changes["retries"]))
        if "headers" in changes:
            changed = replace(changed, headers=checked_headers(changes["headers"]))
        return changed

    def rule(self) -> Rule | None:
        """Check the options for unique jobs. Raises ``ValueError`` or ``TypeError``."""
        is_delayed = self.countdown is not None or self.eta is not None
        return rule_of(self.unique, self.idempotency_key, self.debounce, is_delayed=is_delayed)

    def for_core(self) -> _core.Options:
        """Check all options and freeze them. Raises ``ValueError`` or ``TypeError``, naming the option."""
        queue = self.queue
        if not is_a(queue, str) or not queue or queue != queue.strip() or not queue.isprintable():
            raise ValueError(f"queue must be a name without control characters or surrounding spaces, not {queue!r}")
        if not is_int(self.priority) or not 0 <= self.priority <= 9:
            raise ValueError(f"priority must be an integer from 0 to 9, not {self.priority!r}")
        if self.countdown is not None and self.eta is not None:
            raise ValueError("give countdown or eta, not both")
        if self.durability not in ("replicated", "disk", "os", "none"):
            raise ValueError(f'durability must be "replicated", "disk", "os" or "none", not {self.durability!r}')
        if not is_int(self.max_crashes) or not 1 <= self.max_crashes <= 255:
            raise ValueError(f"max_crashes must be an integer from 1 to 255, not {self.max_crashes!r}")
        expires_after_ms, expires_at_ms = due_ms("expires", self.expires)
        timeout_ms, soft_timeout_ms = _limit_ms("timeout", self.timeout), _limit_ms("soft_timeout", self.soft_timeout)
        if timeout_ms is not None and soft_timeout_ms is not None and soft_timeout_ms >= timeout_ms:
            raise ValueError(
                f"soft_timeout must be less than timeout, which stops the job: they are {self.soft_timeout!r} and"
                f" {self.timeout!r}"
            )
        result_ttl_ms = duration_ms("result_ttl", self.result_ttl) if self.store_result else None
        rule = self.rule()
        if rule is not None and result_ttl_ms is not None:
            result_ttl_ms = max(result_ttl_ms, rule.keeps_result_ms)
        return _core.Options(
            self.task,
            queue=self.queue,
            priority=self.priority,
            countdown_ms=None if self.countdown is None else duration_ms("countdown", self.countdown),
            eta_ms=None if self.eta is None else epoch_ms("eta", self.eta),
            expires_after_ms=expires_after_ms,
            expires_at_ms=expires_at_ms,
            result_ttl_ms=result_ttl_ms,
            max_crashes=self.max_crashes,
            durability=self.durability,
            retries=self.retries,
            headers=list(self.headers.items()),
            timeout_ms=timeout_ms,
            soft_timeout_ms=soft_timeout_ms,
        )


_JOB_OPTIONS = frozenset(each.name for each in fields(Options)) - {"task", "max_crashes"}


# Names reserved for future options. Refused until then, so that no program has to change.
_RESERVED = {
    "deadline": "deadlines of jobs and what they enqueue",
    "single_flight": "unique jobs within a batch",
    "key": "limits for each key",
    "rate_limit": "rate limits",
    "max_running": "limits on running jobs",
    "limits": "shared limits",
    "weight": "limits by weight",
    "batch": "batches",
    "breaker": "circuit breakers",
    "when_full": "waiting for room in a full queue",
}

# Option names of other task queues, with their equivalents here.
_HABITS = {
    "acks_late": "always on: a job whose worker process dies runs again, unless on_crash='fail'",
    "at": "use eta",
    "backoff_cap": "use max_backoff",
    "bind": "current_job() describes the running job, and raise Retry(...) asks for another attempt",
    "cron": 'use a schedule: @app.periodic("30 2 * * *") above @app.task(...)',
    "crontab": 'use a schedule: @app.periodic("30 2 * * *") above @app.task(...)',
    "default_retry_delay": "use backoff, or a list of delays as retries",
    "delay": "use countdown",
    "every": "use a schedule: @app.periodic(every=...) above @app.task(...)",
    "exchange": "use queue, the name of the job's queue",
    "failure_ttl": "failed jobs of all tasks are kept for 30 days",
    "job_id": "delay() creates the id, and returns the job with it",
    "job_timeout": "use timeout",
    "link": "use the method of a call: task.s(...).link(other.s())",
    "link_error": "use the method of a call: task.s(...).link_error(other.s())",
    "max_age": "use expires",
    "max_concurrency": "limits on running jobs are not offered yet; the option will be max_running",
    "max_deliveries": "use max_crashes",
    "min_backoff": "use backoff",
    "on_failure": "use the method of a call: task.s(...).link_error(other.s())",
    "on_success": "use the method of a call: task.s(...).link(other.s())",
    "periodic": "use @app.periodic(...) above @app.task(...)",
    "rate": "rate limits are not offered yet; the option will be rate_limit",
    "retry_backoff_max": "use max_backoff",
    "routing_key": "use queue, the name of the job's queue",
    "schedule": "use @app.periodic(...) above @app.task(...)",
    "slot": "set it on the task, for all of its jobs: @app.task(slot=...)",
    "serializer": "there is a single encoding; use app.codec(...) for your own types",
    "soft_time_limit": "use soft_timeout",
    "task_id": "delay() creates the id, and returns the job with it",
    "throws": "use no_retry_on, for errors after which not to retry",
    "time_limit": "use timeout",
    "ttl": "use expires for waiting jobs, and result_ttl for results",
}


_OF_TASKS = frozenset(TaskOptions.__annotations__)


def refuse_unknown(given: Iterable[str], known: Iterable[str], where: str) -> None:
    known = sorted(known)
    for name in given:
        if name in _RESERVED and name not in known:
            raise NotOffered(f"{where}: {name!r} is reserved for {_RESERVED[name]}, not built yet; leave it out")
        if name not in known:
            hint = _HABITS.get(name)
            if hint is None and name in _OF_TASKS:
                hint = f"set it on the task, for all of its jobs: @app.task({name}=...)"
            if hint is None:
                # Imported here because few programs need it.
                import difflib

                close = difflib.get_close_matches(name, known, n=1)
                hint = f"did you mean {close[0]!r}?" if close else f"it takes {', '.join(known)}"
            raise TypeError(f"{where} got an unknown option {name!r}; {hint}")


def _limit_ms(name: str, value: Any) -> int | None:
    if value is None:
        return None
    # `duration_ms` refuses values that are not a time, or too long.
    is_negative = (is_number(value) and value < 0) or (is_a(value, timedelta) and value < timedelta(0))
    limit_ms = 0 if is_negative else duration_ms(name, value)
    if limit_ms == 0:
        raise ValueError(f"{name} must be at least a millisecond, not {value!r}; use None for no limit")
    return limit_ms


_HEADERS_BYTES = 4096


def checked_headers(headers: Any) -> Mapping[str, str]:
    """Return a copy of the headers. Raises ``TypeError`` or ``ValueError``."""
    if not is_a(headers, Mapping):
        raise TypeError(f"headers must be a dictionary of strings, not {headers!r}")
    size = 0
    for name, value in headers.items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise TypeError(f"headers must be strings, not {name!r}: {value!r}")
        if not name or name.startswith("penstock."):
            raise ValueError(f"a header can't be called {name!r}: names that begin with 'penstock.' are reserved")
        try:
            size += len(name.encode()) + len(value.encode())
        except UnicodeEncodeError:
            raise ValueError(f"the header {name!r} is not valid Unicode: {value!r}") from None
    if size > _HEADERS_BYTES:
        raise ValueError(
            f"the headers take {size:,} bytes with their names, and {_HEADERS_BYTES:,} are allowed;"
            " pass larger data as an argument"
        )
    return dict(headers)
