"""What the rule calls compatible is decoded: a table of cases, and classes and values that hypothesis makes."""

from __future__ import annotations

import enum
from collections.abc import Callable
from datetime import date, datetime, timedelta
from decimal import Decimal
from typing import Annotated, Any, Literal, NamedTuple, Optional
from uuid import UUID

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import Meta, defstruct
from pydantic import BaseModel

from durable.description.compatibility import Fault, Misfit, misfits
from durable.messages.schemas import schema_of


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class MoreColours(enum.Enum):
    RED = "red"
    BLUE = "blue"
    GREEN = "green"


class RenamedColour(enum.Enum):
    CRIMSON = "red"
    BLUE = "blue"


class Way(enum.Enum):
    IN = 1
    OUT = 2


class ExchangedWay(enum.Enum):
    OUT = 1
    IN = 2


class OneWay(enum.Enum):
    OUT = 1
    OTHER = 2


class Right(enum.Flag):
    READ = 1
    WRITE = 2


class ExchangedRight(enum.Flag):
    WRITE = 1
    READ = 2


class Point(NamedTuple):
    x: int
    y: int


class Node(msgspec.Struct):
    value: int
    next: Node | None = None


class WiderNode(msgspec.Struct):
    value: float
    next: WiderNode | None = None


class NarrowerNode(msgspec.Struct):
    value: int
    next: OtherNode | None = None


class OtherNode(msgspec.Struct):
    value: str
    next: NarrowerNode | None = None


class Cat(msgspec.Struct, tag="cat"):
    name: str


class Dog(msgspec.Struct, tag="dog"):
    name: str


class Model(BaseModel):
    number: int
    inner: list[Model] = []


class StricterModel(BaseModel):
    number: int
    inner: list[StricterModel]


LIST: Any = list  # of types that are values here
SET: Any = set
DICT: Any = dict
TUPLE: Any = tuple
OPTIONAL: Any = Optional  # also of None, which has no operator |

A: Any = defstruct("A", [("x", int)])
A_AND_OPTIONAL: Any = defstruct("A", [("x", int), ("y", int, 1)])
A_AND_REQUIRED: Any = defstruct("A", [("x", int), ("y", int)])
A_CLOSED: Any = defstruct("A", [("x", int)], forbid_unknown_fields=True)
ONE_ARGUMENT: Any = defstruct("Arguments", [("sku", str)], array_like=True, forbid_unknown_fields=True)
TWO_ARGUMENTS: Any = defstruct("Arguments", [("sku", str), ("count", int)], array_like=True, forbid_unknown_fields=True)
ONE_OR_TWO: Any = defstruct("Arguments", [("sku", str), ("count", int, 1)], array_like=True, forbid_unknown_fields=True)

FITTING: list[tuple[Any, Any]] = [
    (int, int),
    (int, float),
    (int, Any),
    (int, int | None),
    (int, int | str),
    (Literal["a"], Literal["a", "b"]),
    (Literal["a", 1], str | int),
    (Literal["a"], str),
    (Colour, MoreColours),
    (Colour, RenamedColour),
    (Colour, str),
    (A, A_AND_OPTIONAL),
    (A_AND_REQUIRED, A),
    (A_AND_OPTIONAL, A),
    (A, dict[str, int]),
    (Node, Node),
    (Node, WiderNode),
    (Cat, Cat | Dog),
    (list[int], list[float]),
    (tuple[int, int], list[int]),
    (tuple[int, int], Point),
    (set[int], list[int]),
    (dict[str, int], dict[str, int | None]),
    (Annotated[int, Meta(ge=1)], Annotated[int, Meta(ge=0)]),
    (Annotated[int, Meta(ge=0)], Annotated[int, Meta(ge=0)]),
    (Annotated[str, Meta(min_length=1)], Annotated[str, Meta(min_length=0)]),
    (ONE_ARGUMENT, ONE_OR_TWO),
    (datetime, datetime | None),
    (Model, Model),
    (StricterModel, Model),
]

