"""Arguments of a call: bound to the task's signature, checked against its annotations, and encoded.

A function generated for each task, with the task's own parameters, binds them: ``inspect.Signature.bind`` takes twenty
times as long.
"""

from __future__ import annotations

import collections
import copy
import functools
import inspect
import itertools
import re
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import msgspec

from penstock._durations import is_a
from penstock._values.codec import CannotEncode, Codec, CustomType
from penstock._values.hints import check_of, classes_of, exact_items_of, resolve, shapes_in, spell
from penstock._values.remote_errors import message_of
from penstock._values.secrets import is_secret_hint, is_secret_name
from penstock._values.shapes import shape_of, type_of
from penstock.errors import ArgumentMismatch, PayloadTooLarge

_encode = msgspec.msgpack.Encoder().encode
_HIGHEST_BIT = 1 << 63
_UNKNOWN_VERSION = _HIGHEST_BIT
# In msgpack: the first byte of a body with a version, and the byte before the version itself.
_ARRAY_OF_THREE = b"\x93"
_UINT_64 = b"\xcf"
_NO_KEYWORDS: Mapping[str, Any] = {}
_PLAIN: frozenset[type] = frozenset({type(None), bool, int, float, str, bytes})


class Arguments:
    """Parameters and result of one task. Raises ``UnresolvedHint`` when its annotations cannot be resolved."""

    def __init__(
        self,
        task: str,
        function: Callable[..., Any],
        custom: Mapping[str, CustomType],
        job_of: Callable[[bytes], object],
    ) -> None:
        self._task = task
        hints = resolve(function, task)
        self._parameters = inspect.signature(function).parameters
        self.codec = Codec(shapes_in(hints.values(), custom), custom, job_of)
        self._hints = hints
        self._result_check = check_of(hints["return"]) if "return" in hints else None
        self.bind = _binder(task, self._parameters, hints, self._wrong)
        self._version = _version(self._parameters, hints, self.codec)
        first = hints.get(next(iter(self._parameters), ""))
        self.takes_stream: bool = getattr(typing.get_origin(first) or first, "_is_stream", False) is True
        """Whether the first parameter takes a group's results as a ``Results`` object."""

    def encode(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
        """Return the body of a job. Raises ``TypeError``, which names the task, the argument and the remedy."""
        self.bind(*args, **kwargs)
        return self._encode_bound(args, kwargs)

    def encode_rest(self, args: tuple[Any, ...], kwargs: dict[str, Any], count: int = 1) -> bytes:
        """Return the body of a job that gets its first ``count`` arguments from other steps."""
        bind = self._rest_binders.get(count)
        if bind is None:
            bind = _binder(self._task, self._parameters, self._hints, self._wrong, unknown=count)
            self._rest_binders[count] = bind
        try:
            bind(*[_FROM_ELSEWHERE] * count, *args, **kwargs)
        except TypeError as error:
            where = "its result is the first argument"
            if count > 1:
                where = f"the results of the {count} steps that it needs are the first arguments"
            raise TypeError(
                f"{error}. After another step of a workflow {where}; a call made by .si(...) does not get it"
            ) from None
        return self._encode_bound(args, kwargs)

    def encode_chunk(self, calls: tuple[tuple[Any, ...], ...]) -> bytes:
        """Return the body of a job that makes several calls."""
        for args in calls:
            self.bind(*args)
        try:
            body: list[Any] = [[list(args) for args in calls], {}, self._version]
            return self.codec.encode(body)
        except CannotEncode:
            for args in calls:
                self.encode(args, {})  # the wrong one raises
            raise

    @functools.cached_property
    def _rest_binders(self) -> dict[int, Callable[..., None]]:
        """Binders that skip the given number of first arguments."""
        return {}

    def _encode_bound(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
        try:
            if _PLAIN.issuperset(map(type, args)) and (not kwargs or _PLAIN.issuperset(map(type, kwargs.values()))):
                return _encode((args, kwargs, self._version))
            pack = self.codec.pack
            packed = kwargs and {name: pack(value) for name, value in kwargs.items()}
            return _encode(([*map(pack, args)], packed, self._version))
        except (CannotEncode, OverflowError, UnicodeEncodeError, RecursionError):
            pass  # what follows knows what to do, or to say
        try:
            return self.codec.encode([list(args), kwargs, self._version])
        except CannotEncode:
            raise self._refusal(args, kwargs) from None

    def encode_each(self, calls: Iterable[tuple[Any, ...]]) -> list[bytes]:
        """Return the bodies of several jobs without keyword arguments. Raises like ``encode``."""
        bodies: list[bytes] = []
        bind, are_plain, version = self.bind, _PLAIN.issuperset, msgspec.Raw(_encode(self._version))
        for args in calls:
            if are_plain(map(type, args)):
                bind(*args)
                try:
                    bodies.append(_encode((args, _NO_KEYWORDS, version)))
                    continue
                except (OverflowError, UnicodeEncodeError):
                    pass
            bodies.append(self.encode(args, {}))
        return bodies

    def decode(self, body: bytes) -> tuple[list[Any], dict[str, Any]]:
        """Decode the body of a job. Raises ``ArgumentMismatch`` when it does not fit this version of the task."""
        try:
            try:
                args, kwargs, version = self.codec.decode(body)
            except ValueError:  # older clients wrote no version
                (args, kwargs), version = self.codec.decode(body), None
            if version != self._version:
                self.bind(*args, **kwargs)
        except Exception as error:
            raise self.mismatch(error) from None
        return args, kwargs

    def mismatch(self, error: Exception) -> ArgumentMismatch:
        """Make the error for arguments that do not fit this version of the task."""
        why = message_of(error).removeprefix(f"{self._task}(): ")
        return ArgumentMismatch(f"{self._task}(): the arguments do not fit this version of the task: {why}")

    def bind_value(self, value: Any, args: list[Any], kwargs: dict[str, Any]) -> list[Any]:
        """Prepend the value of the previous step to the arguments. Raises ``ArgumentMismatch``."""
        try:
            self.bind(value, *args, **kwargs)
        except TypeError as error:
            why = message_of(error).removeprefix(f"{self._task}(): ")
            raise ArgumentMismatch(
                f"{self._task}(): the result of the step before does not fit as its first argument: {why}"
            ) from None
        return [value, *args]

    def bind_values(self, values: list[Any], args: list[Any], kwargs: dict[str, Any]) -> list[Any]:
        """Prepend the values of several steps to the arguments. Raises ``ArgumentMismatch``."""
        try:
            self.bind(*values, *args, **kwargs)
        except TypeError as error:
            why = message_of(error).removeprefix(f"{self._task}(): ")
            where = f"the results of the {len(values)} steps before do not fit as its first arguments"
            raise ArgumentMismatch(f"{self._task}(): {where}: {why}") from None
        return [*values, *args]

    def decode_unchecked(self, body: bytes) -> tuple[list[Any], dict[str, Any]]:
        """Decode arguments without checking them against the signature."""
        args, kwargs, *_ = self.codec.decode(body)
        return args, kwargs

    def is_of_another_version(self, body: bytes) -> bool:
        """Return whether a different signature has certainly encoded these arguments.

        The version is readable even where the arguments are not. Older clients wrote no version.
        """
        has_version = body[:1] == _ARRAY_OF_THREE and body[-9:-8] == _UINT_64
        return has_version and int.from_bytes(body[-8:]) not in (self._version, _UNKNOWN_VERSION)

    def of_lists(self) -> Arguments:
        """Return the same arguments for jobs whose result is a list of this task's results."""
        changed, check = copy.copy(self), self._result_check
        if check is not None:
            fits = check

            def all_fit(values: Any) -> bool:
                return all(map(fits, values))

            changed._result_check = all_fit
        return changed

    def is_of_this_version(self, body: bytes) -> bool:
        """Return whether this exact signature checked the arguments when they were encoded."""
        return body[-9:-8] == _UINT_64 and int.from_bytes(body[-8:]) == self._version

    def encode_success(self, before: tuple[Any, ...], value: object, limit_bytes: int) -> bytes:
        """Encode a ``Success``: the fields before its result, and the result.

        Raises ``TypeError``, which names the task and the remedy, or ``PayloadTooLarge``.
        """
        if self._result_check is not None and not self._result_check(value):
            raise TypeError(
                f"{self._task}() returned {_describe(value)}, but is annotated to return {spell(self._hints['return'])}"
            )
        try:
            # In one pass: msgpack encodes a tuple like a Struct, and a nested value like its bytes in that place.
            encoded = _encode((*before, self.codec.pack(value)))
            if len(encoded) <= limit_bytes:
                return encoded
        except (CannotEncode, OverflowError, UnicodeEncodeError, RecursionError):
            pass  # what follows knows what to do, or to say
        result = self._encode_result(value)
        if len(result) > limit_bytes:
            raise PayloadTooLarge(
                f"{self._task}(): the result takes {len(result):,} bytes, but {limit_bytes:,} are allowed;"
                " store large data elsewhere and return a reference, or raise App(max_payload_bytes=...)"
            )
        return _encode((*before, msgspec.Raw(result)))

    def _encode_result(self, value: object) -> bytes:
        try:
            return self.codec.encode(value)
        except CannotEncode as error:
            path = _path_to(error.value, value, "")
            raise TypeError(f"{self._task}(): the result{f' at {path}' if path else ''} {error.why}") from None

    def _refusal(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> TypeError:
        for name, value in self.named(args, kwargs):
            try:
                self.codec.encode(value)
            except CannotEncode as error:
                path = _path_to(error.value, value, name)
                return TypeError(f"{self._task}(): argument {path or name} {error.why}")
        return TypeError(f"{self._task}(): the arguments are nested too deeply")

    def named(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[tuple[str, Any]]:
        """Yield each argument with its name; the first one of ``*rest`` is called ``rest[0]``."""
        positional = [p for p in self._parameters.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        rest = next((p.name for p in self._parameters.values() if p.kind is p.VAR_POSITIONAL), "")
        for index, value in enumerate(args):
            yield positional[index].name if index < len(positional) else f"{rest}[{index - len(positional)}]", value
        yield from kwargs.items()

    def is_secret(self, name: str) -> bool:
        """Return whether the argument with this name from ``named`` is secret."""
        name = name.partition("[")[0]
        parameter = self._parameters.get(name)
        if parameter is None:
            parameter = next((p for p in self._parameters.values() if p.kind is p.VAR_KEYWORD), None)
        hint = None if parameter is None else self._hints.get(parameter.name)
        return is_secret_name(name) or is_secret_hint(hint)

    def _wrong(self, name: str, hint: Any, value: object) -> NoReturn:
        described = type(value).__qualname__ if self.is_secret(name) else _describe(value)
        raise TypeError(
            f"{self._task}(): argument {name} must be {spell(hint)}, not {described};"
            " pass such a value or change the annotation"
        )


class RestArguments:
    """Arguments in a step's body, which lacks the first ones, for previews and for finding secrets."""

    def __init__(self, arguments: Arguments, count: int) -> None:
        self._all = arguments
        self._count = count
        self.is_secret = arguments.is_secret
        self.decode = arguments.decode_unchecked
        self.decode_unchecked = arguments.decode_unchecked

    def named(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[tuple[str, Any]]:
        return itertools.islice(self._all.named([*[None] * self._count, *args], kwargs), self._count, None)


class ChunkArguments:
    """Arguments of a job that makes several calls of a task: one list of them."""

    def __init__(self, arguments: Arguments) -> None:
        self._one = arguments
        self.encode_success = arguments.of_lists().encode_success
        self.is_secret = arguments.is_secret
        self.decode_unchecked = arguments.decode_unchecked
        self.is_of_another_version = arguments.is_of_another_version

    def decode(self, body: bytes) -> tuple[list[Any], dict[str, Any]]:
        """Like ``Arguments.decode``, where each argument is the list of one call's arguments."""
        try:
            calls, kwargs = self._one.decode_unchecked(body)
            if not self._one.is_of_this_version(body):
                for args in calls:
                    self._one.bind(*args)
        except Exception as error:
            raise self._one.mismatch(error) from None
        return calls, kwargs

    def named(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[tuple[str, Any]]:
        """Yield the arguments of each call, named like ``number[0]`` for the first call."""
        for place, call in enumerate(args):
            for name, value in self._one.named(call, {}):
                yield f"{name}[{place}]", value


class UncheckedArguments(Arguments):
    """Arguments of a task whose signature is not known here. Accepts any, without a version.

    It shares one signature, and generates no function to bind it: a program may send to thousands of names once each.
    """

    def __init__(self, task: str, custom: Mapping[str, CustomType], job_of: Callable[[bytes], object]) -> None:
        self._task = task
        self._parameters = _ANY_PARAMETERS
        self._hints = {}
        self._result_check = None
        self.codec = Codec(shapes_in((), custom), custom, job_of)
        self.bind = _take_anything
        self._version = _UNKNOWN_VERSION
        self.takes_stream = False


def _take_anything(*args: Any, **kwargs: Any) -> None: ...


_ANY_PARAMETERS = inspect.signature(_take_anything).parameters


def _version(parameters: Mapping[str, inspect.Parameter], hints: Mapping[str, Any], codec: Codec) -> int:
    """Hash everything that decides whether arguments fit: names, kinds, annotations, and the fields of their classes.

    The highest bit is set, so that msgpack always encodes the number in nine bytes.
    """
    signature = [
        f"{name} {parameter.kind.name} {parameter.default is not parameter.empty} {spell(hints.get(name))}"
        for name, parameter in parameters.items()
    ]
    # Imported here because programs import modules with tasks that they never call.
    import hashlib

    # Values without a better spelling include their address, which differs in each process.
    text = re.sub(" at 0x[0-9a-fA-F]+", "", "\n".join([*signature, *codec.outlines()]))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) | _HIGHEST_BIT


def _binder(
    task: str,
    parameters: Mapping[str, inspect.Parameter],
    hints: Mapping[str, Any],
    wrong: Callable[[str, Any, object], NoReturn],
    *,
    unknown: int = 0,
) -> Callable[..., None]:
    """Generate a function with the task's parameters that checks each argument and returns nothing.

    ``unknown``: number of first arguments that are not checked, because their values are not known yet. For ``def
    send(to: str, body=None, *rest: list[int])`` the function is:

        def bind(to, body=_absent, *rest):
            if not _isinstance(to, _check_to): _wrong('to', _hint_to, to)
            for _item in rest:
                if not _check_rest(_item): _wrong('rest', _hint_rest, _item)
    """
    # The prefix separates these names from the task's own parameters.
    prefix = "_"
    while any(name.startswith(prefix) for name in parameters):
        prefix += "_"
    absent = _Absent(f"{prefix}absent")
    names: dict[str, Any] = {f"{prefix}wrong": wrong, f"{prefix}absent": absent}
    # Without it, a parameter could have one of these names.
    names |= {f"{prefix}isinstance": isinstance, f"{prefix}list": list, f"{prefix}map": map, f"{prefix}type": type}
    signature = inspect.Signature(
        [
            parameter.replace(
                annotation=inspect.Parameter.empty,
                default=absent if parameter.default is not inspect.Parameter.empty else inspect.Parameter.empty,
            )
            for parameter in parameters.values()
        ]
    )
    lines = [f"def bind{signature}:", "    pass"]
    positional = sum(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters.values())
    for place, (name, parameter) in enumerate(parameters.items()):
        if place < min(unknown, positional):
            continue
        hint = hints.get(name, Any)
        item, given = name, ""
        if parameter.kind is parameter.VAR_KEYWORD and typing.get_origin(hint) is typing.Unpack:
            hint = typing.get_args(hint)[0]
        elif parameter.kind in _ALL_OF:
            item = f"{prefix}item"
        elif parameter.default is not inspect.Parameter.empty:
            given = f"{name} is not {prefix}absent and "
        check = check_of(hint)
        if check is None:
            continue
        names[f"{prefix}hint_{name}"] = hint
        names[f"{prefix}check_{name}"] = check
        fits = f"{prefix}check_{name}({item})"
        classes, exactly = classes_of(hint), exact_items_of(hint)
        if classes is not None:
            names[f"{prefix}check_{name}"] = classes[0] if len(classes) == 1 else classes
            fits = f"{prefix}isinstance({item}, {prefix}check_{name})"
        elif exactly is not None:
            # A single pass in C, without a Python call per item.
            names[f"{prefix}exactly_{name}"] = exactly.issuperset
            are_exact = f"{prefix}exactly_{name}({prefix}map({prefix}type, {item}))"
            fits = f"({item}.__class__ is {prefix}list and {are_exact} or {fits})"
        test = f"if {given}not {fits}: {prefix}wrong({name!r}, {prefix}hint_{name}, {item})"
        if item is name:
            lines.append(f"    {test}")
        else:
            skipped = unknown - positional if parameter.kind is parameter.VAR_POSITIONAL else 0
            rest = f"[{skipped}:]" if skipped > 0 else ""
            lines.append(f"    for {item} in {_ALL_OF[parameter.kind].format(name)}{rest}:")
            lines.append(f"        {test}")
    exec("\n".join(lines), names)
    bind: Callable[..., None] = names["bind"]
    # Python's own messages then name the task: "shop.send() missing 1 required argument: 'to'".
    bind.__qualname__ = task
    return bind


_ALL_OF: dict[Any, str] = {inspect.Parameter.VAR_POSITIONAL: "{}", inspect.Parameter.VAR_KEYWORD: "{}.values()"}


# Placeholder for a first argument that comes from another step.
_FROM_ELSEWHERE = object()


class _Absent:
    """Placeholder for a default, which the worker's version of the task fills in."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return self._name


def _path_to(culprit: object, value: Any, path: str) -> str | None:
    """Return the path to ``culprit`` in ``value``, such as ``orders[3].price``, or None if it is not found."""
    if value is culprit:
        return path
    inside: list[tuple[str, object]] = []
    if is_a(value, Mapping):
        inside = [(f"{path}[{key!r}]", item) for key, item in value.items()]
        inside += [(f"{path} (key {key!r})", key) for key in value]
    elif is_a(value, (list, tuple, set, frozenset, collections.deque)):
        inside = [(f"{path}[{index}]", item) for index, item in enumerate(value)]
    elif not isinstance(value, (str, bytes, int, float)) and (shape := shape_of(type_of(value))) is not None:
        state: Any = shape.take(value)
        state = state.get("__dict__", state) if is_a(state, dict) else {}
        inside = [(f"{path}.{name}", item) for name, item in state.items()]
    for inner_path, item in inside:
        found = _path_to(culprit, item, inner_path)
        if found is not None:
            return found
    return None


def _describe(value: object) -> str:
    text = repr(value)
    return f"{type(value).__qualname__} {text if len(text) <= 80 else text[:77] + '...'}"
