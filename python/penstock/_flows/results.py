"""Values of groups, for waiting callers and for later steps."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar, overload

import msgspec

from penstock._flows.failure import (
    GATHERED,
    GONE,
    SUCCEEDED,
    UPSTREAM,
    Asking,
    Failure,
    failure_of,
    failure_of_causes,
    group_error,
)
from penstock._jobs.current import format_id
from penstock._public import public
from penstock._values import envelope
from penstock.errors import CannotDecode, ResultExpired

if TYPE_CHECKING:
    from penstock._tasks.app import App

T = TypeVar("T")

# Number of values to ask for at once.
_PAGE = 1_000

_pack = msgspec.msgpack.Encoder().encode


def member_id(join: bytes, index: int) -> bytes:
    """Return the id of a member of a join."""
    return join[:13] + (index + 1).to_bytes(3, "big")


def is_join(job_id: bytes) -> bool:
    """Whether an id belongs to a group rather than a job."""
    return job_id[13:] == b"\0\0\0"


# Composition of a join's value, encoded in the two lowest bits of byte 12 of its id: a list of the members' values, the
# only member's value, the members' values by name, or an empty list.
LIST, WRAPS, NAMED, EMPTY = range(4)

# Third bit, for a group to which its members may add others, and for a join that wraps one of its members.
MAY_GROW = 4


def kind_of(join: bytes) -> int:
    return join[12] & 3


def wraps(join: bytes) -> bool:
    """Whether the value of a join is that of its only member rather than a list of one."""
    return kind_of(join) == WRAPS


def names_id(join: bytes) -> bytes:
    """Return the id under which the names of a graph's steps are kept. No member can have this id."""
    return join[:13] + b"\xff\xff\xff"


def encode_names(names: Sequence[str], ids: Sequence[bytes], ends: Sequence[int]) -> bytes:
    """Encode the steps of a graph, and which of them, in this order, are members of its join."""
    return _pack((names, b"".join(ids), ends))


class StepNames(NamedTuple):
    """Names and ids of the steps of a graph."""

    names: list[str]
    ids: bytes
    ends: list[int]
    """Indexes of the steps whose results make up the graph's result."""

    def id_of(self, place: int) -> bytes:
        return self.ids[16 * place : 16 * place + 16]


def read_names(join: bytes, end: tuple[int, bytes]) -> StepNames:
    status, body = end
    if status != SUCCEEDED:
        raise ResultExpired(f"graph {format_id(join)}: the names of its steps are not kept any more")
    return msgspec.msgpack.decode(body, type=StepNames)


def read_gathered(body: bytes) -> tuple[bytes, int]:
    """Decode the value of a group that has succeeded: its join and the number of members."""
    return body[:16], int.from_bytes(body[16:], "little")


class MemberIds(Sequence[bytes]):
    """Ids of a group's members, computed on access."""

    def __init__(self, join: bytes, count: int) -> None:
        self.join = join
        self._count = count

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> bytes: ...
    @overload
    def __getitem__(self, index: slice) -> list[bytes]: ...
    def __getitem__(self, index: int | slice) -> bytes | list[bytes]:
        if isinstance(index, slice):
            return [member_id(self.join, each) for each in range(*index.indices(self._count))]
        return member_id(self.join, range(self._count)[index])


