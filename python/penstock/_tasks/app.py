"""App: a name, a broker's URL, and tasks."""

from __future__ import annotations

import inspect
import os
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import datetime
from types import ModuleType
from typing import TYPE_CHECKING, Any, ParamSpec, TypeAlias, TypeVar, Unpack, cast, overload

from penstock import _connection
from penstock._connection import BLOCKING, Connection
from penstock._durations import Seconds, duration_ms, is_a, is_int
from penstock._flows.steps import Partial, Signature, Step
from penstock._habits import answer_habits
from penstock._jobs.job import Job, job_id_of, job_of, remember_app
from penstock._public import public
from penstock._tasks.headers import adding, here
from penstock._tasks.middleware import Call, Layers, Middleware
from penstock._tasks.options import JobOptions, TaskOptions, checked_headers, refuse_unknown
from penstock._tasks.shared import RemoteTask, SharedAsyncTask, SharedTask
from penstock._tasks.task import (
    AnyTask,
    AsyncTask,
    Sender,
    Task,
    TaskDecorator,
    check_task_options,
    is_async,
    may_replace,
    place_of,
)
from penstock._values.codec import Codec, CustomType, is_built_in
from penstock._values.shapes import full_name, shown_name

if TYPE_CHECKING:
    from penstock import _core
    from penstock._flows.build import Built, Plan
    from penstock._flows.status import Workflows
    from penstock._flows.workflow import Workflow
    from penstock._jobs.failed import FailedJobs
    from penstock._jobs.info import JobState
    from penstock._tasks.schedules import CatchUp, Overlap, Periodic, Schedules

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
A = TypeVar("A")
B = TypeVar("B")
C = TypeVar("C")
D = TypeVar("D")
F = TypeVar("F", bound=Callable[[], object])
ScheduledTask = TypeVar("ScheduledTask", bound=AnyTask[..., Any])


# All apps of this process, and callbacks for each new one. Test doubles use these to replace the brokers.
made: weakref.WeakSet[App] = weakref.WeakSet()
on_made: list[Callable[[App], None]] = []


