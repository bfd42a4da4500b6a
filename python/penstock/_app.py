"""The app: a name, a broker's URL, and the tasks."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, ParamSpec, TypeVar, Unpack, overload

from penstock import _connection, _core
from penstock._codec import Codec, CustomType, is_built_in
from penstock._connection import BLOCKING, Connection
from penstock._durations import Seconds, duration_ms, is_int
from penstock._job import Job, job_id_of
from penstock._options import TaskOptions
from penstock._public import public
from penstock._shapes import full_name, shown_name
from penstock._task import (
    AnyTask,
    AsyncTask,
    Signature,
    Task,
    may_replace,
    place_of,
    refuse_unsuitable,
)

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
F = TypeVar("F", bound=Callable[[], object])


@public
class App:
    """Holds tasks and knows the broker. Making one opens nothing and starts nothing.

    ``name``: shown to people, in ``penstock status`` for instance.
    ``url``: the broker. Default: the environment's ``PENSTOCK_URL``, else ``local:.penstock``, which
    needs no server. A server that wants a token finds it in ``PENSTOCK_TOKEN``.
    ``call_timeout``: seconds or a timedelta within which every call except ``result()`` ends, if need be with an error.
    ``max_payload_bytes``: how large the arguments or the result of one job may be, encoded.
    """

    def __init__(
        self,
        name: str,
        url: str | None = None,
        *,
        call_timeout: Seconds = 5.0,
        max_payload_bytes: int = 16 * 1024 * 1024,
    ) -> None:
        if not isinstance(name, str) or not name:
            raise TypeError(f"an app's name must be a text, not {name!r}")
        if url is not None and not isinstance(url, str):
            raise TypeError(f"url must be a text such as 'local:.penstock', not {url!r}")
        timeout_ms = duration_ms("call_timeout", call_timeout)
        if timeout_ms == 0:
            raise ValueError(f"call_timeout must be more than 0 seconds, not {call_timeout!r}")
        if not is_int(max_payload_bytes) or max_payload_bytes < 1:
            raise ValueError(f"max_payload_bytes must be an integer of at least 1, not {max_payload_bytes!r}")
        self.name = name
        self._given_url = url
        self.call_timeout = timeout_ms / 1000
        self.max_payload_bytes = max_payload_bytes
        self.tasks: dict[str, AnyTask[..., Any]] = {}
        self._custom_types: dict[str, CustomType] = {}
        self._plain_codec = Codec({}, self._custom_types)
        self._preload_hooks: list[Callable[[], object]] = []
        self._connection: Connection | None = None
        self._generation = -1

    @property
    def url(self) -> str:
        """Where the broker is; read from the environment when it is first needed, not at import."""
        return self._given_url or os.environ.get("PENSTOCK_URL") or "local:.penstock"

    # The first is a case of the second, and meant to be: of an `async def` the result is what it awaits.
    @overload
    def task(  # type: ignore[overload-overlap]
        self, function: Callable[P, Coroutine[Any, Any, R]], /
    ) -> AsyncTask[P, R]: ...
    @overload
    def task(self, function: Callable[P, R], /) -> Task[P, R]: ...
    @overload
    def task(self, /, **options: Unpack[TaskOptions]) -> TaskDecorator: ...
    def task(self, function: Any = None, /, **options: Unpack[TaskOptions]) -> Any:
        """Make a function a task: ``@app.task``, or ``@app.task(queue="mail", retries=5)``.

        See ``TaskOptions`` for what it takes. ``async def`` functions work alike.
        """
        decorator = TaskDecorator(self, options)
        return decorator if function is None else decorator(function)

    def job(self, job_id: str) -> Job[Any]:
        """The job of this id, whoever enqueued it. Asks nothing; an unknown one is ``gone``."""
        return Job(self, job_id_of(job_id))

    def enqueue(self, signatures: Iterable[Signature[R]]) -> list[Job[R]]:
        """Enqueue calls, of one task or of many, in one transaction: all or none."""
        jobs = self._prepare(signatures)
        if not jobs:
            return []
        connection = self._connected()
        job_ids = connection.publish_many(jobs, self.call_timeout)
        connection.log_notices(BLOCKING)
        return [Job(self, job_id) for job_id in job_ids]

    async def aenqueue(self, signatures: Iterable[Signature[R]]) -> list[Job[R]]:
        """As ``enqueue``, for an event loop."""
        jobs = self._prepare(signatures)
        if not jobs:
            return []
        return [Job(self, job_id) for job_id in await self._connected().submit(jobs, self.call_timeout)]

    def codec(self, type: type[T], encode: Callable[[T], object], decode: Callable[[Any], T]) -> None:
        """Let values of exactly this type travel.

        ``encode`` gives something that travels already, and ``decode`` makes an equal value of it.
        Both the enqueuing process and the worker need it: put it beside the tasks.
        """
        if is_built_in(type):
            raise ValueError(f"{shown_name(type)} travels already, and always in the same way")
        self._custom_types[full_name(type)] = CustomType(type, encode, decode)

    def on_preload(self, function: F) -> F:
        """Run this in a worker once, after the app is imported and before processes are forked from it.

        The place to import what jobs need and to fill caches they share. Connections and threads do not
        survive the fork: open those in the tasks.
        """
        self._preload_hooks.append(function)
        return function

    def check(self) -> None:
        """Resolve the annotations of all tasks; ``TypeError`` lists what is wrong. A worker does it at its start."""
        problems = []
        for task in self.tasks.values():
            try:
                task.arguments  # noqa: B018
            except TypeError as error:
                problems.append(str(error))
        if problems:
            raise TypeError("\n".join(problems))

    def preload(self) -> None:
        """What a worker does before it forks: ``check``, then the ``on_preload`` functions in order."""
        self.check()
        for hook in self._preload_hooks:
            hook()

    def close(self) -> None:
        """End this process's connection to the broker. The next call opens a new one."""
        connection, self._connection = self._connection, None
        if connection is not None and self._generation == _connection.generation():
            _connection.disconnect(connection, self.call_timeout)

    def __repr__(self) -> str:
        return f"<App {self.name!r} {self.url}>"

    def _connected(self) -> Connection:
        # One comparison on the path of every delay(): a fork or a close makes a kept connection old.
        if self._connection is None or self._generation != _connection.generation():
            generation = _connection.generation()
            self._connection = _connection.connect(self.url, f"{self.name}@{os.getpid()}")
            self._generation = generation
        return self._connection

    def _prepare(self, signatures: Iterable[Signature[Any]]) -> list[tuple[_core.Options, bytes]]:
        jobs = []
        for signature in signatures:
            if not isinstance(signature, Signature):
                raise TypeError(f"app.enqueue takes calls that are not made yet, such as send.s(1), not {signature!r}")
            other = signature.task.app
            if other is not self and other.url != self.url:
                raise ValueError(f"{signature.task.name} belongs to {other!r}, whose broker is another one")
            jobs.append(signature._prepare())
        return jobs

    def _codec_of(self, task: str) -> Codec:
        known = self.tasks.get(task)
        return self._plain_codec if known is None else known.arguments.codec

    def _add(self, task: AnyTask[..., Any]) -> None:
        other = self.tasks.get(task.name)
        if other is not None and not may_replace(task.function, other.function):
            raise ValueError(
                f"two tasks are called {task.name!r}: {place_of(other.function)} and {place_of(task.function)};"
                " give one another name with @app.task(name=...)"
            )
        self.tasks[task.name] = task


class TaskDecorator:
    """``@app.task(...)`` with its options, still without a function."""

    def __init__(self, app: App, options: TaskOptions) -> None:
        self._app = app
        self._options = options

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
            # A task of another app: its function becomes a task of this one as well.
            function = function.function
        refuse_unsuitable(function)
        kind: Any = AsyncTask if _is_async(function) else Task
        task = kind(self._app, function, self._options)
        self._app._add(task)
        return task


def _is_async(function: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(inspect.unwrap(function))
