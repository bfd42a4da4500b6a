"""Unique jobs: which calls are the same job, for how long, and the encoding of their keys."""

# No `from __future__ import annotations`: see `_public.py`.
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast

from penstock import _core
from penstock._durations import Seconds, duration_ms, is_a, is_number
from penstock._public import public
from penstock._values.codec import CannotEncode

if TYPE_CHECKING:
    from penstock._tasks.task import AnyTask

By: TypeAlias = Literal["args"] | Callable[..., object] | Iterable[str]
Until: TypeAlias = Literal["waiting", "done"] | timedelta


@public
@dataclass(frozen=True, slots=True)
class Unique:
    """Rule for which calls of a task are one job: ``@app.task(unique=Unique(by=("user",), until="waiting"))``."""

    by: By = "args"
    """Arguments that make two calls the same: ``"args"`` for all arguments as given, without defaults; or names of
    parameters; or a function that gets the arguments and returns any serializable value."""
    until: Until = "done"
    """End of that period. ``"waiting"``: when a worker takes the job. ``"done"``: when it has ended, retries included.
    A timedelta: after that time, whatever happens to the job."""
    on_conflict: Literal["return", "replace", "raise"] = "return"
    """Result of another call within the period. ``"return"``: the existing job, whose ``created`` is False.
    ``"raise"``: raises ``JobExists``. ``"replace"``: the new call replaces a waiting job; a running one is returned."""


@public
@dataclass(frozen=True, slots=True)
class Debounce:
    """Rule that turns a burst of calls into one job with the arguments of the last: ``Debounce(2.0, max_wait=30)``."""

    wait: Seconds
    """Time without another call after which the job is due."""
    max_wait: Seconds | None = None
    """Longest time from the first call until the job is due. Default: ten times ``wait``."""
    by: Callable[..., object] | Iterable[str] = ()
    """Names of parameters, or a function of the arguments. Calls that are equal in these are debounced together.
    Default: all calls of the task."""


_DAY_MS = 86_400_000
_LONGEST_KEY = 512

# First byte of a key. If the encoding changes, so does this byte, and for one release both keys are looked up.
_RULE = b"\x01"


