"""Middleware: layers of an application's own code around every enqueue and every run."""

# No `from __future__ import annotations`: see `_public.py`.
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from penstock import _core
from penstock._durations import is_a
from penstock._jobs.current import CurrentJob
from penstock._public import public
from penstock._tasks.options import checked_headers

if TYPE_CHECKING:
    from penstock._jobs.job import Job
    from penstock._tasks.task import AnyTask


@public
@dataclass(slots=True, eq=False)
class Call:
    """Call that is about to be enqueued, as middleware sees it."""

    task: str
    queue: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    headers: dict[str, str]
    """Headers of the job. Middleware may add to them; those that the call sets with ``options(headers=...)`` always
    stay."""
    _options: _core.Options = field(repr=False)
    _body: bytes = field(repr=False)
    _own_headers: Mapping[str, str] = field(repr=False)

    def _prepared(self) -> tuple[_core.Options, bytes]:
        headers = {**self.headers, **self._own_headers}
        if headers == self._own_headers:
            return self._options, self._body
        return self._options.with_headers(list(checked_headers(headers).items())), self._body


@public
class Middleware:
    """Base class of layers around every enqueue and every run of an app.

    Subclass it, override the methods you need, and pass an instance to ``app.use(...)``. Each method receives ``next``,
    which calls the inner layers, and returns its return value. The first layer that an app uses is the outermost.
    ``async def`` code has separate methods. A layer that overrides one method of such a pair also needs the other, once
    the app has code that calls it.
    """

    def enqueue(self, calls: Sequence[Call], next: Callable[[Sequence[Call]], "list[Job[Any]]"], /) -> "list[Job[Any]]":
        """Wrap one transaction with all of its calls: a ``delay()``, a ``map()`` or an ``enqueue()``.

        Pass on all calls of a workflow, in their order, and change only their headers: their positions define which
        step depends on which.
        """
        return next(calls)

    async def aenqueue(
        self, calls: Sequence[Call], next: Callable[[Sequence[Call]], "Awaitable[list[Job[Any]]]"], /
    ) -> "list[Job[Any]]":
        """Wrap one transaction of an event loop: ``adelay()``, ``amap()``, ``aenqueue()``."""
        return await next(calls)

    def run(self, job: CurrentJob, next: Callable[[], object], /) -> object:
        """Wrap one attempt of a plain task, in the worker. An error that it raises fails the attempt."""
        return next()

    async def arun(self, job: CurrentJob, next: Callable[[], Awaitable[object]], /) -> object:
        """Wrap one attempt of an ``async def`` task, in its event loop."""
        return await next()


class Layers:
    """Middleware of an app."""

    def __init__(self, layers: Sequence[Middleware]) -> None:
        self._layers = layers
        self.enqueues = any(_has(layer, "enqueue") or _has(layer, "aenqueue") for layer in layers)
        self.runs = any(_has(layer, "run") or _has(layer, "arun") for layer in layers)

    def enqueue(self, calls: Sequence[Call], send: Callable[[Sequence[Call]], "list[Job[Any]]"]) -> "list[Job[Any]]":
        self._need("enqueue", "aenqueue", "delay()")
        step = send
        for layer in reversed(self._layers):
            step = _enqueue_step(layer, step)
        return _one_job_each(calls, step(calls))

    async def aenqueue(
        self, calls: Sequence[Call], send: Callable[[Sequence[Call]], "Awaitable[list[Job[Any]]]"]
    ) -> "list[Job[Any]]":
        self._need("aenqueue", "enqueue", "adelay()")
        step = send
        for layer in reversed(self._layers):
            step = _aenqueue_step(layer, step)
        return _one_job_each(calls, await step(calls))

    def run(self, task: "AnyTask[..., Any]", job: CurrentJob, args: list[Any], kwargs: dict[str, Any]) -> object:
        """Call the task inside all layers; for an ``async def`` task return the coroutine."""
        self.check(task)
        if task.is_async:
            return self._arun(task, job, args, kwargs)

        def step() -> object:
            return task.function(*args, **kwargs)

        for layer in reversed(self._layers):
            step = _run_step(layer, job, step)
        return step()

    async def _arun(
        self, task: "AnyTask[..., Any]", job: CurrentJob, args: list[Any], kwargs: dict[str, Any]
    ) -> object:
        def step() -> Awaitable[object]:
            coroutine: Coroutine[Any, Any, object] = task.function(*args, **kwargs)
            return coroutine

        for layer in reversed(self._layers):
            step = _arun_step(layer, job, step)
        return await step()

    def check(self, task: "AnyTask[..., Any]") -> None:
        """Raise ``TypeError`` for a layer that would not run for this task."""
        names = ("arun", "run") if task.is_async else ("run", "arun")
        self._need(*names, f"{task.name}, which is {'' if task.is_async else 'not '}an async def")

    def _need(self, name: str, twin: str, what: str) -> None:
        for layer in self._layers:
            if _has(layer, twin) and not _has(layer, name):
                kind = type(layer).__qualname__
                raise TypeError(f"the middleware {kind} has {twin}() but no {name}(): {what} would bypass it")


def _has(layer: Middleware, name: str) -> bool:
    return getattr(type(layer), name) is not getattr(Middleware, name)


def _enqueue_step(
    layer: Middleware, within: Callable[[Sequence[Call]], "list[Job[Any]]"]
) -> Callable[[Sequence[Call]], "list[Job[Any]]"]:
    return lambda calls: layer.enqueue(calls, within)


def _aenqueue_step(
    layer: Middleware, within: Callable[[Sequence[Call]], "Awaitable[list[Job[Any]]]"]
) -> Callable[[Sequence[Call]], "Awaitable[list[Job[Any]]]"]:
    return lambda calls: layer.aenqueue(calls, within)


def _run_step(layer: Middleware, job: CurrentJob, within: Callable[[], object]) -> Callable[[], object]:
    return lambda: layer.run(job, within)


def _arun_step(
    layer: Middleware, job: CurrentJob, within: Callable[[], Awaitable[object]]
) -> Callable[[], Awaitable[object]]:
    return lambda: layer.arun(job, within)


def _one_job_each(calls: Sequence[Call], jobs: "list[Job[Any]]") -> "list[Job[Any]]":
    if not is_a(jobs, list) or len(jobs) != len(calls):
        raise TypeError(
            f"middleware must return the jobs that next(calls) returned, {len(calls)} of them, not {jobs!r}"
        )
    return jobs
