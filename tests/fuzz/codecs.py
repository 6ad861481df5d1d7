"""Targets: bodies in each content type, as classes of each kind, and CloudEvents."""

from __future__ import annotations

from typing import Any
from uuid import UUID

import msgspec
from hypothesis import strategies as st

from durable.envelope import JSON
from durable.errors import InvalidMessage
from durable.messages import cloudevents, codec
from durable.messages.cloudevents import STRUCTURED, Event
from durable.messages.codecs.msgpack import MSGPACK
from durable.messages.comparison import difference
from tests.fuzz import values
from tests.fuzz.damage import damaged, damaged_text, hostile_text
from tests.fuzz.targets import of_rules
from tests.support.kinds import KINDS, draft, fields

CONTENT_TYPES = [JSON, MSGPACK, STRUCTURED]

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | values.texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(values.texts, inner, max_size=4),
    max_leaves=10,
)


@st.composite
def bodies(draw: st.DrawFn) -> tuple[type[Any], str, bytes]:
    """A class, a content type, and a body that was good, or is another's, or has fields of other types."""
    cls, content_type = draw(st.sampled_from(KINDS)), draw(st.sampled_from(CONTENT_TYPES))
    given = draw(fields)
    body = codec.encode(cls(**given), draft(content_type))
    if content_type != STRUCTURED and draw(st.booleans()):
        decode, encode = (msgspec.json.decode, msgspec.json.encode) if content_type == JSON else _MSGPACK
        other = json_values if content_type == JSON else values.anything
        changed = decode(body) | {draw(st.sampled_from(list(given))): draw(other)}
        body = encode(changed)
    return cls, content_type, draw(damaged(st.just(body), most=3))


_MSGPACK: Any = (msgspec.msgpack.decode, msgspec.msgpack.encode)


def check_body(given: tuple[type[Any], str, bytes]) -> str:
    cls, content_type, body = given
    word = f"{content_type} {'pydantic' if hasattr(cls, 'model_validate') else 'msgspec'}"
    try:
        message = codec.decode(body, cls, content_type)
    except InvalidMessage:
        return f"{word} refused"
    assert isinstance(message, cls)
    try:
        again = codec.encode(message, draft(content_type))
    except InvalidMessage:
        return f"{word} received only"
    read = codec.decode(again, cls, content_type)
    assert difference(message, read, cls.__name__) is None
    return f"{word} read"


# CloudEvents ------------------------------------------------------------------------------------------------------

_ATTRIBUTES = [
    "specversion",
    "id",
    "source",
    "type",
    "time",
    "datacontenttype",
    "partitionkey",
    "expirytime",
    "traceparent",
    "x1",
]
_good = {"specversion": "1.0", "id": "1", "source": "/till", "type": "web.sold"}
_texts = hostile_text | damaged_text(
    st.sampled_from(["2030-01-31T12:00:00Z", "application/json", "text/plain", "1.0", "/till"])
)
events = st.builds(
    lambda more, data: msgspec.json.encode(_good | more | data),
    st.dictionaries(
        st.sampled_from(_ATTRIBUTES) | values.texts, json_values | _texts.filter(str.isprintable), max_size=4
    ),
    st.fixed_dictionaries(
        {}, optional={"data": json_values, "data_base64": st.sampled_from(["e30=", "e30", "", "=", "\n"])}
    ),
)


def check_structured(document: bytes) -> str:
    try:
        event = cloudevents.from_structured(document)
    except InvalidMessage:
        return "no event"
    if event.content_type != JSON or not event.body:
        return "event of other data"
    return _check_event(event)


def check_binary(given: tuple[list[tuple[bytes, bytes]], bytes]) -> str:
    try:
        event = cloudevents.from_binary(given[0], JSON, given[1])
    except InvalidMessage:
        return "no event"
    assert event.body == given[1]
    return _check_event(event)


def _check_event(event: Event) -> str:
    """An event that is passed on says the same: as a message of durable, whose id and source are its own."""
    envelope = draft(
        STRUCTURED,
        id=UUID("019b76da-a800-7cc1-8a2f-2b1c0d9a3e41"),
        message_type=event.message_type,
        source=event.source,
        partition_key=event.partition_key,
        headers=event.headers,
        **({"sent_at": event.sent_at} if event.sent_at else {}),
        deliver_by=event.deliver_by,
    )
    try:
        msgspec.json.decode(event.body)
    except ValueError:
        return "event of no JSON"
    passed_on = cloudevents.from_structured(cloudevents.to_structured(envelope, event.body))
    assert passed_on.message_type == event.message_type
    assert passed_on.partition_key == event.partition_key
    assert passed_on.deliver_by == event.deliver_by
    assert passed_on.body == event.body
    mine = {name: value for name, value in event.headers.items() if name != "ce-id"}
    assert {name: value for name, value in passed_on.headers.items() if name != "ce-id"} == mine
    return f"event{' with headers' if mine else ''}"


_BINARY_NAMES = [
    b"ce-specversion",
    b"ce-id",
    b"ce-source",
    b"ce-type",
    b"CE-Type",
    b"ce-time",
    b"ce-x",
    b"ce-",
]
_BINARY_VALUES = [b"1.0", b"/till", b"web.sold", b"2030-01-31T12:00:00Z", b'"a b"', b"%e2%82%ac", b"%ff"]


@st.composite
def binary_events(draw: st.DrawFn) -> tuple[list[tuple[bytes, bytes]], bytes]:
    """Headers and a body, good but for some headers that are others, or come twice."""
    texts_ = damaged(st.sampled_from(_BINARY_VALUES), most=2)
    others = draw(st.lists(st.tuples(st.sampled_from(_BINARY_NAMES), texts_), max_size=4))
    taken = {name.lower() for name, _ in others}
    good = [(f"ce-{name}".encode(), value.encode()) for name, value in _good.items()]
    kept = [(name, value) for name, value in good if name not in taken]
    return kept + others, draw(json_values.map(msgspec.json.encode) | st.binary(max_size=20))


TARGETS = [
    of_rules("codecs", bodies(), check_body),
    of_rules("cloudevents", damaged(events, most=2), check_structured),
    of_rules("cloudevents-binary", binary_events(), check_binary),
]
