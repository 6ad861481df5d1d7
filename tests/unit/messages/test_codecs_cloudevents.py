"""Messages as CloudEvents in structured mode: the same for consumers that know nothing of durable, and back."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any
from uuid import uuid5

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from durable.envelope import new_id
from durable.errors import InvalidMessage
from durable.messages import codec
from durable.messages.cloudevents import STRUCTURED, from_structured
from tests.support.kinds import KINDS, draft, fields, some_fields

DRAFT = draft(STRUCTURED)
LATER = datetime(2030, 1, 1, tzinfo=UTC)


class Order(msgspec.Struct):
    number: int


class Loose(msgspec.Struct):
    value: Any = None


def encode(message: object, **changed: Any) -> bytes:
    return codec.encode(message, draft(STRUCTURED, **changed))


def decode(body: bytes, cls: type[Any]) -> Any:
    return codec.decode(body, cls, STRUCTURED)


@pytest.mark.parametrize("cls", KINDS)
@given(values=fields)
def test_encoded_message_is_decoded_unchanged(cls: type[Any], values: dict[str, Any]) -> None:
    message = cls(**values)
    assert decode(encode(message), cls) == message


@given(body=st.binary(max_size=60) | st.text(max_size=60).map(str.encode))
@example(body=b"")
@example(body=b"null")
@example(body=b'{"specversion":"1.0","id":"1","source":"a","type":"b","data":' + b"[" * 100_000)
@example(body=b'{"specversion":"1.0","id":"1","source":"a","type":"b","data":{"value":NaN}}')
@example(body=b'{"specversion":"1.0","id":"1","source":"a","type":"b","data":' + b"9" * 5_000 + b"}")
def test_arbitrary_bytes_are_a_message_or_invalid(body: bytes) -> None:
    with pytest.raises(InvalidMessage, match="the body is no Order"):
        decode(body, Order)


def test_event_carries_the_fields_of_its_envelope() -> None:
    headers = {"traceparent": "00-1", "ce-subject": "order 7", "mine": "x", "ce-type": "y", "ce-A b": "z"}
    event = json.loads(encode(Order(7), partition_key="order-7", deliver_by=LATER, headers=headers, source="my orders"))
    assert event == {
        "specversion": "1.0",
        "id": str(DRAFT.id),
        "source": "my%20orders",
        "type": "orders.order-placed",
        "time": "2026-01-02T03:04:05.678901Z",
        "datacontenttype": "application/json",
        "data": {"number": 7},
        "partitionkey": "order-7",
        "expirytime": "2030-01-01T00:00:00Z",
        "traceparent": "00-1",
        "subject": "order 7",
    }


def test_encoded_message_is_read_as_a_structured_event() -> None:
    event = from_structured(encode(Order(7), partition_key="order-7", deliver_by=LATER))
    assert (event.message_type, event.source, event.sent_at) == (DRAFT.message_type, DRAFT.source, DRAFT.sent_at)
    assert (event.body, event.partition_key, event.deliver_by) == (b'{"number":7}', "order-7", LATER)


def test_repeatable_message_has_the_same_bytes_at_any_time() -> None:
    derived = uuid5(new_id(), "invoice-17")
    sent = [
        encode(Order(7), id=derived, sent_at=at, deliver_by=at, headers={"traceparent": at.isoformat()})
        for at in (LATER, datetime(2031, 1, 1, tzinfo=UTC))
    ]
    assert sent[0] == sent[1]


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"specversion": "0.3"}, "only '1.0' is understood"),
        ({"data": None}, "the body is no Order"),
        ({"data": {"number": "seven"}}, "Expected `int`, got `str`"),
        ({"datacontenttype": "application/xml", "data": "<a/>"}, "'application/xml'; only application/json"),
        (
            {"datacontenttype": "application/msgpack", "data": None, "data_base64": "gaZudW1iZXIB"},
            "only application/json is",
        ),
        ({"data": None, "data_base64": "*"}, "data_base64 is no text in base64"),
        ({"id": ""}, "lacks the attribute 'id'"),
    ],
)
def test_event_of_another_form_is_invalid(changed: dict[str, Any], said: str) -> None:
    event = {name: value for name, value in (json.loads(encode(Order(7))) | changed).items() if value is not None}
    with pytest.raises(InvalidMessage, match=said):
        decode(json.dumps(event).encode(), Order)


def test_data_in_base64_and_of_any_kind_of_json_is_read() -> None:
    event = json.loads(encode(Order(7))) | {"datacontenttype": "application/vnd.acme+json; charset=utf-8"}
    assert decode(json.dumps(event).encode(), Order) == Order(7)
    del event["data"]
    assert decode(json.dumps(event | {"data_base64": "eyJudW1iZXIiOjh9"}).encode(), Order) == Order(8)


def test_value_unfit_for_json_is_refused() -> None:
    with pytest.raises(InvalidMessage, match=r"Loose\.value is nan, which JSON cannot represent"):
        encode(Loose(float("nan")))


@pytest.mark.parametrize("cls", KINDS)
def test_the_data_is_the_json_of_the_message(cls: type[Any]) -> None:
    message = cls(**some_fields())
    assert json.loads(encode(message))["data"] == json.loads(codec.encode(message, draft()))
