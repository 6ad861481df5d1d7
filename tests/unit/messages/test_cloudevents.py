"""An event becomes the same envelope in both modes; what is no CloudEvents 1.0 is refused with a reason."""

from __future__ import annotations

import base64
import contextlib
import json
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote
from uuid import NAMESPACE_URL, uuid5

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from durable.errors import InvalidMessage
from durable.messages.cloudevents import from_binary, from_structured

ATTRIBUTES = {"specversion": "1.0", "id": "A-17", "source": "/shop/7", "type": "orders.order-placed"}
DATA = b'{"order_id": 17}'


def structured(data: bytes | None = DATA, **members: Any) -> bytes:
    """An event in JSON; None leaves an attribute out."""
    given = {name: value for name, value in {**ATTRIBUTES, **members}.items() if value is not None}
    text = json.dumps(given).encode()
    return text if data is None else text[:-1] + b', "data": ' + data + b"}"


def binary(*more: tuple[bytes, bytes], **attributes: str) -> list[tuple[bytes, bytes]]:
    given = {**ATTRIBUTES, **attributes}
    return [(f"ce-{name}".encode(), value.encode()) for name, value in given.items()] + list(more)


@pytest.mark.parametrize(
    "event",
    [from_structured(structured()), from_binary(binary(), "application/json; charset=utf-8", DATA)],
    ids=["structured", "binary"],
)
def test_an_event_is_the_same_in_both_modes(event: Any) -> None:
    assert event.id == uuid5(uuid5(NAMESPACE_URL, "/shop/7"), "A-17")
    assert (event.message_type, event.source) == ("orders.order-placed", "/shop/7")
    assert (event.content_type, event.body) == ("application/json", DATA)
    assert (event.sent_at, event.deliver_by, event.partition_key) == (None, None, None)
    assert event.headers == {"ce-id": "A-17"}


def test_event_id_is_scoped_by_its_source() -> None:
    here, there = (from_structured(structured(source=source)).id for source in ("/shop/7", "/shop/8"))

    assert here != there


def test_source_and_id_are_kept_apart() -> None:
    first = from_structured(structured(source="/shop", id="7/17"))
    second = from_structured(structured(source="/shop/7", id="17"))

    assert first.id != second.id


def test_known_attributes_become_fields_of_the_envelope() -> None:
    event = from_structured(
        structured(time="2030-01-31T12:00:00+01:00", expirytime="2030-02-01T00:00:00Z", partitionkey="order-17")
    )

    assert event.sent_at == datetime(2030, 1, 31, 11, tzinfo=UTC)
    assert event.deliver_by == datetime(2030, 2, 1, tzinfo=UTC)
    assert event.partition_key == "order-17"
    assert event.headers == {"ce-id": "A-17"}


def test_other_attributes_are_headers_as_text() -> None:
    event = from_structured(
        structured(subject="order 17", dataschema="urn:x", attempt=3, urgent=True, traceparent="00-a")
    )

    assert event.headers == {
        "ce-id": "A-17",
        "ce-subject": "order 17",
        "ce-dataschema": "urn:x",
        "ce-attempt": "3",
        "ce-urgent": "true",
        "traceparent": "00-a",
    }


def test_null_equals_an_absent_attribute() -> None:
    assert from_structured(
        structured(time=None).replace(b"{", b'{"time": null, "subject": null, ', 1)
    ) == from_structured(structured())


def test_data_keeps_its_bytes() -> None:
    data = b'{ "total" : 1.10,"big": 123456789012345678901234567890 }'

    assert from_structured(structured(data)).body == data


def test_base64_data_is_decoded() -> None:
    encoded = base64.b64encode(DATA).decode()

    assert from_structured(structured(None, data_base64=encoded)) == from_structured(structured())


def test_an_event_may_have_no_data() -> None:
    assert from_structured(structured(None)).body == b""


@pytest.mark.parametrize("content_type", ["application/json", "Application/JSON;charset=utf-8", "application/x.y+json"])
def test_every_kind_of_json_value_is_data(content_type: str) -> None:
    assert from_structured(structured(datacontenttype=content_type)).content_type == "application/json"
    assert from_binary(binary(), content_type, DATA).content_type == "application/json"


def test_data_of_another_type_is_text() -> None:
    event = from_structured(structured(b'"<order/>"', datacontenttype="application/xml"))

    assert (event.content_type, event.body) == ("application/xml", b"<order/>")


