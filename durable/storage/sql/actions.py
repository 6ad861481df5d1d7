"""The SQL of `actions`: a row is something that an operator did."""

from __future__ import annotations

from typing import Final

from durable.storage.sql.statement import Batched, Statement

# A run over many rows adds to its row with each of its batches, in the transaction of the batch.
RECORD_ACTION: Final = Statement("""
INSERT INTO {schema}.actions (id, actor, verb, target, reason, changed, before, after)
VALUES (:id, :actor, :verb, :target, :reason, :changed, CAST(:before AS jsonb), CAST(:after AS jsonb))
ON CONFLICT (id) DO UPDATE SET changed = actions.changed + excluded.changed, ended_at = clock_timestamp()
""")
READ_ACTIONS: Final = Statement("""
SELECT number, id, began_at, ended_at, actor, verb, target, reason, changed, before, after FROM {schema}.actions
WHERE number < COALESCE(CAST(:before_number AS bigint), 9223372036854775807)
    AND (CAST(:actor AS text) IS NULL OR actor = :actor)
    AND (CAST(:verb AS text) IS NULL OR verb = :verb)
    AND (CAST(:target AS text) IS NULL OR strpos(target, :target) > 0)
    AND (CAST(:since AS timestamptz) IS NULL OR began_at >= :since)
    AND (CAST(:until AS timestamptz) IS NULL OR began_at < :until)
ORDER BY number DESC LIMIT :limit
""")
PURGE_ACTIONS: Final = Batched(
    """
    SELECT number FROM {schema}.actions WHERE began_at < now() - CAST(:keep AS interval){only}
    ORDER BY number LIMIT :batch_size {lock}""",
    """, purged AS (
    DELETE FROM {schema}.actions WHERE number IN (SELECT number FROM picked) RETURNING 1
)
SELECT count(*) FROM purged
""",
    key="number",
    only="number = ANY (CAST(:only_0 AS bigint[]))",
)
