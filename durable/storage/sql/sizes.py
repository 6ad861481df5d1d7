"""The SQL of the database's own state: sizes, dead rows, what holds vacuum up, connections, slow statements.

All of it is read from the catalog and the statistics that Postgres keeps anyway; no row of a table is counted.
"""

from __future__ import annotations

from typing import Final

from durable.storage.sql.statement import Statement

# Partitions are summed under the name of their parent.
READ_TABLES: Final = Statement("""
SELECT COALESCE(parent.relname, c.relname) AS name, count(*) AS parts,
    sum(pg_table_size(c.oid))::bigint AS table_bytes, sum(pg_indexes_size(c.oid))::bigint AS index_bytes,
    sum(COALESCE(s.n_live_tup, 0))::bigint AS live_rows, sum(COALESCE(s.n_dead_tup, 0))::bigint AS dead_rows,
    max(GREATEST(s.last_vacuum, s.last_autovacuum)) AS vacuumed_at,
    min(substring(c.relname from '_([0-9]{8})$')) AS first_day,
    max(substring(c.relname from '_([0-9]{8})$')) AS last_day
FROM pg_class c
JOIN pg_namespace n ON n.oid = c.relnamespace
LEFT JOIN pg_inherits i ON i.inhrelid = c.oid
LEFT JOIN pg_class parent ON parent.oid = i.inhparent
LEFT JOIN pg_stat_all_tables s ON s.relid = c.oid
WHERE n.nspname = :schema AND c.relkind = 'r'
GROUP BY 1 ORDER BY sum(pg_total_relation_size(c.oid)) DESC, 1
""")

# Rows that died since the oldest of these began cannot be vacuumed away.
READ_HOLDERS: Final = Statement("""
SELECT 'process' AS kind, pid::text AS name, application_name AS application, usename::text AS role, state,
    clock_timestamp() - xact_start AS age, query, backend_xmin IS NULL AND backend_xid IS NULL AS is_harmless
FROM pg_stat_activity
WHERE datname = current_database() AND pid <> pg_backend_pid() AND backend_type = 'client backend'
    AND (backend_xmin IS NOT NULL OR backend_xid IS NOT NULL)
UNION ALL
SELECT 'prepared transaction', gid, NULL, owner::text, 'prepared', clock_timestamp() - prepared, NULL, false
FROM pg_prepared_xacts WHERE database = current_database()
UNION ALL
SELECT 'replication slot', slot_name, NULL, NULL, CASE WHEN active THEN 'active' ELSE 'inactive' END, NULL, NULL, false
FROM pg_replication_slots WHERE xmin IS NOT NULL OR catalog_xmin IS NOT NULL
ORDER BY age DESC NULLS LAST LIMIT 10
""")

READ_CONNECTIONS: Final = Statement("""
SELECT COALESCE(NULLIF(application_name, ''), '(unnamed)') AS application, count(*)::int AS connections,
    count(*) FILTER (WHERE state = 'active')::int AS active,
    count(*) FILTER (WHERE state LIKE 'idle in transaction%')::int AS idle_in_transaction
FROM pg_stat_activity WHERE datname = current_database() AND backend_type = 'client backend'
GROUP BY 1 ORDER BY 2 DESC, 1 LIMIT 20
""")
READ_SERVER: Final = Statement("""
SELECT current_setting('server_version') AS version, pg_database_size(current_database()) AS database_bytes,
    current_setting('max_connections')::int AS most_connections,
    (SELECT count(*)::int FROM pg_stat_activity WHERE backend_type = 'client backend') AS connections,
    pg_has_role(current_user, 'pg_read_all_stats', 'MEMBER') AS sees_all,
    to_regclass('pg_stat_statements') IS NOT NULL AS has_statements
""")

# The mean times of ours; an extension that is made but not loaded fails to answer.
READ_STATEMENTS: Final = Statement("""
SELECT left(regexp_replace(query, '\\s+', ' ', 'g'), 300) AS query, calls, mean_exec_time / 1000 AS mean_seconds,
    total_exec_time / 1000 AS total_seconds
FROM pg_stat_statements
WHERE dbid = (SELECT oid FROM pg_database WHERE datname = current_database())
    AND strpos(query, CAST(:schema AS text)) > 0 AND strpos(query, 'pg_stat_statements') = 0
ORDER BY total_exec_time DESC LIMIT 10
""")
READ_RUNNING: Final = Statement("""
SELECT left(regexp_replace(query, '\\s+', ' ', 'g'), 300) AS query, 1::bigint AS calls,
    EXTRACT(epoch FROM clock_timestamp() - query_start)::float8 AS mean_seconds,
    EXTRACT(epoch FROM clock_timestamp() - query_start)::float8 AS total_seconds
FROM pg_stat_activity
WHERE datname = current_database() AND state = 'active' AND pid <> pg_backend_pid()
    AND strpos(query, CAST(:schema AS text)) > 0
ORDER BY query_start LIMIT 10
""")
