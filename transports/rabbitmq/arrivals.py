"""Deliveries of a queue: an envelope each, or the reason why not.

    sent by durable      it has a header `durable-...`         as it was sent
    sent by others       with a message_id, and a type of      id: the message_id, if it is a UUID; otherwise one that
                         its own or of its queue               is made of it, of the address of the queue and, on
                                                               a topic, of the exchange and routing key that it was
                                                               published with, the same each time
    Unmappable           anything else, or in a circle of      kept as a dead letter, with what is known of it
                         queues (x-death)

Duplicates are recognised by the id: a broker delivers again every message without an acknowledgement.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final, NamedTuple
from uuid import UUID, uuid5

from pamqp.commands import Basic

from durable.envelope import JSON, Envelope, media_type
from durable.errors import InvalidMessage
from durable.messages.sealed import message_bytes
from durable.transports.rabbitmq.address import Way
from durable.transports.rabbitmq.message import as_text, is_ours, parsed_uuid, received

_IDS: Final = UUID("5f0f8d2c-62a5-4f0e-9c1b-4a3f6c7f3a51")  # the namespace of ids that are made here (RFC 9562, 6.5)
MOST_DEATHS: Final = 100
"""Times that queues may dead-letter one message, before it is kept as a dead letter here."""

_NOT_ENCODED: Final = ("", "identity", "utf-8", "utf8")


class Unmappable(NamedTuple):
    """Delivery that makes no envelope. `raw` is its body, unless that is larger than messages may be."""

    raw: bytes
    reason: str
    metadata: dict[str, str]


@dataclass(frozen=True, slots=True)
class Origin:
    """Consumed queue, with the defaults for messages that durable has not sent."""

    queue: str
    destination: str
    message_type: str | None = None
    is_of_topic: bool = False
    """True for the queue of a topic, which several publishers may write to."""


def mapped(
    delivery: Basic.Deliver, about: Basic.Properties, body: bytes, *, origin: Origin, limit_bytes: int, now: datetime
) -> Envelope | Unmappable:
    """Return the envelope in a delivery that arrived `now`."""
    try:
        if message_bytes(body) > limit_bytes:
            raise InvalidMessage(
                f"the body has {message_bytes(body)} bytes, more than max_message_bytes ({limit_bytes}); send less"
            )
        headers = about.headers or {}
        if (deaths := _deaths(headers)) > MOST_DEATHS:
            raise InvalidMessage(
                f"the delivery goes in a circle: queues have dead-lettered it {deaths} times (x-death)"
            )
        if is_ours(headers):
            return received(about, headers, body, now)
        return _foreign(delivery, about, body, origin, now)
    except (InvalidMessage, RecursionError) as error:
        facts = metadata(delivery, about, origin)
        if message_bytes(body) <= limit_bytes:
            return Unmappable(body, str(error), facts)
        digest = {"body-bytes": str(len(body)), "body-sha256": hashlib.sha256(body).hexdigest()}
        return Unmappable(b"", str(error), facts | digest)


def _deaths(headers: Mapping[str, Any]) -> int:
    """Return how often queues have dead-lettered a message, as the broker has counted."""
    told = headers.get("x-death")
    if not isinstance(told, list):
        return 0
    counts = [each.get("count", 1) if isinstance(each, Mapping) else 1 for each in told]
    return sum(count if isinstance(count, int) and count > 0 else 1 for count in counts)


def metadata(delivery: Basic.Deliver, about: Basic.Properties, origin: Origin) -> dict[str, str]:
    """Return the properties of the delivery for its dead letter; each value has at most 255 bytes."""
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


def _foreign(delivery: Basic.Deliver, about: Basic.Properties, body: bytes, origin: Origin, now: datetime) -> Envelope:
    """Map the message of another program. An id that is no UUID becomes one, the same each time."""
    headers = about.headers or {}
    if not about.message_id:
        raise InvalidMessage("the delivery has no message_id: duplicates of it could not be recognised")
    message_type = about.message_type or origin.message_type
    if not message_type:
        raise InvalidMessage("the delivery has no type: send one, or configure one for the queue (?message_type=)")
    if (about.content_encoding or "").lower() not in _NOT_ENCODED:
        raise InvalidMessage(f"content_encoding {about.content_encoding!r} is not understood; send it as it is")
    id_ = parsed_uuid(about.message_id) or uuid5(_namespace(delivery, headers, origin), about.message_id)
    return Envelope(
        id=id_,
        message_type=message_type,
        destination=origin.destination,
        source=about.app_id or "unknown",
        correlation_id=parsed_uuid(about.correlation_id or "") or id_,
        body=body,
        sent_at=about.timestamp or now,
        content_type=_content_type(about.content_type),
        headers={name: as_text(value) for name, value in headers.items()},
        deliver_by=_deadline(about.expiration, now),
    )


def _namespace(delivery: Basic.Deliver, headers: Mapping[str, Any], origin: Origin) -> UUID:
    """Return the namespace of the ids of one publisher, as far as the broker tells."""
    queue = uuid5(_IDS, origin.destination)
    if not origin.is_of_topic:
        return queue
    way = _published(delivery, headers)
    return uuid5(uuid5(queue, way.exchange), way.routing_key)


def _published(delivery: Basic.Deliver, headers: Mapping[str, Any]) -> Way:
    """Return the way of the publish. A queue that dead-letters a message gives it another one, and keeps the first."""
    first = (headers.get("x-first-death-queue"), headers.get("x-first-death-reason"))
    told = headers.get("x-death")
    for death in told if isinstance(told, list) else ():
        match death:
            case {"queue": queue, "reason": reason, "exchange": str(exchange), "routing-keys": [str(key), *_]}:
                if (queue, reason) == first:
                    return Way(exchange, key)
            case _:
                pass
    return Way(delivery.exchange, delivery.routing_key or "")


def _deadline(expiration: str | None, now: datetime) -> datetime | None:
    """Return the deadline by the expiration, which counts from the queue; the broker does not tell since when."""
    if expiration is None:
        return None
    if not re.fullmatch("[0-9]{1,12}", expiration):
        raise InvalidMessage(f"expiration {expiration[:100]!r} is no number of milliseconds; write digits")
    return now + timedelta(milliseconds=int(expiration))


def _content_type(given: str | None) -> str:
    """Treat JSON as JSON with any charset beside it (RFC 8259: it is UTF-8)."""
    if not given or media_type(given) == JSON:
        return JSON
    return given
