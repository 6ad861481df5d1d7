"""CloudEvents 1.0: what an event says becomes the parts of an envelope, and an envelope an event.

    structured   the body is one JSON object with the attributes and the data
    binary       over HTTP: the body is the data, Content-Type its type, each other attribute a header ce-NAME

    attribute                becomes
    source and id            the envelope's id, a UUIDv5 of both: an event's own id is unique for its source only
    type, source, time       message_type, source, sent_at
    datacontenttype, data    content_type, body: the very bytes that came, so that a repeat is recognised
    partitionkey             partition_key
    expirytime               deliver_by
    traceparent, tracestate  headers of these names
    id and all others        headers ce-NAME, as in binary mode

An event is made the same way round; its id is the envelope's. An id that is no UUIDv7 is made of a business key, or of
what caused the message, so that it may be sent again: then the event must be the same bytes, and says no times.

https://github.com/cloudevents/spec: cloudevents/spec.md, bindings/http-protocol-binding.md, formats/json-format.md.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Any, Final
from urllib.parse import quote, unquote_to_bytes
from uuid import NAMESPACE_URL, UUID, uuid5

import msgspec

from durable import strict_json
from durable.envelope import JSON, Envelope, Moment, media_type, unix_ms
from durable.errors import InvalidMessage

STRUCTURED: Final = "application/cloudevents+json"
BATCHED: Final = "application/cloudevents-batch+json"
HEADER_PREFIX: Final = "ce-"

_VERSION: Final = "1.0"
_REQUIRED: Final = ("specversion", "id", "source", "type")
_TRACING: Final = ("traceparent", "tracestate")
_COLUMNS: Final = ("specversion", "source", "type", "time", "datacontenttype", "partitionkey", "expirytime")
_KINDS_OF_JSON: Final = ("/json", "+json")
_URI_REFERENCE: Final = "/:@!$&'()*+,;=~"
_NAME: Final = re.compile(r"[a-z0-9]+")
_ESCAPED: Final = re.compile(rb"\\(.)")

_INTEGER = Annotated[int, msgspec.Meta(ge=-(2**31), lt=2**31)]
_decode_object = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_decode_value = msgspec.json.Decoder(_INTEGER | bool | str | None).decode
_decode_text = msgspec.json.Decoder(str).decode
_encode_object = msgspec.json.Encoder(order="deterministic").encode


@dataclass(frozen=True, slots=True)
class Event:
    """Parts of an envelope, without those that its receiver adds."""

    id: UUID
    message_type: str
    source: str
    content_type: str
    body: bytes
    sent_at: datetime | None
    deliver_by: datetime | None
    partition_key: str | None
    headers: dict[str, str]


def to_structured(envelope: Envelope, data: bytes) -> bytes:
    """The JSON object of an event with this data, which is JSON; headers ce-NAME are its further attributes."""
    attributes: dict[str, Any] = {
        name.removeprefix(HEADER_PREFIX): value
        for name, value in envelope.headers.items()
        if name.startswith(HEADER_PREFIX) and _NAME.fullmatch(name.removeprefix(HEADER_PREFIX))
    }
    attributes |= {
        "specversion": _VERSION,
        "id": str(envelope.id),
        "source": quote(envelope.source, safe=_URI_REFERENCE),
        "type": envelope.message_type,
        "datacontenttype": JSON,
        "data": msgspec.Raw(data),
    }
    if envelope.partition_key is not None:
        attributes["partitionkey"] = envelope.partition_key
    if unix_ms(envelope.id) is not None:
        attributes["time"] = envelope.sent_at
        if envelope.deliver_by is not None:
            attributes["expirytime"] = envelope.deliver_by
        attributes |= {name: envelope.headers[name] for name in _TRACING if name in envelope.headers}
    return _encode_object(attributes)


def from_structured(document: bytes, *, understood: Container[str] = ()) -> Event:
    """The event in this JSON object; raises InvalidMessage, which says what is wrong with it.

    Data of a type that ends in +json is taken for JSON, unless that type itself is `understood`.
    """
    with _explained("the body is no CloudEvent in JSON"):
        members = strict_json.read(_decode_object, document)
    data, encoded = members.pop("data", None), members.pop("data_base64", None)
    if data is not None and encoded is not None:
        raise InvalidMessage("the event has data and data_base64; give one of them")
    attributes = dict(_attributes(members))
    content_type = _data_type(attributes.get("datacontenttype", JSON), understood)
    body = bytes(data or b"")
    if encoded is not None:
        with _explained("data_base64 is no text in base64"):
            body = base64.b64decode(_decode_text(encoded), validate=True)
    elif data is not None and not content_type.endswith(_KINDS_OF_JSON):
        with _explained(f"data of the type {content_type} is no text"):
            body = _decode_text(data).encode()
    return _event(attributes, content_type, body)


def from_binary(
    headers: Iterable[tuple[bytes, bytes]], content_type: str, body: bytes, *, understood: Container[str] = ()
) -> Event:
    """The event in these headers and this body; as from_structured()."""
    attributes: dict[str, str] = {}
    for header, value in headers:
        name = header.decode("latin-1").lower()
        if name.startswith(HEADER_PREFIX):
            if name in attributes:
                raise InvalidMessage(f"the header {name} comes twice; send it once")
            with _explained(f"the header {name} is not percent-encoded UTF-8"):
                attributes[name] = unquote_to_bytes(_unquoted(value)).decode()
    attributes = {name.removeprefix(HEADER_PREFIX): value for name, value in attributes.items()}
    if "datacontenttype" in attributes:
        raise InvalidMessage("ce-datacontenttype must not be given: the type of the data is Content-Type")
    return _event(attributes, _data_type(content_type, understood), body)


def _event(attributes: Mapping[str, str], content_type: str, body: bytes) -> Event:
    for name in _REQUIRED:
        if not attributes.get(name):
            raise InvalidMessage(f"the event lacks the attribute {name!r}; add it")
    if attributes["specversion"] != _VERSION:
        raise InvalidMessage(f"specversion is {attributes['specversion']!r}; only {_VERSION!r} is understood")
    for name in attributes:
        if not _NAME.fullmatch(name):
            raise InvalidMessage(f"an attribute is named {name!r}; use lower-case letters and digits only")
    return Event(
        id=uuid5(uuid5(NAMESPACE_URL, attributes["source"]), attributes["id"]),
        message_type=attributes["type"],
        source=attributes["source"],
        content_type=content_type,
        body=body,
        sent_at=_moment(attributes, "time"),
        deliver_by=_moment(attributes, "expirytime"),
        partition_key=attributes.get("partitionkey"),
        headers={
            name if name in _TRACING else HEADER_PREFIX + name: value
            for name, value in attributes.items()
            if name not in _COLUMNS
        },
    )


def _attributes(members: Mapping[str, msgspec.Raw]) -> Iterator[tuple[str, str]]:
    """Return attributes in canonical text; null is as good as absent."""
    for name, raw in members.items():
        with _explained(f"the attribute {name!r} is no text, 32-bit integer, boolean or null"):
            value = _decode_value(raw)
        if value is not None:
            yield name, value if isinstance(value, str) else str(value).lower()


def _moment(attributes: Mapping[str, str], name: str) -> datetime | None:
    with _explained(f"{name} is no time as in RFC 3339, such as 2030-01-31T12:00:00Z"):
        return msgspec.convert(attributes.get(name), Moment | None)


def _data_type(value: str, understood: Container[str]) -> str:
    """Return a content type without parameters; every kind of JSON is JSON, as the specification has it."""
    bare = media_type(value)
    return JSON if bare.endswith(_KINDS_OF_JSON) and bare not in understood else bare


def _unquoted(value: bytes) -> bytes:
    """A quoted string is what is inside: older versions of the specification had spaces sent so."""
    value = value.strip()
    if len(value) > 1 and value.startswith(b'"') and value.endswith(b'"'):
        return _ESCAPED.sub(rb"\1", value[1:-1])
    return value


@contextmanager
def _explained(what: str) -> Iterator[None]:
    try:
        yield
    except (ValueError, RecursionError) as error:  # msgspec's errors and UnicodeDecodeError are ValueErrors
        raise InvalidMessage(f"{what}: {error}") from error
