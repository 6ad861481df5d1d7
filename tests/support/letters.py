"""Dead letters made for tests: as the agents make them, or, where there are to be thousands, as they would have."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime

import msgspec
from sqlalchemy import Connection, text

from durable.envelope import ANY_NODE, Envelope, LeasedEnvelope, NodeId, new_id
from durable.messages.digest import fingerprint
from durable.storage import inbox, outbox
from durable.storage.inbox import Arrival
from durable.storage.outbox import Sent
from durable.storage.rows import Letter
from tests.failure import leftovers

SCHEMA = leftovers.SCHEMA
NODE = NodeId(7)
ENDPOINT = "shop"
PEER = "tcp://127.0.0.1:1"
LETTER = Letter.because("a test", "test")


def envelope(
    number: int, *, message_type: str = "letters.placed", destination: str = ENDPOINT, field: str = "number"
) -> Envelope:
    envelope_id = new_id()
    return Envelope(
        id=envelope_id,
        message_type=message_type,
        destination=destination,
        source="elsewhere",
        correlation_id=envelope_id,
        body=msgspec.json.encode({field: number}),
        sent_at=datetime.now(UTC),
    )


def incoming(conn: Connection, envelopes: Sequence[Envelope], letter: Letter = LETTER) -> list[Envelope]:
    """They came in and could not be handled."""
    inbox.store(conn, SCHEMA, [Arrival(ENDPOINT, each, NODE) for each in envelopes])
    for each in envelopes:
        assert inbox.dead_letter(conn, SCHEMA, NODE, LeasedEnvelope(each, 0, ENDPOINT), letter)
    return list(envelopes)


def outgoing(conn: Connection, envelopes: Sequence[Envelope], letter: Letter = LETTER) -> list[Envelope]:
    """They were sent, and the peer refused them."""
    outbox.store(conn, SCHEMA, [Sent(each, None, NODE) for each in envelopes])
    outbox.dead_letter(conn, SCHEMA, NODE, [(LeasedEnvelope(each, 0, each.destination), letter) for each in envelopes])
    return list(envelopes)


MANY = text("""
WITH moved AS (DELETE FROM durable.incoming_envelopes WHERE message_type = :message_type RETURNING *)
INSERT INTO durable.dead_letters (side, address, id, message_type, source, correlation_id, causation_id, partition_key,
    content_type, headers, body, sent_at, deliver_by, attempts, interruptions, exception_type, reason, fingerprint,
    node_id, message_digest, replayable, epoch)
SELECT 'incoming', endpoint, moved.id, message_type, source, correlation_id, causation_id, partition_key, content_type,
    headers, body, sent_at, deliver_by, 1, 0, :kind, :reason, :fingerprint, owner_id, message_digest, true, epoch
FROM moved JOIN durable.received_ids USING (id, endpoint) ORDER BY seq
""")


def waiting(conn: Connection, envelopes: Sequence[Envelope]) -> None:
    """They came in, and wait for any node."""
    for first in range(0, len(envelopes), 1_000):
        arrivals = [Arrival(ENDPOINT, each, ANY_NODE) for each in envelopes[first : first + 1_000]]
        inbox.store(conn, SCHEMA, arrivals)


def many(
    conn: Connection, numbers: Iterable[int], *, message_type: str, kind: str, reason: str, field: str = "number"
) -> None:
    """Thousands of one cause."""
    waiting(conn, [envelope(number, message_type=message_type, field=field) for number in numbers])
    cause = {"message_type": message_type, "kind": kind, "reason": reason, "fingerprint": fingerprint(kind, reason)}
    conn.execute(MANY, cause)
