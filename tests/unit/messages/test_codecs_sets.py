"""Bodies of messages that hold sets: equal messages have one body, whatever the order in which their items come."""

from __future__ import annotations

import re
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from fractions import Fraction
from ipaddress import IPv4Address, IPv4Network
from pathlib import PurePosixPath
from typing import Annotated, Any, Final
from uuid import UUID
from zoneinfo import ZoneInfo

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import (
    Base64Bytes,
    BaseModel,
    ByteSize,
    ConfigDict,
    Field,
    HttpUrl,
    Json,
    PlainSerializer,
    PostgresDsn,
    RootModel,
    WrapSerializer,
    create_model,
    field_serializer,
    model_serializer,
)
from pydantic.dataclasses import dataclass as of_pydantic

from durable.calls.payload import Payload
from durable.envelope import Envelope
from durable.messages.codecs import json as in_json
from durable.messages.codecs import msgpack as in_msgpack
from durable.messages.codecs.json import JsonCodec
from durable.messages.codecs.msgpack import MsgpackCodec
from durable.messages.codecs.set_order import in_one_order
from durable.messages.codecs.sets import is_plain, plain_fields

SAME_PLACE: Final = 2**16
"""Numbers that differ by it have one place in a small set: they come out in the order in which they went in."""
ITEMS: Final = st.lists(st.integers(0, 3).map(lambda number: number * SAME_PLACE), min_size=1, unique=True)
AT: Final = datetime(2026, 1, 2, tzinfo=UTC)
ANY_ENVELOPE: Final[Any] = Envelope
MessageOf = Callable[[Sequence[int]], Any]


@dataclass(frozen=True)
class Inner:
    numbers: frozenset[int]


class Struct(msgspec.Struct, rename="camel", omit_defaults=True):
    the_numbers: set[int]
    by_day: dict[int, set[int]]
    inner: list[Inner]
    pair: tuple[int, frozenset[frozenset[int]]]
    at: datetime = AT
    raw: bytes = b"\x00"
    price: Decimal = Decimal("1.10")
    texts: set[str | int] = msgspec.field(default_factory=set)


class ModelInner(BaseModel, frozen=True):
    numbers: frozenset[int] = Field(alias="theNumbers")


class Model(BaseModel):
    numbers: set[int]
    by_day: dict[int, set[int]] = Field(alias="byDay")
    inner: list[ModelInner]
    pair: tuple[int, frozenset[frozenset[int]]]
    at: datetime = AT
    within: timedelta = timedelta(seconds=1.5)
    price: Decimal = Decimal("1.10")
    big: int = 2**80
    id: UUID = UUID(int=7)
    raw: bytes = b"a"


def struct(items: Sequence[int]) -> Struct:
    return Struct(set(items), {2: set(items), 1: {1}}, [Inner(frozenset(items))], (1, nested(items)), AT, b"\x01")


def model(items: Sequence[int]) -> Model:
    inner = ModelInner(theNumbers=frozenset(items))
    return Model(numbers=set(items), byDay={2: set(items), 1: {1}}, inner=[inner], pair=(1, nested(items)))


def small_model(items: Sequence[int]) -> ModelInner:
    return ModelInner(theNumbers=frozenset(items))


def nested(items: Sequence[int]) -> frozenset[frozenset[int]]:
    return frozenset([frozenset(items), frozenset([min(items)])])


@pytest.mark.parametrize(
    ("codec", "message"),
    [
        pytest.param(JsonCodec(), struct, id="json-struct"),
        pytest.param(JsonCodec(), model, id="json-model"),
        pytest.param(MsgpackCodec(), struct, id="msgpack-struct"),
        pytest.param(MsgpackCodec(), small_model, id="msgpack-model"),
    ],
)
@given(ITEMS)
def test_equal_messages_have_one_body(codec: Any, message: MessageOf, items: list[int]) -> None:
    one, other = message(items), message(items[::-1])
    body = codec.encode(one, ANY_ENVELOPE)
    assert body == codec.encode(other, ANY_ENVELOPE)
    assert codec.decode(body, type(one)) == one


def test_message_with_sets_is_written_as_without_an_order() -> None:
    """Sets of one item have no order."""
    of_struct, of_model, small = struct([3]), model([3]), small_model([3])
    assert in_json._encoder.encode(of_struct) == JsonCodec().encode(of_struct, ANY_ENVELOPE)
    assert of_model.model_dump_json(by_alias=True).encode() == JsonCodec().encode(of_model, ANY_ENVELOPE)
    assert in_msgpack._encode(of_struct) == MsgpackCodec().encode(of_struct, ANY_ENVELOPE)
    packed = in_msgpack._encode_dumped(small.model_dump(by_alias=True))
    assert packed == MsgpackCodec().encode(small, ANY_ENVELOPE)


