"""Calls as a test sees them: enqueued calls with their options, and expected calls."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias, Unpack

from penstock._durations import duration_ms, is_a
from penstock._tasks.options import JobOptions, checked_headers, refuse_unknown
from penstock._tasks.retries import checked_retries
from penstock._tasks.task import AnyTask, Sender

if TYPE_CHECKING:
    from penstock import _core
    from penstock._jobs.job import Job
    from penstock._tasks.app import App

TaskOrName: TypeAlias = Sender[..., Any] | str

# Number of calls that a message lists before it counts the others.
_SHOWN = 20


@dataclass(frozen=True, slots=True)
class Call:
    """Enqueued job: its task, its arguments as the task receives them, and its options."""

    task: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    queue: str
    priority: int
    countdown: float | None
    """Delay in seconds; None if the job is due at once, or at ``eta``."""
    eta: datetime | None
    """Time at which the job is due, in UTC and whole milliseconds; None for no ``eta``."""
    expires: float | datetime | None
    """Time after which the job is not started any more, in seconds from the call or as a datetime in UTC; None for
    never."""
    durability: str
    retries: float | tuple[float, ...] | None
    """Number of retries (``inf`` for no limit), or the seconds before each; None for those of the task."""
    headers: dict[str, str]
    result_ttl: float | None
    """Time in seconds for which the result is kept; None if no result is stored."""
    job: Job[Any] = field(repr=False)

    @property
    def job_id(self) -> str:
        return self.job.id

    @property
    def store_result(self) -> bool:
        return self.result_ttl is not None

    def __str__(self) -> str:
        arguments = [repr(arg) for arg in self.args] + [f"{name}={value!r}" for name, value in self.kwargs.items()]
        options = {"queue": self.queue}
        for name, default in _DEFAULTS.items():
            value = getattr(self, name)
            if value != default:
                options[name] = value
        shown = ", ".join(f"{name}={value!r}" for name, value in options.items())
        return f"{self.task}({', '.join(arguments)})  {shown}"


_DEFAULTS: dict[str, Any] = {
    "priority": 4,
    "countdown": None,
    "eta": None,
    "expires": None,
    "durability": "disk",
    "retries": None,
    "headers": {},
    "result_ttl": 86_400.0,
}


def call_of(
    app: App,
    options: _core.Options,
    body: bytes,
    job: Job[Any],
    arguments: tuple[tuple[Any, ...], dict[str, Any]] | None = None,
) -> Call:
    """Describe a job sent to the broker. ``arguments``: those of a step, whose body lacks some of them."""
    if arguments is None:
        decoded = app.remote_task(options.task).task.arguments.decode(body)
        arguments = tuple(decoded[0]), decoded[1]
    args, kwargs = arguments
    details, retries = options.details(), options.retries
    expires = _seconds(details["expires_after_ms"])
    return Call(
        task=options.task,
        args=args,
        kwargs=kwargs,
        queue=options.queue,
        priority=details["priority"],
        countdown=_seconds(details["countdown_ms"]),
        eta=_moment(details["eta_ms"]),
        expires=_moment(details["expires_at_ms"]) if expires is None else expires,
        durability=details["durability"],
        retries=None if retries is None else _retries(retries),
        headers=options.headers,
        result_ttl=_seconds(details["result_ttl_ms"]),
        job=job,
    )


class Calls(list[Call]):
    """Enqueued calls in order, with assertions about them."""

    def __init__(self) -> None:
        super().__init__()
        self._signature_of: Callable[[str], inspect.Signature | None] = lambda task: None

    def assert_enqueued(
        self,
        task: TaskOrName,
        /,
        *,
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        times: int | None = None,
        **options: Unpack[JobOptions],
    ) -> Call:
        """Return the first call of ``task`` with these arguments and options. Raises ``AssertionError`` if there is
        none.

        ``task``: the task, or its name. With ``args`` or ``kwargs`` the call must be equivalent to ``delay(*args,
        **kwargs)``, whether by position, name or default; without them any arguments match. Each given option of
        ``task.options(...)`` must be equal, and so must each given header. ``times``: exact number of such calls.
        Default: one or more.
        """
        found, wanted = self._find(task, args, kwargs, options)
        if not found or (times is not None and len(found) != times):
            was = f"it was {_times(len(found))}" if found else "it was not"
            expected = "" if times is None else f" {_times(times)}"
            self._fail(f"expected {wanted} to be enqueued{expected}, but {was}", task)
        return found[0]

    def refute_enqueued(
        self,
        task: TaskOrName,
        /,
        *,
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        **options: Unpack[JobOptions],
    ) -> None:
        """Raise ``AssertionError`` if ``assert_enqueued`` would find such a call."""
        found, wanted = self._find(task, args, kwargs, options)
        if found:
            self._fail(f"expected {wanted} not to be enqueued, but it was, {_times(len(found))}", task)

    def _find(
        self,
        task: TaskOrName,
        args: Sequence[Any] | None,
        kwargs: Mapping[str, Any] | None,
        options: Mapping[str, Any],
    ) -> tuple[list[Call], str]:
        name, signature = _name_of(task), self._signature(task)
        refuse_unknown(options, JobOptions.__annotations__, "assert_enqueued")
        expected = _Expected(name, args, kwargs, options, signature)
        return [call for call in self if expected.fits(call)], str(expected)

    def _signature(self, task: TaskOrName) -> inspect.Signature | None:
        return self._signature_of(task) if isinstance(task, str) else _signature(task.task)

    def _fail(self, what: str, task: TaskOrName) -> NoReturn:
        name = _name_of(task)
        # Calls of the same task come first, since one of them was probably meant.
        calls = sorted(self, key=lambda call: call.task != name)
        lines = [f"  {call}" for call in calls[:_SHOWN]]
        if len(calls) > _SHOWN:
            lines.append(f"  and {len(calls) - _SHOWN} more")
        enqueued = "These calls were enqueued:" if calls else "Nothing was enqueued."
        raise AssertionError("\n".join([f"{what}. {enqueued}", *lines]))


class _Expected:
    def __init__(
        self,
        task: str,
        args: Sequence[Any] | None,
        kwargs: Mapping[str, Any] | None,
        options: Mapping[str, Any],
        signature: inspect.Signature | None,
    ) -> None:
        if isinstance(args, str):
            raise TypeError(f"args must be a tuple or a list of arguments, not {args!r}")
        self._task = task
        self._any_arguments = args is None and kwargs is None
        self._args, self._kwargs = tuple(args or ()), dict(kwargs or {})
        self._options = options
        self._signature = signature

    def fits(self, call: Call) -> bool:
        if call.task != self._task:
            return False
        if not self._any_arguments and self._bound(self._args, self._kwargs) != self._bound(call.args, call.kwargs):
            return False
        return all(_equals(call, name, value) for name, value in self._options.items())

    def _bound(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        """Return the arguments in one canonical form, whether given by name, by position or by default."""
        if self._signature is None:
            return args, kwargs
        try:
            bound = self._signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{self._task}(): {error}") from None
        bound.apply_defaults()
        return bound.args, bound.kwargs

    def __str__(self) -> str:
        arguments = "..."
        if not self._any_arguments:
            named = [f"{name}={value!r}" for name, value in self._kwargs.items()]
            arguments = ", ".join([repr(arg) for arg in self._args] + named)
        shown = ", ".join(f"{name}={value!r}" for name, value in self._options.items())
        return f"{self._task}({arguments}){' with ' if shown else ''}{shown}"


def _equals(call: Call, name: str, expected: Any) -> bool:
    found = getattr(call, name)
    if name == "headers":
        return bool({**found, **checked_headers(expected)} == found)
    if name == "retries":
        return bool(found == _retries(checked_retries(expected)))
    if expected is None:
        return found is None
    if name in ("countdown", "expires", "result_ttl") and not isinstance(expected, datetime):
        return isinstance(found, float) and round(found * 1000) == duration_ms(name, expected)
    if isinstance(expected, datetime):
        if expected.tzinfo is None:
            raise ValueError(f"{name} must have a time zone: datetime.now(timezone.utc) instead of datetime.now()")
        # The broker stores times in milliseconds.
        return isinstance(found, datetime) and round(expected.timestamp() * 1000) == round(found.timestamp() * 1000)
    return bool(found == expected)


def signature_in(apps: Sequence[App], task: str) -> inspect.Signature | None:
    """Return the signature of the task of this name in one of the apps."""
    return next((_signature(app.tasks[task]) for app in apps if task in app.tasks), None)


def _signature(task: AnyTask[..., Any]) -> inspect.Signature | None:
    known = task.app.tasks.get(task.name)
    return None if known is None else inspect.signature(known.function)


def _name_of(task: TaskOrName) -> str:
    if isinstance(task, str):
        return task
    if not is_a(task, Sender):
        raise TypeError(f"the first argument must be a task or its name, not {task!r}")
    return task.task.name


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def _retries(checked: int | tuple[int, ...]) -> float | tuple[float, ...]:
    if isinstance(checked, tuple):
        return tuple(ms / 1000 for ms in checked)
    return math.inf if checked == checked_retries(None) else checked


def _seconds(ms: int | None) -> float | None:
    return None if ms is None else ms / 1000


def _moment(ms: int | None) -> datetime | None:
    return None if ms is None else datetime.fromtimestamp(ms / 1000, UTC)
