"""An envelope as an AMQP message: all of it arrives; what AMQP cannot carry, or what is no envelope, is told apart."""

from __future__ import annotations

import hashlib
import logging
import re
from datetime import UTC, datetime, timedelta, timezone
from itertools import product
from typing import Any
from uuid import UUID

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pamqp.body import ContentBody
from pamqp.commands import Basic
from pamqp.frame import unmarshal
from pamqp.header import ContentHeader

from durable.envelope import JSON, Envelope, new_id
from durable.errors import InvalidMessage
from durable.transports.rabbitmq.arrivals import MOST_DEATHS, Origin, Unmappable, mapped, metadata
from durable.transports.rabbitmq.message import content
from tests.support.receivers import envelope

NOW = datetime(2026, 1, 2, 3, 4, 5, 678901, tzinfo=UTC)
FRAME_MAX = 131_072
LIMIT = 1 << 20
ORIGIN = Origin("mail", "rabbitmq://default/queue/mail")
TYPED = Origin("mail", "rabbitmq://default/queue/mail", "mail.requested")
DELIVER = Basic.Deliver("tag", 1, False, "orders", "orders-order.placed")

texts = st.text(st.characters(codec="utf-8"), max_size=20)
names = texts.filter(bool)
taken = st.sampled_from(
    ["durable-", "durable-sent-at", "durable-header-", "durable-header-x", "CC", "BCC", "x-death", "x-delivery-count"]
)
header_names = st.one_of(texts, taken, st.builds(str.__add__, taken, texts))
zones = st.sampled_from([UTC, timezone(timedelta(hours=5, minutes=30)), timezone(-timedelta(hours=11))])
times = st.datetimes(datetime(1, 1, 3), datetime(9999, 12, 29), timezones=zones)
any_envelope = st.builds(
    Envelope,
    id=st.uuids(),
    message_type=names,
    destination=names,
    source=names,
    correlation_id=st.uuids(),
    body=st.binary(max_size=200),
    sent_at=times,
    content_type=names,
    causation_id=st.none() | st.uuids(),
    partition_key=st.none() | texts,
    headers=st.dictionaries(header_names, texts, max_size=4),
    deliver_by=st.none() | times,
    execution_time=st.none() | times,
)


def transmitted(sent: Envelope, frame_max: int = FRAME_MAX) -> tuple[Basic.Properties, bytes]:
    """What a consumer reads of what is written."""
    frames = [unmarshalled for _, unmarshalled in split(content(sent, channel=3, max_frame_bytes=frame_max))]
    assert isinstance(frames[0], ContentHeader)
    body = b"".join(frame.value for frame in frames[1:] if isinstance(frame, ContentBody))
    assert frames[0].body_size == len(body)
    return frames[0].properties, body


def split(data: bytes) -> list[tuple[int, Any]]:
    """The frames in these bytes, with their sizes."""
    frames = []
    while data:
        size, channel, frame = unmarshal(data)
        assert channel == 3
        frames.append((size, frame))
        data = data[size:]
    return frames


def received(about: Basic.Properties, body: bytes = b"{}", origin: Origin = ORIGIN) -> Envelope | Unmappable:
    return mapped(DELIVER, about, body, origin=origin, limit_bytes=LIMIT, now=NOW)


def foreign(about: Basic.Properties, body: bytes = b"{}", origin: Origin = TYPED) -> Envelope:
    found = received(about, body, origin)
    assert isinstance(found, Envelope), found
    return found


def numbered(
    broker: str, exchange: str, key: str, is_of_topic: bool = True, headers: dict[str, Any] | None = None
) -> UUID:
    """The id of message 17 of a publisher."""
    origin = Origin("shop:mail", f"rabbitmq://{broker}/queue/shop:mail", "mail", is_of_topic)
    about = Basic.Properties(message_id="17", headers=headers)
    deliver = Basic.Deliver("tag", 1, False, exchange, key)
    found = mapped(deliver, about, b"{}", origin=origin, limit_bytes=LIMIT, now=NOW)
    assert isinstance(found, Envelope), found
    return found.id


def refused(about: Basic.Properties, body: bytes = b"{}", origin: Origin = TYPED) -> str:
    """Why it is no envelope; its body is kept, and what is known of it."""
    found = received(about, body, origin)
    assert isinstance(found, Unmappable), found
    assert found.raw == body
    assert found.metadata == metadata(DELIVER, about, origin)
    return found.reason


def durable(**changes: Any) -> Basic.Properties:
    """The properties of a message of durable's, with changes; a header of None is left out."""
    about, _ = transmitted(envelope())
    headers = {**(about.headers or {}), **changes.pop("headers", {})}
    about.headers = {name: value for name, value in headers.items() if value is not None}
    for name, value in changes.items():
        setattr(about, name, value)
    return about


