"""The SQL of `circuits`: a row is something that is stopped for a while, on every node.

probing  false: an operator, a handler or plain SQL has paused it; it ends at `until`, or by a resume
         true:  an agent has opened it because of failures; it stays open until something gets through, and from
                `until` on it is tried: a destination by pings, a handler by one message at a time
"""

from __future__ import annotations

from typing import Final

from durable.storage.statements import CLAIMED_ENVELOPE, Statement

# One that an operator has paused stays as it is: the pause says more than the failure. A row whose time is over, and
# that nobody has removed yet, is no circuit any more.
OPEN_CIRCUIT: Final = Statement("""
WITH opened AS (
    INSERT INTO {schema}.circuits (kind, key, reason, until, actor, probing)
    VALUES (:kind, :key, :reason, now() + CAST(:duration AS interval), :actor, true)
    ON CONFLICT (kind, key) DO UPDATE
    SET reason = excluded.reason, since = clock_timestamp(), until = excluded.until, actor = excluded.actor,
        probing = true
    WHERE circuits.until <= now() AND NOT circuits.probing
    RETURNING key
)
SELECT pg_notify(CAST(:channel AS text), '') FROM opened
""")
# Something got through. It ends no pause, which may have come meanwhile.
CLOSE_CIRCUIT: Final = Statement("""
WITH closed AS (
    DELETE FROM {schema}.circuits WHERE kind = :kind AND key = :key AND probing RETURNING key
), told AS (SELECT pg_notify(CAST(:channel AS text), '') FROM closed)
SELECT count(*) FROM told
""")
# By an operator or by code: whatever it was before, it is open from now on for this reason and this time.
PAUSE: Final = Statement("""
WITH paused AS (
    INSERT INTO {schema}.circuits (kind, key, reason, until, actor)
    VALUES (:kind, :key, :reason, now() + CAST(:duration AS interval), :actor)
    ON CONFLICT (kind, key) DO UPDATE
    SET reason = excluded.reason, since = clock_timestamp(), until = excluded.until, actor = excluded.actor,
        probing = false
    RETURNING key
)
SELECT pg_notify(CAST(:channel AS text), '') FROM paused
""")
RESUME: Final = Statement("""
WITH resumed AS (DELETE FROM {schema}.circuits WHERE kind = :kind AND key = :key RETURNING key),
told AS (SELECT pg_notify(CAST(:channel AS text), '') FROM resumed)
SELECT count(*) FROM told
""")
CLOSE_ENDED_CIRCUITS: Final = Statement("DELETE FROM {schema}.circuits WHERE until <= now() AND NOT probing")
READ_CIRCUITS: Final = Statement("""
SELECT kind, key, reason, since, until, actor, probing FROM {schema}.circuits
WHERE probing OR until IS NULL OR until > now() ORDER BY kind, key
""")

# One message for a handler whose circuit is to be tried, and to no other node before the lease is over. The row of the
# circuit is what two nodes compete for; it stays as it is while nothing waits that it could be tried with.
CLAIM_PROBE: Final = Statement(f"""
WITH waiting AS (
    SELECT id, endpoint FROM {{schema}}.incoming_envelopes
    WHERE message_type = :message_type AND owner_id = 0 AND execution_time IS NULL
        AND (deliver_by IS NULL OR deliver_by > now())
    ORDER BY seq LIMIT 1 FOR UPDATE SKIP LOCKED
), tried AS (
    UPDATE {{schema}}.circuits SET until = now() + CAST(:lease AS interval)
    WHERE kind = 'handler' AND key = :handler AND probing AND until <= now() AND EXISTS (SELECT FROM waiting)
    RETURNING key
), claimed AS (
    UPDATE {{schema}}.incoming_envelopes AS row SET owner_id = :node, epoch = row.epoch + 1
    FROM waiting, tried WHERE row.id = waiting.id AND row.endpoint = waiting.endpoint
    RETURNING row.*
)
SELECT {CLAIMED_ENVELOPE}, endpoint, epoch, attempts, interruptions FROM claimed
""")
# Each time it waits for as long as it was open already, which doubles the time between two tries.
PUT_OFF_PROBE: Final = Statement("""
UPDATE {schema}.circuits SET reason = :reason, until = now()
    + GREATEST(CAST(:shortest AS interval), LEAST(now() - since, CAST(:longest AS interval)))
WHERE kind = 'handler' AND key = :key AND probing
""")
TRY_AGAIN: Final = Statement("""
UPDATE {schema}.circuits SET until = now() WHERE kind = 'handler' AND key = :key AND probing
""")
