"""Encodes values to bytes and decodes them to equal values of the same type, or raises an error.

The bytes are msgpack. Values that msgpack knows (None, bool, int, float, str, bytes, list, dict) are encoded directly,
but only when they are exactly of that type: a subclass would arrive as its base. Every other value is a msgpack
extension that names its type, so nothing has to be guessed from annotations:

    code  1 to 63  a type of the standard library; the payload is in the table below
    code 64        a class that the task's annotations name: [full name, state]
    code 65        a type with its own codec: [full name, the value that ``encode`` returned]
    code 66        a ``Job``: the 16 bytes of its id; it arrives as a job of the receiving app

A class is looked up among the classes that the receiving task names, never imported: bytes from a queue cannot choose
which code to load.
"""

from __future__ import annotations

import collections
import datetime
import decimal
import sys
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import msgspec
from msgspec.msgpack import Ext

from penstock._values.shapes import Shape, full_name, is_database_model, outline, shape_of, shown_name, type_of
from penstock.errors import CannotDecode, PenstockError

_raw_encode = msgspec.msgpack.Encoder().encode


@dataclass(frozen=True, slots=True)
class CustomType:
    """Arguments of ``app.codec``."""

    type: type
    encode: Callable[[Any], object]
    decode: Callable[[Any], object]


def register_job(kind: type, id_of: Callable[[Any], bytes]) -> None:
    """Make jobs serializable. Called by the module of their class, which imports this one."""
    _PACK[kind] = lambda pack, job: Ext(_JOB, id_of(job))


def is_built_in(kind: type) -> bool:
    """Whether values of exactly this type are serializable without a codec."""
    return kind in _PLAIN or kind in _PACK or kind in (list, dict) or _pack_late(kind) is not None


class CannotEncode(Exception):
    """``value`` is not serializable. ``why`` completes a sentence that begins with the location of the value."""

    def __init__(self, value: object, why: str) -> None:
        super().__init__(value, why)
        self.value = value
        self.why = why


class Codec:
    """Encodes and decodes the values of one task.

    ``shapes``: the classes that the task's annotations name, by full name. ``custom``: the app's codecs by full name,
    read at each use, since an app may add one later. ``job_of``: makes a job from its id.
    """

    def __init__(
        self, shapes: Mapping[str, Shape], custom: Mapping[str, CustomType], job_of: Callable[[bytes], object]
    ) -> None:
        self._job_of = job_of
        self._shapes = shapes
        self._custom = custom
        self._shape_of_type = {shape.type: shape for shape in shapes.values()}
        self.decode: Callable[[bytes | memoryview | msgspec.Raw], Any]
        self.decode = msgspec.msgpack.Decoder(ext_hook=self._unpack).decode
        # Converts to values that msgpack can encode, or raises `CannotEncode`. It leaves to msgpack the errors that
        # only msgpack detects: integers beyond 64 bits, text that is not Unicode, endless nesting.
        self.pack: Callable[[object], object] = _Packer(self, _PLAIN).pack

    def outlines(self) -> list[str]:
        """Describe the fields of each class that the annotations name."""
        return sorted(map(outline, self._shapes.values()))

    def encode(self, value: object) -> bytes:
        """Encode a value, or raise ``CannotEncode``."""
        try:
            try:
                return _raw_encode(self.pack(value))
            except (OverflowError, UnicodeEncodeError):
                # Some integer is beyond 64 bits, or some text is not Unicode: check each value.
                return _raw_encode(_Packer(self, _PLAIN_WITHOUT_LIMITS).pack(value))
        except RecursionError:
            raise CannotEncode(value, "contains itself or is nested too deeply") from None
        except UnicodeEncodeError as error:
            raise CannotEncode(error.object, "is not valid Unicode") from None

    def encode_sorted(self, value: object) -> bytes:
        """Encode a value for a key: equal maps and sets yield the same bytes. Raises ``CannotEncode``."""
        try:
            return _raw_encode(_SortedPacker(self, _PLAIN_WITHOUT_LIMITS).pack(value))
        except RecursionError:
            raise CannotEncode(value, "contains itself or is nested too deeply") from None
        except UnicodeEncodeError as error:
            raise CannotEncode(error.object, "is not valid Unicode") from None

    def pack_named(self, packer: _Packer, value: Any) -> object:
        """Pack a value of a type that is not built in."""
        kind = type_of(value)
        shape = self._shape_of_type.get(kind)
        if shape is not None:
            return Ext(_NAMED, _raw_encode([shape.name, packer.pack(shape.take(value))]))
        pack = _pack_late(kind)
        if pack is not None:
            return pack(packer.pack, value)
        name = full_name(kind)
        custom = self._custom.get(name)
        if custom is not None and custom.type is kind:
            return Ext(_CUSTOM, _raw_encode([name, packer.pack(custom.encode(value))]))
        raise CannotEncode(value, _advice(value))

    def _unpack(self, code: int, payload: memoryview) -> object:
        if code in (_NAMED, _CUSTOM):
            name, state = self.decode(payload)
            if code == _CUSTOM:
                custom = self._custom.get(name)
                if custom is None:
                    raise CannotDecode(f"it holds a {name}, but this app has no codec for it")
                try:
                    return custom.decode(state)
                except PenstockError:
                    raise
                except Exception as error:
                    raise CannotDecode(f"the app's codec for {name} raised {type(error).__name__}: {error}") from error
            shape = self._shapes.get(name)
            if shape is None:
                raise CannotDecode(f"it holds a {name}, which the annotations do not name here")
            return shape.make(state)
        if code == _JOB:
            return self._job_of(bytes(payload))
        unpack = _UNPACK.get(code)
        if unpack is None:
            raise CannotDecode(f"it holds a value of an unknown kind ({code}), made by a newer penstock")
        return unpack(self.decode, payload)


