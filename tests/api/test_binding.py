"""delay() refuses at once what the task's parameters and annotations do not allow."""

from __future__ import annotations

import collections.abc
import dataclasses
import datetime as dt
import enum
import functools
import re
import sys
import textwrap
import types
import typing
import uuid
from typing import TYPE_CHECKING, Any, Literal, NewType, Protocol, TypedDict, TypeVar, Unpack

import msgspec
import pytest

from penstock import App, ArgumentMismatch

if TYPE_CHECKING:
    from nowhere import Missing

Bound = TypeVar("Bound", bound=int)
UserId = NewType("UserId", int)


class Color(enum.Enum):
    RED = 1


@dataclasses.dataclass
class Thing:
    a: int


class Sized(Protocol):
    def size(self) -> int: ...


class Extra(TypedDict, total=False):
    size: int
    color: typing.Required[str]


def arguments_of(function: Any) -> Any:
    return App("shop").task(name="shop.send")(function).arguments


def plain(to: str, body: str = "hello"): ...
def positional(a, b=2, /, c=3): ...
def keywords(*, a: int, b: int = 2): ...
def everything(a: int, *rest: int, key: str = "k", **more: float): ...
def shadows(wrong, absent, _wrong=1, *, item: int = 0, __check_item=2): ...
def unpacked(**extra: Unpack[Extra]): ...
def built_in(type: list[str], isinstance: int, list: float | None, map: list[int] | None = None): ...


@pytest.mark.parametrize(
    ("function", "args", "kwargs"),
    [
        (plain, ("a",), {}),
        (plain, ("a", "b"), {}),
        (plain, (), {"body": "b", "to": "a"}),
        (positional, (1,), {}),
        (positional, (1, 2), {"c": 4}),
        (keywords, (), {"a": 1}),
        (everything, (1, 2, 3), {"key": "x", "other": 1.5, "another": 2}),
        (shadows, (1, 2), {"item": 3}),
        (unpacked, (), {"color": "red", "size": 1}),
        (lambda: None, (), {}),
        (built_in, (["a"], 1, None), {}),
        (built_in, (["a"], 1, 2.5), {"map": [True, 2]}),
        (positional, ([1, "x"], {"a": [b"y"]}), {"c": {1: {2, 3}}}),
        (positional, ([1 << 70], "\x00"), {}),
        (positional, (1,), {"c": [{"a": -(1 << 70)}, dt.date(2026, 1, 1)]}),
    ],
)
def test_what_fits_arrives_as_it_was_passed(function, args, kwargs):
    arguments = arguments_of(function)
    body = arguments.encode(args, kwargs)
    assert arguments.decode(body) == (list(args), kwargs)
    # Plain values take a shorter path, which writes the same bytes.
    assert body == arguments.codec.encode([list(args), kwargs, arguments._version])


