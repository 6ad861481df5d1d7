"""The outgoing side of storage: rows that wait to be sent."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, NamedTuple
from uuid import UUID

from sqlalchemy import Connection, Row
from sqlalchemy.exc import DBAPIError

from durable.envelope import Envelope, LeasedEnvelope, LeaseKey, NodeId, is_generated
from durable.messages.digest import message_digest
from durable.messages.ordering import FREE, QueueKeys
from durable.storage.database import channel
from durable.storage.isolation import Claimed, batch, isolated, left_alone, put_aside, quarantining, read
from durable.storage.leases import fence
from durable.storage.new_work import ANYWHERE, NewWork
from durable.storage.outages import lack_of, mismatch
from durable.storage.rows import Letter, envelope_columns, queueing_columns
from durable.storage.sql import outbox as statements
from durable.storage.sql.recovery import OUTGOING
from durable.storage.sql.statement import Statement
from durable.storage.sql.work import ALONG_THE_INDEX

NO_FLOORS: Final[Mapping[str, int]] = MappingProxyType({})


class Sent(NamedTuple):
    """Envelope of a commit. `endpoint` is set when it goes into this database's own inbox."""

    envelope: Envelope
    endpoint: str | None
    owner: NodeId
    place: QueueKeys = FREE

    @property
    def key(self) -> Key:
        return self.envelope.id, self.endpoint or self.envelope.destination


Key = tuple[UUID, str]
"""Id and address: the endpoint of a local message, the destination of any other."""


def store(conn: Connection, schema: str, sending: Sequence[Sent]) -> set[Key]:
    """Insert everything that this transaction sends, in one statement. It wakes no node: NOTIFY takes a lock of the
    whole server at commit, and makes PREPARE TRANSACTION impossible.

    Returns the keys of what was not inserted, because it had been sent before. No two may have the same key. Raises
    SchemaMismatch when there are no tables of this version, and Lack when this role may not write to them.
    """
    try:
        return _store(conn, schema, sending)
    except DBAPIError as error:
        if found := mismatch(error, schema) or lack_of(error, schema):
            raise found from None
        raise


def _store(conn: Connection, schema: str, sending: Sequence[Sent]) -> set[Key]:
    columns = (
        envelope_columns([sent.envelope for sent in sending])
        | {
            "execution_time": [sent.envelope.execution_time for sent in sending],
            "destination": [sent.envelope.destination for sent in sending],
            "endpoint": [sent.endpoint for sent in sending],
        }
        | queueing_columns([(sent.owner, sent.place) for sent in sending])
    )
    match sending:
        case [Sent(endpoint=None) as only]:
            return _store_one(conn, schema, statements.STORE_ONE_REMOTE, columns, only)
        case [only] if is_generated(only.envelope.id):
            return _store_one(conn, schema, statements.STORE_ONE_LOCAL, columns, only)
        case _:
            digests = [message_digest(each.envelope.message_type, each.envelope.body) for each in sending]
            rows = statements.STORE_SENT.run(conn, schema, columns | {"message_digest": digests})
            return {(row.id, row.address) for row in rows}


def _store_one(
    conn: Connection, schema: str, statement: Statement, columns: Mapping[str, Sequence[Any]], sent: Sent
) -> set[Key]:
    inserted = statement.run(conn, schema, {name: values[0] for name, values in columns.items()}).rowcount
    return set() if inserted else {sent.key}


def lanes_of(waiting: Iterable[Sent]) -> NewWork:
    """Return the lanes in which these wait; ANYWHERE if one is claimed by its key or tenant, or at its time."""
    message_types, destinations = set[str](), set[str]()
    for envelope, endpoint, _, place in waiting:
        if place != FREE or envelope.execution_time is not None:
            return ANYWHERE
        if endpoint is None:
            destinations.add(envelope.destination)
        else:
            message_types.add(envelope.message_type)
    return NewWork(frozenset(message_types), frozenset(destinations))


def wake_nodes(conn: Connection, schema: str, new: NewWork = ANYWHERE) -> None:
    """Tell the nodes where there is work without an owner; by no transaction of the application."""
    statements.WAKE_NODES.run(conn, schema, {"channel": channel(schema), "payload": new.payload()})