class Rule:
    """Checked uniqueness option. Builds the options of one call, with its key."""

    __slots__ = ("_by", "_conflict", "_key", "_ms", "_until", "_wait")

    def __init__(
        self,
        by: By | None,
        until: str,
        *,
        ms: int | None = None,
        conflict: str = "return",
        wait: tuple[int, int] | None = None,
        key: bytes | None = None,
    ) -> None:
        self._by = by
        self._until = until
        self._ms = ms
        self._conflict = conflict
        self._wait = wait
        self._key = key

    @property
    def keeps_result_ms(self) -> int:
        """Time for which the result must be kept: as long as an idempotency key holds."""
        return 0 if self._key is None else _DAY_MS

    def check(self, task: "AnyTask[..., Any]") -> None:
        """Raise ``ValueError`` if the task lacks one of the parameters."""
        if self._by is None or callable(self._by):
            return
        parameters = _parameters(task.function)
        if task.is_remote:
            raise ValueError(
                f"{task.name} is known only by name, without its parameters: make it unique by a function of the"
                " arguments, or give an idempotency_key"
            )
        unknown = [name for name in self._by if name not in parameters] if self._by != "args" else []
        if unknown:
            raise ValueError(
                f"{task.name}() has no parameter {unknown[0]!r} to be unique by;"
                f" it has {', '.join(parameters) or 'none'}"
            )

    def options(
        self, task: "AnyTask[..., Any]", options: _core.Options, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> _core.Options:
        """Return the options of this call, with its key."""
        wait_ms, max_wait_ms = self._wait or (None, None)
        return options.claimed(
            self._key_of(task, args, kwargs),
            is_own=self._key is not None,
            until=self._until,
            for_ms=self._ms,
            conflict=self._conflict,
            wait_ms=wait_ms,
            max_wait_ms=max_wait_ms,
        )

    def _key_of(self, task: "AnyTask[..., Any]", args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bytes:
        if self._key is not None:
            return key_of(task.name, self._key)
        by = self._by
        if callable(by):
            try:
                value = by(*args, **kwargs)
            except Exception as error:
                raise ValueError(
                    f"{task.name}(): the function {_name(by)} of its unique key raised {type(error).__name__}: {error};"
                    " nothing was sent"
                ) from error
        else:
            value = given(task.function, args, kwargs)
            if by != "args":
                value = {name: value[name] for name in cast("tuple[str, ...]", by) if name in value}
        return key_of(task.name, digest(task, value))


def key_of(task: str, rest: bytes) -> bytes:
    """Return the bytes of a key: the rule, the length and the name of the task, and the part that identifies the
    call."""
    name = task.encode()
    return _RULE + bytes((len(name),)) + name + rest


def digest(task: "AnyTask[..., Any]", value: object) -> bytes:
    """Hash a value, the same in every process and version. Raises ``TypeError`` if it cannot be serialized."""
    # Imported here because programs import modules with tasks that they never call.
    import hashlib

    try:
        encoded = task.arguments.codec.encode_sorted(value)
    except CannotEncode as error:
        raise TypeError(f"{task.name}(): a value of its unique key {error.why}") from None
    return hashlib.blake2b(encoded, digest_size=16).digest()


def given(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments by parameter name, without defaults."""
    names, rest = _positional(function)
    found = dict(zip(names, args, strict=False))
    if rest is not None and len(args) > len(names):
        found[rest] = list(args[len(names) :])
    return {**found, **kwargs}


def _code(function: Callable[..., Any]) -> Any:
    # Not inspect.signature, which evaluates annotations: their names may be imported later in the module.
    return getattr(inspect.unwrap(function), "__code__", None)


def _positional(function: Callable[..., Any]) -> tuple[tuple[str, ...], str | None]:
    code = _code(function)
    if code is None:
        return (), None
    count = code.co_argcount
    rest = code.co_varnames[count + code.co_kwonlyargcount] if code.co_flags & inspect.CO_VARARGS else None
    return code.co_varnames[:count], rest


def _parameters(function: Callable[..., Any]) -> tuple[str, ...]:
    code = _code(function)
    if code is None:
        return ()
    flags = bool(code.co_flags & inspect.CO_VARARGS) + bool(code.co_flags & inspect.CO_VARKEYWORDS)
    return tuple(code.co_varnames[: code.co_argcount + code.co_kwonlyargcount + flags])


def _name(function: Callable[..., object]) -> str:
    return f"{getattr(function, '__qualname__', type(function).__qualname__)}()"


def rule_of(unique: Any, idempotency_key: Any, debounce: Any, *, is_delayed: bool) -> Rule | None:
    """Check the three options together. Raises ``ValueError`` or ``TypeError``."""
    options = {"unique": unique, "idempotency_key": idempotency_key, "debounce": debounce}
    named = [name for name, value in options.items() if value is not None]
    if not named:
        return None
    if len(named) > 1:
        raise ValueError(f"give {' or '.join(named)}, not both: a call has one key. None removes the task's own")
    if debounce is not None:
        if is_delayed:
            raise ValueError("give debounce, or countdown or eta, not both: debounce delays the job itself")
        return _debounced(debounce if isinstance(debounce, Debounce) else Debounce(debounce))
    if idempotency_key is not None:
        return _idempotent(idempotency_key)
    if not isinstance(unique, Unique):
        unique = Unique(until=unique)
    return _unique(unique)


def _unique(unique: Unique) -> Rule:
    conflict: Any = unique.on_conflict
    until: Any = unique.until
    if conflict not in ("return", "replace", "raise"):
        raise ValueError(f'on_conflict must be "return", "replace" or "raise", not {conflict!r}')
    by = _checked_by(unique.by)
    if is_a(until, timedelta):
        ms = _positive_ms("unique", until)
        if conflict == "replace":
            raise ValueError('on_conflict="replace" needs until="waiting" or "done", not a time')
        return Rule(by, "time", ms=ms, conflict=conflict)
    if until not in ("waiting", "done"):
        raise ValueError(f'unique must be "waiting", "done", a timedelta or Unique(...), not {until!r}')
    return Rule(by, "start" if until == "waiting" else "end", conflict=conflict)


def _idempotent(key: Any) -> Rule:
    if not is_a(key, str) or not key:
        raise TypeError(f"idempotency_key must be a string, not {key!r}")
    encoded = key.encode(errors="surrogatepass")
    if len(encoded) > _LONGEST_KEY:
        raise ValueError(f"idempotency_key may have at most {_LONGEST_KEY} bytes, not {len(encoded)}")
    return Rule(None, "time", ms=_DAY_MS, key=encoded)


def _debounced(debounce: Debounce) -> Rule:
    if not is_a(debounce.wait, timedelta) and not is_number(debounce.wait):
        raise TypeError(f"debounce must be seconds, a timedelta or Debounce(...), not {debounce.wait!r}")
    wait_ms = _positive_ms("debounce", debounce.wait)
    max_wait_ms = 10 * wait_ms if debounce.max_wait is None else _positive_ms("max_wait", debounce.max_wait)
    if max_wait_ms < wait_ms:
        raise ValueError(f"max_wait must be at least wait: they are {debounce.max_wait!r} and {debounce.wait!r}")
    by: Any = debounce.by
    if by == "args":
        raise ValueError("debounce by all arguments would merge only identical calls: name some of the parameters")
    return Rule(_checked_by(by), "start", conflict="replace", wait=(wait_ms, max_wait_ms))


def _checked_by(by: Any) -> Any:
    if by == "args" or callable(by):
        return by
    if is_a(by, str):
        raise ValueError(f'by must be "args", names of parameters such as ({by!r},), or a function, not {by!r}')
    names = tuple(by) if is_a(by, Iterable) else ()
    if not is_a(by, Iterable) or not all(is_a(name, str) for name in names):
        raise TypeError(f'by must be "args", names of parameters, or a function, not {by!r}')
    return names


def _positive_ms(name: str, value: Seconds) -> int:
    ms = duration_ms(name, value)
    if ms == 0:
        raise ValueError(f"{name} must be at least a millisecond, not {value!r}")
    return ms
