"""Tasks: a user's function, and the methods that enqueue calls of it."""

from __future__ import annotations

import functools
import inspect
import logging
import sys
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from datetime import timedelta
from types import FunctionType, MappingProxyType, MethodType
from typing import (
    TYPE_CHECKING,
    Any,
    Generic,
    ParamSpec,
    Protocol,
    TypeVar,
    TypeVarTuple,
    Unpack,
    cast,
    overload,
)

from penstock import _core
from penstock._connection import BLOCKING
from penstock._durations import duration_ms, is_a
from penstock._flows.steps import Chord, Partial, Signature, map_reduce
from penstock._habits import answer_habits
from penstock._jobs.job import Job, job_id_of, job_of
from penstock._public import public
from penstock._tasks.headers import headers_for, here
from penstock._tasks.middleware import Call
from penstock._tasks.options import JobOptions, Options, Slot, TaskOptions, refuse_unknown
from penstock._tasks.retries import RetryPolicy, checked_retries, exception_types
from penstock._values.arguments import Arguments
from penstock._values.shapes import module_name
from penstock.errors import PayloadTooLarge

if TYPE_CHECKING:
    from penstock._tasks.app import App

logger = logging.getLogger("penstock")

P = ParamSpec("P")
Q = ParamSpec("Q")
R = TypeVar("R")
T = TypeVar("T")
R_co = TypeVar("R_co", covariant=True)
A_contra = TypeVar("A_contra", contravariant=True)
A = TypeVar("A")
As = TypeVarTuple("As")


