"""Meaning of annotations: which values fit them, and which classes they make serializable."""

from __future__ import annotations

import collections.abc
import functools
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from penstock._durations import is_a
from penstock._values.shapes import DICT, TUPLE, Shape, full_name, hints_by_name, shape_of

Check = Callable[[Any], bool]
"""Function that returns whether a value fits. Where every value fits, None is used instead."""


class UnresolvedHint(Exception):
    """An annotation uses a name that cannot be found at run time."""


def resolve(function: Callable[..., Any], name: str) -> dict[str, Any]:
    """Return the resolved annotations of a function. Raises ``UnresolvedHint`` when a name is missing."""
    try:
        return hints_by_name(function)
    except Exception as error:
        raise UnresolvedHint(_unresolved(name, error)) from error


def _unresolved(name: str, error: Exception) -> str:
    return (
        f"{name}: an annotation cannot be resolved ({type(error).__name__}: {error}); "
        "import what it names at the top of the module, outside `if TYPE_CHECKING`"
    )


def shapes_in(hints: Iterable[Any], custom: Mapping[str, object]) -> dict[str, Shape]:
    """Collect the classes reachable from these annotations, through containers and fields."""
    found: dict[str, Shape] = {}
    seen: list[Any] = []
    waiting = list(hints)
    while waiting:
        hint = waiting.pop()
        # Compared by identity: annotations need not be hashable, and visiting an equal one twice is harmless.
        if any(hint is other for other in seen):
            continue
        seen.append(hint)
        waiting.extend(parts_of(hint))
        if not _is_class(hint):
            continue
        name = full_name(hint)
        if typing.is_typeddict(hint):
            waiting.extend(_field_hints(name, functools.partial(_hints_of_typed_dict, hint)))
        elif name not in custom and hint.__module__ not in _NOT_SEARCHED:
            shape = shape_of(hint)
            if shape is None:
                continue
            other = found.setdefault(name, shape)
            if other.type is not hint:
                raise UnresolvedHint(f"two different classes are called {name}; rename one of them")
            waiting.extend(_field_hints(name, shape.hints))
    return found


_NOT_SEARCHED = frozenset({"builtins", "datetime", "decimal", "uuid", "pathlib", "collections", "fractions"})


def _field_hints(name: str, hints: Callable[[], list[Any]]) -> list[Any]:
    try:
        return hints()
    except Exception as error:
        raise UnresolvedHint(_unresolved(name, error)) from error


def _hints_of_typed_dict(hint: Any) -> list[Any]:
    return list(hints_by_name(hint).values())


def _is_class(hint: Any) -> bool:
    # list[int] claims to be a type, too.
    return isinstance(hint, type) and typing.get_origin(hint) is None


def parts_of(hint: Any) -> list[Any]:
    """Return the parts of an annotation."""
    origin = typing.get_origin(hint)
    if origin is typing.Literal:
        return [type(value) for value in typing.get_args(hint)]
    if origin is not None:
        return [origin, *typing.get_args(hint)]
    if isinstance(hint, typing.NewType):
        return [hint.__supertype__]
    if isinstance(hint, typing.TypeVar):
        return [*hint.__constraints__, *([hint.__bound__] if hint.__bound__ else [])]
    if _is_type_alias(hint):
        return [hint.__value__]
    if is_a(hint, (list, tuple)):  # the parameters of a Callable
        return list(hint)
    return []


def check_of(hint: Any) -> Check | None:
    """Turn an annotation into a fast check of a value that agrees with type checkers.

    Lenient on purpose where a type checker knows more than a running program (callables, protocols, type variables): it
    refuses only values that are certainly wrong.
    """
    if hint is None or hint is type(None):
        return lambda value: value is None
    if isinstance(hint, typing.NewType):
        return check_of(hint.__supertype__)
    if isinstance(hint, typing.TypeVar):
        return _any_of(hint.__constraints__) if hint.__constraints__ else check_of(hint.__bound__ or object)
    if _is_type_alias(hint):
        return _later(hint)
    if hint is typing.LiteralString:
        return _instance_of(str)
    if typing.is_typeddict(hint):
        return _typed_dict(hint)
    origin = typing.get_origin(hint)
    arguments = typing.get_args(hint)
    if origin is not None:
        return _check_of_generic(origin, arguments)
    if _is_class(hint):
        return _instance_of(hint)
    return None


def classes_of(hint: Any) -> tuple[type, ...] | None:
    """Return the classes that fully decide the check, as for ``str`` or ``str | None``; None for ``list[str]``."""
    if hint is None or hint is type(None):
        return (type(None),)
    for kind in (str, int, float, bytes, bool):
        if hint is kind:
            accepted: tuple[type, ...] = _ACCEPTED.get(kind, (kind,))
            return accepted
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        parts = [classes_of(part) for part in typing.get_args(hint)]
        return None if None in parts else tuple(kind for part in parts for kind in part or ())
    return None


def exact_items_of(hint: Any) -> frozenset[type] | None:
    """Return classes whose instances always fit as items, for an annotation of a list; None for others."""
    if typing.get_origin(hint) is not list:
        return None
    classes = classes_of(typing.get_args(hint)[0])
    return None if classes is None else frozenset(classes)


