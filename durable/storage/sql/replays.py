"""SQL statements about the replays that were begun, and what each of them chose."""

from __future__ import annotations

from durable.storage.sql.statement import Statement

FIND_REPLAY = Statement("SELECT plan FROM {schema}.replays WHERE name = :name")
# Who begins the same replay at the same time waits here for the first, and reads its plan.
BEGIN_REPLAY = Statement("""
INSERT INTO {schema}.replays (name, plan) VALUES (:name, CAST(:plan AS jsonb)) ON CONFLICT (name) DO NOTHING
""")
READ_REPLAYS = Statement("SELECT name, begun_at FROM {schema}.replays ORDER BY begun_at DESC, name LIMIT :limit")
PURGE_REPLAYS = Statement("DELETE FROM {schema}.replays WHERE begun_at < now() - CAST(:keep AS interval)")
