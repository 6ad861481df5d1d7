"""Parks behind dead letters: nothing behind one in its order is handled until an operator resumes it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple
from uuid import UUID

from sqlalchemy import Connection, Row

from durable.envelope import LeasedEnvelope, NodeId
from durable.messages.ordering import stream_of
from durable.storage import circuits
from durable.storage.circuits import CircuitKind
from durable.storage.rows import Letter


@dataclass(frozen=True, slots=True)
class Parks:
    """Parks of a node, for a message of the inbox that is buried because of its row."""

    handlers: Callable[[], Mapping[str, str]]
    """Returns the type of the handler by the message type, of the handlers that park."""

    def __call__(self, conn: Connection, schema: str, node: NodeId, buried: Row[Any], letter: Letter) -> None:
        """Park what is behind it, in the transaction of its letter."""
        if (handler := self.handlers().get(buried.message_type)) is not None:
            park_behind(conn, schema, node, Place.of_row(buried), letter, handler)


class Place(NamedTuple):
    """Place of a message in its order."""

    envelope_id: UUID
    partition_key: str | None
    ordering_key: str | None

    @classmethod
    def of(cls, lease: LeasedEnvelope) -> Place:
        return cls(lease.envelope.id, lease.envelope.partition_key, lease.ordering_key)

    @classmethod
    def of_row(cls, row: Row[Any]) -> Place:
        return cls(row.id, row.partition_key, row.ordering_key)

    def circuit(self, handler: str) -> tuple[CircuitKind, str]:
        """Return what a dead letter parks: its key, or the stream of the handler that is ordered as a whole."""
        if self.partition_key is not None and self.partition_key == self.ordering_key:
            return CircuitKind.KEY, self.partition_key
        return CircuitKind.HANDLER, stream_of(handler)


def park_behind(conn: Connection, schema: str, node: NodeId, place: Place, letter: Letter, handler: str) -> None:
    """Park the order of a message that became a dead letter; one without an order parks nothing."""
    if place.ordering_key is None:
        return
    kind, key = place.circuit(handler)
    why = f"{letter.exception_type}: {letter.reason[:500]}"
    reason = f"{why} (message {place.envelope_id} became a dead letter)"
    circuits.park(conn, schema, kind, key, reason=reason, actor=f"node {node}", ordering_key=place.ordering_key)