class TestSending:
    @given(any_envelope)
    @example(envelope())
    def test_envelope_arrives_unchanged(self, sent: Envelope) -> None:
        about, body = transmitted(sent)
        assert received(about, body) == sent

    @given(any_envelope, st.integers(-(2**31), 2**31))
    def test_headers_added_by_the_broker_are_left_out(self, sent: Envelope, count: int) -> None:
        about, body = transmitted(sent)
        about.headers = (about.headers or {}) | {
            "x-delivery-count": count,
            "x-death": [{"queue": "mail", "count": count % MOST_DEATHS}],
            "x-first-death-reason": "expired",
        }
        assert received(about, body) == sent

    def test_a_header_of_a_later_version_is_left_out(self) -> None:
        sent = envelope()
        about, body = transmitted(sent)
        about.headers = (about.headers or {}) | {"durable-of-tomorrow": "x"}
        assert received(about, body) == sent

    def test_properties_carry_the_fields_known_to_other_programs(self) -> None:
        sent = msgspec.structs.replace(
            envelope("orders.order-placed", b"[1]"), headers={"trace": "7"}, deliver_by=NOW + timedelta(seconds=1.5)
        )
        about, body = transmitted(sent)
        assert body == b"[1]"
        assert about.message_id == str(sent.id)
        assert about.correlation_id == str(sent.correlation_id)
        assert about.message_type == "orders.order-placed"
        assert about.app_id == sent.source
        assert about.content_type == JSON
        assert about.timestamp == sent.sent_at.replace(microsecond=0)
        assert about.expiration is None
        assert about.delivery_mode == 2
        assert about.headers is not None
        assert about.headers["trace"] == "7"

    def test_headers_reserved_by_the_broker_travel_under_another_name(self) -> None:
        sent = msgspec.structs.replace(envelope(), headers={"CC": "me", "BCC": "you", "durable-x": "1"})
        about, _ = transmitted(sent)
        assert about.headers is not None
        assert {"CC", "BCC", "durable-x"}.isdisjoint(about.headers)

    @given(st.integers(4_096, 9_000), st.binary(max_size=30_000))
    @example(4_096, bytes(4_088))
    @example(4_096, bytes(4_089))
    def test_no_frame_is_larger_than_agreed(self, frame_max: int, body: bytes) -> None:
        sent = envelope(body=body)
        sizes = [size for size, _ in split(content(sent, channel=3, max_frame_bytes=frame_max))]
        assert max(sizes) <= frame_max
        assert received(*transmitted(sent, frame_max)) == sent

    @pytest.mark.parametrize(
        ("changes", "reason"),
        [
            ({"headers": {"a": float("nan")}}, "header 'a' is not text"),
            ({"headers": {"a": 1}}, "header 'a' is not text"),
            ({"headers": {1: "a"}}, "header 1 is not text"),
            ({"headers": {"a": "x" * 200_000}}, "headers of 200[0-9]{3} bytes, more than a frame .*131072"),
            ({"headers": {"ä" * 65: "x"}}, "longer name than AMQP carries"),
            ({"headers": {"durable-" + "x" * 106: "x"}}, "longer name than AMQP carries"),
            ({"headers": {"a": "\ud800"}}, "AMQP cannot carry it: .*surrogates"),
            ({"headers": {"\ud800" * 100: "x"}}, "AMQP cannot carry it: .*surrogates"),
            ({"message_type": "x" * 256}, "message_type has 256 bytes, more than the 255"),
            ({"source": "ä" * 128}, "source has 256 bytes"),
            ({"content_type": "x" * 300}, "content_type has 300 bytes"),
            ({"content_type": ""}, "content_type is empty"),
            ({"message_type": ""}, "message_type is empty"),
            ({"source": ""}, "source is empty"),
            ({"destination": ""}, "destination is empty"),
            ({"sent_at": datetime(2026, 1, 1)}, "AMQP cannot carry it"),
            ({"deliver_by": datetime(2026, 1, 1)}, "deliver_by has no time zone"),
            ({"execution_time": datetime(2026, 1, 1)}, "execution_time has no time zone"),
        ],
        ids=lambda value: next(iter(value)) if isinstance(value, dict) else value[:20],
    )
    def test_envelope_unfit_for_amqp_is_refused_with_the_reason(
        self, changes: dict[str, Any], reason: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        with caplog.at_level(logging.WARNING), pytest.raises(InvalidMessage, match=reason):
            transmitted(msgspec.structs.replace(envelope(), **changes))
        assert caplog.records == []  # of the library, that it cuts something off

    def test_longest_allowed_texts_are_carried(self) -> None:
        sent = msgspec.structs.replace(
            envelope("x" * 255), source="ä" * 127, headers={"ä" * 64: "1", "durable-" + "x" * 105: "2"}
        )
        assert received(*transmitted(sent)) == sent


class TestPropertiesOfDurable:
    @pytest.mark.parametrize(
        ("changes", "reason"),
        [
            ({"message_id": None}, "message_id is no UUID"),
            ({"message_id": "17"}, "message_id is no UUID: '17'"),
            ({"correlation_id": "17"}, "correlation_id is no UUID"),
            ({"message_type": None}, "no type"),
            ({"app_id": None}, "no app_id"),
            ({"content_type": None}, "no content_type"),
            ({"headers": {"durable-sent-at": None}}, "no durable-sent-at"),
            ({"headers": {"durable-sent-at": "yesterday"}}, "durable-sent-at is no time: 'yesterday'"),
            ({"headers": {"durable-sent-at": "2026-01-01T00:00:00"}}, "durable-sent-at has no time zone"),
            ({"headers": {"durable-sent-at": 17}}, "durable-sent-at is not text"),
            ({"headers": {"durable-destination": None}}, "no durable-destination"),
            ({"headers": {"durable-causation-id": "17"}}, "durable-causation-id is no UUID"),
            ({"headers": {"durable-partition-key": [1]}}, "durable-partition-key is not text"),
            ({"headers": {"durable-deliver-by": "9" * 5_000}}, "durable-deliver-by is no time: '9{100}'"),
            ({"headers": {"durable-execution-time": b"\xff"}}, "durable-execution-time is not text"),
        ],
        ids=lambda value: None if isinstance(value, dict) else value[:40],
    )
    def test_broken_properties_make_no_envelope(self, changes: dict[str, Any], reason: str) -> None:
        assert re.search(reason, refused(durable(**changes)))

    def test_whole_properties_make_an_envelope(self) -> None:
        assert isinstance(received(durable()), Envelope)


class TestPropertiesOfOthers:
    def test_all_known_properties_are_kept(self) -> None:
        id_, correlation_id = new_id(), new_id()
        sent_at = datetime(2025, 12, 31, 23, 59, 59, tzinfo=UTC)
        about = Basic.Properties(
            message_id=str(id_),
            correlation_id=str(correlation_id),
            timestamp=sent_at,
            app_id="legacy",
            content_type="text/csv",
            headers={"trace": "7", "attempt": 2, "final": True, "raw": b"\xff", "nothing": None},
        )
        assert foreign(about, b"a;b") == Envelope(
            id=id_,
            message_type="mail.requested",
            destination="rabbitmq://default/queue/mail",
            source="legacy",
            correlation_id=correlation_id,
            body=b"a;b",
            sent_at=sent_at,
            content_type="text/csv",
            headers={"trace": "7", "attempt": "2", "final": "True", "raw": "\\xff", "nothing": "None"},
        )

    def test_missing_properties_have_defaults(self) -> None:
        found = foreign(Basic.Properties(message_id="17"))
        assert found.correlation_id == found.id
        assert (found.sent_at, found.source, found.content_type, found.headers) == (NOW, "unknown", JSON, {})

    def test_textual_id_becomes_the_same_uuid_each_time_and_another_for_each_queue(self) -> None:
        about = Basic.Properties(message_id="17")
        first = foreign(about)
        assert foreign(about).id == first.id == UUID(str(first.id))
        assert first.id.version == 5
        assert foreign(Basic.Properties(message_id="18")).id != first.id
        assert foreign(about, origin=Origin("post", "rabbitmq://default/queue/post", "mail.requested")).id != first.id

    @pytest.mark.parametrize("is_of_topic", [False, True])
    def test_textual_ids_are_of_a_broker_and_on_a_topic_of_a_publisher(self, is_of_topic: bool) -> None:
        brokers, exchanges, keys = ("default", "us"), ("durable", "events"), ("pos:mail", "web:mail")
        ids = {
            (broker, exchange, key): numbered(broker, exchange, key, is_of_topic)
            for broker, exchange, key in product(brokers, exchanges, keys)
        }

        assert len(set(ids.values())) == (8 if is_of_topic else 2)
        assert ids == {each: numbered(*each, is_of_topic) for each in ids}

    def test_dead_lettered_message_keeps_the_id_of_its_first_publish(self) -> None:
        first = {"queue": "shop:mail", "reason": "expired", "exchange": "durable", "routing-keys": ["pos:mail", "copy"]}
        later = {"queue": "retry", "reason": "expired", "exchange": "dlx", "routing-keys": ["pos:mail"]}
        noted = {"x-first-death-queue": "shop:mail", "x-first-death-reason": "expired"}
        sent = numbered("default", "durable", "pos:mail")

        for deaths in ([first], [later, first], [first, later]):
            assert numbered("default", "", "shop:mail", headers={**noted, "x-death": deaths}) == sent

    @pytest.mark.parametrize(
        "told", [None, 7, [], [7], [{}], [{"queue": "shop:mail", "reason": "expired", "exchange": 7}],
                 [{"queue": "shop:mail", "reason": "expired", "exchange": "durable", "routing-keys": []}]],
    )  # fmt: skip
    def test_unreadable_deaths_leave_the_way_of_the_delivery(self, told: Any) -> None:
        headers = {"x-first-death-queue": "shop:mail", "x-first-death-reason": "expired", "x-death": told}

        assert numbered("default", "", "shop:mail", headers=headers) == numbered("default", "", "shop:mail")

    def test_textual_correlation_id_is_left_out(self) -> None:
        found = foreign(Basic.Properties(message_id="17", correlation_id="18"))
        assert found.correlation_id == found.id

    def test_type_of_the_message_precedes_the_type_of_the_queue(self) -> None:
        about = Basic.Properties(message_id="17", message_type="mail.cancelled")
        assert foreign(about).message_type == foreign(about, origin=ORIGIN).message_type == "mail.cancelled"

    @pytest.mark.parametrize("written", ["application/json; charset=utf-8", "Application/JSON", "application/json"])
    def test_content_type_of_json_is_recognised_in_any_spelling(self, written: str) -> None:
        assert foreign(Basic.Properties(message_id="17", content_type=written)).content_type == JSON

    @pytest.mark.parametrize(
        ("about", "origin", "reason"),
        [
            (Basic.Properties(), TYPED, "no message_id"),
            (Basic.Properties(message_id="17"), ORIGIN, "has no type: send one"),
            (Basic.Properties(message_id="17", content_encoding="gzip"), TYPED, "content_encoding 'gzip'"),
        ],
        ids=["id", "type", "encoding"],
    )
    def test_missing_property_is_named(self, about: Basic.Properties, origin: Origin, reason: str) -> None:
        assert reason in refused(about, origin=origin)

    @pytest.mark.parametrize("encoding", ["utf-8", "UTF-8", "identity"])
    def test_neutral_encoding_is_accepted(self, encoding: str) -> None:
        foreign(Basic.Properties(message_id="17", content_encoding=encoding))

    def test_too_large_body_is_reduced_to_size_and_digest(self) -> None:
        body = bytes(LIMIT + 1)
        found = received(durable(), body)
        assert isinstance(found, Unmappable)
        assert found.raw == b""
        assert found.reason == "the body has 1048577 bytes, more than max_message_bytes (1048576); send less"
        assert found.metadata["body-bytes"] == "1048577"
        assert found.metadata["body-sha256"] == hashlib.sha256(body).hexdigest()
        assert isinstance(received(durable(), bytes(LIMIT)), Envelope)

    def test_metadata_of_a_dead_letter_describes_the_message(self) -> None:
        about = Basic.Properties(message_id="17", correlation_id="18", message_type="t", app_id="a", content_type="c")
        assert metadata(DELIVER, about, ORIGIN) == {
            "queue": "mail",
            "exchange": "orders",
            "routing-key": "orders-order.placed",
            "message-id": "17",
            "correlation-id": "18",
            "type": "t",
            "app-id": "a",
            "content-type": "c",
        }


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | texts | st.binary(max_size=9) | times,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)
shorts = st.none() | st.text(max_size=40)
any_properties = st.builds(
    Basic.Properties,
    content_type=shorts,
    content_encoding=shorts,
    headers=st.none() | st.dictionaries(header_names, values, max_size=4),
    correlation_id=shorts,
    message_id=shorts,
    timestamp=st.none() | times,
    message_type=shorts,
    app_id=shorts,
)


@given(any_properties, st.binary(max_size=50), st.sampled_from([ORIGIN, TYPED]))
def test_delivery_becomes_an_envelope_or_has_a_reason(about: Basic.Properties, body: bytes, origin: Origin) -> None:
    match received(about, body, origin):
        case Envelope() as found:
            assert found.body == body
            assert all(isinstance(value, str) for value in found.headers.values())
        case Unmappable(raw, reason, facts):
            assert raw == body
            assert reason
            assert facts["queue"] == "mail"
