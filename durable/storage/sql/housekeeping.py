"""The SQL statements that touch no envelope: nodes, locks, partitions, versions and rights."""

from __future__ import annotations

from typing import Final

from durable.storage.sql.absent import DROPPED, noting
from durable.storage.sql.statement import Batched, Statement, by_key

# ---------------------------------------------------------------- nodes, locks

REGISTER_NODE = Statement("""
INSERT INTO {schema}.nodes (service, description, version, capabilities)
VALUES (:service, :description, :version, CAST(:capabilities AS jsonb)) RETURNING node_id
""")
HEARTBEAT = Statement(
    "UPDATE {schema}.nodes SET heartbeat_at = clock_timestamp() WHERE node_id = :node RETURNING node_id"
)
REMOVE_NODE = Statement("""
WITH withdrawn AS (DELETE FROM {schema}.offers WHERE node_id = :node)
DELETE FROM {schema}.nodes WHERE node_id = :node
""")
LOCK_NODE = Statement("SELECT pg_try_advisory_lock(:class_id, :node)")
HOLDS_NODE_LOCK = Statement("""
SELECT EXISTS (SELECT FROM pg_locks WHERE locktype = 'advisory' AND granted AND pid = pg_backend_pid()
    AND CAST(CAST(classid AS bigint) AS bit(32)) = CAST(CAST(:class_id AS bigint) AS bit(32))
    AND CAST(objid AS bigint) = :node AND objsubid = 2)
""")
READ_NODES = Statement("""
SELECT node_id, service, description, version, started_at, heartbeat_at,
    clock_timestamp() - heartbeat_at AS heartbeat_age, CAST(capabilities AS text) AS capabilities
FROM {schema}.nodes ORDER BY node_id
""")
# pg_locks shows a key of two ints as unsigned halves (objsubid 2).
READ_LOCKED_NODES = Statement("""
SELECT CAST(objid AS bigint) AS node_id FROM pg_locks
WHERE locktype = 'advisory' AND granted AND objsubid = 2
    AND CAST(CAST(classid AS bigint) AS bit(32)) = CAST(CAST(:class_id AS bigint) AS bit(32))
    AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
""")
# No clock that is set changes the start; a restart does, and so does a failover.
READ_SERVER_TIMES = Statement("SELECT pg_postmaster_start_time() AS started_at, clock_timestamp() AS now")

TRY_JOB_LOCK = Statement("SELECT pg_try_advisory_xact_lock(:class_id, :key)")
LOCK_JOB = Statement("SELECT pg_advisory_xact_lock(:class_id, :key)")

# ---------------------------------------------------------------- maintenance, status, versions

MAKE_PARTITION = Statement("SELECT {schema}.make_partition(CAST(:parent AS text), CAST(:day AS date))")
DROP_PARTITION = Statement(
    "SELECT {schema}.drop_partition(CAST(:parent AS text), CAST(:day AS date), CAST(:keep AS interval))"
)
READ_TODAY = Statement("SELECT CAST(now() AT TIME ZONE 'UTC' AS date)")
_FORGET: Final = """, old AS (
    SELECT picked.*, EXISTS (
        SELECT FROM {schema}.incoming_envelopes AS row WHERE row.id = picked.id AND row.endpoint = picked.endpoint
    ) AS is_needed FROM picked
), kept AS (
    UPDATE {schema}.%s AS known SET received_at = now()
    FROM old WHERE old.is_needed AND known.id = old.id AND known.endpoint = old.endpoint
), purged AS (
    DELETE FROM {schema}.%s AS known USING old
    WHERE NOT old.is_needed AND known.id = old.id AND known.endpoint = old.endpoint
)
SELECT count(*) FROM old
"""


def _forget_old_ids(table: str) -> Batched:
    """Delete ids that are older than :keep, along the index of their ages. The id of a waiting row is kept for as long
    again, so that no second message is stored under it.
    """
    return Batched(
        f"""
    SELECT id, endpoint FROM {{schema}}.{table} WHERE received_at < now() - CAST(:keep AS interval){{only}}
    ORDER BY received_at LIMIT :batch_size {{lock}}""",
        _FORGET % (table, table),
        key="id, endpoint",
        only=by_key("endpoint"),
    )


