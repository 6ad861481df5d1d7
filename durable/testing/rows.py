"""The messages of a bus in memory: those that wait, and what became of the others."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

from durable.encryption.ring import KeyRing
from durable.envelope import Envelope, LeasedEnvelope
from durable.errors import InvalidMessage, MissingKey, UnknownMessageType
from durable.messages import codec
from durable.messages import registry as messages
from durable.storage.inbox import Key


@dataclass(frozen=True)
class Handled:
    """A message whose handler's transaction was committed, by which attempt."""

    message: Any
    envelope: Envelope
    attempt: int


@dataclass(frozen=True)
class DeadLetter:
    """A message that was given up; `message` is None when it cannot be decoded.

    `address` is the endpoint where it came in, or the destination that it was meant for. A letter that is not
    `replayable` is no whole envelope, or has the id of another message.
    """

    message: Any
    envelope: Envelope
    attempts: int
    exception_type: str
    reason: str
    traceback: str | None
    address: str
    side: Literal["incoming", "outgoing"] = "incoming"
    replayable: bool = True


@dataclass(frozen=True)
class Expired:
    """A message whose deliver_by had passed before it was handled."""

    message: Any
    envelope: Envelope


@dataclass(frozen=True)
class Scheduled:
    """A message that waits for its time: sent with delay= or at=, or put off after a failed attempt."""

    message: Any
    envelope: Envelope
    due: datetime
    attempts: int


@dataclass
class Row:
    """A message that waits: for its handler, or for its way to another service."""

    envelope: Envelope
    endpoint: str
    due: datetime | None = None
    attempts: int = 0
    epoch: int = 0
    ordering_key: str | None = None
    is_parked: bool = False
    """True while it waits for its encryption key."""
    was_stored: bool = False
    """True for a message that is stored to be handled, or to be sent: the history tells of its end."""

    @property
    def key(self) -> Key:
        return self.envelope.id, self.endpoint

    @property
    def type(self) -> str:
        return self.envelope.message_type

    def lease(self) -> LeasedEnvelope:
        return LeasedEnvelope(self.envelope, self.epoch, self.endpoint, self.attempts, ordering_key=self.ordering_key)

    def is_due(self, now: datetime) -> bool:
        return self.due is None or self.due <= now

    def is_late(self, now: datetime) -> bool:
        return self.envelope.is_late(now)


def decoded(envelope: Envelope, ring: KeyRing) -> Any:
    """The message inside, or None when this process cannot read it."""
    try:
        cls = messages.class_of(envelope.message_type)
        return codec.decode(ring.opened(envelope).body, cls, envelope.content_type)
    except (InvalidMessage, MissingKey, UnknownMessageType):
        return None