@public
class Sender(Generic[P, R]):
    """Enqueues calls of a task with some options: a task itself, or the return value of ``task.options(...)``."""

    def __init__(self, task: AnyTask[P, R], options: Options) -> None:
        self.task = task
        self._options = options
        self._core_options = options.for_core()
        # None for all but unique jobs, so that other calls of delay() pay for one comparison only.
        self._rule = options.rule()
        if self._rule is not None:
            self._rule.check(task)
        self._views: dict[object, Sender[P, R]] = {}

    def delay(self, /, *args: P.args, **kwargs: P.kwargs) -> Job[R]:
        """Enqueue a call, and return its job once it is as safe as ``durability`` says.

        Raises ``TypeError`` when the arguments do not fit the signature or cannot be serialized, ``PayloadTooLarge``
        when they are too large, ``QueueFull`` or ``DiskFull`` when there is no room. Raises ``BrokerUnavailable`` or
        ``CallTimeout`` after ``app.call_timeout``; their ``maybe_accepted`` says whether the job may run anyway.
        """
        task = self.task
        body = task._encode(args, kwargs)
        app = task.app
        if app._enqueue_layers is not None or here.get() is not None or self._rule is not None:
            return cast(Job[R], app._send([self._call(args, kwargs, body)])[0])
        connection = app._connected()
        job_id = connection.publish(self._core_options, body, app.call_timeout)
        connection.log_notices(BLOCKING)
        return Job(app, job_id, True)

    async def adelay(self, /, *args: P.args, **kwargs: P.kwargs) -> Job[R]:
        """Like ``delay``, but awaitable. Cancelling the await does not withdraw the job."""
        body, app = self.task._encode(args, kwargs), self.task.app
        if app._enqueue_layers is not None or here.get() is not None or self._rule is not None:
            return (await app._asend([self._call(args, kwargs, body)]))[0]
        (job_id,) = await app._connected().submit([(self._core_options, body)], app.call_timeout)
        return job_of(app, job_id)

    def map(self: _OneArgument[A, R], items: Iterable[A]) -> list[Job[R]]:
        """Enqueue a call for each item, with the item as its only argument, in one transaction: all or none."""
        return cast("Sender[..., R]", self)._publish(_only_arguments(items))

    def starmap(self: TakesArguments[*As, R], items: Iterable[tuple[*As]]) -> list[Job[R]]:
        """Like ``map``, where each item is a tuple of all positional arguments of its call."""
        return cast("Sender[..., R]", self)._publish(map(_arguments, items))

    async def amap(self: _OneArgument[A, R], items: Iterable[A]) -> list[Job[R]]:
        """Like ``map``, but awaitable."""
        return await cast("Sender[..., R]", self)._submit(_only_arguments(items))

    async def astarmap(self: TakesArguments[*As, R], items: Iterable[tuple[*As]]) -> list[Job[R]]:
        """Like ``starmap``, but awaitable."""
        return await cast("Sender[..., R]", self)._submit(map(_arguments, items))

    @overload
    def s(self, /, *args: P.args, **kwargs: P.kwargs) -> Signature[R]: ...
    @overload
    def s(self: _TakesFirst[A, Q, T], /, *args: Q.args, **kwargs: Q.kwargs) -> Partial[A, T]: ...
    def s(self, /, *args: Any, **kwargs: Any) -> Any:
        """Return a call to be enqueued later: ``app.enqueue(send.s("ada"))``.

        As a later step of a workflow it gets the result of the previous step as its first argument: ``a.s(1) |
        b.s(2)``. A call that lacks its first argument is a ``Partial``, which can only be a later step.
        """
        return Signature(cast("Sender[..., Any]", self), args, kwargs)

    def si(self, /, *args: P.args, **kwargs: P.kwargs) -> Signature[R]:
        """Return a call with all of its arguments, to be enqueued later. It gets no result of another step."""
        return Signature(self, args, kwargs, immutable=True)

    def map_reduce(
        self: _OneArgument[A, T], items: Iterable[A], reduce: Partial[list[T], T], *, fan_in: int = 1000
    ) -> Chord[T]:
        """Compose a call for each item, and a call of ``reduce`` that gets the list of their results.

        ``fan_in``: largest number of results that one call of ``reduce`` gets. With more items, ``reduce`` is applied
        to parts and then to its own results until one is left, so the grouping must not matter. ``.delay()`` sends the
        workflow.
        """
        return map_reduce(cast("Sender[..., Any]", self), items, reduce, fan_in)

    def options(self, **options: Unpack[JobOptions]) -> Sender[P, R]:
        """Return the same task with other options: ``send.options(countdown=60).delay(...)``. See ``JobOptions``.

        Raises ``TypeError`` or ``ValueError`` for an option that is unknown or wrong.
        """
        values = options.values()
        types = (*map(type, values),)
        # Views are not cached by idempotency key: there is no limit to the number of keys.
        if not _KEPT.issuperset(types) or "idempotency_key" in options:
            return Sender(self.task, self._options.with_changes(options))
        # The types are part of the key: True equals 1, but must be refused.
        key = (types, *options.items())
        views = self._views
        view = views.get(key)
        if view is None:
            view = Sender(self.task, self._options.with_changes(options))
            if len(views) >= _MOST_VIEWS:
                views.clear()
            views[key] = view
        return view

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.task.name}>"

    def _publish(self, arguments: Iterable[tuple[Any, ...]]) -> list[Job[R]]:
        app = self.task.app
        if app._enqueue_layers is not None or here.get() is not None or self._rule is not None:
            calls = self._calls(arguments)
            return app._send(calls) if calls else []
        # Arguments are released one by one: keeping a tuple and a dictionary for each would double the cost.
        bodies = self.task._encode_each(arguments)
        if not bodies:
            return []
        connection = app._connected()
        job_ids = connection.publish_same(self._core_options, bodies, app.call_timeout)
        connection.log_notices(BLOCKING)
        return [Job(app, job_id, True) for job_id in job_ids]

    async def _submit(self, arguments: Iterable[tuple[Any, ...]]) -> list[Job[R]]:
        app = self.task.app
        if app._enqueue_layers is not None or here.get() is not None or self._rule is not None:
            calls = self._calls(arguments)
            return await app._asend(calls) if calls else []
        bodies = self.task._encode_each(arguments)
        if not bodies:
            return []
        jobs = [(self._core_options, body) for body in bodies]
        job_ids = await app._connected().submit(jobs, app.call_timeout)
        return [job_of(app, job_id) for job_id in job_ids]

    def _calls(self, arguments: Iterable[tuple[Any, ...]]) -> list[Call]:
        return [self._call(args, {}, self.task._encode(args, {})) for args in arguments]

    def _options_of(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> _core.Options:
        """Return the options of one call; those of a unique job include its key."""
        rule = self._rule
        return self._core_options if rule is None else rule.options(self.task, self._core_options, args, kwargs)

    def _options_of_step(self) -> _core.Options:
        """Return the options of a call that is a step of a workflow. Raises ``TypeError`` for a unique task."""
        if self._rule is not None:
            raise TypeError(
                f"{self.task.name} is unique or debounced, and a step of a workflow can't be: later steps would wait"
                " for another call's job. Send it on its own, or give the step .options(unique=None, debounce=None)"
            )
        return self._core_options

    def _call(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], body: bytes, core_options: _core.Options | None = None
    ) -> Call:
        """Describe a call for middleware, with the headers of the current context."""
        own = self._options.headers
        headers = {**headers_for(self.task.app), **own}
        options = self._options_of(args, kwargs) if core_options is None else core_options
        return Call(self.task.name, self._options.queue, args, MappingProxyType(kwargs), headers, options, body, own)


