"""The envelope: a message as it is stored and as it travels.

The body is bytes in `content_type`; durable never looks into it on the way. Everything else is a column that can
be queried. An envelope is immutable; what changes (owner, epoch, attempts) belongs to the row, not to the message.
"""

from __future__ import annotations

import re
from datetime import datetime
from typing import Annotated, Final, NewType
from uuid import UUID, uuid5

import msgspec
import uuid_utils.compat

__all__ = ["Envelope"]

NodeId = NewType("NodeId", int)

ANY_NODE: Final = NodeId(0)
"""Owner of a row that any node may claim."""

JSON: Final = "application/json"

_MEDIA_TYPE: Final = re.compile(r"[a-z0-9][a-z0-9!#$&^_.+-]{0,126}/[a-z0-9][a-z0-9!#$&^_.+-]{0,126}")

Moment = Annotated[datetime, msgspec.Meta(tz=True)]
"""A time with its zone; decoding refuses one without."""


DUE = "durable-due"
"""The header of a message with delay= or at= that says when it is due: its execution_time ends there."""

REPLY_TO = "reply-to"
"""The header of a message that asks for an answer: the address to which `ctx.reply()` sends it."""

IN_REPLY_TO = "in-reply-to"
"""The header of an answer: the id of the message that it answers."""

TENANT = "tenant"
"""The header of a message that was sent with tenant=: the tenant that it belongs to."""


class Envelope(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Envelope: a message for one destination.

    On the wire it is an array in the order of these fields: add new ones at the end, with a default, so that peers
    one version apart understand each other. Datetimes are aware, in UTC.
    """

    id: UUID
    message_type: str
    destination: str
    source: str
    correlation_id: UUID
    body: bytes
    sent_at: Moment
    content_type: str = JSON
    causation_id: UUID | None = None
    partition_key: str | None = None
    headers: dict[str, str] = {}
    deliver_by: Moment | None = None
    execution_time: Moment | None = None

    def is_late(self, now: datetime) -> bool:
        """True when its deliver_by has passed."""
        return self.deliver_by is not None and self.deliver_by < now

    @property
    def due_at(self) -> datetime:
        """Return when it could be handled first: delay= and at= are no part of its age."""
        try:
            due = datetime.fromisoformat(self.headers[DUE])
        except (KeyError, ValueError):
            return self.sent_at
        return max(due, self.sent_at) if due.tzinfo is not None else self.sent_at

    @property
    def weight_bytes(self) -> int:
        """Return the approximate size in memory and on the wire, in bytes."""
        return len(self.body) + sum(len(key) + len(value) for key, value in self.headers.items()) + 256


class LeasedEnvelope(msgspec.Struct, frozen=True, gc=False):
    """An envelope whose row this node owns, with the epoch that fences every change to that row.

    `attempts` counts failed attempts before this one; `interruptions` the nodes that died, or met an error of durable
    itself, while they owned it. Rows of one `ordering_key` come one after another. `seq` is the place in the queue of a
    row that was claimed.
    """

    envelope: Envelope
    epoch: int = 0
    endpoint: str = ""
    attempts: int = 0
    interruptions: int = 0
    ordering_key: str | None = None
    seq: int = 0

    @property
    def weight_bytes(self) -> int:
        return self.envelope.weight_bytes

    @property
    def key(self) -> LeaseKey:
        return self.envelope.id, self.endpoint, self.epoch


LeaseKey = tuple[UUID, str, int]
"""Id, address and epoch: one ownership of one row."""


def media_type(content_type: str) -> str:
    """A content type without its parameters, in lower case: what content types are compared by."""
    return content_type.partition(";")[0].strip().lower()


def is_media_type(text: str) -> bool:
    """True for text like "application/vnd.acme.order+json", lower case and without parameters (RFC 6838)."""
    return _MEDIA_TYPE.fullmatch(text) is not None


def request_of(envelope: Envelope) -> UUID | None:
    """Return the id of the message that this one answers; None when its headers name none."""
    try:
        return UUID(envelope.headers.get(IN_REPLY_TO, ""))
    except ValueError:
        return None


def new_id() -> UUID:
    """A UUIDv7 (RFC 9562): it carries its time, so that ids sort, and are forgotten, by day."""
    return uuid_utils.compat.uuid7()


def derived_id(parent: UUID, name: str) -> UUID:
    """A UUIDv8 (RFC 9562) that follows from another id and this name: the same each time.

    No time is in it: it would be that of the parent, which may have waited for longer than duplicates are remembered.
    Its version tells it from a business key, which other messages may be sent under.
    """
    digest = uuid5(parent, name).int
    return UUID(int=digest & ~(0xF << 76) | (8 << 76))


def is_generated(envelope_id: UUID) -> bool:
    """True for an id by new_id() or derived_id(): GENERATED in durable.storage.sql.columns is the same rule."""
    return envelope_id.version in (7, 8)


def unix_ms(envelope_id: UUID) -> int | None:
    """The time inside a UUIDv7, in milliseconds; None for ids of other kinds, also of other variants: DATED in
    durable.storage.sql.columns is the same rule.
    """
    return envelope_id.int >> 80 if envelope_id.version == 7 else None
