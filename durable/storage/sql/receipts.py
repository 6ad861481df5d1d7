"""The SQL statements about what became of messages, by their ids.

Waiting rows and letters are found by their btrees. The history has a BRIN index alone, of xid and id: it finds ids that
have a time in them, and reads what no VACUUM has summarised yet. A row that was seen waiting in a snapshot was ended by
a transaction that this snapshot did not know as over: its xid is at or above the xmin of the snapshot. So later looks
need little of the history, whatever the id is.
"""

from __future__ import annotations

from typing import Final

from durable.storage.sql.statement import Statement

_IDS: Final = "id = ANY (CAST(:ids AS uuid[]))"


def _waiting(table: str, side: str, address: str) -> str:
    return f"""SELECT id, '{side}' AS side, {address} AS address, message_type, 'waiting' AS outcome,
    CAST(NULL AS text) AS reason, CAST(NULL AS timestamptz) AS ended_at, attempts, correlation_id,
    false AS is_letter
FROM {{schema}}.{table} WHERE {_IDS}"""


READ_HORIZON = Statement("SELECT CAST(CAST(pg_snapshot_xmin(pg_current_snapshot()) AS text) AS bigint)")

# A letter that was replayed or handled tells nothing: its message waits, or the history has it.
READ_STANDINGS = Statement(f"""
{_waiting("incoming_envelopes", "incoming", "endpoint")}
UNION ALL
{_waiting("outgoing_envelopes", "outgoing", "destination")}
UNION ALL
SELECT id, side, address, COALESCE(message_type, ''), CASE WHEN resolved_at IS NULL THEN 'dead-lettered'
    ELSE resolution END, CASE WHEN resolution = 'discarded' THEN COALESCE(resolution_reason, left(reason, 1000))
    ELSE left(reason, 1000) END, COALESCE(resolved_at, failed_at), attempts, correlation_id,
    true
FROM {{schema}}.dead_letters WHERE {_IDS}
""")

# :since is 0 for ids of which nothing is known; the day of finished_at then says which partitions are read.
READ_ENDED = Statement(f"""
SELECT id, side, address, message_type, outcome, left(error, 1000) AS reason, finished_at AS ended_at, attempts,
    correlation_id
FROM {{schema}}.envelope_history
WHERE {_IDS} AND xid >= :since
    AND (CAST(:ended_after AS timestamptz) IS NULL OR finished_at >= CAST(:ended_after AS timestamptz))
""")


def _traced(condition: str, *, direction: str = "ASC", only: str = "true") -> Statement:
    """Select the steps of the messages that are chosen, in this order. No index helps: callers bound the time."""
    what = "id, causation_id, correlation_id, message_type, source, sent_at"
    return Statement(f"""
SELECT DISTINCT ON (sent_at, id, side, address, outcome) * FROM (
    SELECT {what}, 'incoming' AS side, endpoint AS address, 'waiting' AS outcome, attempts,
        CAST(NULL AS timestamptz) AS ended_at
    FROM {{schema}}.incoming_envelopes WHERE {condition}
    UNION ALL
    SELECT {what}, 'outgoing', destination, 'waiting', attempts, NULL FROM {{schema}}.outgoing_envelopes
    WHERE {condition}
    UNION ALL
    SELECT id, causation_id, correlation_id, COALESCE(message_type, ''), COALESCE(source, ''),
        COALESCE(sent_at, failed_at), side, address, 'dead-lettered', attempts, failed_at
    FROM {{schema}}.dead_letters WHERE {condition} AND resolved_at IS NULL AND id IS NOT NULL
    UNION ALL
    SELECT {what}, side, address, outcome, attempts, finished_at FROM {{schema}}.envelope_history
    WHERE {condition} AND finished_at >= :after AND finished_at < :until
) AS steps WHERE {only}
ORDER BY sent_at {direction}, id {direction}, side {direction}, address {direction}, outcome {direction}, ended_at
LIMIT :limit
""")


READ_CONVERSATION = _traced("correlation_id = CAST(:wanted AS uuid)")
READ_OF_KEY = _traced(
    "partition_key = CAST(:wanted AS text)",
    direction="DESC",
    only="""CAST(:sent_before AS timestamptz) IS NULL
    OR (sent_at, id) < (CAST(:sent_before AS timestamptz), CAST(:id_before AS uuid))""",
)