MISFITTING: list[tuple[Any, Any, str, Fault]] = [
    (float, int, "", Fault.TYPE),
    (int, str, "", Fault.TYPE),
    (Any, int, "", Fault.TYPE),
    (int | None, int, "", Fault.TYPE),
    (bool, int, "", Fault.TYPE),
    (str, bytes, "", Fault.TYPE),
    (bytes, str, "", Fault.TYPE),
    (str, datetime, "", Fault.TYPE),
    (datetime, str, "", Fault.TYPE),
    (date, datetime, "", Fault.TYPE),
    (str, UUID, "", Fault.TYPE),
    (str, Literal["a"], "", Fault.TYPE),
    (Literal["a", "b"], Literal["a"], "", Fault.VALUE),
    (MoreColours, Colour, "", Fault.VALUE),
    (A, A_AND_REQUIRED, "y", Fault.MISSING),
    (A_AND_OPTIONAL, A_AND_REQUIRED, "y", Fault.MISSING),
    (A_AND_OPTIONAL, A_CLOSED, "y", Fault.FIELD),
    (LIST[A], LIST[A_AND_REQUIRED], "[].y", Fault.MISSING),
    (DICT[str, A], DICT[str, A_AND_REQUIRED], "{}.y", Fault.MISSING),
    (dict[str, int], A, "x", Fault.MISSING),
    (dict[int, int], dict[str, int], "{key}", Fault.TYPE),
    (A, dict[int, int], "{key}", Fault.VALUE),
    (Cat | Dog, Cat, "type", Fault.VALUE),
    (Node, NarrowerNode, "next.value", Fault.TYPE),
    (list[int], set[int], "", Fault.LIMIT),
    (list[int], tuple[int, int], "", Fault.MISSING),
    (tuple[int, int], tuple[int], "[1]", Fault.FIELD),
    (int, Annotated[int, Meta(ge=0)], "", Fault.LIMIT),
    (Annotated[int, Meta(ge=0)], Annotated[int, Meta(ge=1)], "", Fault.LIMIT),
    (Annotated[str, Meta(max_length=9)], Annotated[str, Meta(max_length=8)], "", Fault.LIMIT),
    (str, Annotated[str, Meta(pattern="^a")], "", Fault.LIMIT),
    (ONE_ARGUMENT, TWO_ARGUMENTS, "count", Fault.MISSING),
    (ONE_OR_TWO, TWO_ARGUMENTS, "count", Fault.MISSING),
    (ONE_OR_TWO, ONE_ARGUMENT, "count", Fault.FIELD),
    (Model, StricterModel, "inner", Fault.MISSING),
    (Way, ExchangedWay, "", Fault.NAME),
    (Way, ExchangedWay | None, "", Fault.NAME),
    (Right, ExchangedRight, "", Fault.NAME),
    (Way, OneWay, "", Fault.NAME),
]


def compared(written: Any, read: Any) -> list[Misfit]:
    return misfits(schema_of(written), schema_of(read))


@pytest.mark.parametrize(("written", "read"), FITTING, ids=str)
def test_fits(written: Any, read: Any) -> None:
    assert compared(written, read) == []


@pytest.mark.parametrize(("written", "read", "path", "fault"), MISFITTING, ids=str)
def test_misfit_is_named(written: Any, read: Any, path: str, fault: Fault) -> None:
    found = compared(written, read)
    assert (path, fault) in [(each.path.replace("[0]", ""), each.fault) for each in found], found


def test_written_class_has_its_defaults() -> None:
    assert misfits(schema_of(A_AND_OPTIONAL, written=True), schema_of(A_AND_REQUIRED)) == []
    sparing = defstruct("A", [("x", int), ("y", int, 1)], omit_defaults=True)
    assert misfits(schema_of(sparing, written=True), schema_of(A_AND_REQUIRED)) != []
    for others in ([("y", int, 2)], [("y", int | None, None)]):
        other = defstruct("A", [("x", int), *others])
        assert [each.path for each in misfits(schema_of(sparing, written=True), schema_of(other))] == ["y"]
        assert misfits(schema_of(sparing), schema_of(other)) != []
        for written in (False, True):
            assert misfits(schema_of(A_AND_OPTIONAL, written=written), schema_of(other)) == []
    assert misfits(schema_of(sparing, written=True), schema_of(sparing)) == []
    unset = defstruct("A", [("x", int), ("y", int | msgspec.UnsetType, msgspec.UNSET)])
    assert misfits(schema_of(unset, written=True), schema_of(A_AND_REQUIRED)) != []


# Classes of two versions, and the values of the first ---------------------------------------------------------------

LEAVES: list[tuple[Any, Callable[[], st.SearchStrategy[Any]]]] = [
    (int, lambda: st.integers(-(2**53), 2**53)),
    (float, lambda: st.floats(allow_nan=False, allow_infinity=False)),
    (bool, st.booleans),
    (str, lambda: st.text(max_size=4)),
    (bytes, lambda: st.binary(max_size=4)),
    (None, st.none),
    (datetime, st.datetimes),
    (date, st.dates),
    (UUID, st.uuids),
    (Decimal, lambda: st.decimals(allow_nan=False, allow_infinity=False, places=2)),
    (timedelta, lambda: st.timedeltas(timedelta(-9), timedelta(9))),
    (Literal["a"], lambda: st.just("a")),
    (Literal["a", "b"], lambda: st.sampled_from(["a", "b"])),
    (Literal["a", "b", "c"], lambda: st.sampled_from(["a", "b", "c"])),
    (Literal[1, 2], lambda: st.sampled_from([1, 2])),
    (Colour, lambda: st.sampled_from(Colour)),
    (MoreColours, lambda: st.sampled_from(MoreColours)),
    (Annotated[int, Meta(ge=0)], lambda: st.integers(0, 99)),
    (Annotated[int, Meta(ge=1, le=9)], lambda: st.integers(1, 9)),
    (Annotated[str, Meta(min_length=1)], lambda: st.text(min_size=1, max_size=3)),
    (Annotated[str, Meta(max_length=2)], lambda: st.text(max_size=2)),
    (Any, lambda: st.none() | st.integers(0, 9) | st.text(max_size=2)),
]

