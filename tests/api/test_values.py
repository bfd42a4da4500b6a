"""Every value arrives equal and of the same type, or is refused before sending."""

from __future__ import annotations

import abc
import collections
import dataclasses
import datetime as dt
import decimal
import enum
import fractions
import functools
import ipaddress
import math
import pathlib
import re
import subprocess
import sys
import typing
import uuid
import zoneinfo
from typing import Any, ClassVar, Generic, Literal, NamedTuple, NewType, TypedDict, TypeVar

import attr
import attrs
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock import App, group

T = TypeVar("T")
Number = TypeVar("Number", int, float)
UserId = NewType("UserId", int)


class Color(enum.Enum):
    RED = 1
    GREEN = (2, 3)
    CRIMSON = 1  # noqa: PIE796 - an alias


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Mode(enum.StrEnum):
    READ = "r"


class Access(enum.Flag):
    READ = 1
    WRITE = 2


class Bits(enum.IntFlag):
    ONE = 1
    TWO = 2


class Point(NamedTuple):
    x: int
    y: int = 0


Pair = collections.namedtuple("Pair", ["left", "right"])


@dataclasses.dataclass
class Address:
    street: str
    zone: zoneinfo.ZoneInfo | None = None


@dataclasses.dataclass
class User:
    name: str
    address: Address
    tags: set[str] = dataclasses.field(default_factory=set)
    kind: ClassVar[str] = "user"
    friends: list[User] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Frozen:
    price: decimal.Decimal
    point: Point


@dataclasses.dataclass
class Box(Generic[T]):
    item: T


@dataclasses.dataclass
class Circle:
    radius: float
    area: float = dataclasses.field(init=False)
    made: dataclasses.InitVar[list[str] | None] = None

    def __post_init__(self, made: list[str] | None) -> None:
        self.area = math.pi * self.radius**2
        self.radius += 1  # so that a second run would show
        self.note = "not a field"

    @functools.cached_property
    def unencodable(self) -> object:
        return lambda: None


class Animal(abc.ABC):
    @abc.abstractmethod
    def sound(self) -> str: ...


@dataclasses.dataclass
class Dog(Animal):
    name: str

    def sound(self) -> str:
        return "woof"


@dataclasses.dataclass
class Cat(Animal):
    name: str

    def sound(self) -> str:
        return "meow"


@dataclasses.dataclass
class Puppy(Dog):
    age: int = 0


@attrs.frozen
class Weight:
    grams: int
    _secret: str = "s"


@attrs.define
class Parcel:
    weight: Weight
    labels: list[str] = attrs.Factory(list)


@attr.s(auto_attribs=True)
class OldStyle:
    a: int


class Movie(msgspec.Struct):
    title: str
    year: int | None = None
    cast: list[Point] = []

    def __post_init__(self) -> None:
        self.title += "!"


