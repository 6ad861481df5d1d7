"""The incoming side of storage: rows that wait to be handled, and the ids of everything ever received."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timedelta
from types import MappingProxyType
from typing import Any, Final, NamedTuple
from uuid import UUID

import msgspec
from sqlalchemy import Connection, Row

from durable.duration import within_calendar
from durable.envelope import Envelope, LeasedEnvelope, LeaseKey, NodeId
from durable.messages.digest import message_digest, terms_digest
from durable.messages.ordering import FREE, QueueKeys
from durable.messages.repeats import Known
from durable.storage.isolation import (
    Claimed,
    batch,
    isolated,
    left_alone,
    put_aside,
    quarantining,
    read,
    refusals_named,
)
from durable.storage.leases import fence
from durable.storage.parks import Place, park_behind
from durable.storage.rows import (
    ONCE,
    QUARANTINED,
    UNCOUNTED,
    Letter,
    Tried,
    envelope_columns,
    queueing_columns,
    storable,
)
from durable.storage.sql import inbox as statements
from durable.storage.sql.recovery import INCOMING
from durable.storage.sql.statement import Statement
from durable.storage.sql.work import INBOX
from durable.telemetry import log

Key = tuple[UUID, str]
"""Id and endpoint: what makes an envelope the same envelope to a receiver."""
_Deadline = tuple[UUID, str, datetime | None]


class Arrival(NamedTuple):
    """An envelope as it came in: where, and the node that will handle it, or ANY_NODE."""

    endpoint: str
    envelope: Envelope
    owner: NodeId
    place: QueueKeys = FREE
    digest: int | None = None
    """The digest that is kept with its id; None: that of its type and body, of an envelope that is trusted."""

    @property
    def key(self) -> Key:
        return self.envelope.id, self.endpoint


def store(conn: Connection, schema: str, arrivals: Sequence[Arrival]) -> set[Key]:
    """Insert those that are new, in one statement, and return their keys; the others are duplicates.

    No two arrivals of one call may have the same key. Raises InvalidMessage when the database refuses one of them, and
    RefusedPerhaps when it may be something else that it refuses.
    """
    with refusals_named():
        rows = statements.STORE_RECEIVED.run(
            conn,
            schema,
            envelope_columns([arrival.envelope for arrival in arrivals])
            | {
                "execution_time": [arrival.envelope.execution_time for arrival in arrivals],
                "endpoint": [arrival.endpoint for arrival in arrivals],
                "message_digest": [_digest(arrival) for arrival in arrivals],
                "terms": [terms_digest(arrival.envelope) for arrival in arrivals],
            }
            | queueing_columns([(arrival.owner, arrival.place) for arrival in arrivals]),
        )
    return {(row.id, row.endpoint) for row in rows}


def find_known(conn: Connection, schema: str, duplicates: Sequence[Arrival]) -> dict[Key, tuple[Known, datetime]]:
    """Return what is known under the ids of these arrivals, with the time of the database."""
    rows = conn.execute(
        statements.FIND_KNOWN.within(schema),
        {
            "id": [arrival.envelope.id for arrival in duplicates],
            "endpoint": [arrival.endpoint for arrival in duplicates],
        },
    )
    return {(row.id, row.endpoint): (_known(row), row.now) for row in rows}


def live_longer(conn: Connection, schema: str, duplicates: Sequence[Arrival]) -> bool:
    """Let the messages that wait under these ids live as long as their duplicates would; one whose row the database
    refuses to change lives as long as it would have. False when another one does not wait any more.
    """

    def live(deadlines: Sequence[_Deadline]) -> bool:
        changed = conn.execute(
            statements.LIVE_LONGER.within(schema),
            {
                "id": [envelope_id for envelope_id, _, _ in deadlines],
                "endpoint": [endpoint for _, endpoint, _ in deadlines],
                "deliver_by": [deliver_by for _, _, deliver_by in deadlines],
            },
        )
        return changed.rowcount == len(deadlines)

    deadlines = [(each.envelope.id, each.endpoint, each.envelope.deliver_by) for each in duplicates]
    return all(
        isolated(conn, deadlines, live, left_alone("lengthen the life of", lambda each: f"{each[0]} at {each[1]}"))
    )


def note_expired(conn: Connection, schema: str, expired: Sequence[LeasedEnvelope]) -> None:
    """Note the deadlines of messages that became dead letters by them; without a note, a repetition is a duplicate."""

    def note(part: Sequence[LeasedEnvelope]) -> None:
        conn.execute(
            statements.NOTE_EXPIRED.within(schema),
            {
                "id": [lease.envelope.id for lease in part],
                "endpoint": [lease.endpoint for lease in part],
                "deliver_by": [lease.envelope.deliver_by for lease in part],
            },
        )

    def leave(lease: LeasedEnvelope, reason: str) -> None:
        log.error(
            "the database refuses to note the deadline of %s at %s, which is a dead letter: %s",
            lease.envelope.id,
            lease.endpoint,
            reason,
        )

    isolated(conn, expired, note, leave)


def _known(row: Row[Any]) -> Known:
    return Known.of(
        row.message_digest, row.terms, row.now, due_at=row.due_at, expired=row.expired, deliver_by=row.deliver_by
    )


def _digest(arrival: Arrival) -> int:
    envelope = arrival.envelope
    return message_digest(envelope.message_type, envelope.body) if arrival.digest is None else arrival.digest


def claim_alone(
    conn: Connection,
    schema: str,
    *,
    message_type: str,
    handler: str | None = None,
    batch_size: int,
    node: NodeId,
    is_trial: bool = False,
    floor: int = 0,
) -> Claimed:
    """claim(), by one statement: rows that cannot be read are left to the caller, for put_aside(). A commit of the
    claim alone must not leave the others owned and in nobody's hands.
    """
    params = {"message_type": message_type, "batch_size": batch_size, "node": node, "is_trial": is_trial}
    params |= {"handler": handler or message_type, "floor": floor}
    refused = quarantining(conn, schema, INCOMING, node, "claim")
    return read(batch(conn, schema, statements.CLAIM_INCOMING, params, refused))


def claim(
    conn: Connection,
    schema: str,
    *,
    message_type: str,
    batch_size: int,
    node: NodeId,
    is_trial: bool = False,
    floor: int = 0,
) -> list[LeasedEnvelope]:
    """Take up to `batch_size` unowned messages of this type, oldest first; of a stopped handler only for a trial.

    `floor` is the place in the queue to begin at.
    """
    leases, unreadable = claim_alone(
        conn, schema, message_type=message_type, batch_size=batch_size, node=node, is_trial=is_trial, floor=floor
    )
    put_aside(conn, schema, INCOMING, node, unreadable)
    return leases


def finish_handled(
    conn: Connection,
    schema: str,
    node: NodeId,
    leases: Sequence[LeasedEnvelope],
    *,
    counted: int = 0,
    keep_body: bool = False,
) -> int:
    """Finish messages in the transaction of their handler, with the attempts that failed and that the row of each does
    not count. Returns how many rows were still this node's.
    """
    params = fence(node, [lease.key for lease in leases]) | {"counted": counted, "keep_body": keep_body}
    return int(statements.FINISH_HANDLED.run(conn, schema, params).scalar_one())


def try_to_finish(conn: Connection, schema: str) -> None:
    """Write the history of a made-up message, and undo it: the database refuses that for as long as it has no room."""
    with suppress(_Undone), conn.begin_nested():
        conn.execute(statements.FINISH_MADE_UP.within(schema))
        raise _Undone


class _Undone(Exception):
    """The end of a transaction that was for a try."""


def begin_suspect_attempt(conn: Connection, schema: str, node: NodeId, lease: LeasedEnvelope) -> int | None:
    """Count the attempt before it runs; the new count, or None when the lease was lost."""
    row = _settle(conn, schema, node, lease, statements.BEGIN_SUSPECT_ATTEMPT, {}, "count an attempt of")
    return None if row is None else int(row.attempts)


def retry_later(
    conn: Connection,
    schema: str,
    node: NodeId,
    lease: LeasedEnvelope,
    tried: Tried = ONCE,
    *,
    delay: timedelta,
) -> bool:
    """Make it due after `delay`, unowned, and keep why. False when the lease was lost, or it was handled after all."""
    params = tried.columns() | {"delay": within_calendar(delay)}
    return _settle(conn, schema, node, lease, statements.RETRY_LATER, params, "put off") is not None


def take_back_attempt(conn: Connection, schema: str, node: NodeId, lease: LeasedEnvelope) -> bool:
    """Hand it back without the attempt that was counted before it could run: it is still the first of its key. False
    when the lease was lost."""
    return _settle(conn, schema, node, lease, statements.TAKE_BACK_ATTEMPT, {}, "take back an attempt of") is not None


def put_back(
    conn: Connection,
    schema: str,
    node: NodeId,
    lease: LeasedEnvelope,
    tried: Tried = ONCE,
    *,
    headers: Mapping[str, str],
    fair_key: str | None,
    body: bytes,
) -> bool:
    """Put it behind all that waits, unowned, with these headers and this body instead of its own. False when the lease
    was lost.
    """
    changed = {"headers": msgspec.json.encode(dict(headers)).decode(), "fair_key": fair_key, "body": body}
    params = tried.columns() | changed
    return _settle(conn, schema, node, lease, statements.PUT_BACK, params, "put back") is not None


def dead_letter(
    conn: Connection,
    schema: str,
    node: NodeId,
    lease: LeasedEnvelope,
    letter: Letter,
    tried: Tried = ONCE,
    *,
    keep_body: bool = False,
    parks: str | None = None,
) -> bool:
    """Move it into dead_letters, with its failures. False when the lease was lost, or it was handled after all.

    With `parks`, the type of its handler, nothing that comes behind it in its order is handled until an operator
    resumes its key, or the handler that is ordered as a whole.
    """
    digest = message_digest(lease.envelope.message_type, lease.envelope.body)
    params = letter.parameters() | tried.columns() | {"message_digest": digest, "keep_body": keep_body}
    row = _settle(conn, schema, node, lease, statements.DEAD_LETTER_INCOMING, params, "dead-letter")
    moved = row is not None and int(row[0]) == 1
    if moved and parks is not None:
        park_behind(conn, schema, node, Place.of(lease), letter, parks)
    return moved


class Lateness(NamedTuple):
    """The time within which a deliver_by passes, why its message ends then, and its attempts until now."""

    within: timedelta = timedelta(0)
    reason: str = INBOX.late
    tried: Tried = UNCOUNTED


LATE_NOW: Final = Lateness()


def expire(
    conn: Connection,
    schema: str,
    node: NodeId,
    lease: LeasedEnvelope,
    lateness: Lateness = LATE_NOW,
    *,
    keep_body: bool = False,
) -> bool:
    """Finish it without handling it, if it is so late by the database's clock. True when it was."""
    within, reason, tried = lateness
    params = {"within": within, "reason": reason, "counted": tried.counted, "keep_body": keep_body}
    row = _settle(conn, schema, node, lease, statements.EXPIRE_OWNED_INCOMING, params, "expire")
    return row is not None and int(row[0]) == 1


