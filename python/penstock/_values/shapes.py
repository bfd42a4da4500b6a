"""Shapes of classes: the state of a value that is sent, and how to restore the value from it.

A value is restored like ``copy`` and ``pickle`` do, from its state and without running ``__init__`` or validators. So
equal values stay equal, and data from a queue runs no code. Fields added to a class after the job was enqueued get
their default.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import os
import sys
import typing
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from penstock.errors import CannotDecode

# Built-in types, annotated with `Any` content: a value's class says nothing about its items.
DICT: type[Any] = dict
TUPLE: type[Any] = tuple
type_of: Callable[[object], type[Any]] = type


class ShapeError(CannotDecode):
    """Received state does not fit the class."""


@dataclasses.dataclass(frozen=True, slots=True)
class Shape:
    """Functions that take apart and rebuild values of a class that annotations name."""

    name: str
    type: type
    take: Callable[[Any], object]
    make: Callable[[Any], object]
    # Annotations of the fields. The classes in them become serializable, too.
    hints: Callable[[], list[Any]]


def outline(shape: Shape) -> str:
    """Describe a class: the members of an enumeration, or the annotated fields of any other class."""
    parts = list(shape.type.__members__) if issubclass(shape.type, enum.Enum) else shape.hints()
    return f"{shape.name}: {parts}"


def full_name(cls: type) -> str:
    """Return ``module.qualname``, with the module's real name if it runs as a script."""
    return f"{module_name(cls.__module__)}.{cls.__qualname__}"


def shown_name(cls: type) -> str:
    """Return the full name of a class, or just the name of a built-in one."""
    return cls.__qualname__ if cls.__module__ == "builtins" else full_name(cls)


def module_name(module: str) -> str:
    """Return the name by which a module is imported: ``shop``, not ``__main__``, for ``python shop.py``."""
    if module != "__main__":
        return module
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    if spec is not None:
        return str(spec.name)
    file = getattr(main, "__file__", None)
    return os.path.splitext(os.path.basename(file))[0] if file else module


def shape_of(cls: type) -> Shape | None:
    """Return the shape of an Enum, NamedTuple, dataclass, attrs class, Struct or pydantic v2 model; else None."""
    shape = _shape_of(cls)
    return None if shape is None else Shape(full_name(cls), cls, *shape)


_Parts = tuple[Callable[[Any], object], Callable[[Any], object], Callable[[], list[Any]]]


def is_database_model(cls: type) -> bool:
    """Whether a class is a Django or SQLAlchemy model: a row of a database, not a value."""
    return hasattr(cls, "_sa_class_manager") or any(
        base.__module__ == "django.db.models.base" and base.__name__ == "Model" for base in cls.__mro__
    )


def _shape_of(cls: type[Any]) -> _Parts | None:
    if is_database_model(cls):
        return None
    if issubclass(cls, enum.Enum):
        return _enum(cls)
    if issubclass(cls, TUPLE) and hasattr(cls, "_fields"):
        return _named_tuple(cls)
    if issubclass(cls, msgspec.Struct):
        return _struct(cls)
    if hasattr(cls, "__pydantic_validator__") and hasattr(cls, "model_fields"):
        return _pydantic(cls)
    if any(base is not object and not base.__flags__ & _MADE_BY_CLASS_STATEMENT for base in cls.__mro__):
        # State that Python code cannot see, as in a dataclass that is also a dict.
        return None
    if dataclasses.is_dataclass(cls):
        return _object(cls, _dataclass_defaults(cls))
    if hasattr(cls, "__attrs_attrs__"):
        return _object(cls, _attrs_defaults(cls))
    return None


_MADE_BY_CLASS_STATEMENT = 1 << 9  # Py_TPFLAGS_HEAPTYPE

# Factory of each field's default; None for a field without one.
_Defaults = dict[str, Callable[[], object] | None]


def _enum(cls: Any) -> _Parts:
    members = cls.__members__

    if issubclass(cls, enum.Flag):
        return _flag_value, cls, list

    def make(name: str) -> object:
        try:
            return members[name]
        except KeyError:
            raise ShapeError(f"{full_name(cls)} has no member {name!r}") from None

    return (lambda value: value._name_), make, list


def _flag_value(value: Any) -> object:
    return value._value_


def _named_tuple(cls: Any) -> _Parts:
    defaults = cls._field_defaults

    def make(state: dict[str, object]) -> object:
        _refuse_unknown(cls, state, cls._fields)
        for name in cls._fields:
            if name not in state:
                state[name] = defaults[name] if name in defaults else _missing(cls, name)
        return TUPLE.__new__(cls, [state[name] for name in cls._fields])

    return (lambda value: dict(zip(cls._fields, value, strict=True))), make, functools.partial(_hints_of, cls)


