"""Steps of workflows: calls that are not enqueued yet, and compositions of them. All of them are immutable."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Generic, Literal, Never, Self, TypeVar, TypeVarTuple, Unpack, cast, overload

from penstock._durations import is_a, is_int
from penstock._habits import answer_habits
from penstock._jobs.job import Job
from penstock._public import public

if TYPE_CHECKING:
    from datetime import datetime

    from penstock import _core
    from penstock._durations import Seconds
    from penstock._flows.failure import Failure
    from penstock._flows.results import Results
    from penstock._flows.workflow import Workflow
    from penstock._tasks.middleware import Call
    from penstock._tasks.options import JobOptions
    from penstock._tasks.task import AnyTask, Sender, TakesArguments

A = TypeVar("A")
B = TypeVar("B")
C = TypeVar("C")
D = TypeVar("D")
E = TypeVar("E")
F = TypeVar("F")
R = TypeVar("R")
S = TypeVar("S")
T = TypeVar("T")
R_co = TypeVar("R_co", covariant=True)
A_contra = TypeVar("A_contra", contravariant=True)
As = TypeVarTuple("As")

# Ids of members have 24 bits for the index.
MOST_MEMBERS = (1 << 24) - 1
# Largest number of calls of a group that is sent in one transaction.
AT_ONCE = 10_000
# Largest number of results for one job of map_reduce.
MOST_FAN_IN = 100_000

# Outcomes of a step on which a callback runs, with their numbers in the core.
SUCCEEDED, FAILED = range(2)

TOO_MANY = (
    f"a group may have at most {MOST_MEMBERS:,} members, and this one has more; chunks(task, calls, n) runs n calls in"
    " each job, and task.map_reduce(items, ...) makes groups of groups"
)


@public
class Partial(Generic[A_contra, R_co]):
    """Step that gets its first argument from the previous step: ``b.s(2)`` in ``a.s(1) | b.s(2)``.

    Its type parameters are the types of that argument and of the result. Every ``Step`` is a ``Partial`` that accepts
    any argument.
    """

    __slots__ = ("_links",)

    def __init__(self) -> None:
        self._links: tuple[Link, ...] = ()

    def __or__(self, other: Partial[R_co, S], /) -> Partial[A_contra, S]:
        """Return a chain of both steps. The result of this step becomes the first argument of the other."""
        return Chain([self, check_step("|", other)])

    def options(self, **options: Unpack[JobOptions]) -> Self:
        """Return the same call with other options. A composed step has no options of its own: set them on its calls."""
        raise NotImplementedError

    def link(self, callback: Partial[R_co, Any], /) -> Self:
        """Return the same step with a callback, which runs with the step's result once the step has succeeded.

        A failed callback does not affect the step or later steps.
        """
        return self._linked(Link(check_step("link", callback), SUCCEEDED))

    def link_error(self, errback: Partial[Failure, Any], /) -> Self:
        """Return the same step with an errback, which runs once with a ``Failure`` if the step fails for good.

        The errback of a chain or a chord runs once, whichever of its jobs failed.
        """
        return self._linked(Link(_checked_errback(errback), FAILED))

    if not TYPE_CHECKING:

        def __ror__(self, other: object) -> Never:
            """Raise ``TypeError``: the left operand is not a step."""
            check_step("|", other)

    def _linked(self, link: Link) -> Self:
        changed = copy.copy(self)
        changed._links = (*self._links, link)
        return changed

    def _as_it_is(self) -> Self:
        """Return a step that later changes of this one do not affect."""
        return self

    def _takes_value(self) -> bool:
        """Whether the step uses the value of the previous step."""
        raise NotImplementedError

    def _is_empty(self) -> bool:
        """Whether the step consists only of empty groups."""
        return False


answer_habits(Partial)


class Link:
    """Callback of a step, and the outcome on which it runs."""

    __slots__ = ("callback", "when")

    def __init__(self, callback: Partial[Any, Any], when: int) -> None:
        self.callback = callback
        self.when = when

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Link) and (self.callback, self.when) == (other.callback, other.when)

    __hash__: None = None  # type: ignore[assignment]  # as of steps


@public
class Step(Partial[Any, R_co]):
    """Part of a workflow that can be sent as it is: a call, a chain, a group or a chord."""

    __slots__ = ()

    def __or__(self, other: Partial[R_co, S], /) -> Chain[S]:
        return Chain([self, check_step("|", other)])


@public
class Signature(Step[R_co]):
    """Call that is not enqueued yet: a task, arguments and options. See ``app.enqueue``, ``chain`` and ``group``."""

    __slots__ = ("_sender", "args", "immutable", "kwargs")

    # Header that says how the worker builds the arguments from the job's body.
    _mark = ""

    def __init__(
        self, sender: Sender[..., R_co], args: tuple[Any, ...], kwargs: dict[str, Any], *, immutable: bool = False
    ) -> None:
        super().__init__()
        self._sender = sender
        self.args: tuple[Any, ...] = args
        self.kwargs: Mapping[str, Any] = MappingProxyType(kwargs)
        self.immutable: bool = immutable

    @property
    def task(self) -> AnyTask[..., R_co]:
        return self._sender.task

    def options(self, **options: Unpack[JobOptions]) -> Self:
        """Return the same call with other options."""
        changed = copy.copy(self)
        changed._sender = self._sender.options(**options)
        return changed

    def delay(self) -> Job[R_co]:
        """Enqueue the call now. Raises like ``task.delay()``."""
        if self._links or self._mark:
            return cast("Job[R_co]", _plan(self).send().job)
        return self._sender.delay(*self.args, **self.kwargs)

    async def adelay(self) -> Job[R_co]:
        """Like ``delay``, but awaitable."""
        if self._links or self._mark:
            return cast("Job[R_co]", (await _plan(self).asend()).job)
        return await self._sender.adelay(*self.args, **self.kwargs)

    def __eq__(self, other: object) -> bool:
        if not is_a(other, Signature):
            return NotImplemented
        mine, others = (
            (each.task, each._sender._options, each.args, each.kwargs, each.immutable, each._links)
            for each in (self, cast("Signature[Any]", other))
        )
        return mine == others

    __hash__: None = None  # type: ignore[assignment]  # arguments need not be hashable

    def __repr__(self) -> str:
        return f"<Signature {self}>"

    def __str__(self) -> str:
        arguments = [repr(arg) for arg in self.args] + [f"{name}={value!r}" for name, value in self.kwargs.items()]
        return f"{self.task.name}({', '.join(arguments)})"

    def _prepare(self) -> tuple[_core.Options, bytes]:
        return self._sender._options_of(self.args, self.kwargs), self._body()

    def _call(self) -> Call:
        kwargs = dict(self.kwargs)
        return self._sender._call(self.args, kwargs, self.task._encode(self.args, kwargs))

    def _body(self, *, without: int = 0, first: tuple[Any, ...] = ()) -> bytes:
        """Encode the arguments. ``without``: number of arguments from other steps. ``first``: arguments to prepend."""
        if without:
            return self.task._encode_rest(self.args, dict(self.kwargs), without)
        return self.task._encode((*first, *self.args), dict(self.kwargs))

    def _takes_value(self) -> bool:
        return not self.immutable


class Chunk(Signature[R_co]):
    """Several calls of a task that one job runs one after another. ``args``: a tuple of arguments for each call."""

    __slots__ = ()

    _mark = "chunk"

    def _body(self, *, without: int = 0, first: tuple[Any, ...] = ()) -> bytes:
        return self.task._encode_chunk(self.args)

    def __str__(self) -> str:
        return f"{len(self.args)} calls of {self.task.name}"


class Composed(Step[R_co]):
    """Step that consists of other steps."""

    __slots__ = ()

    def delay(
        self, *, name: str | None = None, deadline: Seconds | datetime | None = None, atomic: bool = False
    ) -> Workflow[R_co]:
        """Send all jobs of the workflow in one transaction, and return its handle.

        A group (or a chord's group) of more than 10,000 calls is sent in several transactions, and its first jobs start
        before the last ones are sent; ``atomic=True`` sends it in one. A transaction that is refused because a queue or
        the disk is full is retried for ``app.call_timeout``. If it still cannot be sent, the workflow is cancelled; the
        error says how many of its jobs had begun, and its ``maybe_accepted`` is True. Sending stops early if the group
        has already failed.

        ``name``: name for people, at most 255 bytes, by which to find the workflow. Default: made of the names of the
        tasks.

        ``deadline``: time after which the workflow is cancelled if it has not ended, as seconds or a timedelta from
        now, or as a datetime with a time zone. Its errbacks run. Default: none.

        Raises ``TypeError`` when arguments do not fit, ``ValueError`` when the steps cannot form one workflow, and
        otherwise like ``task.delay()``.
        """
        return cast("Workflow[R_co]", _plan(self, name, deadline, atomic).send().workflow)

    async def adelay(
        self, *, name: str | None = None, deadline: Seconds | datetime | None = None, atomic: bool = False
    ) -> Workflow[R_co]:
        """Like ``delay``, but awaitable."""
        return cast("Workflow[R_co]", (await _plan(self, name, deadline, atomic).asend()).workflow)

    def options(self, **options: Never) -> Self:  # type: ignore[override]
        """Raise ``TypeError``: set options on the calls of a composed step."""
        first = _first_call(self)
        example = "" if first is None else f", such as {first.task.name}.s(...).options(...)"
        raise TypeError(f"{_kind(self)} has no options of its own; give them to its calls{example}")

    if not TYPE_CHECKING:

        def __call__(self, *args: Any, **kwargs: Any) -> Never:
            """Raise ``TypeError``: calling a composed step is how Celery sends it."""
            raise TypeError(f"{_kind(self)} can't be called; send it with .delay(), which returns a Workflow")

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self}>"


@public
class Chain(Composed[R_co]):
    """Steps that run one after another, each with the result of the one before it as its first argument."""

    __slots__ = ("steps",)

    def __init__(self, steps: Iterable[Partial[Any, Any]]) -> None:
        super().__init__()
        flat: list[Partial[Any, Any]] = []
        for step in steps:
            inner = _steps_of_chain(step)
            if inner:
                flat.extend(inner)
            else:
                flat.append(step)
        self.steps: tuple[Partial[Any, Any], ...] = tuple(flat)

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return (self.steps, self._links) == (cast("Chain[Any]", other).steps, cast("Chain[Any]", other)._links)

    __hash__: None = None  # type: ignore[assignment]  # as of calls

    def __str__(self) -> str:
        return " | ".join(f"({step})" if isinstance(step, Chain) else str(step) for step in self.steps)

    def _takes_value(self) -> bool:
        return next((step._takes_value() for step in self.steps if not step._is_empty()), True)

    def _is_empty(self) -> bool:
        return all(step._is_empty() for step in self.steps)


@public
class Chord(Chain[R_co]):
    """Group followed by a step that gets the list of its results: ``group(...) | body``."""

    __slots__ = ()

    @property
    def header(self) -> Partial[Any, list[Any]]:
        return self.steps[0]

    @property
    def body(self) -> Partial[list[Any], R_co]:
        return self.steps[1]

    def _takes_value(self) -> bool:
        return not self.header._is_empty() and self.header._takes_value()

    def _is_empty(self) -> bool:
        return False


@public
class Group(Composed[list[T]], Generic[T]):
    """Steps that run at the same time. The result is the list of their results, in the same order."""

    __slots__ = ("_errbacks", "_first", "_later", "max_failures")

    def __init__(self, steps: Sequence[Partial[Any, T]], max_failures: int = 0, later: Later | None = None) -> None:
        super().__init__()
        self._first: Sequence[Partial[Any, T]] = steps
        # Steps that are created when they are sent.
        self._later = later
        self.max_failures: int = max_failures
        # Errbacks of each member.
        self._errbacks: tuple[Link, ...] = ()

    @overload  # type: ignore[override]  # its results can be read as a stream, too
    def __or__(self, other: Partial[list[T], S], /) -> Chord[S]: ...
    @overload
    def __or__(self, other: Partial[Results[T], S], /) -> Chord[S]: ...
    def __or__(self, other: Partial[Any, S], /) -> Chord[S]:
        return Chord([self, check_step("|", other)])

    def link_error(self, errback: Partial[Failure, Any], /, *, each: bool = False) -> Self:
        """Return the same group with an errback, which runs once with a ``Failure`` if the group fails.

        With ``each=True`` it runs for each failed member instead, even if the group tolerates that failure.
        """
        link = Link(_checked_errback(errback), FAILED)
        if not each:
            return self._linked(link)
        changed = copy.copy(self)
        changed._errbacks = (*self._errbacks, link)
        return changed

    @property
    def steps(self) -> tuple[Partial[Any, T], ...]:
        """Steps of the group. For a large group made from an iterator, this creates all of them."""
        return (*self._first, *(() if self._later is None else self._later.all()))

    def _stream(self) -> Iterator[Partial[Any, T]]:
        """Iterate over the steps. If they come from an iterator, this works only once."""
        yield from self._first
        if self._later is not None:
            yield from self._later.stream()

    def __len__(self) -> int:
        return len(self._first) + (0 if self._later is None else len(self._later.all()))

    def __eq__(self, other: object) -> bool:
        if not is_a(other, Group):
            return NotImplemented
        theirs = cast("Group[Any]", other)
        mine, others = ((each.steps, each.max_failures, each._links, each._errbacks) for each in (self, theirs))
        return mine == others

    __hash__: None = None  # type: ignore[assignment]  # as of calls

    def __str__(self) -> str:
        shown, known = ", ".join(map(str, self._first[:_SHOWN])), len(self._first)
        if self._later is not None:
            return f"group({shown}, … more than {known:,} in all)"
        return f"group({shown}{f', … {known:,} in all' if known > _SHOWN else ''})"

    def _takes_value(self) -> bool:
        if any(step._takes_value() for step in self._first):
            return True
        return self._later is not None and any(step._takes_value() for step in self._later.all())

    def _is_empty(self) -> bool:
        return not self._first


class Later:
    """Steps of a large group that come from an iterator, created once, when they are sent."""

    __slots__ = ("_all", "_steps", "_where")

    def __init__(self, where: str, steps: Iterator[Any]) -> None:
        self._where = where
        self._steps: Iterator[Any] | None = steps
        self._all: tuple[Partial[Any, Any], ...] | None = None

    def all(self) -> tuple[Partial[Any, Any], ...]:
        """Create all steps, and keep them."""
        if self._all is None:
            found: list[Partial[Any, Any]] = []
            for step in self.stream():
                if len(found) == MOST_MEMBERS - AT_ONCE:
                    raise ValueError(TOO_MANY)
                found.append(step)
            self._all = tuple(found)
        return self._all

    def stream(self) -> Iterator[Partial[Any, Any]]:
        if self._all is not None:
            return iter(self._all)
        if self._steps is None:
            raise ValueError(
                "this group was already sent, and its iterator has no more steps; group(...) of a list"
                " can be sent again"
            )
        steps, self._steps = self._steps, None
        return (check_step(self._where, step) for step in steps)


# Number of members that `str()` of a group shows.
_SHOWN = 3


@overload
def chain(a: Signature[A], /) -> Signature[A]: ...
@overload
def chain(a: Step[A], /) -> Step[A]: ...
@overload
def chain(a: Step[A], b: Partial[A, B], /) -> Chain[B]: ...
@overload
def chain(a: Step[A], b: Partial[A, B], c: Partial[B, C], /) -> Chain[C]: ...
@overload
def chain(a: Step[A], b: Partial[A, B], c: Partial[B, C], d: Partial[C, D], /) -> Chain[D]: ...
@overload
def chain(a: Step[A], b: Partial[A, B], c: Partial[B, C], d: Partial[C, D], e: Partial[D, E], /) -> Chain[E]: ...
@overload
def chain(a: Partial[F, A], b: Partial[A, B], /) -> Partial[F, B]: ...
@overload
def chain(a: Partial[F, A], b: Partial[A, B], c: Partial[B, C], /) -> Partial[F, C]: ...
@overload
def chain(
    a: Step[A], b: Partial[A, B], c: Partial[B, C], d: Partial[C, D], e: Partial[D, E], /, *more: Partial[Any, Any]
) -> Chain[Any]: ...
def chain(*steps: Any) -> Any:
    """Compose steps that run one after another: ``chain(a.s(1), b.s(), c.s())`` is ``a.s(1) | b.s() | c.s()``.

    The result of each step is the first argument of the next step, unless that was made by ``si``. A chain of one step
    is that step. Empty groups are skipped.
    """
    if not steps:
        raise ValueError("chain() needs at least one step")
    checked: list[Partial[Any, Any]] = [check_step("chain", step) for step in steps]
    return checked[0] if len(checked) == 1 else Chain[Any](checked)


@overload
def group(steps: Iterable[Step[A]], /, *, max_failures: Literal[0] = 0) -> Group[A]: ...
@overload
def group(*steps: Step[A], max_failures: Literal[0] = 0) -> Group[A]: ...
@overload
def group(steps: Iterable[Step[A]], /, *, max_failures: int) -> Group[A | Failure]: ...
@overload
def group(*steps: Step[A], max_failures: int) -> Group[A | Failure]: ...
@overload
def group(steps: Iterable[Partial[B, A]], /, *, max_failures: int = 0) -> Partial[B, list[A]]: ...
@overload
def group(*steps: Partial[B, A], max_failures: int = 0) -> Partial[B, list[A]]: ...
def group(*steps: Any, max_failures: int = 0) -> Any:
    """Compose steps that run at the same time: ``group(a.s(1), b.s(2))``, or ``group(a.s(i) for i in range(9))``.

    The result is the list of the steps' results in the same order, or ``[]`` without steps. ``max_failures``: number of
    steps that may fail. A ``Failure`` then takes the place of each missing result. If more steps fail, the group fails.
    Default: 0.
    """
    if not is_int(max_failures) or max_failures < 0:
        raise ValueError(f"max_failures must be a number of steps, not {max_failures!r}")
    given: Any = steps
    if len(steps) == 1 and not isinstance(steps[0], Partial):
        given = steps[0]
        if not is_a(given, Iterable) or isinstance(given, (str, bytes)):
            check_step("group", given)
    return _group("group", given, max_failures)


def _group(where: str, given: Iterable[Any], max_failures: int = 0) -> Group[Any]:
    """Make a group. Steps from an iterator are not kept beyond those of the first transaction."""
    steps = iter(given)
    first = tuple(check_step(where, step) for step in islice(steps, AT_ONCE))
    following = next(steps, None) if len(first) == AT_ONCE else None
    if following is None:
        return Group(first, max_failures)
    later = Later(where, itertools.chain((following,), steps))
    if steps is not given:
        # The collection may change before the group is sent.
        later.all()
    return Group(first, max_failures, later)


@overload
def chord(header: Partial[B, list[A]], body: Partial[list[A], S], /) -> Chord[S]: ...
@overload
def chord(header: Iterable[Step[A]], body: Partial[list[A], S], /) -> Chord[S]: ...
@overload
def chord(header: Partial[B, list[A]], body: Partial[Results[A], S], /) -> Chord[S]: ...
@overload
def chord(header: Iterable[Step[A]], body: Partial[Results[A], S], /) -> Chord[S]: ...
def chord(header: Any, body: Any = None, /) -> Any:
    """Compose a group and a step that gets the list of its results: ``chord(group(...), total.s())``.

    ``header``: the group, or an iterable of its steps. Equivalent to ``group(...) | body``.
    """
    if body is None:
        raise TypeError("chord takes the group and the step after it: chord(header, body.s()).delay()")
    members: Partial[Any, Any] = cast(Any, header if is_a(header, Group) else group(header))
    return Chord[Any]([members, check_step("chord", body)])


def chunks(task: TakesArguments[*As, R], calls: Iterable[tuple[*As]], n: int) -> Group[list[R]]:
    """Compose a group of jobs, each of which makes up to ``n`` calls of ``task`` one after another.

    Use it for calls that take less time than the overhead of a job. ``calls``: a tuple of all positional arguments for
    each call. The result is a list of lists. A job is retried as a whole.
    """
    if not is_int(n) or n < 1:
        raise ValueError(f"n must be the number of calls in a job, not {n!r}")
    sender = cast("Sender[..., R]", _checked_task("chunks", task))
    made = _chunks(sender, iter(calls), n)
    return cast("Group[list[R]]", _group("chunks", made if calls is iter(calls) else list(made)))


def _chunks(sender: Sender[..., Any], calls: Iterator[Any], n: int) -> Iterator[Chunk[Any]]:
    while some := tuple(islice(calls, n)):
        for call in some:
            if isinstance(call, (str, bytes)) or not is_a(call, Iterable):
                raise TypeError(f"chunks takes a tuple of arguments for each call, not {call!r}")
        yield Chunk(sender, tuple(tuple(call) for call in some), {}, immutable=True)


def map_reduce(sender: Sender[..., Any], items: Iterable[Any], reduce: Partial[list[R], R], fan_in: int) -> Chord[R]:
    """Compose a call for each item, and calls of ``reduce`` over their results: see ``Sender.map_reduce``."""
    if not is_int(fan_in) or not 2 <= fan_in <= MOST_FAN_IN:
        raise ValueError(f"fan_in must be a number from 2 to {MOST_FAN_IN:,}, not {fan_in!r}")
    check_step("map_reduce", reduce)
    given = iter(items)
    groups: list[_Calls] = []
    while some := tuple(islice(given, fan_in)):
        groups.append(_Calls(sender, some))
    if len(groups) <= 1:
        return Chord([Group(groups[0] if groups else ()), reduce])
    level: list[Partial[Any, Any]] = [Chord([Group(calls), reduce]) if len(calls) > 1 else calls[0] for calls in groups]
    while len(level) > fan_in:
        level = [
            Chord([Group(tuple(level[at : at + fan_in])), reduce]) if at + 1 < len(level) else level[at]
            for at in range(0, len(level), fan_in)
        ]
    return Chord([Group(tuple(level)), reduce])


class _Calls(Sequence[Signature[Any]]):
    """Calls with one argument each, created on access, since there may be a million."""

    __slots__ = ("_items", "_sender")

    def __init__(self, sender: Sender[..., Any], items: tuple[Any, ...]) -> None:
        self._sender = sender
        self._items = items

    def __len__(self) -> int:
        return len(self._items)

    @overload
    def __getitem__(self, index: int) -> Signature[Any]: ...
    @overload
    def __getitem__(self, index: slice) -> list[Signature[Any]]: ...
    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return [Signature(self._sender, (item,), {}) for item in self._items[index]]
        return Signature(self._sender, (self._items[index],), {})


def check_step(where: str, step: Any) -> Partial[Any, Any]:
    """Return the step. Raises ``TypeError``, with advice, for anything else."""
    if is_a(step, Partial):
        return cast("Partial[Any, Any]", step)._as_it_is()
    if hasattr(step, "si") and hasattr(step, "task"):
        name = step.task.name.rpartition(".")[2]
        raise TypeError(f"{where} takes steps, but {step.task.name} is a task; use a call of it: {name}.s(...)")
    if is_a(step, (list, tuple)) and where != "link_error":
        of_them = "chain(*steps) takes them" if where == "chain" else "group(...) makes one step of them"
        raise TypeError(f"{where} takes steps, not a list of them; {of_them}")
    if isinstance(step, Job):
        raise TypeError(f"{where} takes steps, but {step!r} is already enqueued; task.s(...) makes a call for later")
    raise TypeError(f"{where} takes steps such as task.s(1), a chain or a group, not {step!r}")


def _steps_of_chain(step: Partial[Any, Any]) -> tuple[Partial[Any, Any], ...]:
    """Return the steps of a nested chain. A chain with callbacks of its own stays a single step."""
    return () if step._links or type(step) is not Chain else step.steps


def _checked_errback(errback: Any) -> Partial[Any, Any]:
    if not isinstance(check_step("link_error", errback), Signature):
        raise TypeError(f"link_error takes one call, such as task.s(), not {errback}")
    return cast("Partial[Any, Any]", errback)


def _checked_task(where: str, task: Any) -> Any:
    if not hasattr(task, "si") or not hasattr(task, "task"):
        raise TypeError(f"{where} takes a task, not {task!r}")
    return task


def _kind(step: Partial[Any, Any]) -> str:
    return f"a {type(step).__name__.lower()}"


def _first_call(step: Partial[Any, Any]) -> Signature[Any] | None:
    """Return the first call of a step; None if it has none."""
    if isinstance(step, Signature):
        return step
    inside: Sequence[Partial[Any, Any]] = (
        cast("Group[Any]", step)._first if is_a(step, Group) else cast("Chain[Any]", step).steps
    )
    return next((found for each in inside if (found := _first_call(each)) is not None), None)


def _plan(
    step: Partial[Any, Any],
    name: str | None = None,
    deadline: Seconds | datetime | None = None,
    atomic: bool = False,
) -> Any:
    # Imported here because programs that send no workflow do not need it.
    from penstock._flows.build import Plan

    return Plan(step, name, deadline=deadline, atomic=atomic)
