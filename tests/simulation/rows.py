"""The rows of the tables in memory, in the words of durable.storage.tables."""

from __future__ import annotations

from datetime import datetime
from uuid import UUID

import msgspec


class Work(msgspec.Struct, frozen=True, kw_only=True):
    """A row of outgoing_envelopes or incoming_envelopes; `address` is the destination, or the endpoint."""

    seq: int
    id: UUID
    address: str
    message_type: str
    source: str
    correlation_id: UUID
    causation_id: UUID | None
    partition_key: str | None
    content_type: str
    headers: str
    body: bytes
    sent_at: datetime
    deliver_by: datetime | None
    execution_time: datetime | None
    owner_id: int
    ordering_key: str | None
    fair_key: str | None
    attempts: int = 0
    interruptions: int = 0
    epoch: int = 0
    received_at: datetime | None = None

    @property
    def key(self) -> tuple[UUID, str]:
        return self.id, self.address


class Known(msgspec.Struct, frozen=True, kw_only=True):
    """A row of received_ids or undated_ids."""

    id: UUID
    endpoint: str
    message_digest: int
    terms: int
    received_at: datetime
    sent_at: datetime | None = None
    given_up: bool = False
    carried: int | None = None
    due_at: datetime | None = None
    expired: datetime | None = None


class History(msgspec.Struct, frozen=True, kw_only=True):
    id: UUID
    side: str
    outcome: str
    address: str
    message_type: str
    attempts: int
    interruptions: int
    node_id: int
    error: str | None
    has_body: bool
    finished_at: datetime


class Letter(msgspec.Struct, frozen=True, kw_only=True):
    """A row of dead_letters."""

    letter_id: int
    side: str
    address: str
    id: UUID | None
    message_type: str | None
    partition_key: str | None
    attempts: int
    interruptions: int
    exception_type: str
    reason: str
    node_id: int
    message_digest: int | None
    replayable: bool
    epoch: int
    replay_count: int
    ordering_key: str | None
    fair_key: str | None
    body: bytes


class Attempt(msgspec.Struct, frozen=True, kw_only=True):
    """A row of failed_attempts."""

    attempt_id: int
    id: UUID
    endpoint: str
    number: int
    exception_type: str
    reason: str
    node_id: int
    letter_id: int | None = None


class NodeRow(msgspec.Struct, frozen=True, kw_only=True):
    node_id: int
    service: str
    capabilities: str
    started_at: datetime
    heartbeat_at: datetime


class Circuit(msgspec.Struct, frozen=True, kw_only=True):
    kind: str
    key: str
    reason: str
    since: datetime
    until: datetime | None
    actor: str
    probing: bool = False
    parked: bool = False
    ordering_key: str = ""

    @property
    def name(self) -> tuple[str, str, bool, str]:
        """Its primary key."""
        return self.kind, self.key, self.parked, self.ordering_key

    def is_open(self, now: datetime) -> bool:
        return self.probing or self.until is None or self.until > now


class Counts(msgspec.Struct, frozen=True, kw_only=True):
    """A row of handler_counts."""

    handler: str
    node_id: int
    messages: int
    failures: int
    counted_at: datetime


class Schedule(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    cron: str
    tz: str
    misfire: str
    message_type: str | None
    destination: str | None
    declaration: str
    declared_by: int
    declared_at: datetime
    due_at: datetime
    occurrence_at: datetime | None = None
    failing_since: datetime | None = None
    asked_at: datetime | None = None
    last_at: datetime | None = None
    ran_at: datetime | None = None
    changed_by: str | None = None
    changed_at: datetime | None = None
    error: str | None = None


class Placement(msgspec.Struct, frozen=True, kw_only=True):
    side: str
    name: str
    ordering_key: str | None
    fair_by: str | None


class Sent(msgspec.Struct, frozen=True, kw_only=True):
    """Business row of the workload: this message was sent by the transaction that wrote the row."""

    number: int
    lane: str
    key: str | None
    position: int


class Effect(msgspec.Struct, frozen=True, kw_only=True):
    """Business row of the workload: this message was handled by the transaction that wrote the row."""

    number: int
    lane: str
    key: str | None
    position: int
