"""The statements of the outbox: storing in the application's transaction, claiming, and finishing what was sent."""

from __future__ import annotations

from durable.storage.sql.columns import (
    ENVELOPE,
    FREE,
    GENERATED,
    NO_TERMS,
    QUEUEING,
    REMEMBERED,
    SELECT_ENVELOPE,
    UNNEST_ENVELOPE,
    UNNEST_QUEUEING,
    VALUES_ENVELOPE,
    VALUES_QUEUEING,
    remember_undated,
)
from durable.storage.sql.statement import Batched, Statement, by_key
from durable.storage.sql.work import OUTBOX

# Everything that one commit sends, in one statement: local messages go straight into the inbox. `seq` follows the order
# in which they were sent, which a join alone might turn around. Returns what was there already, under an id that is a
# business key, or that of an earlier attempt of the same handler. A local id that was generated is its own token: it
# is committed with its cause, or not at all, and nobody sends it again.
STORE_SENT = Statement(f"""
WITH sent AS MATERIALIZED (
    SELECT * FROM unnest({UNNEST_ENVELOPE}, CAST(:execution_time AS timestamptz[]), CAST(:destination AS text[]),
        CAST(:endpoint AS text[]), CAST(:message_digest AS bigint[]), {UNNEST_QUEUEING}) WITH ORDINALITY
    AS t ({ENVELOPE}, execution_time, destination, endpoint, message_digest, {QUEUEING}, position)
), undated AS (
    {remember_undated(f"SELECT {REMEMBERED}, {NO_TERMS} FROM sent WHERE endpoint IS NOT NULL AND NOT {GENERATED}")}
), local AS (
    INSERT INTO {{schema}}.incoming_envelopes (endpoint, {ENVELOPE}, execution_time, {QUEUEING})
    SELECT endpoint, {SELECT_ENVELOPE}, execution_time, {QUEUEING} FROM sent
    WHERE endpoint IS NOT NULL AND ({GENERATED} OR (id, endpoint) IN (SELECT id, endpoint FROM undated))
    ORDER BY position
    ON CONFLICT DO NOTHING RETURNING id, endpoint
), remote AS (
    INSERT INTO {{schema}}.outgoing_envelopes (destination, {ENVELOPE}, execution_time, {QUEUEING})
    SELECT destination, {SELECT_ENVELOPE}, execution_time, {QUEUEING} FROM sent WHERE endpoint IS NULL
    ORDER BY position
    ON CONFLICT DO NOTHING RETURNING id, destination
)
SELECT id, endpoint AS address FROM sent
WHERE endpoint IS NOT NULL AND (id, endpoint) NOT IN (SELECT id, endpoint FROM local)
UNION ALL
SELECT id, destination FROM sent
WHERE endpoint IS NULL AND (id, destination) NOT IN (SELECT id, destination FROM remote)
""")


def _store_one(table: str, address: str) -> Statement:
    return Statement(f"""
    INSERT INTO {{schema}}.{table} ({address}, {ENVELOPE}, execution_time, {QUEUEING})
    VALUES (CAST(:{address} AS text), {VALUES_ENVELOPE}, CAST(:execution_time AS timestamptz), {VALUES_QUEUEING})
    ON CONFLICT DO NOTHING""")


# The same for the only message of a commit, which most commits have: without arrays and joins, a third of the work of
# client and server. A local message under a business key needs the statement above.
STORE_ONE_REMOTE = _store_one("outgoing_envelopes", "destination")
STORE_ONE_LOCAL = _store_one("incoming_envelopes", "endpoint")

WAKE_NODES = Statement("SELECT pg_notify(CAST(:channel AS text), CAST(:payload AS text))")

# The latch is looked at here too: a node that latches releases its rows, and no other must take them in the moment
# before it has read `circuits` again. The LIMIT says to the planner how few rows there are.
CLAIM_OUTGOING = Batched(
    f"""
    SELECT each.id, each.destination, each.epoch, each.tid
    FROM unnest(CAST(:destinations AS text[]), CAST(:sizes AS bigint[]), CAST(:floors AS bigint[]))
        AS place (destination, size, floor)
    CROSS JOIN LATERAL (
        SELECT id, destination, epoch, ctid AS tid FROM {OUTBOX.rows}
        WHERE destination = place.destination AND seq >= place.floor AND {FREE}
            AND (deliver_by IS NULL OR deliver_by > now()){{only}}
        ORDER BY seq LIMIT place.size {{lock}}
    ) AS each
    WHERE NOT EXISTS (
        SELECT FROM {{schema}}.circuits
        WHERE kind = 'destination' AND key = place.destination AND (probing OR until IS NULL OR until > now()))
    LIMIT :batch_size""",
    f", {OUTBOX.claimed()}",
    key=OUTBOX.key,
    only=by_key(OUTBOX.address),
)

WAITED_FOR_OUTGOING = Statement("""
SELECT DISTINCT destination FROM {schema}.outgoing_envelopes
WHERE destination = ANY (CAST(:destinations AS text[]))
""")

DELETE_SENT = Statement(f"""
WITH sent AS (
    DELETE FROM {OUTBOX.rows} AS row USING {OUTBOX.mine} RETURNING row.*
), {OUTBOX.history("sent", "sent")}
SELECT count(*) FROM sent
""")

COUNT_FAILED_SEND = Statement(f"""
UPDATE {OUTBOX.rows} AS row SET attempts = row.attempts + 1 FROM {OUTBOX.mine}
""")

DEAD_LETTER_OUTGOING = Statement(f"""
WITH moved AS (
    DELETE FROM {OUTBOX.rows} AS row USING {OUTBOX.mine} RETURNING row.*
), letters AS (
    {OUTBOX.letters()}
), {OUTBOX.history("dead-lettered", "moved", error=":reason")}
SELECT count(*) FROM moved
""")

# Late is what the database's clock says. What comes back neither expired nor not is this node's no more: perhaps it
# expired by an earlier run of this statement, whose reply was lost, and it must not be sent then.
OWNED_OUTGOING = Statement(
    f"SELECT row.id, row.deliver_by < clock_timestamp() AS is_late FROM {OUTBOX.rows} AS row, {OUTBOX.mine}"
)

EXPIRE_OWNED_OUTGOING = Statement(f"""
WITH expired AS (
    DELETE FROM {OUTBOX.rows} AS row USING {OUTBOX.mine} AND row.deliver_by < clock_timestamp() RETURNING row.*
), {OUTBOX.history("expired", "expired", error=f"'{OUTBOX.late}'")}
SELECT id, true AS expired FROM expired
UNION ALL
SELECT row.id, false FROM {OUTBOX.rows} AS row, {OUTBOX.mine} AND row.id NOT IN (SELECT id FROM expired)
""")