answer_habits(Sender)


class _Shown:
    """Provides the signature of a task's own ``delay`` to ``inspect``."""

    __slots__ = ("__wrapped__", "_function", "_returns")

    def __init__(self, shared: Callable[..., Any], function: Callable[..., Any], returns: type[Any]) -> None:
        self.__wrapped__ = shared
        self._function = function
        self._returns = returns

    @property
    def __signature__(self) -> inspect.Signature:
        signature = inspect.signature(self._function)
        # `inspect` drops the first parameter of a bound method.
        first = inspect.Parameter(
            "self" if "self" not in signature.parameters else "_", inspect.Parameter.POSITIONAL_ONLY
        )
        returns: Any = self._returns
        result = signature.return_annotation
        if isinstance(result, str):
            returns = f"{returns.__name__}[{result}]"
        elif result is not inspect.Signature.empty:
            returns = returns[result]
        return signature.replace(parameters=[first, *signature.parameters.values()], return_annotation=returns)


# Programs have few combinations of options, and checking one takes longer than enqueuing a job with it, so `options`
# caches senders. It caches only values of types where equal means identical: two datetimes an hour apart are equal when
# only their `fold` differs.
_KEPT = frozenset({str, int, float, bool, type(None), timedelta})
_MOST_VIEWS = 32


class _OneArgument(Protocol[A_contra, R_co]):
    """Sender whose calls take one argument of any name: see ``map``."""

    def delay(self, item: A_contra, /) -> Job[R_co]: ...


class _TakesFirst(Protocol[A_contra, Q, R_co]):
    """Sender whose calls take this first argument, followed by these: see ``s``."""

    def delay(self, first: A_contra, /, *args: Q.args, **kwargs: Q.kwargs) -> Job[R_co]: ...


class TakesArguments(Protocol[*As, R_co]):
    """Sender whose calls take these positional arguments: see ``starmap``."""

    def delay(self, *args: *As) -> Job[R_co]: ...


class AnyTask(Sender[P, R]):
    """Base of ``Task`` and ``AsyncTask``."""

    is_async = False
    is_remote = False
    # Attributes of the function, from functools.update_wrapper.
    __name__: str
    __qualname__: str
    __wrapped__: Callable[..., Any]

    def __init__(self, app: App, function: Callable[..., Any], options: TaskOptions) -> None:
        refuse_unknown(options, TaskOptions.__annotations__, "@app.task")
        self.app = app
        self.function = function
        self.name: str = options.get("name") or name_of(function)
        self.slot = slot_of(function, options, app.defaults)
        options = {**app.defaults, **options}
        self.retry_policy: RetryPolicy = _retry_policy(options)
        super().__init__(self, _job_options(self.name, options))
        # The function's attributes are not copied: they would replace the task's own of the same names.
        functools.update_wrapper(cast(Any, self), function, updated=())
        self._show_parameters()

    def _show_parameters(self) -> None:
        """Show the function's parameters in ``task.delay?`` and ``inspect.signature(task.delay)``.

        For a method, ``inspect`` asks its function. So each task gets its own copies of the functions, with the same
        code and speed; their parameters are computed on demand.
        """
        for name, returns in _SHOWN.items():
            shared = getattr(type(self), name)
            if isinstance(shared, FunctionType):
                own = FunctionType(shared.__code__, shared.__globals__, name, shared.__defaults__, shared.__closure__)
                own.__kwdefaults__ = shared.__kwdefaults__
                own.__wrapped__ = _Shown(shared, self.function, returns)  # type: ignore[attr-defined]
                setattr(self, name, MethodType(own, self))

    @functools.cached_property
    def arguments(self) -> Arguments:
        """Check of the arguments, built at first use, when every name in annotations has been imported."""
        if self.name.startswith(("__main__.", "<")):
            logger.warning(
                "%s is defined where no worker can import it (at a prompt, with -c or in a pipe); move it to a module",
                self.name,
            )
        try:
            return Arguments(self.name, self.function, self.app._custom_types, self.app._job_of)
        except Exception as error:
            raise TypeError(str(error)) from error

    def job(self, job_id: str) -> Job[R]:
        """Return the job of this id, which must be a call of this task. Does not ask the broker."""
        return Job(self.app, job_id_of(job_id))

    def _encode(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
        body = self.arguments.encode(args, kwargs)
        if len(body) > self.app.max_payload_bytes:
            raise self._too_large(len(body))
        return body

    def _encode_rest(self, args: tuple[Any, ...], kwargs: dict[str, Any], count: int) -> bytes:
        """Encode the arguments of a call except the first ``count``, which come from previous steps."""
        return self._fitting(self.arguments.encode_rest(args, kwargs, count))

    def _encode_chunk(self, calls: tuple[tuple[Any, ...], ...]) -> bytes:
        """Encode the arguments of several calls that one job makes."""
        return self._fitting(self.arguments.encode_chunk(calls))

    def _fitting(self, body: bytes) -> bytes:
        if len(body) > self.app.max_payload_bytes:
            raise self._too_large(len(body))
        return body

    def _encode_each(self, calls: Iterable[tuple[Any, ...]]) -> list[bytes]:
        bodies = self.arguments.encode_each(calls)
        largest = max(map(len, bodies), default=0)
        if largest > self.app.max_payload_bytes:
            raise self._too_large(largest)
        return bodies

    def _too_large(self, length: int) -> PayloadTooLarge:
        return PayloadTooLarge(
            f"{self.name}(): the arguments take {length:,} bytes, but {self.app.max_payload_bytes:,}"
            " are allowed; store large data elsewhere and pass a reference, or raise App(max_payload_bytes=...)"
        )

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name}>"