# Types that PEP 484 tells type checkers to accept in place of a float or complex.
_ACCEPTED: dict[Any, tuple[type, ...]] = {float: (float, int), complex: (complex, float, int)}


def _check_of_generic(origin: Any, arguments: tuple[Any, ...]) -> Check | None:
    if any(origin is mark for mark in _TRANSPARENT):
        return check_of(arguments[0])
    if origin is typing.Union or origin is types.UnionType:
        return _any_of(arguments)
    if origin is typing.Literal:
        return lambda value: any(value == item and type(value) is type(item) for item in arguments)
    if _is_type_alias(origin):
        return _later(origin)
    if not isinstance(origin, type) or origin in _NOT_LOOKED_INTO:
        return None
    is_origin = _instance_of(origin)
    if is_origin is None:
        return None
    if origin is tuple:
        return _tuple(arguments)
    if issubclass(origin, collections.abc.Mapping) and len(arguments) == 2:
        fits_keys, fits_values = _all(arguments[0]), _all(arguments[1])
        if fits_keys or fits_values:
            return lambda value: (
                is_origin(value)
                and (fits_keys is None or fits_keys(value))
                and (fits_values is None or fits_values(value.values()))
            )
    elif issubclass(origin, collections.abc.Iterable) and len(arguments) == 1 and origin.__module__ in _CONTAINERS:
        fits_items = _all(arguments[0])
        if fits_items is not None:
            return lambda value: is_origin(value) and (not isinstance(value, _WALKABLE) or fits_items(value))
    return is_origin


_NOT_LOOKED_INTO = (type, typing.get_origin(Callable[..., Any]))
_CONTAINERS = ("builtins", "collections", "collections.abc")
# Containers whose items are checked. Checking would exhaust an iterator, and the items of a str are strs again.
_WALKABLE: tuple[type[Any], ...] = (list, tuple, set, frozenset, dict, collections.deque)


# ReadOnly exists since Python 3.13.
_TRANSPARENT = (
    *(typing.Annotated, typing.Required, typing.NotRequired, typing.Final, typing.ClassVar),
    getattr(typing, "ReadOnly", None),
)


def _instance_of(kind: type) -> Check | None:
    if kind is object or getattr(kind, "_is_protocol", False):
        return None
    accepted: Any = _ACCEPTED.get(kind, kind)
    try:
        isinstance(None, accepted)
    except TypeError:
        return None
    return lambda value: isinstance(value, accepted)


def _all(hint: Any) -> Callable[[Iterable[Any]], bool] | None:
    """Return a check of every item. For a plain class it tries one pass in C first."""
    check = check_of(hint)
    if check is None:
        return None
    exactly = frozenset([hint] if isinstance(hint, type) else ())
    return lambda items: exactly.issuperset(map(type, items)) or all(map(check, items))


def _any_of(hints: Iterable[Any]) -> Check | None:
    checks: list[Check] = []
    for hint in hints:
        check = check_of(hint)
        if check is None:
            return None
        checks.append(check)
    if len(checks) == 2:  # most often something or None
        first, second = checks
        return lambda value: first(value) or second(value)
    return lambda value: any(check(value) for check in checks)


def _tuple(arguments: tuple[Any, ...]) -> Check:
    if len(arguments) == 2 and arguments[1] is ...:
        fits_items = _all(arguments[0])
        return lambda value: isinstance(value, TUPLE) and (fits_items is None or fits_items(value))
    if any(typing.get_origin(item) is typing.Unpack for item in arguments):
        return lambda value: isinstance(value, TUPLE)
    checks = [check_of(item) for item in arguments]
    return lambda value: (
        isinstance(value, TUPLE)
        and len(value) == len(checks)
        and all(check is None or check(item) for check, item in zip(checks, value, strict=True))
    )


def _typed_dict(hint: Any) -> Check:
    checks: dict[str, Check | None] = {}
    required: set[str] = set()

    def check(value: Any) -> bool:
        if not checks:
            # Resolved only now, because a TypedDict may contain itself.
            for name, item in hints_by_name(hint).items():
                # __required_keys__ does not look into annotations that are text.
                marked = typing.get_origin(item)
                if marked is typing.Required or (name in hint.__required_keys__ and marked is not typing.NotRequired):
                    required.add(name)
                checks[name] = check_of(item)
        return (
            isinstance(value, DICT)
            and required <= value.keys() <= checks.keys()
            and all((fits := checks[name]) is None or fits(item) for name, item in value.items())
        )

    return check


def _later(alias: Any) -> Check:
    """Build the check of a ``type`` alias on first use, because the alias may refer to itself."""
    made: list[Check | None] = []

    def check(value: Any) -> bool:
        if not made:
            made.append(check_of(alias.__value__))
        return made[0] is None or made[0](value)

    return check


def _is_type_alias(hint: Any) -> bool:
    return type(hint).__name__ == "TypeAliasType"


def spell(hint: Any) -> str:
    """Format an annotation as a person would write it."""
    if _is_class(hint):
        return str(hint.__qualname__)
    return str(hint).replace("typing.", "")