def claim_alone(
    conn: Connection, schema: str, sizes: Mapping[str, int], *, node: NodeId, floors: Mapping[str, int] = NO_FLOORS
) -> Claimed:
    """claim(), by one statement unless there are floors: rows that cannot be read are left to the caller, for
    put_aside(). A commit of the claim alone must not leave the others owned and in nobody's hands.
    """
    if floors:
        conn.execute(ALONG_THE_INDEX.within(schema))
    params = {"destinations": list(sizes), "sizes": list(sizes.values()), "batch_size": sum(sizes.values())}
    params |= {"floors": [floors.get(destination, 0) for destination in sizes]}
    refused = quarantining(conn, schema, OUTGOING, node, "claim")
    return read(batch(conn, schema, statements.CLAIM_OUTGOING, params | {"node": node}, refused))


def claim(
    conn: Connection, schema: str, sizes: Mapping[str, int], *, node: NodeId, floors: Mapping[str, int] = NO_FLOORS
) -> list[LeasedEnvelope]:
    """Take unowned rows for these destinations, of each as many as its size says, oldest first. `floors` are the places
    in their queues to begin at, while handled rows are in the way.
    """
    leases, unreadable = claim_alone(conn, schema, sizes, node=node, floors=floors)
    put_aside(conn, schema, OUTGOING, node, unreadable)
    return leases


def delete_sent(
    conn: Connection, schema: str, node: NodeId, leases: Sequence[LeasedEnvelope], *, keep_body: bool = False
) -> int:
    """The peer has them: delete the rows and write their history. Returns how many were still this node's."""

    def delete(keys: Sequence[LeaseKey]) -> int:
        params = fence(node, keys) | {"keep_body": keep_body}
        return int(conn.execute(statements.DELETE_SENT.within(schema), params).scalar_one())

    refused = quarantining(conn, schema, OUTGOING, node, "delete, after it was sent,")
    return sum(isolated(conn, _keys(leases), delete, refused))


class Expiry(NamedTuple):
    """The ids of those that have expired, and of those that are to be sent all the same."""

    expired: set[UUID]
    timely: set[UUID]


def expire(
    conn: Connection, schema: str, node: NodeId, leases: Sequence[LeasedEnvelope], *, keep_body: bool = False
) -> Expiry:
    """Finish those whose deliver_by has passed by the database's clock. What is in neither set is not this node's."""

    def expire_late(keys: Sequence[LeaseKey]) -> Sequence[Row[Any]]:
        params = fence(node, keys) | {"keep_body": keep_body}
        return conn.execute(statements.EXPIRE_OWNED_OUTGOING.within(schema), params).all()

    parts = isolated(conn, _keys(leases), expire_late, quarantining(conn, schema, OUTGOING, node, "expire"))
    rows = [row for part in parts for row in part]
    return Expiry({row.id for row in rows if row.expired}, {row.id for row in rows if not row.expired})


def late(conn: Connection, schema: str, node: NodeId, leases: Sequence[LeasedEnvelope]) -> Mapping[UUID, bool]:
    """Tell, of those that are still this node's, whether their deliver_by has passed by the database's clock."""
    rows = conn.execute(statements.OWNED_OUTGOING.within(schema), fence(node, _keys(leases)))
    return {row.id: bool(row.is_late) for row in rows}


def count_failed_attempt(conn: Connection, schema: str, node: NodeId, leases: Sequence[LeasedEnvelope]) -> None:
    """Count it for each of them; a row that the database refuses to change is sent again, uncounted."""

    def count(keys: Sequence[LeaseKey]) -> None:
        conn.execute(statements.COUNT_FAILED_SEND.within(schema), fence(node, keys))

    isolated(conn, _keys(leases), count, left_alone("count a failed attempt of"))


def dead_letter(
    conn: Connection,
    schema: str,
    node: NodeId,
    rejected: Iterable[tuple[LeasedEnvelope, Letter]],
    *,
    keep_body: bool = False,
) -> None:
    """The peer refuses them for good: move each into dead_letters with the peer's reason."""
    refused = quarantining(conn, schema, OUTGOING, node, "dead-letter")
    for lease, letter in rejected:
        params = letter.parameters() | {"keep_body": keep_body}

        def move(keys: Sequence[LeaseKey], params: Mapping[str, Any] = params) -> None:
            conn.execute(statements.DEAD_LETTER_OUTGOING.within(schema), {**fence(node, keys), **params})

        isolated(conn, [lease.key], move, refused)


def _keys(leases: Sequence[LeasedEnvelope]) -> list[LeaseKey]:
    return [lease.key for lease in leases]


def waited_for(conn: Connection, schema: str, destinations: Sequence[str]) -> set[str]:
    """Return those of these destinations that have rows: with a node, for their time, or for their turn."""
    named = {"destinations": list(destinations)}
    return set(conn.execute(statements.WAITED_FOR_OUTGOING.within(schema), named).scalars())