@public
class App:
    """Holds tasks, and enqueues their jobs at a broker. Creating an app connects to nothing and starts nothing.

    ``name``: name for people, shown in ``penstock status`` for example.

    ``url``: address of the broker. Default: the environment variable ``PENSTOCK_URL``, else ``local:.penstock``, which
    needs no server. The token for a server that requires one is read from ``PENSTOCK_TOKEN``.

    ``include``: modules with tasks of this app, which a worker imports: ``["shop.mail", "shop.pay"]``.

    ``call_timeout``: seconds or a timedelta within which every call except ``result()`` returns or raises. Default: 5.

    ``max_payload_bytes``: largest encoded size of the arguments or the result of one job. Default: 16 MiB.

    ``version_grace``: seconds or a timedelta for which workers keep trying a job whose arguments do not fit because
    another version of its task encoded them, as happens during a deployment. Tries are 30 s to 2 min apart and do not
    count as attempts. Default: 10 minutes.

    ``defaults``: task options that apply unless a task's own ``@app.task(...)`` sets them.

    ``tz``: time zone of the app's schedules, such as ``"Europe/Paris"``. Default: UTC.

    ``version``: version of the app, as a number or a sortable text. While workers of two versions run, the schedules of
    the higher version apply. Without it, those of the worker that started last apply.
    """

    def __init__(
        self,
        name: str,
        url: str | None = None,
        *,
        include: Iterable[str] = (),
        call_timeout: Seconds = 5.0,
        max_payload_bytes: int = 16 * 1024 * 1024,
        version_grace: Seconds = 600.0,
        defaults: TaskOptions | None = None,
        tz: str = "UTC",
        version: int | str | None = None,
    ) -> None:
        if not is_a(name, str) or not name:
            raise TypeError(f"an app's name must be a string, not {name!r}")
        if url is not None and not is_a(url, str):
            raise TypeError(f"url must be a string such as 'local:.penstock', not {url!r}")
        self.include: tuple[str, ...] = () if isinstance(include, str) else (*include,)
        if isinstance(include, str) or not all(is_a(module, str) and module for module in self.include):
            raise TypeError(f"include must be a list of names of modules, such as ['shop.mail'], not {include!r}")
        timeout_ms = duration_ms("call_timeout", call_timeout)
        if timeout_ms == 0:
            raise ValueError(f"call_timeout must be more than 0 seconds, not {call_timeout!r}")
        if not is_int(max_payload_bytes) or max_payload_bytes < 1:
            raise ValueError(f"max_payload_bytes must be an integer of at least 1, not {max_payload_bytes!r}")
        is_text = is_a(version, str) and version != ""
        if version is not None and not is_text and not (isinstance(version, int) and is_int(version) and version >= 0):
            raise TypeError(f"version must be a number of at least 0 or a sortable string, not {version!r}")
        if not is_a(tz, str) or not tz:
            raise TypeError(f"tz must be the name of a time zone, such as 'Europe/Paris', not {tz!r}")
        self.name = name
        self.tz = tz
        self.version = version
        self._given_url = url
        self.call_timeout: float = timeout_ms / 1000
        self.max_payload_bytes = max_payload_bytes
        self._version_grace_ms = duration_ms("version_grace", version_grace)
        self.tasks: dict[str, AnyTask[..., Any]] = {}
        self._custom_types: dict[str, CustomType] = {}
        self._plain_codec = Codec({}, self._custom_types, self._job_of)
        self.defaults: TaskOptions = _checked_defaults({} if defaults is None else defaults)
        self._middleware: list[Middleware] = []
        # None without middleware, so that delay() and each run pay for one comparison only.
        self._enqueue_layers: Layers | None = None
        self._run_layers: Layers | None = None
        self._periodic: dict[str, Periodic] = {}
        self._worker_start_hooks: list[Callable[[], object]] = []
        self._process_start_hooks: list[Callable[[], object]] = []
        self._process_stop_hooks: list[Callable[[], object]] = []
        self._slot_start_hooks: list[Callable[[], object]] = []
        self._slot_stop_hooks: list[Callable[[], object]] = []
        self._connection: Connection | None = None
        self._generation = -1
        remember_app(self)
        made.add(self)
        for tell in on_made:
            tell(self)

    @property
    def url(self) -> str:
        """URL of the broker. Read from the environment when first needed, not at import."""
        return self._given_url or os.environ.get("PENSTOCK_URL") or "local:.penstock"

    # The first overload is a special case of the second, on purpose: the result of an `async def` is the awaited value.
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

        See ``TaskOptions`` for the options. ``async def`` functions work the same way.
        """
        decorator: Any = TaskDecorator(lambda function: self._new_task(function, options))
        return decorator if function is None else decorator(function)

    @overload
    def add(self, task: AsyncTask[P, R], /) -> AsyncTask[P, R]: ...
    @overload
    def add(self, task: Task[P, R], /) -> Task[P, R]: ...
    @overload
    def add(self, module: ModuleType, /) -> list[AnyTask[..., Any]]: ...
    def add(self, tasks: Any, /) -> Any:
        """Add a ``@shared_task``, or every one at the top level of a module, to this app.

        Returns this app's task, or a list of tasks for a module. Raises ``ValueError`` when the module has no shared
        task, or when this app has another task of the same name, and ``TypeError`` for any other argument.
        """
        if is_a(tasks, (SharedTask, SharedAsyncTask)):
            return tasks.bind(self)
        if not is_a(tasks, ModuleType):
            raise TypeError(f"app.add takes a @shared_task or a module that has some, not {tasks!r}")
        members = vars(cast(ModuleType, tasks))
        found = {id(each): each for each in members.values() if is_a(each, (SharedTask, SharedAsyncTask))}
        if not found:
            raise ValueError(f"{tasks.__name__} has no @shared_task at its top level")
        return [each.bind(self) for each in found.values()]

    def remote_task(self, name: str, /, **options: Unpack[JobOptions]) -> Sender[..., Any]:
        """Return a task of another program by its name, to enqueue it like any other task.

        The worker checks the arguments. The options of the task's decorator do not apply: this app's ``defaults`` and
        the options given here do, so name its queue. If this app has a task of that name, returns it.
        """
        sender: Sender[..., Any] = self.tasks.get(name) or RemoteTask(self, name)
        return sender.options(**options) if options else sender

    def send(self, name: str, /, *args: Any, **kwargs: Any) -> Job[Any]:
        """Enqueue a call of the task of this name, whose code may be in another program.

        Returns and raises like ``delay``. For a queue and other options, see ``remote_task``.
        """
        job: Job[Any] = self.remote_task(name).delay(*args, **kwargs)
        return job

    async def asend(self, name: str, /, *args: Any, **kwargs: Any) -> Job[Any]:
        """Like ``send``, but awaitable."""
        job: Job[Any] = await self.remote_task(name).adelay(*args, **kwargs)
        return job

    def job(self, job_id: str) -> Job[Any]:
        """Return the job of this id, enqueued by any program. Does not ask the broker."""
        return Job(self, job_id_of(job_id))

    def workflow(self, workflow_id: str) -> Workflow[Any]:
        """Return the workflow of this id, sent by any program. Does not ask the broker."""
        # Imported here because few programs need it, but all import this module.
        from penstock._flows.workflow import Workflow

        return Workflow(self, job_id_of(workflow_id), None)

    def workflows(self, *, state: JobState | str | None = None, name: str | None = None) -> Workflows:
        """Find workflows of all apps of the broker. Iterate over them, newest first; only that asks the broker.

        ``state``: ``"running"``, ``"succeeded"``, ``"failed"``, ``"cancelled"`` or ``"expired"``. ``name``: the name
        given to ``delay()``. The broker lists a workflow for 24 hours after it succeeds, otherwise for as long as it
        keeps failed jobs.
        """
        from penstock._flows.status import Workflows

        return Workflows(self, state, name)

    @overload
    def enqueue(self, call: Signature[R], /) -> Job[R]: ...
    @overload
    def enqueue(self, calls: Iterable[Signature[R]], /) -> list[Job[R]]: ...
    @overload
    def enqueue(self, a: Signature[A], b: Signature[B], /) -> tuple[Job[A], Job[B]]: ...
    @overload
    def enqueue(self, a: Signature[A], b: Signature[B], c: Signature[C], /) -> tuple[Job[A], Job[B], Job[C]]: ...
    @overload
    def enqueue(
        self, a: Signature[A], b: Signature[B], c: Signature[C], d: Signature[D], /
    ) -> tuple[Job[A], Job[B], Job[C], Job[D]]: ...
    @overload
    def enqueue(
        self,
        a: Signature[R],
        b: Signature[R],
        c: Signature[R],
        d: Signature[R],
        e: Signature[R],
        /,
        *more: Signature[R],
    ) -> tuple[Job[R], ...]: ...
    def enqueue(self, /, *calls: Any) -> Any:
        """Enqueue calls of one task or of many in one transaction: all or none.

        Returns a job for one call, a tuple of jobs for several, and a list for an iterable of calls: ``mail, invoice =
        app.enqueue(send.s("ada"), bill.s(3))``. Raises like ``delay``.
        """
        signatures = self._signatures(calls)
        if not signatures:
            return _shaped(calls, [])
        if self._enqueue_layers is not None or here.get() is not None:
            return _shaped(calls, self._send([signature._call() for signature in signatures]))
        connection = self._connected()
        job_ids = connection.publish_many([signature._prepare() for signature in signatures], self.call_timeout)
        connection.log_notices(BLOCKING)
        return _shaped(calls, [job_of(self, job_id) for job_id in job_ids])

    @overload
    async def aenqueue(self, call: Signature[R], /) -> Job[R]: ...
    @overload
    async def aenqueue(self, calls: Iterable[Signature[R]], /) -> list[Job[R]]: ...
    @overload
    async def aenqueue(self, a: Signature[A], b: Signature[B], /) -> tuple[Job[A], Job[B]]: ...
    @overload
    async def aenqueue(self, a: Signature[A], b: Signature[B], c: Signature[C], /) -> tuple[Job[A], Job[B], Job[C]]: ...
    @overload
    async def aenqueue(
        self, a: Signature[A], b: Signature[B], c: Signature[C], d: Signature[D], /
    ) -> tuple[Job[A], Job[B], Job[C], Job[D]]: ...
    @overload
    async def aenqueue(
        self,
        a: Signature[R],
        b: Signature[R],
        c: Signature[R],
        d: Signature[R],
        e: Signature[R],
        /,
        *more: Signature[R],
    ) -> tuple[Job[R], ...]: ...
    async def aenqueue(self, /, *calls: Any) -> Any:
        """Like ``enqueue``, but awaitable."""
        signatures = self._signatures(calls)
        if not signatures:
            return _shaped(calls, [])
        if self._enqueue_layers is not None or here.get() is not None:
            return _shaped(calls, await self._asend([signature._call() for signature in signatures]))
        jobs = [signature._prepare() for signature in signatures]
        job_ids = await self._connected().submit(jobs, self.call_timeout)
        return _shaped(calls, [job_of(self, job_id) for job_id in job_ids])

    def headers(self, headers: Mapping[str, str] | None = None, /, **named: str) -> AbstractContextManager[None]:
        """Add headers to all calls in the block: ``with app.headers(tenant="north"):``.

        Pass a dictionary for names that are not Python identifiers: ``app.headers({"x-request": "7"})``. A call's own
        ``options(headers=...)`` override these headers, and these override headers inherited from the running job. The
        block applies to this thread or asyncio task, and to asyncio tasks started in it.
        """
        return adding(self, checked_headers({**(headers or {}), **named}))

    def use(self, *middleware: Middleware) -> None:
        """Add middleware around every enqueue and every run of this app. The first one is the outermost."""
        for layer in middleware:
            if not is_a(layer, Middleware):
                raise TypeError(f"app.use takes instances of penstock.Middleware, not {layer!r}")
        self._middleware.extend(middleware)
        layers = Layers(tuple(self._middleware))
        self._enqueue_layers = layers if layers.enqueues else None
        self._run_layers = layers if layers.runs else None

    def periodic(
        self,
        cron: str | None = None,
        /,
        *,
        every: Seconds | None = None,
        at: datetime | None = None,
        name: str | None = None,
        tz: str | None = None,
        args: Iterable[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        overlap: Overlap = "skip",
        catchup: CatchUp = "once",
        window: Seconds = 3600.0,
        jitter: Seconds = 0.0,
    ) -> Callable[[ScheduledTask], ScheduledTask]:
        """Schedule a task: ``@app.periodic("30 2 * * *")`` above ``@app.task``. Workers declare it when they start.

        ``cron``: minute, hour, day of the month, month and day of the week, or ``@hourly`` to ``@yearly``.

        ``every``: interval in seconds or as a timedelta, counted from the creation of the schedule.

        ``at``: a single time, as a datetime with a time zone.

        ``name``: name of the schedule. Default: the task's name.

        ``tz``: time zone of the cron line. Default: the app's.

        ``args``, ``kwargs``: arguments of each call.

        ``overlap``: policy for a time that comes while an earlier job has not ended: ``"skip"`` it (the default),
        ``"queue"`` one job after the other, ``"cancel_previous"``, or ``"allow"`` both.

        ``catchup``: policy for times that passed while no broker ran: run the last one ``"once"`` (the default),
        ``"skip"`` them, or run ``"all"``.

        ``window``: age in seconds, or a timedelta, beyond which such times are skipped. Default: one hour.

        ``jitter``: longest random delay of each job, in seconds or as a timedelta. Default: 0.

        Raises ``TypeError`` or ``ValueError`` when the decorated object is not a task of this app, or a time is wrong.
        """
        from penstock._tasks.schedules import declaring, timing_of

        timing = timing_of(self, cron, every, at, tz, jitter, overlap, catchup, window)
        return declaring(self, name, args, kwargs, timing)

    @property
    def schedules(self) -> Schedules:
        """Schedules of this app in the broker: list, set, pause, resume, run or remove them."""
        # Imported here because few programs need it, but all import this module.
        from penstock._tasks.schedules import Schedules

        return Schedules(self)

    def failed(
        self,
        *,
        id: str | Job[Any] | None = None,
        task: str | AnyTask[..., Any] | None = None,
        queue: str | None = None,
        workflow: str | Workflow[Any] | None = None,
        error: str | type[BaseException] | None = None,
        fingerprint: str | None = None,
        since: datetime | Seconds | None = None,
        newest_first: bool = False,
    ) -> FailedJobs:
        """Find failed jobs of all apps of the broker: list, count, retry or remove them.

        All given conditions must match; only using the returned object asks the broker. ``workflow``: the workflow of
        the jobs, or its id. ``error``: an exception class, or its full name such as ``"shop.Gone"``. ``fingerprint``:
        that of a ``FailedJob``, for the same error from the same place in the code. ``since``: the earliest time of the
        failure, as a datetime or as seconds (or a timedelta) ago. ``newest_first``: start with the latest failure
        instead of the earliest.
        """
        # Imported here because few programs need it, but all import this module.
        from penstock._jobs.failed import FailedJobs
        from penstock._jobs.job import job_id_of

        name = task if task is None or isinstance(task, str) else task.name
        return FailedJobs(
            self,
            id=id,
            task=name,
            queue=queue,
            workflow=None if workflow is None else job_id_of(workflow if isinstance(workflow, str) else workflow.id),
            error=error,
            fingerprint=fingerprint,
            since=since,
            newest_first=newest_first,
        )

    def codec(self, type: type[T], encode: Callable[[T], object], decode: Callable[[Any], T]) -> None:
        """Make values of exactly this type serializable, as arguments and results.

        ``encode`` returns a value that is serializable already, and ``decode`` turns that back into an equal value.
        Both the enqueuing process and the worker need the codec, so define it next to the tasks. Raises ``ValueError``
        for a type that is serializable without a codec.
        """
        if is_built_in(type):
            raise ValueError(f"{shown_name(type)} is serializable already, with a fixed encoding")
        self._custom_types[full_name(type)] = CustomType(type, encode, decode)

    def on_worker_start(self, function: F) -> F:
        """Run a function once in a worker, after importing the app and before forking processes.

        Use it to import modules that jobs need, and to fill caches that they share. Connections and threads do not
        survive the fork: open them in ``on_process_start``. An error stops the worker.
        """
        return _add_hook(self._worker_start_hooks, "on_worker_start", function)

    def on_process_start(self, function: F) -> F:
        """Run a function in each process that runs jobs, before its first one. Use it to open connections.

        An error stops the process, which has not taken a job yet. The worker logs the error and tries again with
        another process, after a growing delay.
        """
        return _add_hook(self._process_start_hooks, "on_process_start", function)

    def on_process_stop(self, function: F) -> F:
        """Run a function in each process that ran jobs, when it stops and its last job has ended.

        A process that is killed does not run it. An error is logged.
        """
        return _add_hook(self._process_stop_hooks, "on_process_stop", function)

    def on_slot_start(self, function: F) -> F:
        """Run a function in each slot before its first job: in its thread, or its process after ``on_process_start``.

        Use it for resources that threads cannot share, such as a connection in a ``threading.local``. All slots of an
        event loop share one call, which runs on the loop; an ``async def`` function runs only there. An error keeps the
        slot from taking jobs. In a thread the error is logged and the function is tried again after a growing delay.
        Elsewhere the process exits, as for ``on_process_start``.
        """
        return _add_hook(self._slot_start_hooks, "on_slot_start", function, may_be_async=True)

    def on_slot_stop(self, function: F) -> F:
        """Run a function in each slot where ``on_slot_start`` ran, when it stops and its last job has ended.

        A slot whose process is killed or whose thread dies does not run it. An error is logged.
        """
        return _add_hook(self._slot_stop_hooks, "on_slot_stop", function, may_be_async=True)

    def check(self) -> None:
        """Check the annotations and schedules of all tasks, as a worker does when it starts. Raises ``TypeError``."""
        problems: list[str] = []
        for task in self.tasks.values():
            try:
                task.arguments  # noqa: B018
                if self._run_layers is not None:
                    self._run_layers.check(task)
            except TypeError as error:
                problems.append(str(error))
        for periodic in self._periodic.values():
            try:
                self._declaration(periodic, 0)
            except TypeError as error:
                problems.append(str(error))
        if problems:
            raise TypeError("\n".join(problems))

    def _begin_worker(self) -> None:
        """Do the same as a worker before it forks: ``check``, then call the ``on_worker_start`` functions in order."""
        self.check()
        for hook in self._worker_start_hooks:
            hook()

    def _declarations(self, started_ms: int) -> list[str]:
        """Return the declarations of the app's schedules that a worker sends to the broker when it starts."""
        return [self._declaration(periodic, started_ms) for periodic in self._periodic.values()]

    def _declaration(self, periodic: Periodic, started_ms: int) -> str:
        try:
            return periodic.declaration(self, started_ms)
        except (TypeError, ValueError) as error:
            raise TypeError(f"schedule {periodic.name!r}: {error}") from error

    def close(self) -> None:
        """Close this process's connection to the broker. The next call opens a new one."""
        connection, self._connection = self._connection, None
        if connection is not None and self._generation == _connection.generation():
            _connection.disconnect(connection, self.call_timeout)

    async def aclose(self) -> None:
        """Like ``close``, but awaitable."""
        import asyncio

        await asyncio.to_thread(self.close)

    def __repr__(self) -> str:
        return f"<App {self.name!r} {self.url}>"

    def _connected(self) -> Connection:
        # Every delay() pays for this one comparison: a fork or a close makes a kept connection stale.
        if self._connection is None or self._generation != _connection.generation():
            generation = _connection.generation()
            self._connection = _connection.connect(self.url, f"{self.name}@{os.getpid()}", self)
            self._generation = generation
        return self._connection

    def _signatures(self, calls: tuple[Any, ...]) -> list[Signature[Any]]:
        signatures: list[Any] = list(calls)
        if len(calls) == 1 and not isinstance(calls[0], Partial):
            if not is_a(calls[0], Iterable):
                raise TypeError(_NO_SIGNATURE.format(calls[0]))
            signatures = list(calls[0])
        for signature in signatures:
            if not is_a(signature, Signature):
                raise TypeError((_COMPOSED if is_a(signature, Partial) else _NO_SIGNATURE).format(signature))
            if signature._links:
                raise TypeError(_LINKED.format(signature))
            other = signature.task.app
            if other is not self and other.url != self.url:
                raise ValueError(f"{signature.task.name} belongs to {other!r}, which uses another broker")
        return signatures

    def _send(self, calls: Sequence[Call]) -> list[Job[Any]]:
        """Enqueue calls with the headers of the context, through the middleware."""
        layers = self._enqueue_layers
        return self._publish(calls) if layers is None else layers.enqueue(calls, self._publish)

    async def _asend(self, calls: Sequence[Call]) -> list[Job[Any]]:
        layers = self._enqueue_layers
        return await (self._submit(calls) if layers is None else layers.aenqueue(calls, self._submit))

    def _publish(self, calls: Sequence[Call]) -> list[Job[Any]]:
        jobs = [call._prepared() for call in calls]
        if not jobs:
            return []
        connection = self._connected()
        job_ids = connection.publish_many(jobs, self.call_timeout)
        connection.log_notices(BLOCKING)
        return [job_of(self, job_id) for job_id in job_ids]

    async def _submit(self, calls: Sequence[Call]) -> list[Job[Any]]:
        jobs = [call._prepared() for call in calls]
        if not jobs:
            return []
        job_ids = await self._connected().submit(jobs, self.call_timeout)
        return [job_of(self, job_id) for job_id in job_ids]

    def replace(self, step: Step[R]) -> R:
        """Replace the running job with a step, from inside its task: ``return app.replace(step)``.

        The step runs once the task has returned, which frees the job's slot. The step's outcome becomes the job's:
        ``job.result()`` waits for it, later steps and chord bodies get its value, and its failure fails them. The end
        of the job and the step are sent in one transaction. A job may be replaced repeatedly, up to 256 times.

        Returns an object that the task must return (or raise); to type checkers, it is the step's result.

        Raises ``RuntimeError`` outside of a job, and otherwise like ``step.delay()``.
        """
        from penstock._flows.replacing import replacement

        return cast("R", replacement(self, step))

    def _send_plan(self, plan: Plan, blocking: tuple[str, str] = BLOCKING) -> Built:
        """Send a workflow as one transaction, with the headers of the context, through the middleware.

        A workflow that is too large for one is sent in several. ``blocking``: as for ``Connection.log_notices``.
        """
        if plan.is_growing:
            from penstock._flows.growing import send_all

            return send_all(self, plan)

        def publish(jobs: _Jobs) -> Built:
            built = self._connected().publish_plan(plan, jobs, self.call_timeout)
            self._connected().log_notices(blocking)
            return built

        return self._send_jobs(plan, publish)

    async def _asend_plan(self, plan: Plan) -> Built:
        if plan.is_growing:
            from penstock._flows.growing import asend_all

            return await asend_all(self, plan)
        return await self._asend_jobs(plan, lambda jobs: self._connected().submit_plan(plan, jobs, self.call_timeout))

    def _send_jobs(self, plan: Plan, publish: Callable[[_Jobs], Built]) -> Built:
        """Send the planned jobs with the headers of the context, through the middleware."""
        layers = self._enqueue_layers
        if layers is None and here.get() is None:
            return publish(plan.jobs())
        sent: list[Built] = []

        def send(calls: Sequence[Call]) -> list[Job[Any]]:
            sent.append(publish(_prepared(plan, calls)))
            return [Job(self, job_id, True) for job_id in sent[-1].job_ids]

        calls = plan.calls()
        if layers is None:
            send(calls)
        else:
            layers.enqueue(calls, send)
        return _one_sent(sent)

    async def _asend_jobs(self, plan: Plan, submit: Callable[[_Jobs], Awaitable[Built]]) -> Built:
        layers = self._enqueue_layers
        if layers is None and here.get() is None:
            return await submit(plan.jobs())
        sent: list[Built] = []

        async def send(calls: Sequence[Call]) -> list[Job[Any]]:
            sent.append(await submit(_prepared(plan, calls)))
            return [Job(self, job_id, True) for job_id in sent[-1].job_ids]

        calls = plan.calls()
        if layers is None:
            await send(calls)
        else:
            await layers.aenqueue(calls, send)
        return _one_sent(sent)

    def _job_of(self, job_id: bytes) -> Job[Any]:
        """Make a job from an id in an argument or a result. Such a job has certainly been enqueued."""
        return Job(self, job_id, True)

    def _codec_of(self, task: str) -> Codec:
        known = self.tasks.get(task)
        return self._plain_codec if known is None else known.arguments.codec

    def _new_task(self, function: Callable[..., Any], options: TaskOptions) -> AnyTask[..., Any]:
        kind = AsyncTask[..., Any] if is_async(function) else Task[..., Any]
        task = kind(self, function, options)
        other = self.tasks.get(task.name)
        if other is not None and not may_replace(task.function, other.function):
            raise ValueError(
                f"two tasks are called {task.name!r}: {place_of(other.function)} and {place_of(task.function)};"
                " rename one of them with @app.task(name=...)"
            )
        self.tasks[task.name] = task
        return task