@public
class Task(AnyTask[P, R]):
    """Function that can be enqueued. Calling the task runs the function directly."""

    if TYPE_CHECKING:
        function: Callable[P, R]

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> R:
        return self.function(*args, **kwargs)


@public
class AsyncTask(AnyTask[P, R]):
    """``async def`` function that can be enqueued. Calling the task returns the coroutine."""

    is_async = True

    if TYPE_CHECKING:
        function: Callable[P, Coroutine[Any, Any, R]]

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> Coroutine[Any, Any, R]:
        return self.function(*args, **kwargs)


class TaskDecorator:
    """Decorator that ``@app.task(...)`` and ``@shared_task(...)`` return."""

    def __init__(self, new_task: Callable[[Callable[..., Any]], AnyTask[..., Any]]) -> None:
        self._new_task = new_task

    # The first overload is a special case of the second, on purpose: the result of an `async def` is the awaited value.
    @overload
    def __call__(  # type: ignore[overload-overlap]
        self, function: Callable[P, Coroutine[Any, Any, R]], /
    ) -> AsyncTask[P, R]: ...
    @overload
    def __call__(self, function: Callable[P, R], /) -> Task[P, R]: ...
    def __call__(self, function: Any, /) -> Any:
        if isinstance(function, staticmethod):
            function = function.__func__
        if isinstance(function, AnyTask):
            # A task of another app: its function becomes a task of this app, too.
            function = function.function
        refuse_unsuitable(function)
        return self._new_task(function)


# Methods that have the parameters of the function, with the type that wraps its result.
_SHOWN: dict[str, type[Any]] = {"delay": Job, "adelay": Job, "si": Signature}


def _only_arguments(items: Iterable[A]) -> Iterator[tuple[A]]:
    try:
        return ((item,) for item in items)
    except TypeError:
        raise TypeError(f"map takes an iterable of arguments, one for each call, not {items!r}") from None


def _arguments(item: Any) -> tuple[Any, ...]:
    if isinstance(item, (str, bytes)) or not is_a(item, Iterable):
        raise TypeError(f"starmap takes a tuple of arguments for each call, not {item!r}; map takes single ones")
    return tuple(item)