class _Packer:
    """Replaces values that msgpack does not know. Values of the types in ``plain`` stay as they are."""

    __slots__ = ("_codec", "_plain")

    def __init__(self, codec: Codec, plain: frozenset[type]) -> None:
        self._codec = codec
        self._plain = plain

    def pack(self, value: Any) -> object:
        kind = type_of(value)
        if kind in self._plain:
            return value
        if kind is list:
            # One pass in C recognizes a list of only numbers or strings.
            return value if self._plain.issuperset(map(type, value)) else [self.pack(item) for item in value]
        if kind is dict:
            return self._pack_dict(value)
        pack = _PACK.get(kind)
        return self._codec.pack_named(self, value) if pack is None else pack(self.pack, value)

    def _pack_dict(self, value: dict[Any, Any]) -> object:
        if not self._plain.issuperset(map(type, value)):
            return Ext(_PAIRS, _pairs(self.pack, value))
        if self._plain.issuperset(map(type, value.values())):
            return value
        return {key: self.pack(item) for key, item in value.items()}


class _SortedPacker(_Packer):
    """Packs maps and sets in the order of their encoded bytes, because their own order differs between processes."""

    __slots__ = ()

    def pack(self, value: Any) -> object:
        kind = type_of(value)
        if kind is set or kind is frozenset:
            items = sorted(_raw_encode(self.pack(item)) for item in value)
            return Ext(4 if kind is set else 5, _raw_encode([msgspec.Raw(item) for item in items]))
        if kind is collections.Counter:
            value = collections.Counter(dict(self._sorted(value)))
        elif kind is collections.defaultdict:
            value = collections.defaultdict(value.default_factory, self._sorted(value))
        elif kind is list:
            return [self.pack(item) for item in value]
        return super().pack(value)

    def _pack_dict(self, value: dict[Any, Any]) -> object:
        if any(type(key) is not str for key in value):
            return Ext(_PAIRS, _pairs(self.pack, dict(self._sorted(value))))
        return {key: self.pack(item) for key, item in self._sorted(value)}

    def _sorted(self, value: Mapping[Any, Any]) -> list[tuple[Any, Any]]:
        return sorted(value.items(), key=lambda item: _raw_encode(self.pack(item[0])))


_PLAIN: frozenset[type] = frozenset({type(None), bool, int, float, str, bytes})
_PLAIN_WITHOUT_LIMITS = _PLAIN - {int, str}

_PAIRS = 1
_NAMED = 64
_CUSTOM = 65
_JOB = 66

_Pack = Callable[[Any], object]
_Decode = Callable[[memoryview], Any]


def _pairs(pack: _Pack, value: Mapping[Any, Any]) -> bytes:
    return _raw_encode([[pack(key), pack(item)] for key, item in value.items()])


