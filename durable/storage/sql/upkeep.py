"""The SQL statements about the database as a whole: sizes, dead rows, what holds vacuum up, connections, statements.

They read catalogs and the server's statistics, never the rows of a table. Any role may run them. Of the sessions of
other roles it sees pid, role, application and the transaction numbers, unless it has the rights of pg_read_all_stats.
"""

from __future__ import annotations

from typing import Final

from durable.storage.sql.statement import Statement

# A size takes a lock of its table for a moment: neither that nor the rest may hold a page up.
LIMIT_TIMES = Statement("""
SELECT set_config('statement_timeout', CAST(:statement AS text), true),
    set_config('lock_timeout', CAST(:lock AS text), true)
""")
READ_SIGHT = Statement("""
SELECT clock_timestamp() AS now, current_database() AS database, quote_ident(current_user) AS role,
    current_setting('server_version') AS version, pg_has_role(current_user, 'pg_read_all_stats', 'USAGE') AS sees_all
""")
READ_SIZE = Statement("SELECT pg_database_size(current_database())")

# ---------------------------------------------------------------- tables

# Partitions count for their parent, staging tables together. An estimate of 0 rows may be one that was never made.
_LIVE: Final = """CASE WHEN s.n_live_tup + s.n_dead_tup > 0 THEN s.n_live_tup
        ELSE GREATEST(CAST(c.reltuples AS bigint), 0) END"""
READ_TABLES = Statement(f"""
SELECT COALESCE(whole.relname, CASE WHEN starts_with(c.relname, 'staged_') THEN 'staged_*' ELSE c.relname END) AS name,
    count(*) AS parts,
    CAST(sum({_LIVE}) AS bigint) AS rows,
    CAST(sum(COALESCE(s.n_dead_tup, 0)) AS bigint) AS dead,
    CAST(sum(COALESCE(pg_table_size(c.oid), 0)) AS bigint) AS table_bytes,
    CAST(sum(COALESCE(pg_indexes_size(c.oid), 0)) AS bigint) AS index_bytes,
    max(GREATEST(s.last_vacuum, s.last_autovacuum)) AS vacuumed_at
FROM pg_class c
JOIN pg_namespace n ON n.oid = c.relnamespace
LEFT JOIN pg_inherits i ON i.inhrelid = c.oid
LEFT JOIN pg_class whole ON whole.oid = i.inhparent
LEFT JOIN pg_stat_user_tables s ON s.relid = c.oid
WHERE n.nspname = :schema AND c.relkind = 'r'
GROUP BY 1 ORDER BY sum(COALESCE(pg_total_relation_size(c.oid), 0)) DESC, 1 LIMIT :limit
""")
READ_INDEXES = Statement("""
SELECT COALESCE(whole.relname, c.relname) AS name, COALESCE(parent.relname, t.relname) AS table_name,
    CAST(sum(COALESCE(pg_relation_size(c.oid), 0)) AS bigint) AS size_bytes,
    CAST(sum(COALESCE(s.idx_scan, 0)) AS bigint) AS scans
FROM pg_index x
JOIN pg_class c ON c.oid = x.indexrelid
JOIN pg_class t ON t.oid = x.indrelid
JOIN pg_namespace n ON n.oid = t.relnamespace
LEFT JOIN pg_inherits i ON i.inhrelid = c.oid
LEFT JOIN pg_class whole ON whole.oid = i.inhparent
LEFT JOIN pg_inherits p ON p.inhrelid = t.oid
LEFT JOIN pg_class parent ON parent.oid = p.inhparent
LEFT JOIN pg_stat_user_indexes s ON s.indexrelid = c.oid
WHERE n.nspname = :schema AND t.relkind = 'r'
GROUP BY 1, 2 ORDER BY 3 DESC, 1 LIMIT :limit
""")
READ_DAYS = Statement("""
SELECT p.relname AS name, count(days.day) AS days, min(days.day) AS oldest, max(days.day) AS newest,
    CAST(COALESCE(sum(pg_total_relation_size(c.oid)) FILTER (WHERE days.day IS NOT NULL), 0) AS bigint) AS size_bytes,
    CAST(COALESCE(sum(pg_total_relation_size(c.oid)) FILTER (WHERE days.day IS NULL), 0) AS bigint) AS other_bytes,
    CAST(now() AT TIME ZONE 'UTC' AS date) AS today
FROM pg_inherits i
JOIN pg_class c ON c.oid = i.inhrelid
JOIN pg_class p ON p.oid = i.inhparent
JOIN pg_namespace n ON n.oid = p.relnamespace
CROSS JOIN LATERAL (
    SELECT CASE WHEN c.relname ~ '_[0-9]{8}$' THEN to_date(right(c.relname, 8), 'YYYYMMDD') END AS day
) AS days
WHERE n.nspname = :schema AND p.relname IN ('received_ids', 'envelope_history')
GROUP BY p.relname ORDER BY p.relname
""")

