"""An envelope as an AMQP message, and back.

    id               message_id               body           body, as it is
    correlation_id   correlation_id           content_type   content_type
    message_type     type                     sent_at        timestamp, in seconds; exactly in durable-sent-at
    source           app_id

    destination, causation_id, partition_key, deliver_by, execution_time     headers durable-destination, durable-...
    headers                                                                  headers

With a deliver_by goes durable-published-at, what the sender's clock says: see durable.transports.deadlines.

A header of the application whose name is taken, by durable (`durable-...`) or by the broker (`CC`, `x-death`, ...),
travels as `durable-header-` and its name. So the broker cannot mistake it, and what the broker adds on the way is known
by its name and left out. Every message is persistent: a broker may confirm others and lose them in a crash. None has
an expiration, unless that is set: a broker drops what has expired and tells nobody, while the receiver counts it.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, Final
from uuid import UUID

from pamqp.body import ContentBody
from pamqp.commands import Basic
from pamqp.frame import marshal
from pamqp.header import ContentHeader

from durable.envelope import Envelope
from durable.errors import InvalidMessage
from durable.transports.deadlines import moved
from durable.transports.rabbitmq.options import LONGEST_NAME

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
_PUBLISHED_AT: Final = "durable-published-at"
_EXECUTION_TIME: Final = "durable-execution-time"

# What RabbitMQ reads (CC and BCC, of any other type than an array, close the channel) or writes on the way.
OF_THE_BROKER: Final = (
    "CC", "BCC", "x-death", "x-first-death-", "x-last-death-", "x-delivery-count", "x-acquired-count", "x-delay",
    "x-received-from", "x-shovel", "x-stream-", "x-opt-",
)  # fmt: skip
_TAKEN: Final = (_OURS, *OF_THE_BROKER)

_LONGEST_HEADER_NAME: Final = 128  # bytes; the library cuts off what is beyond
_FRAME_OVERHEAD: Final = 8
_EPOCH: Final = datetime.fromtimestamp(0, UTC)


Sign = Callable[[Basic.Properties, bytes], None]
"""Adds a signature to the properties of a message, for its body."""


def content(
    envelope: Envelope,
    *,
    channel: int,
    max_frame_bytes: int,
    now: datetime | None = None,
    expiration: str | None = None,
    sign: Sign | None = None,
) -> bytes:
    """The frames that follow Basic.Publish: header and body. Raises InvalidMessage if AMQP cannot carry it."""
    body = envelope.body
    try:
        about = properties(envelope, now)
        about.expiration = expiration
        if sign is not None:
            sign(about, body)
        header = marshal(ContentHeader(body_size=len(body), properties=about), channel)
    except (TypeError, ValueError, struct.error) as error:  # such as a lone surrogate, which is a ValueError
        raise InvalidMessage(f"AMQP cannot carry it: {error}") from error
    if len(header) > max_frame_bytes:
        raise InvalidMessage(
            f"AMQP cannot carry it: headers of {len(header)} bytes, more than a frame of "
            f"this broker has ({max_frame_bytes})"
        )
    most = max_frame_bytes - _FRAME_OVERHEAD
    parts = (body[start : start + most] for start in range(0, len(body), most))
    return header + b"".join(marshal(ContentBody(part), channel) for part in parts)


def expiration_of(envelope: Envelope, now: datetime | None) -> str | None:
    """Return the time left until the deadline, in milliseconds as AMQP has it; a broker takes at most 49 days."""
    if envelope.deliver_by is None or now is None:
        return None
    left = (envelope.deliver_by - now) // timedelta(milliseconds=1)
    return str(min(max(0, left), 2**32 - 1))


def properties(envelope: Envelope, now: datetime | None = None) -> Basic.Properties:
    """`now` is told with a deadline. Raises InvalidMessage for what would be left out or cut off, or would close the
    connection."""
    for name, value in (
        ("message_type", envelope.message_type),
        ("source", envelope.source),
        ("content_type", envelope.content_type),
    ):
        if not value:
            raise InvalidMessage(f"{name} is empty; AMQP needs a value")
        if len(value) * 4 > LONGEST_NAME and (size := len(value.encode())) > LONGEST_NAME:
            raise InvalidMessage(f"{name} has {size} bytes, more than the {LONGEST_NAME} of AMQP; shorten it")
    return Basic.Properties(
        content_type=envelope.content_type,
        headers=_headers(envelope, now),
        delivery_mode=PERSISTENT,
        correlation_id=str(envelope.correlation_id),
        message_id=str(envelope.id),
        timestamp=envelope.sent_at if envelope.sent_at >= _EPOCH else None,
        message_type=envelope.message_type,
        app_id=envelope.source,
    )


def _headers(envelope: Envelope, now: datetime | None) -> dict[str, Any]:
    if not envelope.destination:
        raise InvalidMessage("destination is empty; name one")
    headers: dict[str, Any] = {_DESTINATION: envelope.destination, _SENT_AT: envelope.sent_at.isoformat()}
    if envelope.causation_id is not None:
        headers[_CAUSATION_ID] = str(envelope.causation_id)
    if envelope.partition_key is not None:
        headers[_PARTITION_KEY] = envelope.partition_key
    if envelope.deliver_by is not None:
        headers[_DELIVER_BY] = _written("deliver_by", envelope.deliver_by)
        if now is not None:
            headers[_PUBLISHED_AT] = now.isoformat()
    if envelope.execution_time is not None:
        headers[_EXECUTION_TIME] = _written("execution_time", envelope.execution_time)
    for name, value in envelope.headers.items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise InvalidMessage(f"header {name!r} is not text; give a string")
        key = _ESCAPED + name if name.startswith(_TAKEN) else name
        if len(key) * 4 > _LONGEST_HEADER_NAME and len(key.encode()) > _LONGEST_HEADER_NAME:
            raise InvalidMessage(f"header {name!r} has a longer name than AMQP carries; shorten it")
        headers[key] = value
    return headers


def _written(name: str, moment: datetime) -> str:
    if moment.tzinfo is None:
        raise InvalidMessage(f"AMQP cannot carry it: {name} has no time zone")
    return moment.isoformat()


def is_ours(headers: Mapping[str, Any]) -> bool:
    """True for the headers of a message that durable has sent. Others are left as they are."""
    return any(name.startswith(_OURS) for name in headers)


def received(about: Basic.Properties, headers: Mapping[str, Any], body: bytes, now: datetime) -> Envelope:
    """The envelope that durable has sent and that arrives `now`; raises InvalidMessage when something of it is missing
    or broken.

    Headers of a later version of durable are not known here, and left out.
    """
    if UNREADABLE in headers:
        raise InvalidMessage(f"the properties cannot be read: {headers[UNREADABLE]}")
    sent_at = _moment(headers, _SENT_AT)
    if sent_at is None:
        raise InvalidMessage(f"incomplete headers of durable: no {_SENT_AT}")
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
            name.removeprefix(_ESCAPED): as_text(value)
            for name, value in headers.items()
            if name.startswith(_ESCAPED) or not name.startswith(_TAKEN)
        },
        deliver_by=_deadline(headers, now),
        execution_time=_moment(headers, _EXECUTION_TIME),
    )


def _deadline(headers: Mapping[str, Any], now: datetime) -> datetime | None:
    """Return the earlier deadline by the clocks of sender and receiver: the time at the broker is unknown."""
    deliver_by, published_at = _moment(headers, _DELIVER_BY), _moment(headers, _PUBLISHED_AT)
    if deliver_by is None or published_at is None:
        return deliver_by
    return min(deliver_by, moved(deliver_by, published_at, now))


def _missing(name: str) -> Any:
    raise InvalidMessage(f"incomplete headers of durable: no {name}")


def _text(headers: Mapping[str, Any], name: str) -> str | None:
    value = headers.get(name)
    if value is not None and not isinstance(value, str):
        raise InvalidMessage(f"{name} is not text; send a string")
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
        raise InvalidMessage(f"{name} has no time zone: {text[:100]!r}")
    return moment


def _uuid(name: str, text: str | None) -> UUID:
    if (found := parsed_uuid(text or "")) is None:
        raise InvalidMessage(f"{name} is no UUID: {(text or '')[:100]!r}")
    return found


def parsed_uuid(text: str) -> UUID | None:
    try:
        return UUID(text)
    except ValueError:
        return None


def as_text(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, bytes | bytearray):
        return value.decode(errors="backslashreplace")
    return str(value)