def is_async(function: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(inspect.unwrap(function))


def name_of(function: Callable[..., Any]) -> str:
    return f"{module_name(function.__module__)}.{function.__qualname__}"


def refuse_unsuitable(function: object) -> None:
    """Raise ``TypeError`` at the decorator for a function that could only fail later."""
    if isinstance(function, (classmethod, type)) or not callable(function) or not hasattr(function, "__qualname__"):
        raise TypeError(f"a task must be a function, not {function!r}")
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise TypeError(f"{function.__qualname__}() is a generator; a task must return its result")
    outer = function.__qualname__.rpartition(".")[0]
    # Not inspect.signature, which evaluates annotations: their names may be imported later in the module.
    code = getattr(inspect.unwrap(function), "__code__", None)
    first = code.co_varnames[0] if code and code.co_argcount else None
    if outer and not outer.endswith("<locals>") and first in ("self", "cls"):
        raise TypeError(f"{function.__qualname__}() takes {first}; a task is a plain function or a staticmethod")


def may_replace(new: Callable[..., Any], old: Callable[..., Any]) -> bool:
    """Whether the same definition has run again, as in a reloaded module or a notebook cell."""
    if "<locals>" in new.__qualname__ or "<lambda>" in new.__qualname__:
        return False
    if not hasattr(sys.modules.get(new.__module__), "__file__"):
        return True
    return new.__module__ == old.__module__ and _place(new) == _place(old)


def place_of(function: Callable[..., Any]) -> str:
    file, line = _place(function)
    return f"{file}:{line}"


def _place(function: Callable[..., Any]) -> tuple[str, int]:
    code = getattr(inspect.unwrap(function), "__code__", None)
    return (code.co_filename, code.co_firstlineno) if code else (function.__module__, 0)


# Options of a task that are sent with each of its jobs.
_OF_JOBS = frozenset(
    {
        "queue",
        "priority",
        "expires",
        "result_ttl",
        "store_result",
        "durability",
        "timeout",
        "soft_timeout",
        "unique",
        "debounce",
    }
)


def _job_options(name: str, options: TaskOptions) -> Options:
    on_crash = options.get("on_crash", "retry")
    if on_crash not in ("retry", "fail"):
        raise ValueError(f'on_crash must be "retry" or "fail", not {on_crash!r}')
    max_crashes = options.get("max_crashes", 3)
    changes: Any = {key: value for key, value in options.items() if key in _OF_JOBS}
    return Options(name, 1 if on_crash == "fail" else max_crashes).with_changes(changes)


_SLOTS = ("process", "thread", "async", "isolated")


def slot_of(function: Callable[..., Any], options: TaskOptions, defaults: TaskOptions) -> Slot | None:
    """Return the kind of slot that the options, or else the defaults, name; or None.

    Raises ``TypeError`` for a kind that cannot run the function. A default that cannot is meant for the app's other
    tasks, and ignored.
    """
    slot = options.get("slot")
    if slot is None:
        slot = defaults.get("slot")
        return slot if slot is not None and _misfit(function, slot) is None else None
    _check_slot(slot)
    misfit = _misfit(function, slot)
    if misfit is not None:
        raise TypeError(misfit)
    return slot


def _check_slot(slot: object) -> None:
    if slot not in _SLOTS:
        raise ValueError(f"slot must be {' or '.join(map(repr, _SLOTS))}, not {slot!r}")


def _misfit(function: Callable[..., Any], slot: Slot) -> str | None:
    name = getattr(function, "__qualname__", "this")
    if slot == "thread" and is_async(function):
        return f'{name}() is an async def, so its slot must be "async", "process" or "isolated", not "thread"'
    if slot == "async" and not is_async(function):
        return (
            f'{name}() is not an async def and would block the loop, so its slot must be "thread" or "process",'
            ' not "async"'
        )
    return None


def check_task_options(options: TaskOptions) -> None:
    """Check options that a task may have. Raises ``TypeError`` or ``ValueError``."""
    if "slot" in options:
        _check_slot(options["slot"])
    _job_options("defaults", options).for_core()
    _retry_policy(options)


def _retry_policy(options: TaskOptions) -> RetryPolicy:
    return RetryPolicy(
        retries=checked_retries(options.get("retries", 0)),
        backoff_ms=duration_ms("backoff", options.get("backoff", 1.0)),
        factor=options.get("backoff_factor", 2.0),
        jitter=options.get("jitter", 0.5),
        cap_ms=duration_ms("max_backoff", options.get("max_backoff", 600.0)),
        retry_on=exception_types("retry_on", options.get("retry_on", Exception)),
        no_retry_on=exception_types("no_retry_on", options.get("no_retry_on", ())),
    )