@pytest.mark.parametrize(
    ("sent", "meant"),
    [
        (b"Euro%20%E2%82%AC%20%F0%9F%98%80", "Euro € 😀"),
        (b"%e2%82%ac", "€"),
        (b'"in quotes"', "in quotes"),
        (rb'"a \"word\" and a \\"', 'a "word" and a \\'),
        (b"100%2525", "100%25"),
        (b'"', '"'),
    ],
)
def test_header_values_are_decoded_once(sent: bytes, meant: str) -> None:
    assert from_binary(binary((b"Ce-Subject", sent)), "application/json", DATA).headers["ce-subject"] == meant


@given(st.text(st.characters(exclude_categories=["Cs"]), min_size=1))
def test_any_text_survives_a_header(text: str) -> None:
    event = from_binary(binary((b"ce-subject", quote(text, safe="").encode())), "application/json", DATA)

    assert event.headers["ce-subject"] == text


@pytest.mark.parametrize(
    ("document", "reason"),
    [
        (b"", "no CloudEvent in JSON"),
        (b"[]", "no CloudEvent in JSON"),
        (b'{"a": \xff}', "no CloudEvent in JSON"),
        (structured(b"NaN"), "no CloudEvent in JSON"),
        (structured(b"[" * 100_000 + b"]" * 100_000), "no CloudEvent in JSON"),
        (structured(b'"\\ud800"'), "no CloudEvent in JSON"),
        (structured(id=None), "lacks the attribute 'id'"),
        (structured(source=""), "lacks the attribute 'source'"),
        (structured(type=None), "lacks the attribute 'type'"),
        (structured(specversion=None), "lacks the attribute 'specversion'"),
        (structured(specversion="0.3"), "only '1.0' is understood"),
        (structured(specversion=1.0), "the attribute 'specversion' is no text"),
        (structured(subject={"a": 1}), "the attribute 'subject' is no text"),
        (structured(attempt=2**31), "the attribute 'attempt' is no text"),
        (structured(attempt=1).replace(b'"attempt": 1', b'"attempt": ' + b"1" * 5_000), "the attribute 'attempt'"),
        (structured(subject="?").replace(b"?", b"\xff"), "the attribute 'subject' is no text"),
        (structured(orderId="17"), "named 'orderId'; use lower-case letters and digits only"),
        (structured(time="2030-01-31T12:00:00"), "time is no time as in RFC 3339"),
        (structured(time="yesterday"), "time is no time as in RFC 3339"),
        (structured(expirytime="2030-01-31"), "expirytime is no time as in RFC 3339"),
        (structured(data_base64="e30="), "give one of them"),
        (structured(None, data_base64="e30"), "no text in base64"),
        (structured(None, data_base64=17), "no text in base64"),
        (structured(datacontenttype="text/plain"), "data of the type text/plain is no text"),
    ],
)
def test_malformed_event_is_refused(document: bytes, reason: str) -> None:
    with pytest.raises(InvalidMessage, match=reason):
        from_structured(document)


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        ((b"CE-ID", b"again"), "ce-id comes twice"),
        ((b"ce-subject", b"%C0%A0"), "ce-subject is not percent-encoded UTF-8"),
        ((b"ce-subject", b"%ED%A0%80"), "ce-subject is not percent-encoded UTF-8"),
        ((b"ce-subject", b"\xe9"), "ce-subject is not percent-encoded UTF-8"),
        ((b"ce-datacontenttype", b"application/json"), "the type of the data is Content-Type"),
        ((b"ce-order-id", b"17"), "named 'order-id'"),
        ((b"ce-", b"17"), "named ''"),
        ((b"ce-time", b"now"), "time is no time as in RFC 3339"),
    ],
)
def test_malformed_headers_of_an_event_are_refused(header: tuple[bytes, bytes], reason: str) -> None:
    with pytest.raises(InvalidMessage, match=reason):
        from_binary(binary(header), "application/json", DATA)


@given(start=st.integers(0, 150), length=st.integers(0, 20), instead=st.binary(max_size=20))
@example(start=0, length=150, instead=b"")
def test_corrupted_event_raises_only_invalid_message(start: int, length: int, instead: bytes) -> None:
    document = structured()

    with contextlib.suppress(InvalidMessage):
        from_structured(document[:start] + instead + document[start + length :])
    with contextlib.suppress(InvalidMessage):
        from_binary(binary((b"ce-time", instead), (instead, b"17")), "application/json", DATA)