Pair = tuple[Any, Any, st.SearchStrategy[Any]]
FORMS = ["leaf", "leaf", "list", "set", "dict", "keys", "tuple", "option", "struct", "array"]


@st.composite
def pairs(draw: st.DrawFn, depth: int = 3) -> Pair:
    """Two types, the second often like the first, and a strategy for the values of the first."""
    form = "leaf" if depth == 0 else draw(st.sampled_from(FORMS))
    if form == "leaf":
        kind, values = draw(st.sampled_from(LEAVES))
        return kind, draw(st.sampled_from([kind, kind, draw(st.sampled_from(LEAVES))[0]])), values()
    old, new, values = draw(pairs(depth - 1))
    if form == "list":
        other = draw(st.sampled_from([LIST[new], TUPLE[new, ...], TUPLE[new, new], new]))
        return LIST[old], other, st.lists(values, max_size=3)
    if form == "set":
        number = draw(st.sampled_from([int, str]))
        other = draw(st.sampled_from([SET[number], LIST[number], SET[int]]))
        return SET[number], other, st.sets(st.integers(0, 9) if number is int else st.text(max_size=2), max_size=3)
    if form in ("dict", "keys"):
        key, keys = (str, st.text(max_size=2)) if form == "dict" else (int, st.integers(0, 9))
        return DICT[key, old], DICT[draw(st.sampled_from([key, str])), new], st.dictionaries(keys, values, max_size=2)
    if form == "tuple":
        second, other, others = draw(pairs(depth - 1))
        return TUPLE[old, second], draw(st.sampled_from([TUPLE[new, other], LIST[new]])), st.tuples(values, others)
    if form == "option":
        return OPTIONAL[old], draw(st.sampled_from([OPTIONAL[new], new])), st.none() | values
    return draw(structs(depth - 1, form == "array"))


@st.composite
def structs(draw: st.DrawFn, depth: int, array_like: bool) -> Pair:
    """Two classes that share some of their fields."""
    fields: tuple[list[Any], list[Any]] = [], []
    values: dict[str, st.SearchStrategy[Any]] = {}
    has_default = [False, False]
    for name in draw(st.lists(st.sampled_from("abc"), unique=True, max_size=3)):
        old, new, given = draw(pairs(depth))
        for side, kind in enumerate((old, new)):
            has_default[side] = has_default[side] or draw(st.integers(0, 3)) == 0
            if side == 0 or draw(st.integers(0, 3)):
                fields[side].append((name, OPTIONAL[kind], None) if has_default[side] else (name, kind))
        values[name] = given
    if draw(st.booleans()):
        fields[1].append(("d", int, 1) if has_default[1] or draw(st.booleans()) else ("d", int))
    tag = draw(st.sampled_from([None, "one", "two"]))
    made = [
        defstruct(
            "S",
            each,
            array_like=array_like,
            forbid_unknown_fields=draw(st.integers(0, 3)) == 0,
            omit_defaults=draw(st.integers(0, 3)) == 0,
            tag=tag if draw(st.integers(0, 3)) else None,
        )
        for each in fields
    ]
    new = made[1] if draw(st.integers(0, 7)) else DICT[str, Any]
    return made[0], new, st.builds(made[0], **values)


def is_valid(kind: Any) -> bool:
    try:
        msgspec.json.Decoder(kind)
    except TypeError:  # two kinds of text in one union, and the like
        return False
    return True


@pytest.mark.parametrize("codec", [msgspec.json, msgspec.msgpack], ids=["json", "msgpack"])
@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
@given(pair=pairs().filter(lambda pair: is_valid(pair[0]) and is_valid(pair[1])), data=st.data())
def test_fitting_value_is_decoded(codec: Any, pair: Pair, data: st.DataObject) -> None:
    old, new, values = pair
    assert misfits(schema_of(old, written=True), schema_of(old)) == [], "what is not changed fits"
    if not misfits(schema_of(old, written=True), schema_of(new)):
        options = {} if codec is msgspec.json else {"decimal_format": "string"}
        body = codec.Encoder(**options).encode(data.draw(values))
        codec.Decoder(new).decode(body)
