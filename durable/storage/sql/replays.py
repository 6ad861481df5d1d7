"""SQL statements about the replays that were begun, and what each of them chose."""

from __future__ import annotations

from durable.storage.sql.statement import Statement

LOCK_SHARED = Statement("SELECT pg_try_advisory_lock_shared(:class_id, :key)")
UNLOCK_SHARED = Statement("SELECT pg_advisory_unlock_shared(:class_id, :key)")
LOCK_ALONE = Statement("SELECT pg_try_advisory_lock(:class_id, :key)")
UNLOCK_ALONE = Statement("SELECT pg_advisory_unlock(:class_id, :key)")
# pg_locks shows a key of two ints as unsigned halves (objsubid 2).
HAS_LOCK = Statement("""
SELECT EXISTS (SELECT FROM pg_locks WHERE locktype = 'advisory' AND granted AND objsubid = 2
    AND pid = pg_backend_pid() AND CAST(objid AS bigint) = :key
    AND CAST(CAST(classid AS bigint) AS bit(32)) = CAST(CAST(:class_id AS bigint) AS bit(32)))
""")
FIND_REPLAY = Statement("SELECT plan FROM {schema}.replays WHERE name = :name")
# Who begins the same replay at the same time waits here for the first, and reads its plan.
BEGIN_REPLAY = Statement("""
INSERT INTO {schema}.replays (name, plan) VALUES (:name, CAST(:plan AS jsonb)) ON CONFLICT (name) DO NOTHING
""")
READ_REPLAYS = Statement("SELECT name, begun_at FROM {schema}.replays ORDER BY begun_at DESC, name LIMIT :limit")
READ_READDRESSED = Statement("""
SELECT plan ->> 'destination' AS destination, begun_at FROM {schema}.replays
WHERE plan ->> 'same-ids' = 'true' AND plan ->> 'destination' IS NOT NULL ORDER BY begun_at, name
""")
PURGE_REPLAYS = Statement("DELETE FROM {schema}.replays WHERE begun_at < now() - CAST(:keep AS interval)")