class Tags(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    names: frozenset[str]


class Options(TypedDict, total=False):
    color: typing.Required[Color]
    size: int


class Text(str):
    pass


class Whole(int):
    pass


class Real(float):
    pass


class Table(dict):
    pass


class Row(list):
    pass


class Plain:
    def __init__(self, value: int) -> None:
        self.value = value


@dataclasses.dataclass
class DictAndMore(dict):
    more: int = 0


app = App("values")
app.codec(Plain, lambda value: {value.value}, lambda state: Plain(*state))
Plain.__eq__ = lambda self, other: type(other) is Plain and self.value == other.value  # type: ignore[method-assign]


def round_trip(hint: Any, value: Any) -> Any:
    """Send a value through a task whose parameter and result are annotated with ``hint``, as bytes."""

    def echo(value):
        return value

    if hint is not None:
        echo.__annotations__ = {"value": hint, "return": hint}
    fresh = App("fresh")
    fresh._custom_types.update(app._custom_types)
    task = fresh.task(name="echo")(echo)
    (arrived,), _ = task.arguments.decode(task.arguments.encode((value,), {}))
    (returned,) = task.arguments.codec.decode(task.arguments.encode_success((), value, 1 << 20))
    assert_same(arrived, returned)
    return arrived


def assert_same(a: Any, b: Any) -> None:
    """Whether two values are equal and of the same types at every level. NaN equals NaN here."""
    assert type(a) is type(b)
    if isinstance(a, enum.Enum):
        assert a is b
    elif isinstance(a, decimal.Decimal):
        assert a.as_tuple() == b.as_tuple()
    elif isinstance(a, (float, dt.datetime, dt.time)):
        assert repr(a) == repr(b)
        if not isinstance(a, float):
            assert a == b
            assert (a.fold, a.tzname()) == (b.fold, b.tzname())
    elif isinstance(a, collections.abc.Mapping):
        assert getattr(a, "default_factory", None) is getattr(b, "default_factory", None)
        for (key_a, item_a), (key_b, item_b) in zip(a.items(), b.items(), strict=True):
            assert_same(key_a, key_b)
            assert_same(item_a, item_b)
    elif isinstance(a, (list, tuple, collections.deque)):
        assert getattr(a, "maxlen", None) == getattr(b, "maxlen", None)
        for item_a, item_b in zip(a, b, strict=True):
            assert_same(item_a, item_b)
    elif isinstance(a, (set, frozenset)):
        assert {(type(item), item) for item in a} == {(type(item), item) for item in b}
    elif dataclasses.is_dataclass(a):
        for field in dataclasses.fields(a):
            assert_same(getattr(a, field.name), getattr(b, field.name))
    else:
        assert a == b


BERLIN = zoneinfo.ZoneInfo("Europe/Berlin")
NOON = dt.datetime(2026, 11, 20, 12, 0, 0, 123)

# None means a parameter without annotation.
BUILT_IN = [
    (None, None),
    (None, True),
    (bool, False),
    (int, True),
    (int, 0),
    (int, 2**63),
    (int, 2**64),
    (int, 2**70),
    (int, -(2**63)),
    (int, -(2**63) - 1),
    (int, -(2**70)),
    (None, [1, 2**70, "text", [2**64]]),
    (None, {"a": 2**70, 2**80: "key"}),
    (float, 1.5),
    (float, 1),
    (float, -0.0),
    (float, math.nan),
    (float, -math.inf),
    (list[float], [math.inf, math.nan]),
    (complex, 1 - 2j),
    (str, ""),
    (str, "ä€𝄞\0"),
    (bytes, b"\x00\xff"),
    (bytearray, bytearray(b"abc")),
    (list, []),
    (list[int], [1, 2]),
    (None, [[[1], "a"], {"b": [None]}]),
    (tuple[int, ...], (1, 2, 3)),
    (tuple[int, str], (1, "a")),
    (tuple[()], ()),
    (None, (1, (2, [3, (4,)]))),
    (set[int], {1, 2}),
    (frozenset[str], frozenset({"a"})),
    (None, {(1, frozenset({"a"}))}),
    (dict[int, str], {1: "a", -1: "b"}),
    (dict[tuple[int, int], str], {(1, 2): "a"}),
    (None, {None: 1, b"k": 2, 1.5: 3, "s": 4}),
    (None, {uuid.UUID(int=5): 1, "plain": 2}),
    (None, {True: 1}),
    (collections.OrderedDict[str, int], collections.OrderedDict([("b", 1), ("a", 2)])),
    (None, collections.OrderedDict()),
    (collections.defaultdict[str, list[int]], collections.defaultdict(list, {"a": [1]})),
    (None, collections.defaultdict(None, {"a": 1})),
    (collections.Counter[str], collections.Counter("hello")),
    (None, collections.deque([1, (2,)], maxlen=5)),
    (None, collections.deque()),
    (range, range(1, 2**70, 3)),
    (decimal.Decimal, decimal.Decimal("1.10")),
    (decimal.Decimal, decimal.Decimal("-0")),
    (decimal.Decimal, decimal.Decimal("sNaN12")),
    (decimal.Decimal, decimal.Decimal("1E+999999")),
    (fractions.Fraction, fractions.Fraction(-3, 7)),
    (uuid.UUID, uuid.UUID(int=2**127 + 5)),
    (uuid.UUID | str, "not a UUID but a str"),
    (uuid.UUID | str, uuid.UUID(int=1)),
    (None, str(uuid.UUID(int=1))),
    (dt.date, dt.date(1, 1, 1)),
    (dt.date, dt.date(2026, 11, 20)),
    (dt.datetime, NOON),
    (dt.datetime, NOON.replace(tzinfo=dt.UTC)),
    (dt.datetime, NOON.replace(tzinfo=dt.timezone(dt.timedelta(hours=-3, minutes=-30)))),
    (dt.datetime, NOON.replace(tzinfo=dt.timezone(dt.timedelta(0), "Zulu"))),
    (dt.datetime, NOON.replace(tzinfo=BERLIN)),
    (dt.datetime, dt.datetime(2026, 10, 25, 2, 30, fold=1, tzinfo=BERLIN)),
    (dt.datetime, dt.datetime(2026, 10, 25, 2, 30, fold=1)),
    (dt.datetime, dt.datetime.max),
    (dt.time, dt.time(1, 2, 3, 4)),
    (dt.time, dt.time(1, 2, tzinfo=dt.UTC, fold=1)),
    (dt.timedelta, dt.timedelta(days=-1, microseconds=1)),
    (dt.tzinfo, dt.UTC),
    (dt.tzinfo, BERLIN),
    (pathlib.Path, pathlib.Path("/tmp/ä")),
    (pathlib.Path, pathlib.Path("not-unicode-\udcff")),
    (pathlib.PurePath, pathlib.PurePosixPath("a/b")),
    (None, pathlib.PureWindowsPath("c:/a")),
    (None, ipaddress.ip_address("::1")),
    (ipaddress.IPv4Network, ipaddress.ip_network("10.0.0.0/8")),
    (None, ipaddress.ip_interface("10.0.0.1/8")),
    (Any, (1, {2})),
    (object, decimal.Decimal("1")),
    (Number, 1.5),
    (T, (1,)),
    (UserId, 5),
    (Literal["a", 1], 1),
    (int | None, None),
    (typing.Optional[tuple[int, ...]], (1,)),  # noqa: UP045
    (collections.abc.Sequence[int], (1, 2)),
    (collections.abc.Mapping[str, int], {"a": 1}),
    (collections.abc.Iterable[str], "text"),
    (typing.Annotated[int, "units"], 3),
    (typing.LiteralString, "x"),
    (collections.abc.Callable[[int], int] | int, 3),
]

CLASSES = [
    (Color, Color.RED),
    (Color, Color.CRIMSON),
    (list[Color], [Color.GREEN]),
    (Literal[Color.RED], Color.RED),
    (Level, Level.HIGH),
    (Level | int, Level.HIGH),
    (Level | int, 2),
    (Mode, Mode.READ),
    (Access, Access.READ | Access.WRITE),
    (Access, Access(0)),
    (Bits, Bits(7)),
    (Point, Point(1, 2)),
    (Pair, Pair(1, (2, 3))),
    (User, User("Ada", Address("Main St", BERLIN), {"x"})),
    (User, User("Ada", Address("A"), friends=[User("Bob", Address("B"))])),
    (dict[str, list[User]], {"a": [User("Ada", Address("A"))]}),
    (Frozen, Frozen(price=decimal.Decimal("1.0"), point=Point(1))),
    (Box[int], Box(1)),
    (Box[Address], Box[Address](Address("generic"))),
    (Box[list[Color]], Box([Color.RED])),
    (Circle, Circle(1.0, ["x"])),
    (Dog | Cat, Dog("Rex")),
    (Dog | Cat, Cat("Tom")),
    (Animal | Puppy, Puppy("Rex", 3)),
    (Weight, Weight(3, "t")),
    (Parcel, Parcel(Weight(1), ["a"])),
    (OldStyle, OldStyle(1)),
    (Movie, Movie("Alien", 1979, [Point(1)])),
    (Tags, Tags(names=frozenset({"a"}))),
    (Options, {"color": Color.RED, "size": 3}),
    (typing.Annotated[list[Point], "doc"], [Point(1)]),
    (None, Plain(3)),
    (Plain, Plain(3)),
    (list[Plain | int], [Plain(1), 2]),
]


def label(value: object) -> str:
    # Without addresses, so that test names are the same in every process that collects them.
    return re.sub(r" at 0x\w+", "", repr(value))[:50]


@pytest.mark.parametrize(("hint", "value"), BUILT_IN + CLASSES, ids=label)
def test_arrives_equal_and_of_the_same_type(hint, value):
    assert_same(round_trip(hint, value), value)


keys = st.none() | st.booleans() | st.integers() | st.text() | st.binary() | st.uuids() | st.dates()
leaves = keys | st.floats() | st.decimals() | st.datetimes(timezones=st.none() | st.timezones()) | st.timedeltas()


@given(
    st.recursive(
        leaves,
        lambda inner: (
            st.lists(inner)
            | st.lists(inner).map(tuple)
            | st.dictionaries(keys | st.tuples(keys, keys), inner)
            | st.sets(keys)
            | st.frozensets(keys)
            | st.builds(Box, inner)
        ),
    )
)
def test_any_nesting_of_values_arrives(value):
    assert_same(round_trip(Any | Box[Any], value), value)


def test_what_is_not_a_field_travels_too_and_post_init_does_not_run_again():
    circle = Circle(1.0)
    circle.unencodable  # noqa: B018
    arrived = round_trip(Circle, circle)
    assert vars(arrived) == {"radius": 2.0, "area": math.pi, "note": "not a field"}


def test_a_frozen_dataclass_stays_hashable_and_frozen():
    arrived = round_trip(Frozen, Frozen(price=decimal.Decimal("1.0"), point=Point(1)))
    assert {arrived: 1}[Frozen(price=decimal.Decimal("1.0"), point=Point(1))] == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        arrived.price = decimal.Decimal(2)


@pytest.mark.parametrize(
    ("hint", "value", "says"),
    [
        (str, Text("x"), "is a {here}.Text, which would not arrive as one: pass a plain str"),
        (int, Whole(1), "Whole, which would not arrive as one: pass a plain int"),
        (float, Real(1), "Real, which would not arrive as one: pass a plain float"),
        (dict, Table(a=1), "Table, which would not arrive as one: pass a plain dict"),
        (list, Row([1]), "Row, which would not arrive as one: pass a plain list"),
        (None, {"a": [1, Text("x")]}, "argument value['a'][1] is a"),
        (None, {Text("k"): 1}, "argument value (key 'k') is a"),
        (int, Level.LOW, "which the annotations do not name: name Level in the annotation"),
        (str, Mode.READ, "which the annotations do not name: name Mode in the annotation"),
        (None, Color.RED, "name Color in the annotation of the parameter"),
        (None, Point(1), "name Point in the annotation"),
        (None, User("a", Address("b")), "name User in the annotation"),
        (Animal, Dog("Rex"), "name Dog in the annotation"),
        (Dog, Puppy("Rex"), "name Puppy in the annotation"),
        (Box[Any], Box(Color.RED), "argument value.item is a {here}.Color"),
        (User, User("a", Address("b", "no zone")), None),  # fields keep their values, which type checkers have checked
        (None, DictAndMore(3), "DictAndMore, which would not arrive as one: pass a plain dict"),
        (None, lambda: None, "is a function: pass plain data instead"),
        (None, object(), "is an object: pass plain data instead, or add a codec"),
        (None, memoryview(b"x"), "is a memoryview: pass bytes(...) of it"),
        (None, (number for number in ()), "is a generator"),
        (None, ValueError("x"), "is a ValueError"),
        (None, int, "is a type"),
        (None, msgspec.msgpack.Ext(1, b""), "Ext: pass plain data"),
        (None, collections.defaultdict(lambda: 0), "a defaultdict whose default is a function; pass dict(...) of it"),
        (None, "\ud800", "is not valid Unicode"),
        (None, ["ok", "\ud800"], "argument value[1] is not valid Unicode"),
        (None, NOON.replace(tzinfo=type("Zone", (dt.tzinfo,), {})()), "has a time zone of type"),
    ],
    ids=label,
)
def test_is_refused_with_the_place_and_the_fix(hint, value, says):
    if says is None:
        assert_same(round_trip(hint, value), value)
        return
    with pytest.raises(TypeError) as caught:
        round_trip(hint, value)
    assert str(caught.value).startswith("echo(): argument value")
    assert says.format(here=__name__) in str(caught.value)


def test_a_value_that_contains_itself_is_refused():
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(TypeError, match=r"echo\(\): argument value contains itself or is nested too deeply"):
        round_trip(None, loop)


def test_a_codec_for_what_travels_already_is_refused():
    for kind in (int, list, set, dt.datetime):
        with pytest.raises(ValueError, match="is serializable already, with a fixed encoding"):
            app.codec(kind, list, kind)


def test_a_codec_comes_before_the_shape_of_its_class():
    fresh = App("fresh")
    fresh.codec(Address, lambda address: address.street, Address)

    @fresh.task(name="f")
    def f(address: Address) -> None: ...

    assert b"Main St" in f.arguments.encode((Address("Main St"),), {})
    assert b"zone" not in f.arguments.encode((Address("Main St"),), {})


def test_pydantic_models_travel():
    import pydantic

    class Base(pydantic.BaseModel):
        model_config = pydantic.ConfigDict(extra="allow")

    class Inner(Base):
        at: dt.datetime

    class Outer(Base):
        name: str = pydantic.Field(alias="Name")
        inner: Inner
        count: int = 0
        _private: int = pydantic.PrivateAttr(default=0)

    outer = Outer(Name="n", inner=Inner(at=NOON), extra={1, 2})
    outer._private = 3
    outer.__dict__["count"] = "not an int, but it is what was there"
    arrived = round_trip(Outer, outer)
    assert arrived == outer
    assert type(arrived.inner) is Inner
    assert arrived.model_fields_set == outer.model_fields_set
    assert arrived.extra == {1, 2}
    with pytest.raises(TypeError, match="Inner, which the annotations do not name"):
        round_trip(None, Inner(at=NOON))


def test_numpy_scalars_and_arrays_are_refused_with_the_fix():
    import numpy

    for value in (numpy.float64(1.5), numpy.int64(3), numpy.bool_(True)):
        with pytest.raises(TypeError, match=r"is a numpy\.\w+: pass value\.item\(\)"):
            round_trip(None, value)
    with pytest.raises(TypeError, match=r"is a numpy\.ndarray: pass value\.tolist\(\), or add a codec"):
        round_trip(None, numpy.zeros(3))


def test_a_workflow_and_a_step_are_refused_with_the_fix():
    app = App("shop", url="memory:")
    add = app.task(name="add")(lambda a: a)
    with pytest.raises(
        TypeError, match=r"is a penstock.Workflow: pass its id, and call app.workflow\(id\) in the task"
    ):
        round_trip(None, app.workflow("0" * 32))
    for step in (add.s(1), add.s(1) | add.s(), group(add.s(1))):
        with pytest.raises(TypeError, match=r"is a penstock.\w+, which was not sent: pass its parts"):
            round_trip(None, step)


def test_a_django_model_is_refused_with_the_fix():
    from django.conf import settings
    from django.db import models

    if not settings.configured:
        settings.configure()
    import django

    django.setup()

    class Order(models.Model):
        class Meta:
            app_label = "shop"

    for hint in (None, Order):
        with pytest.raises(TypeError, match="Order, a row of your database: pass its key and load it in the task"):
            round_trip(hint, Order(pk=1))


def test_a_sqlalchemy_model_is_refused_with_the_fix():
    from sqlalchemy import orm

    class Base(orm.MappedAsDataclass, orm.DeclarativeBase):
        pass

    class Order(Base):
        __tablename__ = "orders"
        id: orm.Mapped[int] = orm.mapped_column(primary_key=True)

        __annotations__ = {"id": orm.Mapped[int]}

    for hint in (None, Order):
        with pytest.raises(TypeError, match="Order, a row of your database: pass its key and load it in the task"):
            round_trip(hint, Order(id=1))


def test_a_django_safe_string_is_refused():
    from django.utils import safestring

    with pytest.raises(TypeError, match="SafeString, which would not arrive as one: pass a plain str"):
        round_trip(str, safestring.mark_safe("<b>"))


class TestAMessageFromAnotherVersion:
    """The classes differ between the enqueuing process and the worker."""

    def exchange(self, old: type, new: type, value: object) -> Any:
        for kind in (old, new):
            kind.__qualname__ = "Thing"

        def version(kind: type) -> Any:
            def f(value): ...

            f.__annotations__ = {"value": kind}
            return App("version").task(name="f")(f).arguments

        return version(new).decode(version(old).encode((value,), {}))[0][0]

    def test_a_new_field_takes_its_default(self):
        old = dataclasses.make_dataclass("Old", [("a", int)])
        new = dataclasses.make_dataclass("New", [("a", int), ("b", list, dataclasses.field(default_factory=list))])
        assert self.exchange(old, new, old(1)) == new(1, [])
        old = attrs.make_class("Old", ["a"])
        new = attrs.make_class("New", {"a": attrs.field(), "b": attrs.field(default=3)})
        assert self.exchange(old, new, old(1)) == new(1, 3)
        old, new = collections.namedtuple("Old", "a"), collections.namedtuple("New", "b a", defaults=[5, 6])
        assert self.exchange(old, new, old(1)) == new(5, 1)

    def test_a_new_field_without_default_is_an_error(self):
        old = dataclasses.make_dataclass("Old", [("a", int)])
        new = dataclasses.make_dataclass("New", [("a", int), ("b", int)])
        with pytest.raises(
            TypeError, match=r"f\(\): the arguments do not fit.*Thing gained the field 'b' after the job was enqueued"
        ):
            self.exchange(old, new, old(1))

    def test_a_field_that_has_gone_is_an_error(self):
        old = dataclasses.make_dataclass("Old", [("a", int), ("b", int)], slots=True)
        new = dataclasses.make_dataclass("New", [("a", int)], slots=True)
        with pytest.raises(TypeError, match=r"Thing has no field 'b'"):
            self.exchange(old, new, old(1, 2))

    def test_a_class_that_is_not_named_any_more_is_an_error_and_is_not_imported(self):
        old = dataclasses.make_dataclass("Old", [("a", int)])
        new = dataclasses.make_dataclass("New", [("a", int)])
        new.__module__ = "elsewhere"
        with pytest.raises(TypeError, match=r"it holds a .*Thing, which the annotations do not name here"):
            self.exchange(old, new, old(1))


def test_a_value_arrives_where_nothing_has_imported_its_module():
    """Few programs use these types, so `import penstock` does not load their modules."""
    values = [BERLIN, fractions.Fraction(1, 3), pathlib.PurePosixPath("a"), ipaddress.ip_network("10.0.0.0/8")]
    body = App("shop").task(name="shop.f")(lambda *values: None).arguments.encode(tuple(values), {})
    script = (
        "import sys; from penstock import App\n"
        "late = {'fractions', 'ipaddress', 'pathlib', 'zoneinfo'} & {*sys.modules}\n"
        "task = App('shop').task(name='shop.f')(lambda *values: None)\n"
        f"print(late, task.arguments.decode({body!r})[0])\n"
        f"print(task.arguments.decode({body!r})[0])\n"
        f"print(task.arguments.encode(tuple(task.arguments.decode({body!r})[0]), {{}}) == {body!r})\n"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert run.stdout.splitlines() == [f"set() {values}", f"{values}", "True"], run.stderr
