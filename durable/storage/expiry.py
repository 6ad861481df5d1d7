"""Messages that came too late and become dead letters, where that is asked for instead of a line in the history.

bury()            unowned rows, by recovery
bury_incoming()   one that a handling agent was about to begin, or to put off
bury_outgoing()   those that a sending agent was about to send
"""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import Connection

from durable.envelope import LeasedEnvelope, NodeId
from durable.storage import inbox, outbox
from durable.storage.inbox import LATE_NOW, Lateness
from durable.storage.isolation import batch, quarantining, readable
from durable.storage.leases import Burials
from durable.storage.outbox import Expiry
from durable.storage.rows import UNCOUNTED, Letter
from durable.storage.sql.recovery import INCOMING, Recovery
from durable.storage.sql.work import INBOX, OUTBOX

_KIND = "expired"


def bury(
    conn: Connection,
    schema: str,
    table: Recovery,
    node: NodeId,
    batch_size: int,
    burials: Burials,
    *,
    keep_body: bool = False,
) -> int:
    """Make dead letters of unowned rows whose deliver_by has passed. Returns how many."""
    params = {"node": node, "batch_size": batch_size} | burials.parameters()
    refused = quarantining(conn, schema, table, node, "claim")
    claimed = readable(conn, schema, table, node, batch(conn, schema, table.claim_late, params, refused))
    if table is INCOMING:
        for lease in claimed:
            letter = _letter(lease, INBOX.late)
            inbox.dead_letter(conn, schema, node, lease, letter, UNCOUNTED, keep_body=keep_body)
        inbox.note_expired(conn, schema, claimed)
    else:
        late = [(lease, _letter(lease, OUTBOX.late)) for lease in claimed]
        outbox.dead_letter(conn, schema, node, late, keep_body=keep_body)
    return len(claimed)


def bury_incoming(
    conn: Connection,
    schema: str,
    node: NodeId,
    lease: LeasedEnvelope,
    lateness: Lateness = LATE_NOW,
    *,
    keep_body: bool = False,
) -> bool:
    """Make a dead letter of it, if it is so late by the database's clock."""
    within, reason, tried = lateness
    late = inbox.late(conn, schema, node, lease, within=within)
    if late is None:
        return False
    letter = _letter(late, reason)
    buried = inbox.dead_letter(conn, schema, node, late, letter, tried, keep_body=keep_body)
    if buried:
        inbox.note_expired(conn, schema, [late])
    return buried


def bury_outgoing(
    conn: Connection, schema: str, node: NodeId, leases: Sequence[LeasedEnvelope], *, keep_body: bool = False
) -> Expiry:
    """Expire as outbox.expire(), into dead letters."""
    own = outbox.late(conn, schema, node, leases)
    late = [lease for lease in leases if own.get(lease.envelope.id)]
    letters = [(lease, _letter(lease, OUTBOX.late)) for lease in late]
    outbox.dead_letter(conn, schema, node, letters, keep_body=keep_body)
    expired = {lease.envelope.id for lease in late}
    return Expiry(expired, own.keys() - expired)


def _letter(lease: LeasedEnvelope, reason: str) -> Letter:
    return Letter.because(reason, _KIND, lease.envelope.message_type)
