"""The SQL statements by which tables leave the database whole: up to where, in which parts, and what was archived.

Every row carries the transaction that wrote it (`xid`). Below the oldest transaction that still runs nothing can be
added any more: that is the horizon, and what lies below it is what may be archived. A row's number says nothing of
that kind, because a transaction which took the lower number may commit later.
"""

from __future__ import annotations

from durable.storage.statements import Statement

# ---------------------------------------------------------------- snapshots and parts of tables

# Both in one transaction: what is below this horizon is whole in this snapshot.
EXPORT_SNAPSHOT = Statement("""
SELECT pg_export_snapshot() AS name, CAST(CAST(pg_snapshot_xmin(pg_current_snapshot()) AS text) AS bigint) AS horizon
""")
READ_HORIZON = Statement("SELECT CAST(CAST(pg_snapshot_xmin(pg_current_snapshot()) AS text) AS bigint)")
# A snapshot lasts for as long as the work of many tasks; it must not be ended for idling.
HOLD_SNAPSHOT = Statement("SET LOCAL idle_in_transaction_session_timeout = 0")
JOIN_SNAPSHOT = Statement("SET TRANSACTION SNAPSHOT '{snapshot}'")

# A table without partitions is no tree to Postgres; it is its own leaf.
READ_LEAVES = Statement("""
SELECT c.relname AS leaf, pg_relation_size(c.oid) / CAST(current_setting('block_size') AS integer) AS blocks
FROM pg_class c
WHERE (c.oid = CAST(:table AS regclass) AND c.relkind = 'r')
    OR c.oid IN (SELECT relid FROM pg_partition_tree(CAST(:table AS regclass)) WHERE isleaf)
ORDER BY c.relname
""")


class ByTransaction:
    """The statements over a range of transactions of one of the tables that note them; `time` tells a row's age."""

    def __init__(self, table: str, time: str) -> None:
        self.table = table
        # By leaf: how many rows there are, and in which blocks they lie.
        self.survey = Statement(f"""
SELECT c.relname AS leaf, survey.rows, (CAST(CAST(survey.first AS text) AS point))[0] AS first_block,
    (CAST(CAST(survey.last AS text) AS point))[0] AS last_block
FROM (
    SELECT tableoid, count(*) AS rows, min(ctid) AS first, max(ctid) AS last
    FROM {{schema}}.{table} WHERE xid >= :low AND xid < :high GROUP BY tableoid
) AS survey JOIN pg_class c ON c.oid = survey.tableoid ORDER BY c.relname
""")
        # Where a batch of about this many rows ends: whole transactions, and one at least.
        self.find_end = Statement(f"""
SELECT max(xid) + 1 FROM (
    SELECT xid FROM {{schema}}.{table} WHERE xid >= :low AND xid < :high ORDER BY xid LIMIT :rows
) AS first
""")
        self.exists = Statement(f"""
SELECT EXISTS (SELECT FROM {{schema}}.{table} WHERE xid >= :low AND xid < :high)
""")
        self.lag = Statement(f"""
SELECT count(*) AS rows, clock_timestamp() - min({time}) AS age FROM {{schema}}.{table} WHERE xid >= :low
""")


HISTORY = ByTransaction("envelope_history", "finished_at")
DEAD_LETTERS = ByTransaction("dead_letters", "COALESCE(resolved_at, failed_at)")
BY_TRANSACTION = {each.table: each for each in (HISTORY, DEAD_LETTERS)}

# ---------------------------------------------------------------- what was archived, and where