PURGE_UNDATED_IDS = _forget_old_ids("undated_ids")
# Ids of days for which no partition was made.
PURGE_DEFAULT_IDS = _forget_old_ids("received_ids_default")
# What is archived only `pipeline purge` drops, which compares it with the lake before.
PURGE_DEFAULT_HISTORY = Batched(
    """
    SELECT ctid AS place, CAST(ctid AS text) AS shown FROM {schema}.envelope_history_default
    WHERE finished_at < now() - CAST(:keep AS interval)
        AND {schema}.archived_below('envelope_history') IS NULL{only}
    LIMIT :batch_size {lock}""",
    f""", purged AS (
    DELETE FROM {{schema}}.envelope_history_default WHERE ctid = ANY (ARRAY(SELECT place FROM picked))
    RETURNING {DROPPED["envelope_history"]}
), noted AS ("""
    + noting("envelope_history", "purged")
    + """
)
SELECT count(*) FROM purged
""",
    key="shown",
    only="ctid = ANY (CAST(CAST(:only_0 AS text[]) AS tid[]))",
)
VERSION_TABLE_EXISTS = Statement("""
SELECT EXISTS (SELECT FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
    WHERE n.nspname = :schema AND c.relname = 'alembic_version')
""")
READ_VERSION = Statement("SELECT version_num FROM {schema}.alembic_version")
COUNT_DEAD_LETTERS = Statement("""
SELECT exception_type, COALESCE(message_type, '(unreadable)') AS message_type, count(*) AS count,
    min(failed_at) AS first, max(failed_at) AS last
FROM {schema}.dead_letters WHERE resolved_at IS NULL GROUP BY 1, 2 ORDER BY 3 DESC
""")
READ_SERVER = Statement("""
SELECT current_setting('server_version') AS version, CAST(current_setting('server_version_num') AS integer) AS number,
    current_database() AS database, current_user AS role, pg_backend_pid() AS pid
""")
READ_ENCRYPTION = Statement("""
SELECT COALESCE((SELECT ssl FROM pg_stat_ssl WHERE pid = pg_backend_pid()), false)
""")
READ_CLOCK = Statement("SELECT clock_timestamp()")
COUNT_PREPARED = Statement("SELECT count(*) FROM pg_prepared_statements WHERE name <> ''")
# Postgres has it from 17 on. The value of the role: a session of durable may have another.
READ_TRANSACTION_LIMIT = Statement("""
SELECT COALESCE((SELECT CAST(setting AS bigint) FROM pg_settings WHERE name = 'transaction_timeout'), 0)
""")
# Of this transaction, but for those that the URL sets.
LIFT_LIMITS = Statement("""
SELECT set_config(name, '0', true) FROM pg_settings WHERE name = ANY (CAST(:names AS text[])) AND source <> 'client'
""")
READ_SERVER_SETTING = Statement("SELECT current_setting(:name)")
# How many days from today each daily partition is; the parents are partitioned by UTC days.
READ_PARTITION_DAYS = Statement("""
SELECT p.relname AS parent,
    to_date(right(c.relname, 8), 'YYYYMMDD') AS day,
    to_date(right(c.relname, 8), 'YYYYMMDD') - CAST(now() AT TIME ZONE 'UTC' AS date) AS days_from_today
FROM pg_inherits i
JOIN pg_class c ON c.oid = i.inhrelid
JOIN pg_class p ON p.oid = i.inhparent
JOIN pg_namespace n ON n.oid = p.relnamespace
WHERE n.nspname = :schema AND p.relname IN ('received_ids', 'envelope_history') AND c.relname ~ '_[0-9]{8}$'
""")
# reserved_connections came with Postgres 16; a limit of -1 is none.
READ_CONNECTION_LIMITS = Statement("""
SELECT CAST(current_setting('max_connections') AS integer)
        - CAST(current_setting('superuser_reserved_connections') AS integer)
        - CAST(COALESCE(current_setting('reserved_connections', true), '0') AS integer) AS server,
    NULLIF((SELECT rolconnlimit FROM pg_roles WHERE rolname = current_user), -1) AS role,
    NULLIF((SELECT datconnlimit FROM pg_database WHERE datname = current_database()), -1) AS database
""")
# From the catalogs alone: it must also answer a role that may not look into the schema. Days are made and dropped by
# the functions, and reached through their parents; only the default partitions are named in statements.
READ_MISSING_RIGHTS = Statement("""
SELECT 'USAGE on the schema' AS missing FROM pg_namespace n
WHERE n.nspname = :schema AND NOT has_schema_privilege(n.oid, 'USAGE')
UNION ALL
SELECT privilege || ' on ' || c.relname
FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
CROSS JOIN unnest(ARRAY['SELECT', 'INSERT', 'UPDATE', 'DELETE']) AS privilege
WHERE n.nspname = :schema AND c.relkind IN ('r', 'p') AND (NOT c.relispartition OR right(c.relname, 8) = '_default')
    AND NOT starts_with(c.relname, 'staged_')
    AND (c.relname <> 'alembic_version' OR privilege = 'SELECT') AND NOT has_table_privilege(c.oid, privilege)
UNION ALL
SELECT 'USAGE on ' || c.relname FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE n.nspname = :schema AND c.relname = 'node_ids' AND NOT has_sequence_privilege(c.oid, 'USAGE')
UNION ALL
SELECT 'EXECUTE on ' || p.proname FROM pg_proc p JOIN pg_namespace n ON n.oid = p.pronamespace
WHERE n.nspname = :schema AND p.proname IN ('make_partition', 'drop_partition', 'drop_archived_history',
        'begin_generation', 'make_staging', 'drop_staging')
    AND NOT has_function_privilege(p.oid, 'EXECUTE')
""")
READ_WIDE_RIGHTS = Statement("""
SELECT 'this role is a superuser' AS wide FROM pg_roles WHERE rolname = current_user AND rolsuper
UNION ALL
SELECT 'this role owns the schema' FROM pg_namespace n
WHERE n.nspname = :schema AND pg_get_userbyid(n.nspowner) = current_user
    AND NOT (SELECT rolsuper FROM pg_roles WHERE rolname = current_user)
UNION ALL
SELECT 'this role may CREATE in the schema' FROM pg_namespace n
WHERE n.nspname = :schema AND pg_get_userbyid(n.nspowner) <> current_user AND has_schema_privilege(n.oid, 'CREATE')
    AND NOT (SELECT rolsuper FROM pg_roles WHERE rolname = current_user)
UNION ALL
SELECT 'this role may ' || privilege || ' alembic_version'
FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
CROSS JOIN unnest(ARRAY['INSERT', 'UPDATE', 'DELETE']) AS privilege
WHERE n.nspname = :schema AND c.relname = 'alembic_version' AND pg_get_userbyid(n.nspowner) <> current_user
    AND has_table_privilege(c.oid, privilege) AND NOT (SELECT rolsuper FROM pg_roles WHERE rolname = current_user)
UNION ALL
SELECT 'PUBLIC has ' || granted.privilege_type || ' on the schema'
FROM pg_namespace n CROSS JOIN aclexplode(n.nspacl) AS granted WHERE n.nspname = :schema AND granted.grantee = 0
UNION ALL
SELECT DISTINCT 'PUBLIC has ' || granted.privilege_type || ' on ' || c.relname
FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace CROSS JOIN aclexplode(c.relacl) AS granted
WHERE n.nspname = :schema AND granted.grantee = 0
""")
# What a node needs, and no right to create, alter or drop anything. `{role}` is quoted by the caller.
GRANT_RUNTIME_RIGHTS = Statement("""
GRANT USAGE ON SCHEMA {schema} TO {role};
GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA {schema} TO {role};
GRANT USAGE ON ALL SEQUENCES IN SCHEMA {schema} TO {role};
GRANT EXECUTE ON FUNCTION {schema}.make_partition(text, date) TO {role};
GRANT EXECUTE ON FUNCTION {schema}.drop_partition(text, date, interval) TO {role};
GRANT EXECUTE ON FUNCTION {schema}.make_staging(text, text) TO {role};
GRANT EXECUTE ON FUNCTION {schema}.drop_staging(text, interval) TO {role};
GRANT EXECUTE ON FUNCTION {schema}.drop_archived_history(date) TO {role};
GRANT EXECUTE ON FUNCTION {schema}.begin_generation() TO {role};
REVOKE INSERT, UPDATE, DELETE ON {schema}.alembic_version FROM {role};
""")
READ_CONNECTING = Statement("""
SELECT quote_ident(current_database()) AS database, has_database_privilege(:role, current_database(), 'CONNECT') AS may,
    has_database_privilege(current_database(), 'CONNECT WITH GRANT OPTION') AS grantable
""")
