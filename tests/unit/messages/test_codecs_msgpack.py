"""Messages to MessagePack and back: faithfully, or not at all."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from decimal import Decimal
from ipaddress import IPv4Address
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import BaseModel

from durable.errors import InvalidMessage
from durable.messages import codec
from durable.messages.codecs.msgpack import MSGPACK
from tests.support.kinds import KINDS, draft, fields, some_fields
from tests.support.subclasses import VALUES


class Loose(msgspec.Struct):
    value: Any = None


class LooseModel(BaseModel):
    value: Any = None


class Addressed(BaseModel):
    host: IPv4Address


def encode(message: object) -> bytes:
    return codec.encode(message, draft(MSGPACK))


def decode(body: bytes, cls: type[Any]) -> Any:
    return codec.decode(body, cls, MSGPACK)


def nested(depth: int) -> Any:
    value: Any = None
    for _ in range(depth):
        value = [value]
    return value


class TestEveryKind:
    @pytest.mark.parametrize("cls", KINDS)
    @given(values=fields)
    def test_encoded_message_is_decoded_unchanged(self, cls: type[Any], values: dict[str, Any]) -> None:
        message = cls(**values)
        assert decode(encode(message), cls) == message

    @pytest.mark.parametrize("cls", [*KINDS, Loose, LooseModel])
    @given(body=st.binary(max_size=60))
    @example(body=b"")
    @example(body=b"\xc0")
    @example(body=b"\x81\xa5value\xc7\x00\x05")
    @example(body=b"\x81\xa5value\xcb\x7f\xf0\x00\x00\x00\x00\x00\x00")
    def test_arbitrary_bytes_are_a_message_or_invalid(self, cls: type[Any], body: bytes) -> None:
        try:
            message = decode(body, cls)
        except InvalidMessage:
            return
        assert isinstance(message, cls)

    @pytest.mark.parametrize("cls", KINDS)
    def test_kinds_of_message_classes_share_one_form(self, cls: type[Any]) -> None:
        values = some_fields()
        form = msgspec.msgpack.decode(encode(cls(**values)))
        assert form == {
            **values,
            "id": str(values["id"]),
            "total": "10.10",
            "day": "2024-02-29",
            "wait": "PT90S",
            "tags": [1],
            "colour": "blue",
        }

    @pytest.mark.parametrize("cls", KINDS)
    def test_field_added_by_a_newer_sender_is_passed_over(self, cls: type[Any]) -> None:
        message = cls(**some_fields())
        known = msgspec.msgpack.decode(encode(message))
        assert decode(msgspec.msgpack.encode({**known, "added": {"deep": [1]}}), cls) == message


@pytest.mark.parametrize("cls", [Loose, LooseModel])
class TestOddValues:
    def test_non_finite_number_is_decoded_unchanged(self, cls: type[Any]) -> None:
        for value in (math.inf, -math.inf):
            assert decode(encode(cls(value=value)), cls).value == value
        assert math.isnan(decode(encode(cls(value=math.nan)), cls).value)

    @pytest.mark.parametrize("value", [2**64, -(2**63) - 1, 10**5_000], ids=["2^64", "-2^63-1", "5,000 digits"])
    def test_an_integer_of_more_than_64_bits_is_refused(self, cls: type[Any], value: int) -> None:
        with pytest.raises(InvalidMessage, match="cannot be encoded"):
            encode(cls(value=value))

    def test_a_lone_surrogate_is_refused(self, cls: type[Any]) -> None:
        with pytest.raises(InvalidMessage, match="cannot be encoded"):
            encode(cls(value="\ud800"))

    def test_too_deep_nesting_is_refused(self, cls: type[Any]) -> None:
        with pytest.raises(InvalidMessage, match="cannot be encoded"):
            encode(cls(value=nested(100_000)))  # Python 3.11 refuses 1,000 levels, 3.12 some 10,000

    def test_object_without_a_form_is_refused(self, cls: type[Any]) -> None:
        with pytest.raises(InvalidMessage, match="cannot be encoded"):
            encode(cls(value=object()))

    @pytest.mark.parametrize(
        "body",
        [
            pytest.param(b"", id="nothing"),
            pytest.param(b"\x81\xa5value", id="cut"),
            pytest.param(b"\x81\xa5value\xdd\xff\xff\xff\xff", id="an array of 4 billion that is cut"),
            pytest.param(b"\x81\xa5value\xc6\xff\xff\xff\xff", id="4 GiB that are cut"),
            pytest.param(b"\x81\xa5value" + b"\x91" * 100_000 + b"\xc0", id="100k nesting"),
            pytest.param(b"\x81\xa5value" + b"\xdd\xff\xff\xff\xff" * 100_000, id="100k nested arrays of 4 billion"),
            pytest.param(b"\x81\xa5value\xa1\xff", id="invalid UTF-8"),
            pytest.param(b"\x81\xa5value\xc1", id="the byte that is never used"),
            pytest.param(b"\x81\xa5value\x01\x01", id="something behind"),
            pytest.param(b'{"value": 1}', id="JSON"),
            pytest.param(b"\x93\x01\x02\x03", id="an array"),
        ],
    )
    def test_malformed_or_exhausting_body_is_invalid(self, cls: type[Any], body: bytes) -> None:
        with pytest.raises(InvalidMessage, match=f"the body is no {cls.__name__}"):
            decode(body, cls)


@pytest.mark.parametrize("cls", KINDS)
@pytest.mark.parametrize("name", ["id", "number", "total", "at", "tags", "colour", "picture"])
def test_extension_type_is_refused_as_a_value(cls: type[Any], name: str) -> None:
    form = msgspec.msgpack.decode(encode(cls(**some_fields())))
    body = msgspec.msgpack.encode({**form, name: msgspec.msgpack.Ext(42, b"\x00")})
    with pytest.raises(InvalidMessage):
        decode(body, cls)


def test_type_known_only_to_pydantic_travels_as_in_json() -> None:
    message = Addressed(host=IPv4Address("10.0.0.1"))
    assert msgspec.msgpack.decode(encode(message)) == {"host": "10.0.0.1"}
    assert decode(encode(message), Addressed) == message


def test_msgpack_is_smaller_than_json_and_keeps_bytes() -> None:
    message = KINDS[0](**some_fields(picture=bytes(range(256)) * 4))
    assert bytes(range(256)) * 4 in encode(message)
    assert len(encode(message)) < len(codec.encode(message, draft()))


def test_money_keeps_its_digits_and_moments_their_microseconds() -> None:
    at = datetime(2026, 1, 1, 0, 0, 0, 1, tzinfo=UTC)
    message = KINDS[0](**some_fields(total=Decimal("10.10"), at=at))
    assert (str(decode(encode(message), KINDS[0]).total), decode(encode(message), KINDS[0]).at) == ("10.10", at)


@pytest.mark.parametrize(("cls", "value"), VALUES.values(), ids=list(VALUES))
def test_value_of_a_subclass_is_sent_as_its_class(cls: type, value: Any) -> None:
    carrier = msgspec.defstruct("Carrier", [("value", cls)])
    body = encode(carrier(value))

    codec.refuse_unfaithful(carrier(value), body, MSGPACK)
    assert decode(body, carrier).value == value
