"""Rows that the database does not have any more, by day: how many, of which times, and below which transaction.

    gap        no lake has them: they were dropped while nothing archived them, or a lake has lost them as well
    lost       a lake has lost them when it was restored, and has them again when it is put back to a commit of before
    dropped    a lake has them: they were dropped after they had been archived
    foreign    a lake has them: the database lost them when it was restored
    early      history that was dropped before the first archive: no lake begins before it, and only streams miss it. A
               whole day counts as one row

A lake to which an archive moves lacks what was dropped, or lost, and is in others: such rows become a gap. Foreign ones
do so, too, when the lake that has them is put back to a state before them.
"""

from __future__ import annotations

from typing import Final

from durable.storage.rows import QUARANTINED, REFUSED
from durable.storage.sql.statement import Statement
from durable.storage.sql.times import in_range

# An audit needs a letter only where its message has no row of history.
_IS_NEEDED: Final = {
    "envelope_history": "true",
    "dead_letters": f"side = 'incoming' AND id IS NOT NULL AND exception_type IN ('{QUARANTINED}', '{REFUSED}')",
}
# A lake begins with the oldest day of history that is here. Letters go one by one, also before the first archive.
_UNARCHIVED: Final = {
    "envelope_history": "CASE WHEN begins IS NULL THEN 'early' ELSE 'gap' END",
    "dead_letters": "'gap'",
}
DROPPED: Final = {
    "envelope_history": "finished_at, xid",
    "dead_letters": "side, id, exception_type, failed_at, xid",
}
"""The columns of dropped rows that noting() needs."""
_TIMES: Final = {"envelope_history": "finished_at", "dead_letters": "failed_at"}
_INSERT: Final = """
    INSERT INTO {schema}.absent_rows AS known (table_name, day, kind, lake_id, first_at, last_at, row_count, below)"""
_WIDEN: Final = """
    ON CONFLICT (table_name, day, kind, lake_id) DO UPDATE SET
        first_at = LEAST(known.first_at, excluded.first_at), last_at = GREATEST(known.last_at, excluded.last_at),
        below = GREATEST(known.below, excluded.below)"""
_ADD: Final = ", row_count = known.row_count + excluded.row_count"


def noting(table: str, rows: str) -> str:
    """Write a statement that notes the rows that are dropped."""
    moment = in_range(_TIMES[table])
    of_needed = f"FILTER (WHERE {_IS_NEEDED[table]})"
    return f"""{_INSERT}
    SELECT '{table}', CAST({moment} AT TIME ZONE 'UTC' AS date),
        CASE WHEN xid < begins THEN 'dropped' ELSE {_UNARCHIVED[table]} END,
        '', min({moment}) {of_needed}, max({moment}) {of_needed}, count(*),
        {{schema}}.number_drop('{table}', max(xid) + 1)
    FROM {rows}, (SELECT {{schema}}.gap_begins('{table}') AS begins) AS archive GROUP BY 2, 3{_WIDEN}{_ADD}"""


READ_GAPS = Statement("""
SELECT first_at, last_at FROM {schema}.absent_rows
WHERE table_name = :table AND kind IN ('gap', 'lost') AND first_at IS NOT NULL ORDER BY day
""")
READ_FOREIGN = Statement("""
SELECT day, first_at, last_at, row_count, below FROM {schema}.absent_rows
WHERE table_name = :table AND kind = 'foreign' AND lake_id = :lake_id ORDER BY day
""")
NOTE = Statement(f"""{_INSERT}
SELECT :table, day, :kind, :lake_id, first_at, last_at, row_count, below
FROM unnest(CAST(:days AS date[]), CAST(:firsts AS timestamptz[]), CAST(:lasts AS timestamptz[]),
    CAST(:counts AS bigint[]), CAST(:belows AS bigint[])) AS found (day, first_at, last_at, row_count, below){_WIDEN}
""")
# A lake that ends at `low` has none of their rows, or some; all those of before `until`. `others`: also rows that other
# lakes have. Such a gap has no rows of its own: those that were dropped are counted as such.
NOTE_AS_GAPS = Statement(f"""{_INSERT}
SELECT table_name, day, :noted, '', min(CASE WHEN :until BETWEEN first_at AND last_at THEN :until ELSE first_at END),
    max(last_at), 0, max(below)
FROM {{schema}}.absent_rows
WHERE table_name = :table AND kind = :kind
    AND (CAST(:since AS timestamptz) IS NULL OR last_at >= CAST(:since AS timestamptz))
    AND CASE WHEN lake_id IN ('', :lake_id) THEN below > :low ELSE :others END
GROUP BY table_name, day{_WIDEN}
RETURNING day, first_at, last_at
""")
# The newest commit of the lake is one that it had lost before these rows were noted: it has come back from a better
# backup, with the rows of before that commit. Who loses them once more finds them among those that were dropped.
DELETE_FOUND = Statement("""
DELETE FROM {schema}.absent_rows AS lost USING {schema}.archive_claims AS newest
WHERE lost.table_name = :table AND lost.kind = 'lost' AND newest.table_name = :table AND newest.commit_id = :commit_id
    AND newest.lost_at <= lost.noted_at AND lost.below <= newest.high
""")
READ_LAST_DROP = Statement("""
SELECT CAST(COALESCE(max(number), 0) AS bigint) AS number FROM {schema}.drops WHERE table_name = :table
""")
# The days that have lost a row of the transaction `low` or a later one; none unless a drop after `number` took one.
READ_DROPPED_SINCE = Statement("""
SELECT min(day) AS first_day, max(day) AS last_day FROM {schema}.absent_rows
WHERE table_name = :table AND kind IN ('gap', 'dropped', 'early') AND row_count > 0 AND below > :low
HAVING EXISTS (
    SELECT FROM {schema}.drops WHERE table_name = :table AND number > :number AND below > :low
)
""")
COUNT_DROPPED = Statement("""
SELECT day, CAST(sum(row_count) AS bigint) AS rows FROM {schema}.absent_rows
WHERE table_name = :table AND kind IN ('gap', 'dropped') GROUP BY day
""")
