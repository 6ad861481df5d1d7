"""Bodies of messages that hold sets: equal messages have one body, whatever the order in which their items come."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any, Final
from uuid import UUID

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, Field, field_serializer

from durable.envelope import Envelope
from durable.messages.codecs import json as in_json
from durable.messages.codecs import msgpack as in_msgpack
from durable.messages.codecs.json import JsonCodec
from durable.messages.codecs.msgpack import MsgpackCodec
from durable.messages.codecs.set_order import in_one_order

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


class Ranked(BaseModel):
    names: set[str]

    @field_serializer("names")
    def ranked(self, names: set[str]) -> list[str]:
        return sorted(names, key=len)


def test_list_of_a_serializer_stays_unchanged() -> None:
    ranked = Ranked(names={"bb", "c"})
    assert JsonCodec().encode(ranked, ANY_ENVELOPE) == b'{"names":["c","bb"]}'
    assert msgspec.msgpack.decode(MsgpackCodec().encode(ranked, ANY_ENVELOPE)) == {"names": ["c", "bb"]}


@pytest.mark.parametrize(
    ("value", "made"), [({1, 2}, [2, 1, 9]), ({1, 2}, [2]), ({"a": {1, 2}, "b": [2, 1]}, {"b": [2, 1]}), ([1], [2, 1])]
)
def test_parts_unlike_those_of_the_value_stay_unchanged(value: object, made: object) -> None:
    assert in_one_order(value, made) == made
