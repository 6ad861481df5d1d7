"""The SQL of `circuits`: a row is something that is stopped for a while, on every node.

parked   true:  a dead letter has stopped a key, or an ordered handler, until a resume
probing  false: an operator, a handler or plain SQL has paused it; it ends at `until`, or by a resume
         true:  an agent has opened it because of failures; it stays open until something gets through, and from
                `until` on it is tried: a destination by pings, a handler by one message at a time

A park has its row beside that of a pause or of failures, and neither ends the other. A park stops the messages of its
`ordering_key`, under whatever names other releases have the handler; rows besides have '' there. Where releases place
the messages of a handler in several orders, it may be parked in each.
"""

from __future__ import annotations

from typing import Final

from durable.storage.sql.columns import ORDERED
from durable.storage.sql.statement import Statement
from durable.storage.sql.work import INBOX

# Plain SQL may write a time that Python's calendar does not reach, such as 'infinity': a pause without an end.
_CALENDAR: Final = "BETWEEN TIMESTAMPTZ '0002-01-01' AND TIMESTAMPTZ '9998-12-31'"
UNTIL: Final = f"CASE WHEN until {_CALENDAR} THEN until END"
SINCE: Final = f"CASE WHEN since {_CALENDAR} THEN since ELSE now() END"

# One that an operator has paused stays as it is: the pause says more than the failure. A row whose time is over, and
# that nobody has removed yet, is no circuit any more.
OPEN_CIRCUIT: Final = Statement("""
WITH opened AS (
    INSERT INTO {schema}.circuits (kind, key, reason, until, actor, probing)
    VALUES (:kind, :key, :reason, now() + CAST(:duration AS interval), :actor, true)
    ON CONFLICT (kind, key, parked, ordering_key) DO UPDATE
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
# A pause that is prolonged, shortened or given another reason is the same pause.
_SAME_PAUSE: Final = """
        since = CASE WHEN circuits.probing OR circuits.until <= now() THEN clock_timestamp() ELSE circuits.since END"""
# By an operator, who has the last word: whatever it was before, it is paused for this reason and this time.
PAUSE: Final = Statement(f"""
WITH paused AS (
    INSERT INTO {{schema}}.circuits (kind, key, reason, until, actor)
    VALUES (:kind, :key, :reason, now() + CAST(:duration AS interval), :actor)
    ON CONFLICT (kind, key, parked, ordering_key) DO UPDATE
    SET reason = excluded.reason, until = excluded.until, actor = excluded.actor, probing = false,{_SAME_PAUSE}
    RETURNING key
)
SELECT pg_notify(CAST(:channel AS text), '') FROM paused
""")
# By code. A pause that lasts as long already is somebody's word, and stays; one that does not is lengthened.
PAUSE_AT_LEAST: Final = Statement(f"""
WITH paused AS (
    INSERT INTO {{schema}}.circuits (kind, key, reason, until, actor)
    VALUES (:kind, :key, :reason, now() + CAST(:duration AS interval), :actor)
    ON CONFLICT (kind, key, parked, ordering_key) DO UPDATE
    SET reason = excluded.reason, until = excluded.until, actor = excluded.actor, probing = false,{_SAME_PAUSE}
    WHERE circuits.probing OR circuits.until < COALESCE(excluded.until, 'infinity')
    RETURNING key
)
SELECT pg_notify(CAST(:channel AS text), '') FROM paused
""")
# The first dead letter in an order stays the reason. Where a resume deletes its row at this moment, this waits, and
# parks anew.
PARK: Final = Statement("""
WITH parked AS (
    INSERT INTO {schema}.circuits (kind, key, reason, actor, parked, ordering_key)
    VALUES (:kind, :key, :reason, :actor, true, :ordering_key)
    ON CONFLICT (kind, key, parked, ordering_key) DO NOTHING
    RETURNING key
)
SELECT pg_notify(CAST(:channel AS text), '') FROM parked
""")
# The places of a message type in an order: that which its nodes declare, those of parks of its name, and the others in
# which the same handlers are parked.
READ_ORDERS: Final = Statement("""
WITH own AS MATERIALIZED (
    SELECT ordering_key FROM {schema}.placements
    WHERE side = 'incoming' AND name = :key AND ordering_key IS NOT NULL
    UNION
    SELECT ordering_key FROM {schema}.circuits WHERE kind = 'handler' AND key = :parked_key AND parked
), names AS (
    SELECT key FROM {schema}.circuits JOIN own USING (ordering_key) WHERE kind = 'handler' AND parked
)
SELECT ordering_key FROM own WHERE ordering_key <> ''
UNION
SELECT ordering_key FROM {schema}.circuits JOIN names USING (key)
WHERE kind = 'handler' AND parked AND ordering_key <> ''
""")
_PARK_OF_IT: Final = "parked AND (key = :parked_key OR ordering_key = ANY (CAST(:orders AS text[])))"
_SEEN: Final = "(CAST(:seen AS timestamptz) IS NULL OR since = CAST(:seen AS timestamptz))"
# Of a pause beside a park the pause alone, also where another resume ends that pause at the same time. Whoever has seen
# one park of it ends its parks in all orders, and under all names.
# The row of a schedule stays, with its end: whoever looks at the schedule next passes over what came meanwhile.
RESUME: Final = Statement(f"""
WITH paused AS MATERIALIZED (
    SELECT FROM {{schema}}.circuits
    WHERE kind = :kind AND key = :key AND NOT parked AND (probing OR until IS NULL OR until > now())
), seen_park AS MATERIALIZED (
    SELECT FROM {{schema}}.circuits WHERE kind = :kind AND {_PARK_OF_IT} AND {_SEEN}
), deleted AS (
    DELETE FROM {{schema}}.circuits
    WHERE kind = :kind AND kind <> 'schedule' AND (
        NOT parked AND key = :key AND {_SEEN}
        OR {_PARK_OF_IT} AND NOT EXISTS (SELECT FROM paused) AND EXISTS (SELECT FROM seen_park))
    RETURNING probing OR until IS NULL OR until > now() AS was_open
), ended AS (
    UPDATE {{schema}}.circuits SET until = now()
    WHERE kind = :kind AND key = :key AND kind = 'schedule' AND (until IS NULL OR until > now()) AND {_SEEN}
    RETURNING true AS was_open
), resumed AS (
    SELECT was_open FROM deleted UNION ALL SELECT was_open FROM ended
), told AS (SELECT was_open, pg_notify(CAST(:channel AS text), '') FROM resumed)
SELECT EXISTS (SELECT FROM told WHERE was_open) AS was_open, (
    SELECT reason FROM {{schema}}.circuits
    WHERE kind = :kind AND {_PARK_OF_IT} AND EXISTS (SELECT FROM paused)
    ORDER BY since LIMIT 1) AS still_parked
""")
CLOSE_ENDED_CIRCUITS: Final = Statement("""
DELETE FROM {schema}.circuits WHERE until <= now() AND NOT probing
    AND (kind <> 'schedule' OR NOT EXISTS (SELECT FROM {schema}.schedules WHERE name = key))
""")
_OPEN_ROWS: Final = f"""
SELECT kind, key, reason, {SINCE} AS since, {UNTIL} AS until, actor, probing, parked,
    NULLIF(ordering_key, '') AS ordering_key
FROM {{schema}}.circuits WHERE (probing OR until IS NULL OR until > now())"""

# A pause comes before the park beside it: so does a resume end them.
READ_CIRCUITS: Final = Statement(f"{_OPEN_ROWS} ORDER BY kind, key, parked, circuits.ordering_key")

# What code declares, all of it, and the oldest keys, which grow with use: of those that are parked, and of the others.
# Parked keys behind which messages wait come first.
READ_OLDEST: Final = Statement(f"""
{_OPEN_ROWS} AND kind <> 'key'
UNION ALL ({_OPEN_ROWS} AND kind = 'key' AND NOT parked ORDER BY since, key LIMIT :most)
UNION ALL (
    SELECT oldest.* FROM ({_OPEN_ROWS} AND kind = 'key' AND parked ORDER BY since, key LIMIT :most_probed) AS oldest
    ORDER BY NOT EXISTS (SELECT FROM {INBOX.rows} AS row WHERE {ORDERED} AND row.ordering_key = oldest.key), since, key
    LIMIT :most)
ORDER BY kind, key, parked, ordering_key
""")
# In the order of a list: keys, of which there may be many, are the last ones, and the oldest of a kind are its first.
LIST_CIRCUITS: Final = Statement(f"""
{_OPEN_ROWS} AND (CAST(:kind AS text) IS NULL OR kind = CAST(:kind AS text))
ORDER BY kind = 'key', kind, since, key, parked, circuits.ordering_key LIMIT :most OFFSET :start
""")
COUNT_CIRCUITS: Final = Statement(f"""
SELECT kind, count(*) AS count FROM ({_OPEN_ROWS}) AS open GROUP BY kind
""")

# Two nodes compete for the row; who gets it has the circuit for itself for the time of the lease.
BEGIN_TRIAL: Final = Statement("""
UPDATE {schema}.circuits SET until = now() + CAST(:lease AS interval)
WHERE kind = 'handler' AND key = :key AND probing AND until <= now() RETURNING key
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

# A node's row is what it counts now, not a sum of what it has told. While the circuit is open nothing is counted: what
# a node that has not heard of it yet would tell is of the time before. Rows of nodes that tell nothing any more go.
SHARE_COUNTS: Final = Statement("""
WITH stale AS (
    SELECT node_id FROM {schema}.handler_counts
    WHERE handler = :handler AND node_id <> :node AND counted_at < clock_timestamp() - CAST(:window AS interval)
    FOR UPDATE SKIP LOCKED
), gone AS (
    DELETE FROM {schema}.handler_counts AS row USING stale WHERE handler = :handler AND row.node_id = stale.node_id
), told AS (
    INSERT INTO {schema}.handler_counts (handler, node_id, messages, failures)
    SELECT :handler, :node, :messages, :failures
    WHERE NOT EXISTS (
        SELECT FROM {schema}.circuits
        WHERE kind = 'handler' AND key = :handler AND NOT parked AND (probing OR until IS NULL OR until > now()))
    ON CONFLICT (handler, node_id) DO UPDATE
    SET messages = excluded.messages, failures = excluded.failures, counted_at = clock_timestamp()
)
SELECT CAST(COALESCE(sum(messages), 0) AS integer) AS messages, CAST(COALESCE(sum(failures), 0) AS integer) AS failures
FROM {schema}.handler_counts
WHERE handler = :handler AND node_id <> :node AND counted_at >= clock_timestamp() - CAST(:window AS interval)
""")
FORGET_COUNTS: Final = Statement("DELETE FROM {schema}.handler_counts WHERE handler = :handler")

# Of each message type the parked orders in which it waits, or in which its messages are placed.
READ_PARKED_TYPES: Final = Statement(f"""
WITH RECURSIVE {INBOX.distinct("message_type", ORDERED)}, parks AS (
    SELECT ordering_key FROM {{schema}}.circuits WHERE kind = 'handler' AND parked
)
SELECT name, ordering_key FROM found CROSS JOIN parks
WHERE EXISTS (
    SELECT FROM {INBOX.rows} AS row
    WHERE {ORDERED} AND row.message_type = found.name AND row.ordering_key = parks.ordering_key)
UNION
SELECT name, ordering_key FROM {{schema}}.placements JOIN parks USING (ordering_key) WHERE side = 'incoming'
""")

# How much waits in the order of each of these keys: of the first ones, behind which anything waits. NULL: no limit.
COUNT_BEHIND: Final = Statement(f"""
SELECT parked.key, (SELECT count(*) FROM (
    SELECT FROM {INBOX.rows} WHERE {ORDERED} AND ordering_key = parked.key
    LIMIT CAST(:limit AS bigint)) AS counted) AS waiting
FROM (
    SELECT key FROM unnest(CAST(:keys AS text[])) WITH ORDINALITY AS named (key, place)
    WHERE EXISTS (SELECT FROM {INBOX.rows} WHERE {ORDERED} AND ordering_key = named.key)
    ORDER BY place LIMIT CAST(:groups AS bigint)) AS parked
""")