class Extended(msgspec.Struct):
    numbers: set[int]
    more: msgspec.msgpack.Ext


def test_extension_of_messagepack_is_carried_beside_a_set() -> None:
    extended = Extended({1}, msgspec.msgpack.Ext(5, b"a"))
    assert MsgpackCodec().decode(MsgpackCodec().encode(extended, ANY_ENVELOPE), Extended) == extended


class Ranked(BaseModel):
    names: set[str]

    @field_serializer("names")
    def ranked(self, names: set[str]) -> list[str]:
        return sorted(names, key=len)


class RankedRoot(RootModel[set[str]]):
    @field_serializer("root")
    def ranked(self, names: set[str]) -> list[str]:
        return sorted(names, key=len)


class Whole(BaseModel):
    names: set[str]

    @model_serializer(mode="plain")
    def written(self) -> dict[str, list[str]]:
        return {"names": sorted(self.names, key=len)}


LongestLast = PlainSerializer(lambda names: sorted(names, key=len))


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (Annotated[set[str], LongestLast], {"bb", "c"}),
        (list[Annotated[set[str], LongestLast]], [{"bb", "c"}]),
        (dict[str, Annotated[frozenset[str], LongestLast]], {"x": frozenset({"bb", "c"})}),
        (Ranked, Ranked(names={"bb", "c"})),
        (tuple[Ranked, Whole], (Ranked(names={"bb", "c"}), Whole(names={"bb", "c"}))),
        (RankedRoot, RankedRoot({"bb", "c"})),
        (RootModel[list[Ranked]], RootModel[list[Ranked]]([Ranked(names={"bb", "c"})])),
    ],
    ids=["field", "field of lists", "field of dicts", "model", "models", "root", "root of models"],
)
@pytest.mark.parametrize("codec", [JsonCodec(), MsgpackCodec()], ids=["json", "msgpack"])
def test_list_of_a_serializer_stays_unchanged_beside_sets_in_order(codec: Any, kind: Any, value: Any) -> None:
    made = create_model("Made", value=(kind, ...), numbers=(set[int], ...))
    one, other = (made(value=value, numbers=numbers) for numbers in ({SAME_PLACE, 0}, {0, SAME_PLACE}))
    body = codec.encode(one, ANY_ENVELOPE)
    assert body == codec.encode(other, ANY_ENVELOPE)
    read = msgspec.json.decode(body) if isinstance(codec, JsonCodec) else msgspec.msgpack.decode(body)
    assert read["value"] == made(value=value, numbers={0}).model_dump(mode="json")["value"]


ORDINARY: Final[tuple[tuple[Any, Any], ...]] = (
    (Sequence[str], ["a"]),
    (defaultdict[str, int], {"a": 1}),
    (deque[int], [1]),
    (Counter[str], {"a": 1}),
    (PurePosixPath, "/a"),
    (ZoneInfo, "UTC"),
    (HttpUrl, "http://a.example/"),
    (PostgresDsn, "postgresql://a.example/b"),
    (IPv4Address, "127.0.0.1"),
    (IPv4Network, "127.0.0.0/8"),
    (Fraction, "1/3"),
    (re.Pattern, "a+"),
    (ByteSize, 5),
    (Base64Bytes, b"YQ=="),
    (Json[list[int]], "[1]"),
    (Annotated[Decimal, PlainSerializer(str)], "1.10"),
    (Annotated[datetime, WrapSerializer(lambda value, write: write(value))], AT),
    (Sequence[frozenset[int]], [{0, SAME_PLACE}]),
    (Mapping[str, frozenset[int]], {"a": {0, SAME_PLACE}}),
    (defaultdict[str, set[int]], {"a": {0, SAME_PLACE}}),
    (deque[set[int]], [{0, SAME_PLACE}]),
    (tuple[Annotated[Decimal, PlainSerializer(str)], set[int]], ("1.10", {0, SAME_PLACE})),
    (dict[IPv4Address, set[int]], {"127.0.0.1": {0, SAME_PLACE}}),
    (AbstractSet[HttpUrl], [HttpUrl(f"http://{name}.example") for name in "abcdefgh"]),
    (set[int] | None, {0, SAME_PLACE}),
    (Json[set[int]], f"[0, {SAME_PLACE}]"),
)
"""Types that pydantic writes by functions, and others, each with a value."""


