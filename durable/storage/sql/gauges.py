"""The SQL statements that are run at every look of a monitor, however much waits.

Each walks partial indexes, and no further than :limit entries a group: a backlog of a million rows is counted as fast
as one of :limit. Groups are found by a loose scan, one step each, and only the first :groups of them.
"""

from __future__ import annotations

from durable.storage.sql.columns import FREE_INCOMING, FREE_OUTGOING, QUEUED_INCOMING, QUEUED_OUTGOING
from durable.storage.sql.statement import Statement


def _unowned(table: str, group: str, which: str) -> Statement:
    """Count, for each group, the unowned rows, and find when the first of them was sent."""
    return Statement(f"""
WITH RECURSIVE found AS (
    (SELECT {group} AS name FROM {{schema}}.{table} WHERE {which} ORDER BY {group} LIMIT 1)
    UNION ALL
    SELECT (SELECT {group} FROM {{schema}}.{table} WHERE {which} AND {group} > found.name ORDER BY {group} LIMIT 1)
    FROM found WHERE found.name IS NOT NULL
), named AS (
    SELECT name FROM found WHERE name IS NOT NULL LIMIT :groups
)
SELECT name,
    (SELECT count(*) FROM (
        SELECT FROM {{schema}}.{table} WHERE {which} AND {group} = name
        ORDER BY seq LIMIT :limit) AS counted) AS count,
    clock_timestamp() - (SELECT sent_at FROM {{schema}}.{table} WHERE {which} AND {group} = name
        ORDER BY seq LIMIT 1) AS oldest_age
FROM named
""")


def _owned(table: str) -> Statement:
    return Statement(f"""
WITH RECURSIVE found AS (
    (SELECT owner_id FROM {{schema}}.{table} WHERE owner_id <> 0 ORDER BY owner_id LIMIT 1)
    UNION ALL
    SELECT (SELECT owner_id FROM {{schema}}.{table} WHERE owner_id <> 0 AND owner_id > found.owner_id
            ORDER BY owner_id LIMIT 1)
    FROM found WHERE found.owner_id IS NOT NULL
)
SELECT owner_id,
    (SELECT count(*) FROM (
        SELECT FROM {{schema}}.{table} AS row WHERE row.owner_id <> 0 AND row.owner_id = found.owner_id
        LIMIT :limit) AS counted) AS count
FROM found WHERE owner_id IS NOT NULL LIMIT :groups
""")


READ_UNOWNED_OUTGOING = [
    _unowned("outgoing_envelopes", "destination", which) for which in (FREE_OUTGOING, QUEUED_OUTGOING)
]
READ_UNOWNED_INCOMING = [
    _unowned("incoming_envelopes", "message_type", which) for which in (FREE_INCOMING, QUEUED_INCOMING)
]
READ_OWNED_OUTGOING = _owned("outgoing_envelopes")
READ_OWNED_INCOMING = _owned("incoming_envelopes")

# What is put off, and by how much the first of it is overdue: a running node makes it claimable within poll_interval.
READ_SCHEDULED = Statement("""
SELECT clock_timestamp() AS now,
    (SELECT count(*) FROM (
        SELECT FROM {schema}.outgoing_envelopes WHERE execution_time IS NOT NULL
        ORDER BY execution_time LIMIT :limit) AS counted) AS outgoing,
    (SELECT count(*) FROM (
        SELECT FROM {schema}.incoming_envelopes WHERE execution_time IS NOT NULL
        ORDER BY execution_time LIMIT :limit) AS counted) AS incoming,
    clock_timestamp() - LEAST(
        (SELECT execution_time FROM {schema}.outgoing_envelopes WHERE execution_time < now()
            ORDER BY execution_time LIMIT 1),
        (SELECT execution_time FROM {schema}.incoming_envelopes WHERE execution_time < now()
            ORDER BY execution_time LIMIT 1)) AS overdue
""")

COUNT_UNRESOLVED = Statement("""
SELECT count(*) FROM (SELECT FROM {schema}.dead_letters WHERE resolved_at IS NULL LIMIT :limit) AS counted
""")

# From the statistics that Postgres keeps of every table anyway.
READ_ESTIMATES = Statement("""
SELECT relname AS name, n_live_tup AS rows, pg_total_relation_size(relid) AS size_bytes FROM pg_stat_user_tables
WHERE schemaname = :schema AND relname IN ('outgoing_envelopes', 'incoming_envelopes', 'dead_letters')
""")
