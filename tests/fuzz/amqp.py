"""Targets: what a broker passes on from anybody who may publish there, as frames and as properties."""

from __future__ import annotations

import struct
from datetime import UTC, datetime
from typing import Any

from hypothesis import strategies as st
from pamqp.commands import Basic
from pamqp.frame import marshal, unmarshal
from pamqp.header import ContentHeader

from durable.envelope import Envelope
from durable.errors import InvalidMessage
from durable.messages.validation import find_error, find_misdating
from durable.settings import load_settings
from durable.transports.rabbitmq.arrivals import Origin, Unmappable, mapped
from durable.transports.rabbitmq.message import content
from durable.transports.rabbitmq.socket import CANNOT_BE_READ, mended
from tests.fuzz import values
from tests.fuzz.damage import damaged, hostile_text, scalars
from tests.fuzz.targets import of_rules

NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
SETTINGS = load_settings()
LIMIT = 1 << 10
FRAME_MAX = 131_072
DELIVER = Basic.Deliver("tag", 1, False, "orders", "orders-order.placed")
ORIGIN = Origin("mail", "rabbitmq://default/queue/mail", "mail.requested")

_ID = "019b76da-a800-7cc1-8a2f-2b1c0d9a3e41"
_TIME = "2026-01-02T03:04:05+00:00"
_GOOD: dict[str, Any] = {
    "message_id": _ID,
    "correlation_id": _ID,
    "message_type": "orders.order-placed",
    "app_id": "orders",
    "content_type": "application/json",
    "delivery_mode": 2,
}
_OURS = {"durable-destination": "rabbitmq://default/queue/mail", "durable-sent-at": _TIME}
_TEXTS = (
    scalars
    | hostile_text.filter(lambda text: text.isprintable() and len(text) < 60)
    | st.sampled_from(
        [
            _ID,
            _TIME,
            "0001-01-01T00:00:00+14:00",
            "9999-12-31T23:59:59-12:00",
            "2026-01-02",
            "9" * 12,
            "-1",
            "{" + _ID + "}",
        ]
    )
)
_HEADERS = [
    "durable-destination",
    "durable-sent-at",
    "durable-causation-id",
    "durable-partition-key",
    "durable-deliver-by",
    "durable-published-at",
    "durable-execution-time",
    "durable-unreadable",
    "durable-header-x",
    "x-death",
    "CC",
    "trace",
]

_field = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats()
    | _TEXTS
    | st.binary(max_size=20)
    | st.decimals(-1000, 1000, places=3)
    | st.datetimes(datetime(1970, 1, 2), datetime(9999, 12, 30), timezones=st.just(UTC)),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(scalars, inner, max_size=3),
    max_leaves=8,
)
_deaths = st.lists(st.dictionaries(st.sampled_from(["count", "queue"]), _field, max_size=2) | _field, max_size=3)


@st.composite
def deliveries(draw: st.DrawFn) -> tuple[Basic.Properties, bytes]:
    """Properties that are good but for some, of a message of durable's or of another program's."""
    given = dict(_GOOD)
    for name in draw(st.lists(st.sampled_from([*_GOOD, "expiration", "content_encoding", "reply_to"]), max_size=2)):
        if name != "delivery_mode":
            given[name] = draw(st.none() | _TEXTS)
    headers: dict[str, Any] = dict(_OURS) if draw(st.booleans()) else {}
    headers |= draw(st.dictionaries(st.sampled_from(_HEADERS) | scalars, _TEXTS | _field, max_size=3))
    if draw(st.booleans()):
        headers["x-death"] = draw(_deaths)
    timestamp = draw(st.none() | st.just(NOW) | values.moments)
    return Basic.Properties(headers=headers or None, timestamp=timestamp, **given), draw(st.binary(max_size=LIMIT + 1))


def check_delivery(given: tuple[Basic.Properties, bytes]) -> str:
    about, body = given
    return _check(about, body)


def _check(about: Basic.Properties, body: bytes) -> str:
    """A delivery is an envelope, which can be judged, stored and sent on, or a dead letter with its facts."""
    found = mapped(DELIVER, about, body, origin=ORIGIN, limit_bytes=LIMIT, now=NOW)
    match found:
        case Unmappable(raw, reason, facts):
            assert reason
            assert raw == (body if len(body) <= LIMIT else b"")
            assert all(isinstance(value, str) for value in facts.values())
            return "dead letter"
        case Envelope():
            return _check_envelope(found, body)


def _check_envelope(found: Envelope, body: bytes) -> str:
    assert found.body == body
    if find_error(found, **SETTINGS.limits):
        return "quarantined"
    misdated = find_misdating(found, NOW, **SETTINGS.window)
    try:
        frames = content(found, channel=1, max_frame_bytes=FRAME_MAX)
    except InvalidMessage:
        return "not to be sent on"
    _, _, header = unmarshal(frames)
    assert isinstance(header, ContentHeader)
    again = mapped(DELIVER, header.properties, body, origin=ORIGIN, limit_bytes=LIMIT, now=NOW)
    assert again == found
    return "misdated" if misdated else "envelope"


# Frames -----------------------------------------------------------------------------------------------------------


@st.composite
def header_frames(draw: st.DrawFn) -> bytes:
    """The frame of the properties, its payload damaged and its size as it then is."""
    about, body = draw(deliveries())
    try:
        frame = marshal(ContentHeader(0, len(body), about), 1)
    except (*CANNOT_BE_READ, TypeError, struct.error):
        frame = marshal(ContentHeader(0, len(body), Basic.Properties(**_GOOD)), 1)
    payload = draw(damaged(st.just(frame[7:-1])))
    return struct.pack("!BHI", 2, 1, len(payload)) + payload + b"\xce"


def check_frame(frame: bytes) -> str:
    """A frame that has the size of a body can be read, once it is mended; what can be read stays as it is."""
    read = mended(frame)
    try:
        _, _, header = unmarshal(read)
    except CANNOT_BE_READ:
        assert read == frame
        assert len(frame) < 8 + 12
        return "cut short"
    assert isinstance(header, ContentHeader)
    if read == frame:
        return f"read: {_check(header.properties, b'{}')}"
    assert _check(header.properties, b"{}") == "dead letter"
    return "mended"


TARGETS = [
    of_rules("amqp-deliveries", deliveries(), check_delivery),
    of_rules("amqp-frames", header_frames(), check_frame),
]