answer_habits(App)


_NO_SIGNATURE = "app.enqueue takes calls that are not enqueued yet, such as send.s(1), not {!r}"


_COMPOSED = "app.enqueue takes single calls, but {!r} is a workflow: send it with its delay()"
_LINKED = "app.enqueue takes calls without callbacks, but {!r} has some: send it with its delay()"


_Jobs: TypeAlias = "Sequence[tuple[_core.Options, bytes]]"


def _prepared(plan: Plan, calls: Sequence[Call]) -> list[tuple[Any, bytes]]:
    if len(calls) != len(plan):
        raise TypeError(
            f"middleware must pass on the {len(plan)} calls of a workflow, not {len(calls)}: their positions define"
            " what depends on what"
        )
    return [call._prepared() for call in calls]


def _one_sent(sent: list[Built]) -> Built:
    if len(sent) != 1:
        raise TypeError(f"middleware must call next(calls) once for a workflow, not {len(sent)} times")
    return sent[0]


def _shaped(calls: tuple[Any, ...], jobs: list[Job[Any]]) -> object:
    """Return jobs in the same shape as the given calls."""
    if len(calls) != 1:
        return tuple(jobs)
    return jobs[0] if isinstance(calls[0], Signature) else jobs


def _add_hook(hooks: list[Callable[[], object]], name: str, function: F, *, may_be_async: bool = False) -> F:
    if not callable(function) or (inspect.iscoroutinefunction(function) and not may_be_async):
        kinds = "" if may_be_async else ", and no async def"
        raise TypeError(f"{name} takes a function without arguments{kinds}, not {function!r}")
    hooks.append(function)
    return function


def _checked_defaults(defaults: TaskOptions) -> TaskOptions:
    if not is_a(defaults, Mapping):
        raise TypeError(f"defaults must be a dictionary of task options, not {defaults!r}")
    refuse_unknown(defaults, set(TaskOptions.__annotations__) - {"name"}, "App(defaults=...)")
    check_task_options(defaults)
    return defaults.copy()