@pytest.mark.parametrize(
    ("function", "args", "kwargs", "says"),
    [
        (plain, (), {}, "shop.send() missing 1 required positional argument: 'to'"),
        (plain, ("a", "b", "c"), {}, "shop.send() takes from 1 to 2 positional arguments but 3 were given"),
        (plain, ("a",), {"to": "b"}, "shop.send() got multiple values for argument 'to'"),
        (plain, ("a",), {"bdy": "b"}, "shop.send() got an unexpected keyword argument 'bdy'"),
        (
            plain,
            (42,),
            {},
            "shop.send(): argument to must be str, not int 42; pass such a value or change the annotation",
        ),
        (plain, ("a",), {"body": None}, "shop.send(): argument body must be str, not NoneType None; "),
        (positional, (1,), {"b": 2}, "shop.send() got some positional-only arguments passed as keyword arguments: 'b'"),
        (keywords, (1,), {}, "shop.send() takes 0 positional arguments but 1 was given"),
        (keywords, (), {"a": "1"}, "shop.send(): argument a must be int, not str '1'; "),
        (everything, (1, 2, "3"), {}, "shop.send(): argument rest must be int, not str '3'; "),
        (everything, (1,), {"other": "3"}, "shop.send(): argument more must be float, not str '3'; "),
        (everything, (1, 2), {"x": 1 + 2j}, "shop.send(): argument more must be float, not complex (1+2j); "),
        (unpacked, (), {"size": 1}, "shop.send(): argument extra must be Extra, not dict {'size': 1}; "),
        (built_in, (["a", 1], 1, None), {}, "shop.send(): argument type must be list[str], not list ['a', 1]; "),
        (built_in, (["a"], 1, None), {"map": ["x"]}, "shop.send(): argument map must be list[int] | None, not list"),
        (plain, ("x" * 200, 1), {}, "argument body must be str, not int 1"),
        (plain, (b"x" * 200,), {}, "xxx...; pass such a value"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(function, args, kwargs, says):
    with pytest.raises(TypeError) as caught:
        arguments_of(function).encode(args, kwargs)
    assert says in str(caught.value)


FITS = [
    (float, [1, 1.5, True], ["1", None]),
    (complex, [1, 1.5, 2j], ["1"]),
    (bool, [True], [1]),
    (int, [1, True], [1.0, "1"]),
    (str, ["a"], [b"a"]),
    (bytes, [b"a"], ["a", bytearray(b"a")]),
    (None, [None], [0]),
    (Any, [1, None, "x"], []),
    (object, [1, None, "x"], []),
    (int | None, [1, None], ["x"]),
    (float | str | None, [1.5, 1, "x", None], [b"x", [None]]),
    (list[float], [[], [1.5, 1, True]], [["1"], (1.5,)]),
    (list[str | None], [["x", None]], [[1], "x", None]),
    (list[str] | None, [["x"], None], [[1], "x"]),
    (typing.Union[uuid.UUID, str], [uuid.UUID(int=1), "x"], [1]),  # noqa: UP007
    (Thing | Color, [Thing(1), Color.RED], [1, None]),
    (list[int], [[], [1]], [(1,), ["x"], [1, "x"], {1}]),
    (list[int | str], [[1, "x"]], [[1.0]]),
    (list[list[int]], [[[1]]], [[["x"]], [1]]),
    (list, [[1, "x"]], [()]),
    (set[str], [{"x"}], [frozenset({"x"}), {1}]),
    (tuple[int, str], [(1, "x")], [(1,), (1, "x", 2), ("x", 1), [1, "x"]]),
    (tuple[int, ...], [(), (1, 2)], [("x",)]),
    (dict[str, int], [{}, {"a": 1}], [{1: 1}, {"a": "x"}, []]),
    (dict[str, Any], [{"a": []}], [{1: 1}]),
    (dict[str, list[Thing]], [{"a": [Thing(1)]}], [{"a": [1]}]),
    (collections.abc.Sequence[int], [[1], (1,), range(3)], [{1}, ["x"], 1]),
    (collections.abc.Mapping[str, int], [{"a": 1}], [{"a": "x"}, [1]]),
    (collections.abc.Iterable[int], [[1], {1}], [["x"], 1]),
    (collections.OrderedDict[str, int], [collections.OrderedDict(a=1)], [{"a": 1}]),
    (Literal["a", 1, None], ["a", 1, None], ["b", True, 1.0]),
    (Literal[Color.RED], [Color.RED], [1]),
    (UserId, [1], ["x"]),
    (Bound, [1], ["x"]),
    (TypeVar("Free"), [1, "x"], []),
    (TypeVar("Either", int, str), [1, "x"], [1.5]),
    (typing.Annotated[list[int], "doc"], [[1]], [["x"]]),
    (Extra, [{"color": "red"}, {"color": "red", "size": 1}], [{}, {"color": 1}, {"color": "red", "x": 1}]),
    (Sized, [1, "x"], []),  # a protocol cannot be checked with certainty at run time
    (dt.date, [dt.date(2026, 1, 1), dt.datetime(2026, 1, 1)], ["2026-01-01"]),
    (list["Thing"], [[Thing(1)]], [[1]]),
]


@pytest.mark.parametrize(
    ("hint", "fits", "does_not_fit"), FITS, ids=lambda value: re.sub(r" at 0x\w+", "", str(value))[:40]
)
def test_values_are_checked_against_the_annotation(hint, fits, does_not_fit):
    def f(value): ...

    f.__annotations__ = {"value": hint}
    arguments = arguments_of(f)
    for value in fits:
        arguments.bind(value)
    for value in does_not_fit:
        with pytest.raises(TypeError, match=r"shop\.send\(\): argument value must be "):
            arguments.bind(value)


def test_a_default_is_the_workers_business():
    # The worker's version of the task may have another default, and defaults are not checked: `= None` is common.
    def f(a: int, b: str = None): ...  # type: ignore[assignment]  # noqa: RUF013

    assert arguments_of(f).decode(arguments_of(f).encode((1,), {})) == ([1], {})


def test_a_wrapped_function_has_the_parameters_it_shows():
    def shout(function):
        @functools.wraps(function)
        def wrapper(*args, **kwargs):
            return function(*args, **kwargs)

        return wrapper

    arguments = arguments_of(shout(plain))
    with pytest.raises(TypeError, match="argument to must be str"):
        arguments.encode((1,), {})


def test_an_annotation_that_cannot_be_resolved_is_an_error_at_first_delay_and_at_check():
    app = App("shop")

    @app.task(name="shop.send")
    def send(to: Missing) -> None: ...

    @app.task(name="shop.fine")
    def fine(to: str) -> None: ...

    @app.task(name="shop.nested")
    def nested(things: list[Holder]) -> None: ...

    says = r"shop\.send: an annotation cannot be resolved \(NameError: name 'Missing' is not defined\); import what it"
    with pytest.raises(TypeError, match=says):
        send.delay(1)
    with pytest.raises(TypeError, match=rf"{says}.*\n.*Holder: an annotation cannot be resolved"):
        app.check()


@dataclasses.dataclass
class Holder:
    missing: Missing


def test_two_classes_of_one_name_are_refused():
    def make():
        @dataclasses.dataclass
        class Local:
            a: int

        return Local

    def f(a, b): ...

    f.__annotations__ = {"a": make(), "b": make()}
    with pytest.raises(TypeError, match=r"two different classes are called .*make\.<locals>\.Local"):
        arguments_of(f)


def test_a_result_is_checked_and_encoded_like_an_argument():
    def f() -> list[int]: ...

    arguments = arguments_of(f)
    with pytest.raises(TypeError, match=r"shop\.send\(\) returned str 'x', but is annotated to return list\[int\]"):
        arguments.encode_success((), "x", 1_000)

    def g(): ...

    with pytest.raises(
        TypeError, match=r"shop\.send\(\): the result at \[1\] is a .*Thing, which the annotations do not"
    ):
        arguments_of(g).encode_success((), [1, Thing(1)], 1_000)
    with pytest.raises(TypeError, match=r"shop\.send\(\): the result is an object"):
        arguments_of(g).encode_success((), object(), 1_000)


@pytest.mark.skipif(sys.version_info < (3, 12), reason="the type statement is of Python 3.12")
def test_type_aliases_of_python_3_12(monkeypatch):
    module: Any = types.ModuleType("aliases")
    monkeypatch.setitem(sys.modules, "aliases", module)
    source = """
        import dataclasses

        @dataclasses.dataclass
        class Leaf[T]:
            value: T

        type Tree = list[Tree] | Leaf[int]

        def f(tree: Tree): ...
        """
    exec(textwrap.dedent(source), vars(module))
    arguments = arguments_of(module.f)
    tree = [module.Leaf(1), [module.Leaf(2)]]
    assert arguments.decode(arguments.encode((tree,), {}))[0] == [tree]
    with pytest.raises(TypeError, match="argument tree must be Tree, not list"):
        arguments.encode(([1],), {})


class NewColor(enum.Enum):
    RED = 1
    BLUE = 2


@dataclasses.dataclass
class NewThing:
    a: int
    b: int = 2


# As if a newer version of the code had changed these classes.
for new, old in ((NewColor, Color), (NewThing, Thing)):
    new.__qualname__ = old.__qualname__


def before(number: int, color: Color, thing: Thing | None = None): ...
def unchanged(number: int, color: Color, thing: Thing | None = None) -> int: ...
def renamed(count: int, color: Color, thing: Thing | None = None): ...
def added(number: int, color: Color, thing: Thing | None = None, more: int = 1): ...
def annotated(number: float, color: Color, thing: Thing | None = None): ...
def by_keyword(number: int, *, color: Color, thing: Thing | None = None): ...
def required(number: int, color: Color, thing: Thing | None): ...
def with_a_member_more(number: int, color: NewColor, thing: Thing | None = None): ...
def with_a_field_more(number: int, color: Color, thing: NewThing | None = None): ...


@pytest.mark.parametrize(
    "function", [renamed, added, annotated, by_keyword, required, with_a_member_more, with_a_field_more]
)
def test_arguments_tell_the_version_of_the_signature_that_encoded_them(function):
    body = arguments_of(before).encode((1, Color.RED), {})
    assert not arguments_of(unchanged).is_of_another_version(body)
    assert arguments_of(function).is_of_another_version(body)


def test_arguments_without_a_version_are_of_no_other():
    """Older clients wrote no version."""
    arguments = arguments_of(plain)
    body = msgspec.msgpack.encode([["a"], {}])
    assert arguments.decode(body) == (["a"], {})
    assert not arguments.is_of_another_version(body)
    with pytest.raises(ArgumentMismatch, match=r"do not fit this version of the task: argument body must be str"):
        arguments.decode(msgspec.msgpack.encode([["a", 2], {}]))
