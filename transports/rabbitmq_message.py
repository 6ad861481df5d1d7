"""An envelope as an AMQP message, and what arrives from a queue as an envelope.

    id               message_id               body           body, as it is
    correlation_id   correlation_id           content_type   content_type
    message_type     type                     sent_at        timestamp, in seconds; exactly in durable-sent-at
    source           app_id                   deliver_by     expiration; exactly in durable-deliver-by

    destination, causation_id, partition_key, execution_time     headers durable-destination, durable-...
    headers                                                      headers

A header of the application whose name is taken, by durable (`durable-...`) or by the broker (`CC`, `x-death`, ...),
travels as `durable-header-` and its name. So the broker cannot mistake it, and what the broker adds on the way is known
by its name and left out. Every message is persistent: a broker may confirm others and lose them in a crash.

What was not sent by durable has no header that begins with `durable-`. It needs an id and a type, of its own or that of
its queue, and becomes an envelope like any other; what cannot is Unmappable.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final, NamedTuple
from uuid import UUID, uuid5

from pamqp.body import ContentBody
from pamqp.commands import Basic
from pamqp.frame import marshal
from pamqp.header import ContentHeader

from durable.envelope import JSON, Envelope
from durable.errors import InvalidMessage
from durable.transports.rabbitmq_options import LONGEST_NAME

PERSISTENT: Final = 2

UNREADABLE: Final = "durable-unreadable"
"""The header of a message whose own properties could not be read; it says why."""

_OURS: Final = "durable-"
_ESCAPED: Final = "durable-header-"
_DESTINATION: Final = "durable-destination"
_SENT_AT: Final = "durable-sent-at"
_CAUSATION_ID: Final = "durable-causation-id"
_PARTITION_KEY: Final = "durable-partition-key"
_DELIVER_BY: Final = "durable-deliver-by"
_EXECUTION_TIME: Final = "durable-execution-time"

# What RabbitMQ reads (CC and BCC, of any other type than an array, close the channel) or writes on the way.
_OF_THE_BROKER: Final = (
    "CC", "BCC", "x-death", "x-first-death-", "x-last-death-", "x-delivery-count", "x-acquired-count", "x-delay",
    "x-received-from", "x-shovel", "x-stream-", "x-opt-",
)  # fmt: skip
_TAKEN: Final = (_OURS, *_OF_THE_BROKER)

_LONGEST_HEADER_NAME: Final = 128  # bytes; the library cuts off what is beyond
_FRAME_OVERHEAD: Final = 8
_LONGEST_EXPIRATION: Final = 2**32 - 1  # milliseconds; RabbitMQ may close the channel at more
_EPOCH: Final = datetime.fromtimestamp(0, UTC)
_FOREIGN_IDS: Final = UUID("5f0f8d2c-62a5-4f0e-9c1b-4a3f6c7f3a51")  # of this transport, for version 5 UUIDs
_NOT_ENCODED: Final = ("", "identity", "utf-8", "utf8")


class Unmappable(NamedTuple):
    """What arrived and can be no envelope. `raw` is the body, unless that is larger than messages may be."""

    raw: bytes
    reason: str
    metadata: dict[str, str]


@dataclass(frozen=True, slots=True)
class Origin:
    """The queue that is consumed, and what is taken for granted of messages that durable has not sent."""

    queue: str
    destination: str
    message_type: str | None = None


# Sending ----------------------------------------------------------------------------------------------------------


def content(envelope: Envelope, *, channel: int, max_frame_bytes: int, now: datetime) -> bytes:
    """The frames that follow Basic.Publish: header and body. Raises InvalidMessage if AMQP cannot carry it."""
    body = envelope.body
    try:
        header = marshal(ContentHeader(body_size=len(body), properties=properties(envelope, now)), channel)
    except (TypeError, ValueError, struct.error) as error:  # such as a lone surrogate, which is a ValueError
        raise InvalidMessage(f"AMQP cannot carry it: {error}") from error
    if len(header) > max_frame_bytes:
        raise InvalidMessage(
            f"its headers take {len(header)} bytes, more than a frame of this broker has ({max_frame_bytes}, frame_max)"
        )
    most = max_frame_bytes - _FRAME_OVERHEAD
    parts = (body[start : start + most] for start in range(0, len(body), most))
    return header + b"".join(marshal(ContentBody(part), channel) for part in parts)


def properties(envelope: Envelope, now: datetime) -> Basic.Properties:
    """Raises InvalidMessage for what would be left out or cut off, or would close the connection."""
    for name, value in (
        ("message_type", envelope.message_type),
        ("source", envelope.source),
        ("content_type", envelope.content_type),
    ):
        if not value:
            raise InvalidMessage(f"{name} is empty")
        if len(value) * 4 > LONGEST_NAME and (size := len(value.encode())) > LONGEST_NAME:
            raise InvalidMessage(f"{name} has {size} bytes, more than the {LONGEST_NAME} of AMQP")
    return Basic.Properties(
        content_type=envelope.content_type,
        headers=_headers(envelope),
        delivery_mode=PERSISTENT,
        correlation_id=str(envelope.correlation_id),
        expiration=_expiration(envelope.deliver_by, now),
        message_id=str(envelope.id),
        timestamp=envelope.sent_at if envelope.sent_at >= _EPOCH else None,
        message_type=envelope.message_type,
        app_id=envelope.source,
    )


def _headers(envelope: Envelope) -> dict[str, Any]:
    if not envelope.destination:
        raise InvalidMessage("destination is empty")
    headers: dict[str, Any] = {_DESTINATION: envelope.destination, _SENT_AT: envelope.sent_at.isoformat()}
    if envelope.causation_id is not None:
        headers[_CAUSATION_ID] = str(envelope.causation_id)
    if envelope.partition_key is not None:
        headers[_PARTITION_KEY] = envelope.partition_key
    if envelope.deliver_by is not None:
        headers[_DELIVER_BY] = envelope.deliver_by.isoformat()
    if envelope.execution_time is not None:
        headers[_EXECUTION_TIME] = envelope.execution_time.isoformat()
    for name, value in envelope.headers.items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise InvalidMessage(f"header {name!r} is not text")
        key = _ESCAPED + name if name.startswith(_TAKEN) else name
        if len(key) * 4 > _LONGEST_HEADER_NAME and len(key.encode()) > _LONGEST_HEADER_NAME:
            raise InvalidMessage(f"header {name!r} has a longer name than AMQP carries")
        headers[key] = value
    return headers


def _expiration(deliver_by: datetime | None, now: datetime) -> str | None:
    """Milliseconds after which the broker drops the message.

    What is past already gets none: a broker would drop it unseen, but the receiver expires it and counts it.
    """
    if deliver_by is None:
        return None
    left_ms = (deliver_by - now) // timedelta(milliseconds=1)
    return str(left_ms) if 0 < left_ms <= _LONGEST_EXPIRATION else None


# Receiving --------------------------------------------------------------------------------------------------------


def mapped(
    delivery: Basic.Deliver, about: Basic.Properties, body: bytes, *, origin: Origin, limit_bytes: int, now: datetime
) -> Envelope | Unmappable:
    """The envelope in what arrived. `now` is when a message without a timestamp was sent."""
    try:
        if len(body) > limit_bytes:
            raise InvalidMessage(f"the body has {len(body)} bytes, more than max_message_bytes ({limit_bytes})")
        headers = about.headers or {}
        if any(name.startswith(_OURS) for name in headers):
            return _own(about, headers, body)
        return _foreign(about, headers, body, origin, now)
    except (InvalidMessage, RecursionError) as error:
        facts = metadata(delivery, about, origin)
        if len(body) <= limit_bytes:
            return Unmappable(body, str(error), facts)
        digest = {"body-bytes": str(len(body)), "body-sha256": hashlib.sha256(body).hexdigest()}
        return Unmappable(b"", str(error), facts | digest)


def metadata(delivery: Basic.Deliver, about: Basic.Properties, origin: Origin) -> dict[str, str]:
    """What a dead letter says of the message that it was; each value has at most 255 bytes."""
    facts = {
        "queue": origin.queue,
        "exchange": delivery.exchange,
        "routing-key": delivery.routing_key,
        "message-id": about.message_id,
        "correlation-id": about.correlation_id,
        "type": about.message_type,
        "app-id": about.app_id,
        "content-type": about.content_type,
        "content-encoding": about.content_encoding,
    }
    return {name: value for name, value in facts.items() if value is not None}


def _own(about: Basic.Properties, headers: Mapping[str, Any], body: bytes) -> Envelope:
    """As durable has sent it; headers of a later version of durable are not known here, and left out."""
    if UNREADABLE in headers:
        raise InvalidMessage(f"its properties cannot be read: {headers[UNREADABLE]}")
    sent_at = _moment(headers, _SENT_AT)
    if sent_at is None:
        raise InvalidMessage(f"it has headers of durable, but no {_SENT_AT}")
    return Envelope(
        id=_uuid("message_id", about.message_id),
        message_type=about.message_type or _missing("type"),
        destination=_text(headers, _DESTINATION) or _missing(_DESTINATION),
        source=about.app_id or _missing("app_id"),
        correlation_id=_uuid("correlation_id", about.correlation_id),
        body=body,
        sent_at=sent_at,
        content_type=about.content_type or _missing("content_type"),
        causation_id=_uuid(_CAUSATION_ID, text) if (text := _text(headers, _CAUSATION_ID)) is not None else None,
        partition_key=_text(headers, _PARTITION_KEY),
        headers={
            name.removeprefix(_ESCAPED): _as_text(value)
            for name, value in headers.items()
            if name.startswith(_ESCAPED) or not name.startswith(_TAKEN)
        },
        deliver_by=_moment(headers, _DELIVER_BY),
        execution_time=_moment(headers, _EXECUTION_TIME),
    )


def _foreign(
    about: Basic.Properties, headers: Mapping[str, Any], body: bytes, origin: Origin, now: datetime
) -> Envelope:
    """What anybody else has sent. Its id makes it known again; what is no UUID becomes one, the same each time."""
    if not about.message_id:
        raise InvalidMessage("it has no message_id: duplicates of it could not be recognised")
    message_type = about.message_type or origin.message_type
    if not message_type:
        raise InvalidMessage("it has no type, and none is configured for its queue (?message_type=)")
    if (about.content_encoding or "").lower() not in _NOT_ENCODED:
        raise InvalidMessage(f"content_encoding {about.content_encoding!r} is not understood; send it as it is")
    id_ = _parsed_uuid(about.message_id) or uuid5(uuid5(_FOREIGN_IDS, origin.queue), about.message_id)
    return Envelope(
        id=id_,
        message_type=message_type,
        destination=origin.destination,
        source=about.app_id or "unknown",
        correlation_id=_parsed_uuid(about.correlation_id or "") or id_,
        body=body,
        sent_at=about.timestamp or now,
        content_type=_content_type(about.content_type),
        headers={name: _as_text(value) for name, value in headers.items()},
    )


def _content_type(given: str | None) -> str:
    """JSON is JSON, whatever charset is said beside it (RFC 8259: it is UTF-8)."""
    if not given or given.partition(";")[0].strip().lower() == JSON:
        return JSON
    return given


def _missing(name: str) -> Any:
    raise InvalidMessage(f"it has headers of durable, but no {name}")


def _text(headers: Mapping[str, Any], name: str) -> str | None:
    value = headers.get(name)
    if value is not None and not isinstance(value, str):
        raise InvalidMessage(f"{name} is not text")
    return value


def _moment(headers: Mapping[str, Any], name: str) -> datetime | None:
    text = _text(headers, name)
    if text is None:
        return None
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise InvalidMessage(f"{name} is no time: {text[:100]!r}") from None
    if moment.tzinfo is None:
        raise InvalidMessage(f"{name} has no time zone")
    return moment


def _uuid(name: str, text: str | None) -> UUID:
    if (found := _parsed_uuid(text or "")) is None:
        raise InvalidMessage(f"{name} is no UUID: {(text or '')[:100]!r}")
    return found


def _parsed_uuid(text: str) -> UUID | None:
    try:
        return UUID(text)
    except ValueError:
        return None


def _as_text(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, bytes | bytearray):
        return value.decode(errors="backslashreplace")
    return str(value)
