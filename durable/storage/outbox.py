"""The outgoing side of storage: rows that wait to be sent."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple
from uuid import UUID

from sqlalchemy import Connection

from durable.digest import message_digest
from durable.envelope import Envelope, Leased, NodeId
from durable.ordering import FREE, Place
from durable.storage import statements
from durable.storage.database import channel
from durable.storage.leases import fence
from durable.storage.rows import Letter, envelope_columns, leased, queueing_columns


class Sent(NamedTuple):
    """One envelope of a commit: `endpoint` is set when it goes into this database's own inbox."""

    envelope: Envelope
    endpoint: str | None
    owner: NodeId
    place: Place = FREE

    @property
    def key(self) -> Key:
        return self.envelope.id, self.endpoint or self.envelope.destination


Key = tuple[UUID, str]
"""Id and address: the endpoint of a local message, the destination of any other."""


def store(conn: Connection, schema: str, batch: Sequence[Sent]) -> set[Key]:
    """Insert everything that this transaction sends, in one statement. It wakes no node: NOTIFY takes a lock of the
    whole server at commit, and makes PREPARE TRANSACTION impossible.

    Returns the keys of what was not inserted, because it had been sent before. No two may have the same key.
    """
    rows = conn.execute(
        statements.STORE_SENT.within(schema),
        envelope_columns([sent.envelope for sent in batch])
        | {
            "execution_time": [sent.envelope.execution_time for sent in batch],
            "destination": [sent.envelope.destination for sent in batch],
            "endpoint": [sent.endpoint for sent in batch],
            "message_digest": [message_digest(sent.envelope.message_type, sent.envelope.body) for sent in batch],
        }
        | queueing_columns([(sent.owner, sent.place) for sent in batch]),
    )
    return {(row.id, row.address) for row in rows}


def wake_nodes(conn: Connection, schema: str) -> None:
    """Tell the nodes that there is work without an owner; by no transaction of the application."""
    conn.execute(statements.WAKE_NODES.within(schema), {"channel": channel(schema)})


def claim(conn: Connection, schema: str, *, destination: str, batch_size: int, node: NodeId) -> list[Leased]:
    """Take up to `batch_size` unowned rows for this destination, oldest first."""
    rows = conn.execute(
        statements.CLAIM_OUTGOING.within(schema), {"destination": destination, "batch_size": batch_size, "node": node}
    )
    return [leased(row) for row in rows]


def delete_sent(
    conn: Connection, schema: str, node: NodeId, leases: Sequence[Leased], *, keep_body: bool = False
) -> int:
    """The peer has them: delete the rows and write their history. Returns how many were still this node's."""
    params = _mine(node, leases) | {"keep_body": keep_body}
    return int(conn.execute(statements.DELETE_SENT.within(schema), params).scalar_one())


class Expiry(NamedTuple):
    """The ids of those that have expired, and of those that are to be sent all the same."""

    expired: set[UUID]
    timely: set[UUID]


def expire(conn: Connection, schema: str, node: NodeId, leases: Sequence[Leased], *, keep_body: bool = False) -> Expiry:
    """Finish those whose deliver_by has passed by the database's clock. What is in neither set is not this node's."""
    params = _mine(node, leases) | {"keep_body": keep_body}
    rows = conn.execute(statements.EXPIRE_OWNED_OUTGOING.within(schema), params).all()
    return Expiry({row.id for row in rows if row.expired}, {row.id for row in rows if not row.expired})


def count_failed_attempt(conn: Connection, schema: str, node: NodeId, leases: Sequence[Leased]) -> None:
    conn.execute(statements.COUNT_FAILED_SEND.within(schema), _mine(node, leases))


def dead_letter(
    conn: Connection, schema: str, node: NodeId, rejected: Iterable[tuple[Leased, Letter]], *, keep_body: bool = False
) -> None:
    """The peer refuses them for good: move each into dead_letters with the peer's reason."""
    for lease, letter in rejected:
        params = _mine(node, [lease]) | letter.parameters() | {"keep_body": keep_body}
        conn.execute(statements.DEAD_LETTER_OUTGOING.within(schema), params)


def _mine(node: NodeId, leases: Sequence[Leased]) -> dict[str, Any]:
    return fence(node, [lease.key for lease in leases])
