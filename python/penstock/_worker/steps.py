"""Steps of workflows in a worker: builds the arguments of a task from the data of its job.

Most jobs are not steps: their body has all arguments. The first arguments of a step may come from values of previous
steps, which arrive with the job or are fetched. A chunk makes several calls.
"""

from __future__ import annotations

import functools
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, cast

from penstock._flows.results import given_value
from penstock._jobs.current import MARK, Extras
from penstock._values.arguments import ChunkArguments, RestArguments

if TYPE_CHECKING:
    from penstock._flows.failure import Asking
    from penstock._tasks.task import AnyTask
    from penstock._values.arguments import Arguments


def is_step(extras: Extras) -> bool:
    """Whether a job has arguments from elsewhere than its body."""
    return extras[5][0] is not None or MARK in extras[3]


def begin(task: AnyTask[..., Any], body: bytes, extras: Extras) -> Asking[tuple[Any, list[Any], dict[str, Any]]]:
    """Return the object to run instead of the task, and its arguments. Raises ``ArgumentMismatch``."""
    mark = extras[3].get(MARK)
    if mark == "chunk":
        chunk = _chunk_of(task)
        return (chunk, *chunk.arguments.decode(body))
    inputs = extras[5][0]
    if inputs is None:
        return (task, *task.arguments.decode(body))
    shape, given = inputs
    # Values of several steps go to one parameter each, none of which can be a stream.
    streams = task.arguments.takes_stream and mark != "spread"
    value = yield from given_value(task.app, shape, given, mark == "errback", streams)
    bind = task.arguments.bind_values if mark == "spread" else task.arguments.bind_value
    try:
        args, kwargs = task.arguments.decode_unchecked(body)
    except Exception as error:
        raise task.arguments.mismatch(error) from None
    return task, bind(value, args, kwargs), kwargs


def arguments_of(task: AnyTask[..., Any], extras: Extras) -> Arguments:
    """Return the object that names the arguments in the body of a job."""
    if MARK in extras[3] and extras[3][MARK] == "chunk":
        return cast("Arguments", ChunkArguments(task.arguments))
    inputs = extras[5][0]
    if inputs is not None:
        count = inputs[1][1] if extras[3].get(MARK) == "spread" else 1
        return cast("Arguments", RestArguments(task.arguments, count))
    return task.arguments


class _Chunk:
    """Replacement of a task: its function makes all calls of a chunk."""

    def __init__(self, task: AnyTask[..., Any]) -> None:
        self._task = task
        self.arguments = ChunkArguments(task.arguments)
        self.function = self._run_async if task.is_async else self._run

    def __getattr__(self, name: str) -> Any:
        return getattr(self._task, name)

    def _run(self, *calls: list[Any]) -> list[Any]:
        function = self._task.function
        return [function(*call) for call in calls]

    async def _run_async(self, *calls: list[Any]) -> list[Any]:
        function: Any = self._task.function
        results: list[Any] = []
        for call in calls:
            awaited: Coroutine[Any, Any, Any] = function(*call)
            results.append(await awaited)
        return results


@functools.lru_cache(maxsize=256)
def _chunk_of(task: AnyTask[..., Any]) -> _Chunk:
    return _Chunk(task)
