"""Fields in JSON that a message has not taken, at each depth and in every kind of class."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Any, Final, Literal, NamedTuple, TypedDict

import attrs
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import AliasChoices, AliasPath, BaseModel, ConfigDict, Field, RootModel
from pydantic.dataclasses import dataclass as pydantic_dataclass

from durable.errors import InvalidMessage
from durable.messages import codec
from durable.messages.cloudevents import STRUCTURED
from durable.messages.registry import message
from durable.messages.unknown_fields import refuse_unknown_fields


class Point(msgspec.Struct, frozen=True, rename="camel"):
    east_of: int
    height: int = 0


class Circle(msgspec.Struct, tag="circle", tag_field="shape"):
    middle: Point


class Square(msgspec.Struct, tag="square", tag_field="shape"):
    corner: Point


class Pair(msgspec.Struct, array_like=True):
    first: Point
    second: Point | None = None


class TaggedPair(msgspec.Struct, array_like=True, tag=True):
    first: Point


class Named(NamedTuple):
    point: Point
    label: str = ""


class Typed(TypedDict):
    point: Point


@dataclass
class Plain:
    point: Point
    made: int = field(default=0, init=False)


@dataclass
class Spot:
    number: int = 0


@attrs.define
class Attrs:
    point: Point | None = None


class Side(StrEnum):
    LEFT = "left"


@pydantic_dataclass
class Checked:
    number: int = Field(default=0, alias="No")


class Inner(BaseModel):
    kind: Literal["inner"] = "inner"
    number: int = Field(default=0, alias="theNumber")


class Other(BaseModel):
    kind: Literal["other"]
    plain: Spot | None = None


class Open(BaseModel):
    model_config = ConfigDict(extra="allow")
    inner: Inner | None = None


class Numbers(RootModel[list[Inner]]):
    pass


@message("unknown-fields.structs")
class Structs(msgspec.Struct, omit_defaults=True):
    point: Point | None = None
    shape: Circle | Square | None = None
    shapes: list[Circle | Square | int] = []
    pair: Pair | None = None
    tagged: TaggedPair | None = None
    pairs: tuple[Point, ...] = ()
    named: Named | None = None
    typed: Typed | None = None
    by_number: dict[int, Point] = {}
    by_text: dict[str, Point] = {}
    by_side: dict[Side, Point] = {}
    several: frozenset[Point] = frozenset()
    plain: Plain | None = None
    attrs: Attrs | None = None
    anything: Any = None
    raw: msgspec.Raw = msgspec.Raw(b"null")
    self: Structs | None = None


@message("unknown-fields.models")
class Models(BaseModel):
    inner: Inner | None = None
    either: Annotated[Inner | Other, Field(discriminator="kind")] | None = None
    choices: int = Field(default=0, validation_alias=AliasChoices("choices", "chosen", AliasPath("way", "to")))
    open: Open | None = None
    numbers: Numbers | None = None
    checked: Checked | None = None
    plain: Spot | None = None
    by_text: dict[str, Inner] = {}


POINT: Final = {"eastOf": 1, "height": 2}
Place = tuple[str | int, ...]
CASES: Final[Sequence[tuple[type, dict[str, Any], Sequence[Place]]]] = (
    (Structs, {}, [()]),
    (Structs, {"point": POINT}, [(), ("point",)]),
    (Structs, {"point": {"eastOf": 0, "height": 0}, "shapes": []}, [("point",)]),
    (Structs, {"shape": {"shape": "circle", "middle": POINT}}, [("shape",), ("shape", "middle")]),
    (Structs, {"shapes": [1, {"shape": "square", "corner": POINT}]}, [("shapes", 1), ("shapes", 1, "corner")]),
    (Structs, {"pair": [POINT, POINT]}, [("pair", 0), ("pair", 1)]),
    (Structs, {"pair": [POINT]}, [("pair", 0)]),
    (Structs, {"tagged": ["TaggedPair", POINT]}, [("tagged", 1)]),
    (Structs, {"pairs": [POINT, POINT]}, [("pairs", 0), ("pairs", 1)]),
    (Structs, {"named": [POINT, "x"]}, [("named", 0)]),
    (Structs, {"named": [POINT]}, [("named", 0)]),
    (Structs, {"typed": {"point": POINT}}, [("typed",), ("typed", "point")]),
    (Structs, {"by_number": {"2": POINT, "1": POINT}}, [("by_number", "2"), ("by_number", "1")]),
    (Structs, {"by_text": {"2": POINT}}, [("by_text", "2")]),
    (Structs, {"by_side": {"left": POINT}}, [("by_side", "left")]),
    (Structs, {"several": [POINT, {"eastOf": 7}]}, [("several", 0), ("several", 1)]),
    (Structs, {"plain": {"point": POINT, "made": 3}}, [("plain",), ("plain", "point")]),
    (Structs, {"attrs": {"point": POINT}}, [("attrs",), ("attrs", "point")]),
    (Structs, {"anything": {"a": [{"b": 1}]}, "raw": {"c": 1}}, [()]),
    (Structs, {"self": {"self": {"point": POINT}}}, [("self",), ("self", "self"), ("self", "self", "point")]),
    (Models, {"inner": {"theNumber": 1}}, [(), ("inner",)]),
    (Models, {"inner": {"number": 1}}, [("inner",)]),
    (Models, {"either": {"kind": "other", "plain": {"number": 1}}}, [("either",), ("either", "plain")]),
    (Models, {"chosen": 1}, [()]),
    (Models, {"way": {"to": 1}}, [()]),
    (Models, {"open": {"more": {"a": 1}, "inner": {"kind": "inner"}}}, [("open", "inner")]),
    (Models, {"numbers": [{"theNumber": 1}, {}]}, [("numbers", 0), ("numbers", 1)]),
    (Models, {"checked": {"No": 1}}, [("checked",)]),
    (Models, {"by_text": {"a": {}}}, [("by_text", "a")]),
)
PLACES: Final = [(cls, document, place) for cls, document, places in CASES for place in places]


def at(document: Any, place: Place) -> Any:
    for step in place:
        document = document[step]
    return document


def changed(document: Any, place: Place, **more: Any) -> bytes:
    other = msgspec.json.decode(msgspec.json.encode(document))
    at(other, place).update(more)
    return msgspec.json.encode(other)


def in_an_event(body: bytes) -> bytes:
    event = {"specversion": "1.0", "id": "1", "source": "/", "type": "t", "data": msgspec.Raw(body)}
    return msgspec.json.encode(event)


def as_it_is(body: bytes) -> bytes:
    return body


KINDS: Final = pytest.mark.parametrize(
    ("content_type", "written"), [("application/json", as_it_is), (STRUCTURED, in_an_event)], ids=["json", "event"]
)


@pytest.mark.parametrize(("cls", "document", "_"), CASES)
@KINDS
def test_fields_of_the_class_are_taken(
    cls: type, document: Any, _: object, content_type: str, written: Callable[[bytes], bytes]
) -> None:
    codec.refuse_unknown_fields(written(msgspec.json.encode(document)), cls, content_type)


@pytest.mark.parametrize(("cls", "document", "place"), PLACES)
@KINDS
def test_unknown_field_is_refused_by_its_name_and_place(
    cls: type, document: Any, place: Place, content_type: str, written: Callable[[bytes], bytes]
) -> None:
    body = written(changed(document, place, tset=3))
    with pytest.raises(InvalidMessage) as caught:
        codec.refuse_unknown_fields(body, cls, content_type)
    path = cls.__qualname__ + "".join(f"[{each}]" if isinstance(each, int) else f".{each}" for each in place)
    assert str(caught.value).startswith(f"{path}: unknown field 'tset'; ")


@pytest.mark.parametrize(("cls", "document", "place"), PLACES)
@KINDS
def test_unknown_field_may_stay_unchanged(
    cls: type, document: Any, place: Place, content_type: str, written: Callable[[bytes], bytes]
) -> None:
    before = written(changed(document, place, tset=[3]))
    codec.refuse_unknown_fields(before, cls, content_type, before=before)
    for other in (changed(document, place, tset=[4]), changed(document, place, tset=[3], more=1)):
        with pytest.raises(InvalidMessage, match="unknown field"):
            codec.refuse_unknown_fields(written(other), cls, content_type, before=before)


@pytest.mark.parametrize(
    ("document", "told"), [({"pair": [POINT, None, 3]}, "2 items"), ({"tagged": ["TaggedPair", POINT, 3]}, "2 items")]
)
def test_item_beyond_the_fields_of_an_array_is_refused(document: Any, told: str) -> None:
    with pytest.raises(InvalidMessage, match=f"too many items; give {told}"):
        codec.refuse_unknown_fields(msgspec.json.encode(document), Structs)


def test_misspelt_field_gets_the_nearest_name() -> None:
    with pytest.raises(InvalidMessage, match=r"Structs\.point: unknown field 'heigth'; did you mean 'height'\?"):
        codec.refuse_unknown_fields(b'{"point":{"eastOf":1,"heigth":2}}', Structs)
    with pytest.raises(InvalidMessage, match=r"unknown field 'east_of'; did you mean 'eastOf'\?"):
        codec.refuse_unknown_fields(b'{"point":{"eastOf":1,"east_of":2}}', Structs)


def test_fields_within_the_arguments_of_a_call_are_read_strictly() -> None:
    arguments = {"point": Point(1), "count": 1}
    refuse_unknown_fields(b'{"point":{"eastOf":1}}', arguments, "Map.put")
    with pytest.raises(InvalidMessage, match=r"Map\.put\.point: unknown field 'heigth'; did you mean 'height'\?"):
        refuse_unknown_fields(b'{"point":{"eastOf":1,"heigth":2}}', arguments, "Map.put")


def test_body_before_need_not_be_of_the_class() -> None:
    before = b'{"point":"nowhere","urgent":true}'
    codec.refuse_unknown_fields(b'{"urgent":true}', Structs, before=before)
    with pytest.raises(InvalidMessage, match="unknown field 'urgent'"):
        codec.refuse_unknown_fields(b'{"urgent":true}', Structs, before=b"\xff")


def test_field_moves_with_its_item() -> None:
    before = changed({"pairs": [POINT]}, ("pairs", 0), newer=1)
    codec.refuse_unknown_fields(changed({"pairs": [POINT, POINT]}, ("pairs", 1), newer=1), Structs, before=before)


texts = st.text(st.characters(codec="utf-8"), max_size=3)
documents = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | texts,
    lambda parts: st.lists(parts, max_size=3) | st.dictionaries(texts, parts, max_size=3),
    max_leaves=8,
)


@given(documents)
def test_document_of_any_shape_is_taken_where_anything_is(document: Any) -> None:
    codec.refuse_unknown_fields(msgspec.json.encode({"anything": document}), Structs)


def test_document_of_many_depths_is_refused_or_taken() -> None:
    body = b'{"self":' * 300 + b"{}" + b"}" * 300
    codec.refuse_unknown_fields(body, Structs)
