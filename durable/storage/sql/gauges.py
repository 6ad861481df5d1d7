"""The SQL statements that are run at every look of a monitor, however much waits.

Each walks partial indexes, and no further than :limit entries a group: a backlog of a million rows is counted as fast
as one of :limit. Groups are found by a loose scan, one step each, and only the first :groups of them.
"""

from __future__ import annotations

from durable.storage.sql.columns import FREE, OWNED, QUEUED
from durable.storage.sql.recovery import REFUSED_OWNER
from durable.storage.sql.statement import Statement
from durable.storage.sql.work import INBOX, OUTBOX, WorkTable


def _unowned(table: WorkTable, which: str) -> Statement:
    """Count, for each group, the unowned rows, and find when the first of them was sent."""
    return Statement(f"""
WITH RECURSIVE {table.distinct(table.lane, which)}, named AS (
    SELECT name FROM found WHERE name IS NOT NULL LIMIT :groups
)
SELECT name,
    (SELECT count(*) FROM (
        SELECT FROM {table.rows} WHERE {which} AND {table.lane} = name
        ORDER BY seq LIMIT :limit) AS counted) AS count,
    clock_timestamp() - (SELECT sent_at FROM {table.rows} WHERE {which} AND {table.lane} = name
        ORDER BY seq LIMIT 1) AS oldest_age
FROM named
""")


def _owned(table: WorkTable) -> Statement:
    return Statement(f"""
WITH RECURSIVE {table.distinct("owner_id", OWNED)}
SELECT name AS owner_id,
    (SELECT count(*) FROM (
        SELECT FROM {table.rows} AS row WHERE row.{OWNED} AND row.owner_id = found.name
        LIMIT :limit) AS counted) AS count
FROM found WHERE name IS NOT NULL LIMIT :groups
""")


def _refused(table: WorkTable) -> str:
    return f"""(SELECT count(*) FROM (
        SELECT FROM {table.rows} WHERE owner_id = {REFUSED_OWNER} LIMIT :limit) AS counted)"""


READ_UNOWNED_OUTGOING = [_unowned(OUTBOX, which) for which in (FREE, QUEUED)]
READ_UNOWNED_INCOMING = [_unowned(INBOX, which) for which in (FREE, QUEUED)]
READ_OWNED_OUTGOING = _owned(OUTBOX)
READ_OWNED_INCOMING = _owned(INBOX)
COUNT_REFUSED = Statement(f"SELECT {_refused(OUTBOX)} AS outgoing, {_refused(INBOX)} AS incoming")

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
