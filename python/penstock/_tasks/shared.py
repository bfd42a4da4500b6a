"""Tasks whose app or code is elsewhere: shared tasks of libraries, and tasks known only by name."""

from __future__ import annotations

import functools
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, Unpack, cast, overload

from penstock import _core
from penstock._durations import is_a
from penstock._tasks.options import Options, TaskOptions, refuse_unknown
from penstock._tasks.retries import RetryPolicy
from penstock._tasks.task import (
    AnyTask,
    AsyncTask,
    Sender,
    Task,
    TaskDecorator,
    check_task_options,
    is_async,
    name_of,
)
from penstock._tasks.unique import Rule
from penstock._values.arguments import UncheckedArguments

if TYPE_CHECKING:
    from penstock._tasks.app import App
    from penstock._values.arguments import Arguments

P = ParamSpec("P")
R = TypeVar("R")


class RemoteTask(AnyTask[..., Any]):
    """Task whose code is not in this process: see ``App.send``."""

    is_remote = True

    def __init__(self, app: App, name: str) -> None:
        if not is_a(name, str) or not name:
            raise TypeError(f"the name of a task must be a string such as 'shop.mail.post', not {name!r}")
        super().__init__(app, _elsewhere, {"name": name})

    @functools.cached_property
    def arguments(self) -> Arguments:
        return UncheckedArguments(self.name, self.app._custom_types, self.app._job_of)


def _elsewhere() -> None: ...


class _Shared(AnyTask[P, R]):
    """Task that gets its app later. Everything that depends on an app comes from the task that ``App.add`` made."""

    def __init__(self, function: Callable[..., Any], options: TaskOptions) -> None:
        refuse_unknown(options, TaskOptions.__annotations__, "@shared_task")
        check_task_options(options)
        self.function = function
        self.name = options.get("name") or name_of(function)
        self.given = options
        self._bound: dict[App, AnyTask[P, R]] = {}
        functools.update_wrapper(cast(Any, self), function, updated=())
        self._show_parameters()

    def bind(self, app: App) -> AnyTask[P, R]:
        """Make this function a task of an app."""
        task = cast(AnyTask[P, R], app._new_task(self.function, self.given))
        self._bound[app] = task
        return task

    @property
    def task(self) -> AnyTask[P, R]:  # type: ignore[override]
        if len(self._bound) == 1:
            (bound,) = self._bound.values()
            return bound
        add = f"app.add({self.function.__name__})"
        if not self._bound:
            raise RuntimeError(f"the shared task {self.name} has no app yet: call {add} first")
        apps = ", ".join(repr(app.name) for app in self._bound)
        raise RuntimeError(
            f"the shared task {self.name} was added to several apps ({apps}): use the task that {add} returned for"
            " the app that you mean"
        )

    @property
    def app(self) -> App:  # type: ignore[override]
        return self.task.app

    @property
    def retry_policy(self) -> RetryPolicy:  # type: ignore[override]
        return self.task.retry_policy

    @property
    def _options(self) -> Options:  # type: ignore[override]
        return self.task._options

    @property
    def _core_options(self) -> _core.Options:  # type: ignore[override]
        return self.task._core_options

    @property
    def _rule(self) -> Rule | None:  # type: ignore[override]
        return self.task._rule

    @property
    def _views(self) -> dict[object, Sender[P, R]]:  # type: ignore[override]
        return self.task._views

    @property
    def arguments(self) -> Arguments:  # pyright: ignore[reportIncompatibleVariableOverride]  # not cached: see above
        return self.task.arguments


# The properties of `_Shared` hide attributes of `AnyTask` that are never set from outside.
class SharedTask(_Shared[P, R], Task[P, R]):  # pyright: ignore[reportIncompatibleVariableOverride]
    """Function that becomes a task of each app that adds it."""


class SharedAsyncTask(_Shared[P, R], AsyncTask[P, R]):  # pyright: ignore[reportIncompatibleVariableOverride]
    """``async def`` function that becomes a task of each app that adds it."""


@overload
def shared_task(  # type: ignore[overload-overlap]
    function: Callable[P, Coroutine[Any, Any, R]], /
) -> AsyncTask[P, R]: ...
@overload
def shared_task(function: Callable[P, R], /) -> Task[P, R]: ...
@overload
def shared_task(**options: Unpack[TaskOptions]) -> TaskDecorator: ...
def shared_task(function: Any = None, /, **options: Unpack[TaskOptions]) -> Any:
    """Make a function of a library a task without an app: ``@shared_task`` or ``@shared_task(retries=5)``.

    An app adopts it with ``app.add(post)`` or ``app.add(mail_library)``. Enqueuing it before that raises
    ``RuntimeError``. So does enqueuing it when several apps have added it: enqueue the task that ``app.add`` returned.
    """
    decorator: Any = TaskDecorator(
        lambda function: (SharedAsyncTask if is_async(function) else SharedTask)(function, options)
    )
    return decorator if function is None else decorator(function)