def late(
    conn: Connection, schema: str, node: NodeId, lease: LeasedEnvelope, *, within: timedelta
) -> LeasedEnvelope | None:
    """The message with the deadline of its row, if that has passed by the database's clock, or passes within this
    time.
    """
    row = _settle(conn, schema, node, lease, statements.LATE_INCOMING, {"within": within}, "expire")
    if row is None:
        return None
    return msgspec.structs.replace(lease, envelope=msgspec.structs.replace(lease.envelope, deliver_by=row.deliver_by))


class Unfit(NamedTuple):
    """Bytes that cannot be handled, the reason, and what is known of them."""

    endpoint: str
    raw: bytes
    reason: str
    envelope: Envelope | None = None
    headers: Mapping[str, str] = MappingProxyType({})
    replayable: bool = False
    """Are the bytes the body of this envelope, and can all of it be stored? Then it is replayed to this `place`."""
    place: QueueKeys = FREE


def quarantine(conn: Connection, schema: str, node: NodeId, unfit: Unfit) -> None:
    """Keep what cannot be handled as a dead letter. Raises InvalidMessage when the database refuses even that, and
    RefusedPerhaps."""
    endpoint, raw, reason, envelope, headers, replayable, place = unfit
    whole = envelope if replayable else None
    params = {
        "address": endpoint,
        "id": envelope and envelope.id,
        "message_type": envelope and envelope.message_type,
        "source": envelope and envelope.source,
        "correlation_id": envelope and envelope.correlation_id,
        "content_type": envelope and envelope.content_type,
        "sent_at": envelope and envelope.sent_at,
        "causation_id": whole and whole.causation_id,
        "partition_key": whole and whole.partition_key,
        "ordering_key": place.ordering_key,
        "fair_key": place.fair_key,
        "deliver_by": whole and whole.deliver_by,
        "headers": msgspec.json.encode({storable(k): storable(v) for k, v in headers.items()}).decode(),
        "body": raw,
        "message_digest": message_digest(envelope.message_type if envelope else "", raw),
        "replayable": whole is not None,
        "node": node,
    }
    with refusals_named():
        letter = Letter.because(reason, QUARANTINED, envelope.message_type if envelope else "")
        conn.execute(statements.QUARANTINE.within(schema), params | letter.parameters())


def _settle(
    conn: Connection,
    schema: str,
    node: NodeId,
    lease: LeasedEnvelope,
    statement: Statement,
    params: Mapping[str, Any],
    doing: str,
) -> Row[Any] | None:
    """The row that this statement returns for one message; None, also where the database refused to change it."""

    def settle(keys: Sequence[LeaseKey]) -> Row[Any] | None:
        envelope_id, endpoint, epoch = keys[0] if keys else (None, None, None)
        one = {"id": envelope_id, "endpoint": endpoint, "epoch": epoch, "node": node}
        return conn.execute(statement.within(schema), {**one, **params}).first()

    (row,) = isolated(conn, [lease.key], settle, quarantining(conn, schema, INCOMING, node, doing)) or (None,)
    return row