def _pack_int(pack: _Pack, value: int) -> object:
    if -(1 << 63) <= value < 1 << 64:
        return value
    return Ext(2, value.to_bytes(value.bit_length() // 8 + 1, signed=True))


def _pack_str(pack: _Pack, value: str) -> object:
    try:
        value.encode()
    except UnicodeEncodeError:
        raise CannotEncode(value, "is not valid Unicode; if it is a file's name, pass os.fsencode(...)") from None
    return value


def _items(code: int) -> Callable[[_Pack, Any], Ext]:
    return lambda pack, value: Ext(code, _raw_encode([pack(item) for item in value]))


def _text(code: int) -> Callable[[_Pack, Any], Ext]:
    # File names may contain bytes that are not Unicode; Python keeps them as surrogate escapes.
    return lambda pack, value: Ext(code, str(value).encode(errors="surrogateescape"))


def _pack_datetime(pack: _Pack, value: datetime.datetime) -> Ext:
    if value.fold == 0 and (value.tzinfo is None or value.tzinfo is datetime.UTC):
        return Ext(10, value.isoformat().encode())
    return Ext(11, _raw_encode([value.replace(tzinfo=None, fold=0).isoformat(), value.fold, _zone(pack, value)]))


def _pack_time(pack: _Pack, value: datetime.time) -> Ext:
    return Ext(13, _raw_encode([value.replace(tzinfo=None, fold=0).isoformat(), value.fold, _zone(pack, value)]))


def _zone(pack: _Pack, value: datetime.datetime | datetime.time) -> object:
    zone = value.tzinfo
    if zone is None or type(zone) in _PACK or _pack_late(type(zone)) is not None:
        return pack(zone)
    raise CannotEncode(
        value, f"has a time zone of type {shown_name(type(zone))}; use zoneinfo.ZoneInfo or datetime.timezone"
    )


def _pack_zone_info(pack: _Pack, value: Any) -> Ext:
    # A zone that ZoneInfo.from_file made has no key.
    if value.key is None:
        raise CannotEncode(value, "is a time zone without a name; use zoneinfo.ZoneInfo(name)")
    return Ext(_ZONE_INFO, value.key.encode())


def _pack_timezone(pack: _Pack, value: datetime.timezone) -> Ext:
    offset = value.utcoffset(None)
    name = [value.tzname(None)] if value.tzname(None) != datetime.timezone(offset).tzname(None) else []
    return Ext(15, _raw_encode([offset.days, offset.seconds, offset.microseconds, *name]))


def _unpack_timezone(decode: _Decode, payload: memoryview) -> datetime.timezone:
    days, seconds, microseconds, *name = decode(payload)
    return datetime.timezone(datetime.timedelta(days, seconds, microseconds), *name)


def _unpack_datetime(decode: _Decode, payload: memoryview) -> datetime.datetime:
    text, fold, zone = decode(payload)
    return datetime.datetime.fromisoformat(text).replace(fold=fold, tzinfo=zone)


def _unpack_time(decode: _Decode, payload: memoryview) -> datetime.time:
    text, fold, zone = decode(payload)
    return datetime.time.fromisoformat(text).replace(fold=fold, tzinfo=zone)


def _pack_default_dict(pack: _Pack, value: collections.defaultdict[Any, Any]) -> Ext:
    factory = value.default_factory
    name = next((name for name, known in _FACTORIES.items() if known is factory), None)
    if factory is not None and name is None:
        raise CannotEncode(value, "is a defaultdict whose default is a function; pass dict(...) of it")
    return Ext(20, _raw_encode([name, _pairs(pack, value)]))


def _unpack_default_dict(decode: _Decode, payload: memoryview) -> object:
    name, pairs = decode(payload)
    return collections.defaultdict(None if name is None else _FACTORIES[name], decode(pairs))


_FACTORIES: dict[str, type] = {
    kind.__name__: kind for kind in (int, float, bool, str, bytes, list, dict, set, tuple, complex, frozenset)
}


def _unpack_deque(decode: _Decode, payload: memoryview) -> object:
    maxlen, items = decode(payload)
    return collections.deque(items, maxlen)


def _utf8(payload: memoryview) -> str:
    return str(payload, "utf-8", "surrogateescape")


# Keyed by the exact type. A code never changes its meaning: journals contain them.
_PACK: dict[type, Callable[[_Pack, Any], object]] = {
    int: _pack_int,
    str: _pack_str,
    tuple: _items(3),
    set: _items(4),
    frozenset: _items(5),
    bytearray: lambda pack, value: Ext(6, bytes(value)),
    complex: lambda pack, value: Ext(7, _raw_encode([value.real, value.imag])),
    decimal.Decimal: _text(8),
    uuid.UUID: lambda pack, value: Ext(9, value.bytes),
    datetime.datetime: _pack_datetime,
    datetime.date: _text(12),
    datetime.time: _pack_time,
    datetime.timedelta: lambda pack, value: Ext(14, _raw_encode([value.days, value.seconds, value.microseconds])),
    datetime.timezone: _pack_timezone,
    collections.OrderedDict: lambda pack, value: Ext(18, _pairs(pack, value)),
    collections.Counter: lambda pack, value: Ext(19, _pairs(pack, value)),
    collections.defaultdict: _pack_default_dict,
    collections.deque: lambda pack, value: Ext(24, _raw_encode([value.maxlen, [pack(item) for item in value]])),
    range: lambda pack, value: Ext(25, _raw_encode([pack(value.start), pack(value.stop), pack(value.step)])),
}

# Types that few programs use, and whose modules take a tenth of the time of `import penstock`, so they are imported
# only when such a value occurs.
_ZONE_INFO = 16
_LATE = {
    "ZoneInfo": (_ZONE_INFO, "zoneinfo"),
    "Fraction": (17, "fractions"),
    "PosixPath": (21, "pathlib"),
    "PurePosixPath": (22, "pathlib"),
    "PureWindowsPath": (23, "pathlib"),
    "IPv4Address": (26, "ipaddress"),
    "IPv6Address": (27, "ipaddress"),
    "IPv4Network": (28, "ipaddress"),
    "IPv6Network": (29, "ipaddress"),
    "IPv4Interface": (30, "ipaddress"),
    "IPv6Interface": (31, "ipaddress"),
}


def _pack_late(kind: type) -> Callable[[_Pack, Any], object] | None:
    """Return the packer of a rarely used type and register it, or None for other types."""
    code, module = _LATE.get(kind.__name__, (0, ""))
    if getattr(sys.modules.get(module), kind.__name__, None) is not kind:
        return None
    pack = _PACK[kind] = _pack_zone_info if code == _ZONE_INFO else _text(code)
    return pack


def _unpack_late(code: int, module: str, name: str) -> Callable[[_Decode, memoryview], object]:
    def unpack(decode: _Decode, payload: memoryview) -> object:
        kind = getattr(import_module(module), name)
        _UNPACK[code] = lambda decode, payload: kind(_utf8(payload))
        return kind(_utf8(payload))

    return unpack


_UNPACK: dict[int, Callable[[_Decode, memoryview], object]] = {
    _PAIRS: lambda decode, payload: dict(decode(payload)),
    2: lambda decode, payload: int.from_bytes(payload, signed=True),
    3: lambda decode, payload: tuple(decode(payload)),
    4: lambda decode, payload: set(decode(payload)),
    5: lambda decode, payload: frozenset(decode(payload)),
    6: lambda decode, payload: bytearray(payload),
    7: lambda decode, payload: complex(*decode(payload)),
    8: lambda decode, payload: decimal.Decimal(_utf8(payload)),
    9: lambda decode, payload: uuid.UUID(bytes=bytes(payload)),
    10: lambda decode, payload: datetime.datetime.fromisoformat(_utf8(payload)),
    11: _unpack_datetime,
    12: lambda decode, payload: datetime.date.fromisoformat(_utf8(payload)),
    13: _unpack_time,
    14: lambda decode, payload: datetime.timedelta(*decode(payload)),
    15: _unpack_timezone,
    18: lambda decode, payload: collections.OrderedDict(decode(payload)),
    19: lambda decode, payload: collections.Counter(dict(decode(payload))),
    20: _unpack_default_dict,
    24: _unpack_deque,
    25: lambda decode, payload: range(*decode(payload)),
    **{code: _unpack_late(code, module, name) for name, (code, module) in _LATE.items()},
}


def _advice(value: object) -> str:
    """Return advice for a value that is not serializable."""
    kind = type(value)
    name = shown_name(kind)
    name = f"{'an' if name[0] in 'aeiou' and kind.__module__ == 'builtins' else 'a'} {name}"
    package = kind.__module__.partition(".")[0]
    if is_database_model(kind):
        return f"is {name}, a row of your database: pass its key and load it in the task"
    if package == "django" and kind.__name__ == "QuerySet":
        return "is a QuerySet: pass a list of keys and load the rows in the task"
    if package == "numpy" and hasattr(value, "item") and not getattr(value, "shape", ()):
        return f"is {name}: pass value.item()"
    if package == "numpy":
        return f"is {name}: pass value.tolist(), or add a codec with app.codec({kind.__name__}, encode, decode)"
    if kind.__module__ == "penstock" and hasattr(kind, "as_completed"):
        return f"is {name}: pass its id, and call app.workflow(id) in the task"
    if kind.__module__ == "penstock" and hasattr(kind, "link_error"):
        return f"is {name}, which was not sent: pass its parts, and compose it in the task"
    if shape_of(kind) is not None:
        return (
            f"is {name}, which the annotations do not name: name {kind.__name__} in the annotation"
            f" of the parameter (or of the result), or add a codec with app.codec({kind.__name__}, encode, decode)"
        )
    if isinstance(value, memoryview):
        return "is a memoryview: pass bytes(...) of it"
    for base in (int, float, str, bytes, dict, list, tuple, set, frozenset, datetime.datetime, datetime.date):
        if isinstance(value, base):
            return (
                f"is {name}, which would not arrive as one: pass a plain {base.__name__},"
                f" or add a codec with app.codec({kind.__name__}, encode, decode)"
            )
    return f"is {name}: pass plain data instead, or add a codec with app.codec({kind.__name__}, encode, decode)"
