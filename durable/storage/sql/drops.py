"""Rows that the database has dropped: the times of those that were archived before, and of those that were not.

Times that were not archived are gaps of every lake. Those that were archived are gaps of a lake that was used before,
and is used again: what was dropped in the meantime is in another one.
"""

from __future__ import annotations

from typing import Final

from durable.storage.rows import QUARANTINED, REFUSED
from durable.storage.sql.statement import Statement
from durable.storage.sql.times import in_range

# An audit needs a letter only where its message has no row of history.
_IS_NEEDED: Final = {
    "envelope_history": "true",
    "dead_letters": (f"side = 'incoming' AND id IS NOT NULL AND exception_type IN ('{QUARANTINED}', '{REFUSED}')"),
}
DROPPED: Final = {
    "envelope_history": "finished_at, xid",
    "dead_letters": "side, id, exception_type, failed_at, xid",
}
"""The columns of rows that are dropped by which the drop is noted."""
_TIMES: Final = {"envelope_history": "finished_at", "dead_letters": "failed_at"}
_WIDEN: Final = """ON CONFLICT (table_name, day, was_archived) DO UPDATE SET
        first_at = LEAST(known.first_at, excluded.first_at), last_at = GREATEST(known.last_at, excluded.last_at)"""


def noting(table: str, rows: str) -> str:
    """Write a statement that notes the days and times of dropped rows, once the table has been archived."""
    moment = in_range(_TIMES[table])
    of_needed = f"FILTER (WHERE {_IS_NEEDED[table]})"
    return f"""
    INSERT INTO {{schema}}.archive_drops AS known (table_name, day, was_archived, first_at, last_at, row_count)
    SELECT '{table}', CAST({moment} AT TIME ZONE 'UTC' AS date), xid < begins, min({moment}) {of_needed},
        max({moment}) {of_needed}, count(*)
    FROM {rows}, (SELECT {{schema}}.gap_begins('{table}') AS begins) AS archive
    WHERE begins IS NOT NULL GROUP BY 2, 3
    {_WIDEN}, row_count = known.row_count + excluded.row_count"""


READ_GAPS = Statement("""
SELECT first_at, last_at FROM {schema}.archive_drops
WHERE table_name = :table AND NOT was_archived AND first_at IS NOT NULL ORDER BY day
""")
NOTE_GAPS = Statement(f"""
INSERT INTO {{schema}}.archive_drops AS known (table_name, day, was_archived, first_at, last_at, row_count)
SELECT :table, day, false, first_at, last_at, 0
FROM unnest(CAST(:days AS date[]), CAST(:firsts AS timestamptz[]), CAST(:lasts AS timestamptz[]))
    AS gone (day, first_at, last_at)
{_WIDEN}
""")
# What was archived into other lakes since, and dropped, is missing in the one that is used again.
NOTE_DROPS_AS_GAPS = Statement(f"""
INSERT INTO {{schema}}.archive_drops AS known (table_name, day, was_archived, first_at, last_at, row_count)
SELECT table_name, day, false, GREATEST(first_at, CAST(:since AS timestamptz)), last_at, row_count
FROM {{schema}}.archive_drops
WHERE table_name = :table AND was_archived AND (CAST(:since AS timestamptz) IS NULL OR last_at >= :since)
{_WIDEN}
""")
COUNT_DROPPED = Statement("""
SELECT day, CAST(sum(row_count) AS bigint) AS rows FROM {schema}.archive_drops WHERE table_name = :table GROUP BY day
""")