def _struct(cls: Any) -> _Parts:
    names = cls.__struct_fields__

    def make(state: dict[str, object]) -> object:
        _refuse_unknown(cls, state, names)
        try:
            value = cls(**state)
        except TypeError as error:
            raise ShapeError(f"{full_name(cls)}: {error}") from None
        # msgspec always runs __post_init__. It ran before sending, and must not change anything now.
        for name, item in state.items():
            msgspec.structs.force_setattr(value, name, item)
        return value

    return (lambda value: {name: getattr(value, name) for name in names}), make, functools.partial(_hints_of, cls)


def _pydantic(cls: Any) -> _Parts:
    # Pydantic itself uses __getstate__ and __setstate__ to copy a model without validation.
    def take(value: Any) -> object:
        state = dict(value.__getstate__())
        state["__dict__"] = _without_caches(cls, state["__dict__"])
        return state

    def make(state: dict[str, Any]) -> object:
        held = state["__dict__"]
        for name, field in cls.model_fields.items():
            if name not in held:
                held[name] = (
                    _missing(cls, name) if field.is_required() else field.get_default(call_default_factory=True)
                )
        value = cls.__new__(cls)
        value.__setstate__(state)
        return value

    return take, make, lambda: [field.annotation for field in cls.model_fields.values()]


def _object(cls: type[Any], defaults: _Defaults) -> _Parts:
    slots = frozenset(_slots_of(cls))
    has_dict = bool(cls.__dictoffset__)

    def take(value: object) -> object:
        state = {name: getattr(value, name) for name in slots if hasattr(value, name)}
        if has_dict:
            state.update(_without_caches(cls, vars(value)))
        return state

    def make(state: dict[str, object]) -> object:
        value: Any = object.__new__(cls)
        for name, item in state.items():
            try:
                object.__setattr__(value, name, item)
            except AttributeError:
                raise ShapeError(f"{full_name(cls)} has no field {name!r}") from None
        for name, default in defaults.items():
            if name not in state:
                object.__setattr__(value, name, _missing(cls, name) if default is None else default())
        return value

    return take, make, functools.partial(_hints_of, cls)


def _dataclass_defaults(cls: Any) -> _Defaults:
    defaults: _Defaults = {}
    for field in dataclasses.fields(cls):
        if field.default_factory is not dataclasses.MISSING:
            defaults[field.name] = field.default_factory
        elif field.default is not dataclasses.MISSING:
            defaults[field.name] = functools.partial(_same, field.default)
        elif field.init:
            defaults[field.name] = None
    return defaults


def _attrs_defaults(cls: Any) -> _Defaults:
    attr: Any = sys.modules["attr"]
    defaults: _Defaults = {}
    for field in cls.__attrs_attrs__:
        if field.default is attr.NOTHING:
            if field.init:
                defaults[field.name] = None
        elif isinstance(field.default, attr.Factory):
            if not field.default.takes_self:
                defaults[field.name] = field.default.factory
        else:
            defaults[field.name] = functools.partial(_same, field.default)
    return defaults


def _same(value: object) -> object:
    return value


def _missing(cls: type, name: str) -> object:
    raise ShapeError(f"{full_name(cls)} gained the field {name!r} after the job was enqueued; give it a default")


def _refuse_unknown(cls: type, state: dict[str, object], names: tuple[str, ...]) -> None:
    for name in state:
        if name not in names:
            raise ShapeError(f"{full_name(cls)} has no field {name!r}")


def _without_caches(cls: type, state: dict[str, Any]) -> dict[str, Any]:
    """Leave out values cached by ``cached_property``, which are recomputed on demand, and the attribute that
    ``Box[int](1)`` leaves in its instance."""
    return {
        name: value
        for name, value in state.items()
        if name != "__orig_class__" and not isinstance(getattr(cls, name, None), functools.cached_property)
    }


def _slots_of(cls: type) -> Iterator[str]:
    for base in cls.__mro__:
        slots = base.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name.startswith("__") and not name.endswith("__"):
                yield f"_{base.__name__.lstrip('_')}{name}"
            elif name not in ("__dict__", "__weakref__"):
                yield name


def _hints_of(cls: type) -> list[Any]:
    return list(hints_by_name(cls).values())


def hints_by_name(thing: Any) -> dict[str, Any]:
    """Return the resolved annotations of a function or class. Raises any error of the lookup."""
    # Python 3.12 does not find the type parameters of `class Leaf[T]` in annotations that are text.
    parameters = {
        parameter.__name__: parameter
        for owner in getattr(thing, "__mro__", (thing,))
        for parameter in getattr(owner, "__type_params__", ())
    }
    return typing.get_type_hints(thing, localns=parameters or None, include_extras=True)