@public
class Results(Sequence["T | Failure"], Generic[T]):
    """Results of a group in the order of its members, with a ``Failure`` for each member that failed.

    Results are read from the broker on access, 1,000 at a time. Iterating keeps no more than that in memory, while
    ``list(results)`` keeps them all. Each read may raise ``ResultExpired``, ``BrokerUnavailable`` and ``CallTimeout``.
    ``async for`` iterates without blocking an event loop.

    A task whose first parameter is annotated with ``Results[...]`` gets the results of the previous group in this form
    instead of as a list. They can be read until the job has ended.
    """

    # Marks a streaming parameter in annotations of tasks.
    _is_stream = True

    def __init__(self, app: App | None, join: bytes, count: int, held: list[Any] | None = None) -> None:
        self._app = app
        self._ids = MemberIds(join, count)
        # All results, where they arrived with a job.
        self._held = held
        self._page: tuple[int, list[Any]] = (0, [])

    def __len__(self) -> int:
        return len(self._ids)

    @overload
    def __getitem__(self, index: int) -> T | Failure: ...
    @overload
    def __getitem__(self, index: slice) -> list[T | Failure]: ...
    def __getitem__(self, index: int | slice) -> Any:
        places = range(len(self))[index]
        if isinstance(places, int):
            return self._read(places // _PAGE)[places % _PAGE]
        return [self._read(place // _PAGE)[place % _PAGE] for place in places]

    def __iter__(self) -> Iterator[T | Failure]:
        for number in range(-(-len(self) // _PAGE)):
            yield from self._read(number)

    async def __aiter__(self) -> AsyncIterator[T | Failure]:
        for number in range(-(-len(self) // _PAGE)):
            values = self._kept(number)
            if values is None:
                app = self._of_app()
                values = await afinish(app, self._asking(app, number), app.call_timeout)
                self._page = (number, values)
            for value in values:
                yield value

    def ok(self) -> list[T]:
        """Return the results of the successful members."""
        return [value for value in self if not isinstance(value, Failure)]

    async def aok(self) -> list[T]:
        """Like ``ok``, but awaitable."""
        return [value async for value in self if not isinstance(value, Failure)]

    def failures(self) -> list[Failure]:
        """Return the failures of the unsuccessful members."""
        return [value for value in self if isinstance(value, Failure)]

    async def afailures(self) -> list[Failure]:
        """Like ``failures``, but awaitable."""
        return [value async for value in self if isinstance(value, Failure)]

    def __repr__(self) -> str:
        return f"<Results of {len(self):,}>"

    def _read(self, number: int) -> list[Any]:
        values = self._kept(number)
        if values is None:
            app = self._of_app()
            values = finish(app, self._asking(app, number), app.call_timeout)
            self._page = (number, values)
        return values

    def _kept(self, number: int) -> list[Any] | None:
        if self._held is not None:
            return self._held[number * _PAGE : (number + 1) * _PAGE]
        kept, values = self._page
        return values if values and kept == number else None

    def _of_app(self) -> App:
        assert self._app is not None  # but for an empty group, of which there is nothing to read
        return self._app

    def _asking(self, app: App, number: int) -> Asking[list[Any]]:
        first = number * _PAGE
        ends = yield self._ids[first : first + _PAGE]
        return (yield from _values(app, self._ids.join, first, ends))


def finish(app: App, asking: Asking[T], timeout_s: float | None) -> T:
    """Ask the broker until there is a value. All those jobs have ended, so ``timeout_s`` limits the broker's
    answers."""
    try:
        ids = next(asking)
        while True:
            ids = asking.send(app._connected().read_all(ids, timeout_s))
    except StopIteration as end:
        value: T = end.value
        return value


async def afinish(app: App, asking: Asking[T], timeout_s: float | None) -> T:
    """Like ``finish``, but awaitable."""
    try:
        ids = next(asking)
        while True:
            ids = asking.send(await app._connected().aread_all(ids, timeout_s))
    except StopIteration as end:
        value: T = end.value
        return value


def outcome(app: App, job_id: bytes, status: int, body: bytes) -> Asking[Any]:
    """Build the value of a step whose end refers to other jobs. Raises ``GroupError``."""
    if status == UPSTREAM:
        raise (yield from group_error(job_id, body))
    return (yield from _gathered(app, *read_gathered(body), None))


Given = tuple[bytes, int, "Sequence[tuple[int, Any]] | None"]
"""(join, count, values) as a job receives them. Each value is (status, body); None means that they must be fetched."""


def given_value(app: App, shape: int, given: Given, errback: bool, streams: bool) -> Asking[Any]:
    """Build the first argument of a job from previous values. ``streams``: whether the task takes ``Results``."""
    join, count, values = given
    if errback:
        return (yield from _given_failure(shape, join, values or ()))
    if shape == 0:
        return (yield from _all_values(app, join, count, values))[0]
    if streams and kind_of(join) not in (EMPTY, NAMED):
        # Values that did not arrive with the job are read on access.
        held = None if values is None else (yield from _values(app, join, 0, values))
        return Results[Any](app, join, count, held)
    return (yield from _gathered(app, join, count, values, of_one=False))


def _given_failure(shape: int, join: bytes, values: Sequence[tuple[int, Any]]) -> Asking[Failure]:
    status, body = values[0] if values else (GONE, b"")
    if shape != 0:
        # The group has ended, with this in place of its values.
        causes = [body[at : at + 16] for at in range(0, len(body), 16)] if status == UPSTREAM else []
        return (yield from failure_of_causes(join, None, causes, is_group=True))
    job_id = member_id(join, 0)
    return (yield from failure_of(job_id, None, status, body))


def _gathered(
    app: App, join: bytes, count: int, values: Sequence[tuple[int, Any]] | None, *, of_one: bool = True
) -> Asking[Any]:
    kind = kind_of(join)
    if kind == EMPTY:
        return []
    found = yield from _all_values(app, join, count, values)
    if kind == NAMED:
        (end,) = yield [names_id(join)]
        steps = read_names(join, end)
        return {steps.names[place]: value for place, value in zip(steps.ends, found, strict=True)}
    return found[0] if kind == WRAPS and of_one else found


def _all_values(app: App, join: bytes, count: int, values: Sequence[tuple[int, Any]] | None) -> Asking[list[Any]]:
    if values is not None:
        return (yield from _values(app, join, 0, values))
    ids = MemberIds(join, count)
    found: list[Any] = []
    for first in range(0, count, _PAGE):
        ends = yield ids[first : first + _PAGE]
        found += yield from _values(app, join, first, ends)
    return found


def _values(app: App, join: bytes, first: int, ends: Sequence[tuple[int, Any]]) -> Asking[list[Any]]:
    """Build the values of consecutive members of a join, starting at index ``first``."""
    found: list[Any] = []
    for index, (status, body) in enumerate(ends, first):
        if status == SUCCEEDED:
            found.append(_decoded(app, join, index, body))
        elif status == GATHERED:
            # Already decoded, in the data that arrived with a job.
            inner: Given = (*read_gathered(body), None) if isinstance(body, bytes) else body
            found.append((yield from _gathered(app, *inner)))
        elif status == GONE:
            job_id = format_id(member_id(join, index))
            raise ResultExpired(
                f"job {job_id}: it was member {index} of its group, and its result is not kept: it was enqueued with"
                " store_result=False, or has outlived its result_ttl"
            )
        else:
            found.append((yield from failure_of(member_id(join, index), index, status, body)))
    return found


def _decoded(app: App, join: bytes, index: int, body: bytes) -> Any:
    success = envelope.decode_success(body)
    try:
        return app._codec_of(success.task).decode(success.result)
    except CannotDecode as error:
        raise CannotDecode(
            f"job {format_id(member_id(join, index))}: the result of {success.task} can't be read here: {error}; import"
            " the module that defines it. The job succeeded, and its result is kept"
        ) from error