@pytest.mark.parametrize("codec", [JsonCodec(), MsgpackCodec()], ids=["json", "msgpack"])
@pytest.mark.parametrize(("kind", "value"), ORDINARY, ids=map(str, range(len(ORDINARY))))
@pytest.mark.parametrize("config", [ConfigDict(), ConfigDict(defer_build=True)], ids=["built", "deferred"])
def test_sets_have_one_order_beside_fields_of_any_type(codec: Any, kind: Any, value: Any, config: ConfigDict) -> None:
    made = create_model("Made", __config__=config, value=(kind, ...), numbers=(set[int], ...))
    one, other = made(value=value, numbers={SAME_PLACE, 0}), made(value=turned(value), numbers={0, SAME_PLACE})
    body = codec.encode(one, ANY_ENVELOPE)
    assert body == codec.encode(other, ANY_ENVELOPE)
    assert codec.decode(body, made) == one


def turned(value: Any) -> Any:
    """The same value, whose sets were filled in the other order."""
    match value:
        case str() if value.startswith("[0,"):
            return f"[{SAME_PLACE}, 0]"
        case set():
            return {*sorted(value, reverse=True)} if value != {*sorted(value)} else {*reversed([*value])}
        case dict():
            return {key: turned(each) for key, each in value.items()}
        case tuple():
            return tuple(map(turned, value))
        case list() if isinstance(value[0], HttpUrl):
            return value[::-1]
        case list():
            return [*map(turned, value)]
        case _:
            return value


class Open(BaseModel, extra="allow"):
    __pydantic_extra__: dict[str, set[int]] = Field(init=False)  # pyright: ignore[reportIncompatibleVariableOverride]


@pytest.mark.parametrize("codec", [JsonCodec(), MsgpackCodec()], ids=["json", "msgpack"])
def test_sets_have_one_order_in_fields_beyond_the_declared(codec: Any) -> None:
    one, other = (Open.model_validate({"more": numbers}) for numbers in ({SAME_PLACE, 0}, {0, SAME_PLACE}))
    body = codec.encode(one, ANY_ENVELOPE)
    assert body == codec.encode(other, ANY_ENVELOPE)
    assert codec.decode(body, Open) == one


@dataclass
class Crossed:
    """Each alias is the name of the other field."""

    numbers: Annotated[set[int], Field(alias="texts")]
    texts: Annotated[list[str], Field(alias="numbers")]


@of_pydantic
class CrossedByPydantic(Crossed): ...


class CrossedModel(BaseModel, populate_by_name=True):
    numbers: set[int] = Field(alias="texts")
    texts: list[str] = Field(alias="numbers")


class HoldingModel(BaseModel):
    value: Crossed | CrossedByPydantic | CrossedModel


@dataclass
class HoldingDataclass:
    value: Crossed


@pytest.mark.parametrize("codec", [JsonCodec(), MsgpackCodec()], ids=["json", "msgpack"])
@pytest.mark.parametrize(
    "made",
    [
        lambda numbers, texts: Crossed(numbers, texts),
        lambda numbers, texts: CrossedByPydantic(numbers=texts, texts=numbers),
        lambda numbers, texts: CrossedModel(numbers=texts, texts=numbers),
        lambda numbers, texts: HoldingDataclass(Crossed(numbers, texts)),
        lambda numbers, texts: HoldingModel(value=Crossed(numbers, texts)),
        lambda numbers, texts: HoldingModel(value=CrossedModel(numbers=texts, texts=numbers)),
    ],
    ids=["dataclass", "of pydantic", "model", "in a dataclass", "dataclass in a model", "model in a model"],
)
def test_sets_have_one_order_and_lists_keep_theirs_under_crossed_aliases(codec: Any, made: Any) -> None:
    one, other = (made(numbers, ["c", "a", "b"]) for numbers in ({SAME_PLACE, 0}, {0, SAME_PLACE}))
    body = codec.encode(one, ANY_ENVELOPE)
    assert body == codec.encode(other, ANY_ENVELOPE)
    read = codec.decode(body, type(one))
    assert getattr(read, "value", read).texts == ["c", "a", "b"]


@dataclass(frozen=True)
class Line:
    sku: str


class ModelLine(BaseModel, frozen=True):
    sku: str


class Lines(BaseModel):
    lines: frozenset[ModelLine]