# ---------------------------------------------------------------- what holds vacuum up

# Vacuum keeps each row that the oldest of these may still see. Those of other databases do not count, but for slots and
# standbys, which belong to none. A vacuum holds no other one up.
READ_HOLDERS = Statement("""
SELECT 'session' AS kind, CAST(NULL AS text) AS name, a.pid, CAST(a.usename AS text) AS role, a.application_name,
    a.state, clock_timestamp() - a.xact_start AS age, GREATEST(age(a.backend_xid), age(a.backend_xmin)) AS transactions,
    a.datid IS NULL AS is_standby
FROM pg_stat_activity a
WHERE (a.backend_xid IS NOT NULL OR a.backend_xmin IS NOT NULL) AND a.pid <> pg_backend_pid()
    AND (a.datid IS NULL OR a.datname = current_database())
    AND COALESCE(a.backend_type, '') <> 'autovacuum worker'
UNION ALL
SELECT 'prepared', p.gid, NULL, CAST(p.owner AS text), NULL, 'prepared', clock_timestamp() - p.prepared,
    age(p.transaction), false
FROM pg_prepared_xacts p WHERE p.database = current_database()
UNION ALL
SELECT 'slot', CAST(r.slot_name AS text), r.active_pid, NULL, COALESCE(CAST(r.plugin AS text), r.slot_type),
    CASE WHEN r.active THEN 'active' ELSE 'inactive' END, NULL, GREATEST(age(r.xmin), age(r.catalog_xmin)), false
FROM pg_replication_slots r WHERE r.xmin IS NOT NULL OR r.catalog_xmin IS NOT NULL
ORDER BY transactions DESC, age DESC NULLS LAST LIMIT :limit
""")

# ---------------------------------------------------------------- connections

# Of a session of another role the kind is hidden; a session with a role and a database is a client's.
READ_CONNECTIONS = Statement("""
SELECT a.application_name, CAST(a.usename AS text) AS role, count(*) AS connections,
    count(*) FILTER (WHERE a.datname = current_database()) AS here,
    count(*) FILTER (WHERE a.state = 'active') AS active,
    count(*) FILTER (WHERE starts_with(a.state, 'idle in transaction')) AS idle_in_transaction,
    count(*) FILTER (WHERE a.state IS NULL) AS hidden,
    CAST(sum(count(*)) OVER () AS bigint) AS in_use,
    CAST(current_setting('max_connections') AS integer) AS most
FROM pg_stat_activity a
WHERE a.usesysid IS NOT NULL AND a.datid IS NOT NULL AND COALESCE(a.backend_type, 'client backend') = 'client backend'
GROUP BY 1, 2 ORDER BY 3 DESC, 1, 2 LIMIT :limit
""")

# ---------------------------------------------------------------- statements

FIND_STATEMENTS = Statement("""
SELECT quote_ident(n.nspname) AS place,
    has_schema_privilege(n.oid, 'USAGE') AND has_table_privilege(c.oid, 'SELECT') AS is_readable
FROM pg_extension e
JOIN pg_namespace n ON n.oid = e.extnamespace
JOIN pg_class c ON c.relnamespace = n.oid AND c.relname = 'pg_stat_statements'
WHERE e.extname = 'pg_stat_statements'
""")
# Ours name the schema of their tables. `{place}` is the schema of the extension, quoted.
READ_SLOWEST = Statement("""
SELECT left(min(s.query), 2000) AS query, CAST(sum(s.calls) AS bigint) AS calls,
    make_interval(secs => sum(s.total_exec_time) / 1000) AS total,
    make_interval(secs => sum(s.total_exec_time) / sum(s.calls) / 1000) AS mean,
    make_interval(secs => max(s.max_exec_time) / 1000) AS longest
FROM {place}.pg_stat_statements AS s
WHERE s.dbid = (SELECT oid FROM pg_database WHERE datname = current_database()) AND s.calls > 0
    AND position(CAST(:mark AS text) IN s.query) > 0
GROUP BY s.queryid ORDER BY 3 DESC LIMIT :limit
""")
READ_RUNNING = Statement("""
SELECT a.pid, CAST(a.usename AS text) AS role, a.application_name, clock_timestamp() - a.query_start AS age,
    a.wait_event_type AS waits_for, left(a.query, 2000) AS query
FROM pg_stat_activity a
WHERE a.datname = current_database() AND a.state = 'active' AND a.pid <> pg_backend_pid()
    AND a.backend_type = 'client backend'
ORDER BY a.query_start LIMIT :limit
""")