LOCK_ARCHIVE = Statement("SELECT pg_try_advisory_lock(:class_id, :key)")
UNLOCK_ARCHIVE = Statement("SELECT pg_advisory_unlock(:class_id, :key)")
READ_IDENTITY = Statement("""
SELECT system_identifier, current_database() AS database FROM pg_control_system()
""")
# What was archived before tells it for good; else the nodes that are there now.
READ_SERVICES = Statement("""
SELECT DISTINCT service FROM {schema}.archives
UNION
SELECT service FROM {schema}.nodes WHERE NOT EXISTS (SELECT FROM {schema}.archives)
ORDER BY service
""")
READ_ARCHIVE = Statement("""
SELECT service, app_id, lake, lake_id, claimed_below, archived_below, archived_at FROM {schema}.archives
WHERE table_name = :table
""")
# From here on nothing of the table is dropped that is not archived.
BEGIN_ARCHIVE = Statement("""
INSERT INTO {schema}.archives (table_name, service, app_id, lake, lake_id)
VALUES (:table, :service, :app_id, :lake, :lake_id)
ON CONFLICT (table_name) DO NOTHING
""")
MOVE_ARCHIVE = Statement("""
UPDATE {schema}.archives SET service = :service, app_id = :app_id, lake = :lake, lake_id = :lake_id,
    claimed_below = 0, archived_below = 0
WHERE table_name = :table
""")
END_ARCHIVES = Statement("DELETE FROM {schema}.archives")
# Before a commit of the lake: so an offset of the lake beyond it is known to come from another life of the database.
CLAIM_ARCHIVE = Statement("""
UPDATE {schema}.archives SET claimed_below = GREATEST(claimed_below, :high) WHERE table_name = :table
""")
CONFIRM_ARCHIVE = Statement("""
UPDATE {schema}.archives SET archived_below = GREATEST(archived_below, :high), archived_at = clock_timestamp()
WHERE table_name = :table AND archived_below < :high
""")

# ---------------------------------------------------------------- what holds the horizon back

READ_OLDEST_TRANSACTION = Statement("""
SELECT pid, application_name, usename AS role, state, clock_timestamp() - xact_start AS age, query
FROM pg_stat_activity
WHERE backend_xid IS NOT NULL ORDER BY age(backend_xid) DESC LIMIT 1
""")
READ_OLDEST_PREPARED = Statement("""
SELECT gid, clock_timestamp() - prepared AS age FROM pg_prepared_xacts ORDER BY age(transaction) DESC LIMIT 1
""")

# ---------------------------------------------------------------- comparing with the lake, and letting go

# By UTC day and side: how many rows, and sums that no other set of ids has but by chance.
DIGEST_HISTORY = Statement("""
SELECT CAST(finished_at AT TIME ZONE 'UTC' AS date) AS day, side, count(*) AS rows,
    CAST(sum(CAST(CAST('x' || left(digits, 16) AS bit(64)) AS bigint)) AS text) AS high,
    CAST(sum(CAST(CAST('x' || right(digits, 16) AS bit(64)) AS bigint)) AS text) AS low,
    CAST(sum(xid) AS text) AS xids
FROM (
    SELECT finished_at, side, xid, replace(CAST(id AS text), '-', '') AS digits
    FROM {schema}.envelope_history WHERE xid < :high
        AND (CAST(:since AS timestamptz) IS NULL OR finished_at >= CAST(:since AS timestamptz))
        AND (CAST(:until AS timestamptz) IS NULL OR finished_at < CAST(:until AS timestamptz))
) AS archived GROUP BY 1, 2 ORDER BY 1, 2
""")
# How old the days are, by the database's clock.
READ_OLD_DAYS = Statement("""
SELECT to_date(right(c.relname, 8), 'YYYYMMDD') AS day
FROM pg_inherits i
JOIN pg_class c ON c.oid = i.inhrelid
WHERE i.inhparent = CAST(:table AS regclass) AND c.relname ~ '_[0-9]{8}$'
    AND to_date(right(c.relname, 8), 'YYYYMMDD') + 1 < (now() AT TIME ZONE 'UTC') - CAST(:keep AS interval)
ORDER BY 1
""")
COUNT_UNARCHIVED = Statement("""
SELECT CAST(finished_at AT TIME ZONE 'UTC' AS date) AS day, count(*) AS rows FROM {schema}.envelope_history
WHERE xid >= :low AND finished_at < CAST(:until AS timestamptz) GROUP BY 1 ORDER BY 1
""")
DROP_ARCHIVED_HISTORY = Statement("SELECT {schema}.drop_archived_history(CAST(:day AS date))")
