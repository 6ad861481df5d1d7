"""The SQL of the flow: how many messages came to an end lately, and how long they took.

History is written in the order of its time, so the newest rows are in the last pages of the newest days. Only so many
pages are read, by their places: no index is needed, and the cost is the same at any size of the history.
"""

from __future__ import annotations

from typing import Final

from durable.storage.sql.statement import Statement

# The pages of the two newest days with rows in them, which are partitions; the default partition has what no day takes.
READ_NEWEST_DAYS: Final = Statement("""
SELECT child.relname AS name, pg_relation_size(child.oid) / current_setting('block_size')::bigint AS pages
FROM pg_inherits JOIN pg_class child ON child.oid = inhrelid
WHERE inhparent = to_regclass(CAST(:parent AS text)) AND child.relname ~ '_[0-9]{8}$'
    AND pg_relation_size(child.oid) > 0
ORDER BY child.relname DESC LIMIT 2
""")

_NEWEST: Final = """
newest AS MATERIALIZED (
    SELECT side, outcome, message_type, finished_at, EXTRACT(epoch FROM finished_at - sent_at)::float8 AS seconds
    FROM {schema}.{day} WHERE ctid >= CAST(CAST(:first AS text) AS tid)
    UNION ALL
    SELECT side, outcome, message_type, finished_at, EXTRACT(epoch FROM finished_at - sent_at)::float8 AS seconds
    FROM {schema}.{day_before} WHERE ctid >= CAST(CAST(:first_before AS text) AS tid)
), bounds AS (
    SELECT clock_timestamp() AS now,
        GREATEST(clock_timestamp() - CAST(:longest AS interval),
            LEAST(min(finished_at), clock_timestamp() - interval '1 min')) AS since
    FROM newest
), cut AS (
    SELECT newest.*, width_bucket(EXTRACT(epoch FROM finished_at)::float8, EXTRACT(epoch FROM since)::float8,
        EXTRACT(epoch FROM now)::float8 + 0.001, CAST(:slices AS integer)) AS slice
    FROM newest, bounds WHERE finished_at >= since
)"""

# One row of bounds, then the slices of time, then the message types: of what was handled, how long it took.
READ_FLOW: Final = (
    "WITH"
    + _NEWEST
    + """
SELECT 'bounds' AS what, NULL AS name, 0 AS slice, now, since, 0::bigint AS incoming, 0 AS outgoing, 0 AS failed,
    NULL::float8 AS p50, NULL::float8 AS p99
FROM bounds
UNION ALL
SELECT 'slice', NULL, slice, NULL, NULL,
    count(*) FILTER (WHERE side = 'incoming' AND outcome = 'handled'),
    count(*) FILTER (WHERE side = 'outgoing' AND outcome = 'sent'),
    count(*) FILTER (WHERE outcome = 'dead-lettered'),
    percentile_disc(0.5) WITHIN GROUP (ORDER BY seconds) FILTER (WHERE side = 'incoming' AND outcome = 'handled'),
    percentile_disc(0.99) WITHIN GROUP (ORDER BY seconds) FILTER (WHERE side = 'incoming' AND outcome = 'handled')
FROM cut GROUP BY slice
UNION ALL
SELECT 'type', message_type, 0, NULL, NULL,
    count(*) FILTER (WHERE outcome = 'handled'), 0, count(*) FILTER (WHERE outcome = 'dead-lettered'),
    percentile_disc(0.5) WITHIN GROUP (ORDER BY seconds) FILTER (WHERE outcome = 'handled'),
    percentile_disc(0.99) WITHIN GROUP (ORDER BY seconds) FILTER (WHERE outcome = 'handled')
FROM cut WHERE side = 'incoming' GROUP BY message_type
"""
)