@pytest.mark.parametrize(
    ("kind", "place"),
    [
        (frozenset[ModelLine], r"Made\.value"),
        (set[Line], r"Made\.value"),
        (dict[str, set[tuple[int, ModelLine]]], r"Made\.value"),
        (tuple[ModelLine, set[ModelLine]], r"Made\.value"),
        (list[Lines], r"Lines\.lines"),
        (RootModel[list[Lines]], r"Lines\.lines"),
        (RootModel[set[ModelLine]], r"RootModel.*\.root"),
    ],
    ids=["models", "dataclasses", "tuples", "beside a model", "within a model", "within a root", "root"],
)
def test_set_of_models_is_refused_in_messagepack(kind: Any, place: str) -> None:
    made = create_model("Made", value=(kind, ...))
    said = rf"^{place} is a set of models, which MessagePack cannot carry; make it a list or a tuple$"
    with pytest.raises(TypeError, match=said):
        MsgpackCodec().check(made)
    with pytest.raises(TypeError, match=said):
        Payload(made)


def test_set_of_models_has_one_body_in_json() -> None:
    skus = [ModelLine(sku=str(number)) for number in range(20)]
    one, other = Lines(lines=frozenset(skus)), Lines(lines=frozenset(skus[::-1]))
    body = JsonCodec().encode(one, ANY_ENVELOPE)
    assert body == JsonCodec().encode(other, ANY_ENVELOPE)
    assert JsonCodec().decode(body, Lines) == one


@pytest.mark.parametrize(
    ("value", "made"), [({1, 2}, [2, 1, 9]), ({1, 2}, [2]), ({"a": {1, 2}, "b": [2, 1]}, {"b": [2, 1]}), ([1], [2, 1])]
)
def test_parts_unlike_those_of_the_value_stay_unchanged(value: object, made: object) -> None:
    assert in_one_order(value, made) == made


# ---------------------------------------------------------------- parts without sets


class Row(msgspec.Struct):
    numbers: list[int]


class RowWithTags(Row):
    tags: set[int]


class ModelRow(BaseModel):
    numbers: list[int]


class LooseRow(BaseModel, extra="allow"):
    numbers: list[int]


class WrittenRow(BaseModel):
    numbers: list[int]

    @model_serializer
    def written(self) -> dict[str, set[int]]:
        return {"numbers": set(self.numbers)}


PLAIN: Final[Sequence[Any]] = (
    bool, int, float, str, bytes, Decimal, UUID, datetime, timedelta, None, int | None, list[int], tuple[int, str],
    tuple[int, ...], dict[str, dict[int, list[float]]], list[int | str],
)  # fmt: skip
NOT_PLAIN: Final[Sequence[Any]] = (
    set[int], frozenset[int], list[set[int]], dict[str, set[int]], int | set[int], set[int] | None, Any, object,
    list[Any], dict[str, Any], AbstractSet[int],
)  # fmt: skip


@pytest.mark.parametrize("kind", PLAIN, ids=str)
def test_type_without_sets_is_plain(kind: Any) -> None:
    of_struct = msgspec.defstruct("Made", [("value", kind), ("numbers", set[int])])
    of_model = create_model("Made", value=(kind, ...), numbers=(set[int], ...))
    assert [plain_fields(cls) for cls in (of_struct, of_model)] == [{"value"}, {"value"}]


@pytest.mark.parametrize("kind", NOT_PLAIN, ids=str)
def test_type_with_room_for_a_set_is_not_plain(kind: Any) -> None:
    of_struct = msgspec.defstruct("Made", [("value", kind)])
    of_model = create_model("Made", value=(kind, ...))
    assert not any(is_plain(cls) or "value" in plain_fields(cls) for cls in (of_struct, of_model))


@pytest.mark.parametrize("cls", [RowWithTags, LooseRow, WrittenRow, int, dict, Fraction])
def test_class_with_more_than_plain_fields_is_not_plain(cls: type[Any]) -> None:
    assert not is_plain(cls)


@pytest.mark.parametrize("of", [Row, ModelRow])
def test_rows_without_sets_stay_as_they_were_made(of: Any) -> None:
    """As many as there may be: they are not walked one by one."""
    rows, made = [of(numbers=[1, 2])], [{"numbers": [1, 2]}]
    beside = {"rows": rows, "tags": {1}}
    assert in_one_order(beside, {"rows": made, "tags": [1]})["rows"] is made
    assert in_one_order(rows[0], made[0]) is made[0]


@given(ITEMS)
def test_sets_of_a_subclass_have_one_order_in_a_field_of_its_base(items: list[int]) -> None:
    class Rows(msgspec.Struct):
        rows: list[Row]
        tags: set[int]

    one, other = (Rows([RowWithTags([1], set(each))], {1}) for each in (items, items[::-1]))
    assert JsonCodec().encode(one, ANY_ENVELOPE) == JsonCodec().encode(other, ANY_ENVELOPE)
    assert MsgpackCodec().encode(one, ANY_ENVELOPE) == MsgpackCodec().encode(other, ANY_ENVELOPE)
