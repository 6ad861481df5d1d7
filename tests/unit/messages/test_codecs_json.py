"""Messages to JSON and back: faithfully, or not at all."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

import attrs
import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict

from durable.envelope import JSON
from durable.errors import InvalidMessage
from durable.messages import codec
from durable.messages.codec import decode
from tests.support.kinds import KINDS, Colour, draft, fields, some_fields
from tests.support.subclasses import VALUES


class Loose(msgspec.Struct):
    value: Any = None


class LooseModel(BaseModel):
    value: Any = None


class ModelThatWritesNaN(BaseModel):
    model_config = ConfigDict(ser_json_inf_nan="constants")
    value: float | list[float]


@dataclass
class Inner:
    ratio: float


@attrs.define
class AttrsOuter:
    inner: Inner


@dataclass
class Outer:
    inner: Inner
    by_name: dict[str, list[float | None]] = field(default_factory=dict)
    colour: Colour = Colour.RED


def encode(message: object) -> bytes:
    return codec.encode(message, draft())


class TestEveryKind:
    @pytest.mark.parametrize("cls", KINDS)
    @given(values=fields)
    def test_encoded_message_is_decoded_unchanged(self, cls: type[Any], values: dict[str, Any]) -> None:
        message = cls(**values)
        body = encode(message)
        assert decode(body, cls) == message
        json.loads(body, parse_constant=pytest.fail)  # and is JSON for others

    @pytest.mark.parametrize("cls", [*KINDS, Loose, LooseModel])
    @given(
        body=st.binary(max_size=60) | st.text(max_size=60).map(str.encode) | st.from_regex(rb"[\[\]{}\",:0-9.e\\u-]+")
    )
    @example(body=b"")
    @example(body=b"null")
    @example(body=b"[]")
    @example(body=b'{"value":1e999}')
    def test_arbitrary_bytes_are_a_message_or_invalid(self, cls: type[Any], body: bytes) -> None:
        try:
            message = decode(body, cls)
        except InvalidMessage:
            return
        assert isinstance(message, cls)

    @pytest.mark.parametrize("cls", KINDS)
    def test_money_keeps_its_digits(self, cls: type[Any]) -> None:
        body = encode(cls(**some_fields(total=Decimal("10.10"))))
        assert b'"total":"10.10"' in body
        assert str(decode(body, cls).total) == "10.10"

    @pytest.mark.parametrize("cls", KINDS)
    def test_field_added_by_a_newer_sender_is_passed_over(self, cls: type[Any]) -> None:
        message = cls(**some_fields())
        newer = encode(message)[:-1] + b',"added":{"deep":[1]}}'
        assert decode(newer, cls) == message


class TestEncoding:
    @pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
    @pytest.mark.parametrize(
        ("wrap", "path"),
        [
            (Loose, "Loose.value"),
            (LooseModel, "LooseModel.value"),
            (lambda v: Loose([1.0, v]), "Loose.value[1]"),
            (lambda v: Loose((None, v)), "Loose.value[1]"),
            (lambda v: Loose({"a": {"b": v}}), "Loose.value['a']['b']"),
            (lambda v: Loose({v}), "Loose.value[0]"),
            (lambda v: LooseModel(value=[LooseModel(value=v)]), "LooseModel.value[0].value"),
            (lambda v: Outer(Inner(v)), "Outer.inner.ratio"),
            (lambda v: Outer(Inner(1), {"a": [None, v]}), "Outer.by_name['a'][1]"),
            (lambda v: AttrsOuter(Inner(v)), "AttrsOuter.inner.ratio"),
            (lambda v: ModelThatWritesNaN(value=v), "ModelThatWritesNaN.value"),
            (lambda v: ModelThatWritesNaN(value=[v]), "ModelThatWritesNaN.value[0]"),
        ],
    )
    def test_non_finite_number_is_refused_with_its_place(self, wrap: Any, path: str, value: float) -> None:
        message = wrap(value=value) if wrap is LooseModel else wrap(value)
        with pytest.raises(InvalidMessage) as refused:
            encode(message)
        assert str(refused.value) == f"{path} is {value}, which JSON cannot represent; send a finite number"

    @pytest.mark.parametrize(
        "message",
        [Loose(None), Loose([None, {"a": None}]), LooseModel(), Loose("null"), Loose("NaN"), Loose("Infinity")],
    )
    def test_null_and_words_resembling_numbers_are_accepted(self, message: Any) -> None:
        assert decode(encode(message), type(message)) == message

    @pytest.mark.parametrize("message", [Loose("\ud800"), Loose({"\udfff": 1}), LooseModel(value="\ud800")])
    def test_a_lone_surrogate_is_refused(self, message: object) -> None:
        with pytest.raises(InvalidMessage, match="cannot be encoded"):
            encode(message)

    @pytest.mark.parametrize("depth", [990, 100_000])
    def test_too_deep_nesting_is_refused(self, depth: int) -> None:
        nested: Any = None
        for _ in range(depth):
            nested = [nested]
        with pytest.raises(InvalidMessage, match="recursion"):
            encode(Loose(nested))

    def test_undecodable_integer_is_refused(self) -> None:
        with pytest.raises(InvalidMessage, match="4300 digits"):
            encode(Loose(10**5000))

    def test_object_without_a_json_form_is_refused(self) -> None:
        with pytest.raises(InvalidMessage, match="Loose cannot be encoded"):
            encode(Loose(object()))


@dataclass
class Picky:
    value: int

    def __post_init__(self) -> None:
        raise LookupError("no such value")


class TestDecoding:
    @pytest.mark.parametrize("cls", [Loose, LooseModel])
    @pytest.mark.parametrize(
        "body",
        [
            pytest.param(b'{"value": NaN}', id="NaN"),
            pytest.param(b'{"value": -Infinity}', id="infinity"),
            pytest.param(b'{"value": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", id="100k nesting"),
            pytest.param(b'{"value": ' + b"9" * 5_000 + b"}", id="5,000 digits"),
            pytest.param(b'{"value": "\xff"}', id="invalid UTF-8"),
            pytest.param(b'{"value": "\\ud800"}', id="lone surrogate"),
            pytest.param(b'{"value": 1} x', id="something behind"),
            pytest.param(b'\xef\xbb\xbf{"value": 1}', id="byte order mark"),
            pytest.param(b"", id="nothing"),
            pytest.param(b'{"value": 1', id="cut"),
        ],
    )
    def test_malformed_or_exhausting_body_is_invalid(self, cls: type[Any], body: bytes) -> None:
        with pytest.raises(InvalidMessage, match=f"the body is no {cls.__name__}"):
            decode(body, cls)

    def test_error_of_the_class_makes_the_message_invalid(self) -> None:
        with pytest.raises(InvalidMessage, match="no such value") as invalid:
            decode(b'{"value": 1}', Picky)
        assert isinstance(invalid.value.__cause__, LookupError)


@pytest.mark.parametrize(("cls", "value"), VALUES.values(), ids=list(VALUES))
def test_value_of_a_subclass_is_sent_as_its_class(cls: type, value: Any) -> None:
    carrier = msgspec.defstruct("Carrier", [("value", cls)])
    body = encode(carrier(value))

    codec.refuse_unfaithful(carrier(value), body, JSON)
    assert decode(body, carrier).value == value
