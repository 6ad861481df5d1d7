"""Gaps of an archive: rows that the database drops while nothing archives them, noted with the rows that go.

A gap has the day, and the first and the last time of such rows in it. Who archives again notes the gaps in the lake.
"""

from __future__ import annotations

from typing import Final

from durable.storage.sql.statement import Statement
from durable.storage.sql.times import in_range

_WIDEN: Final = """ON CONFLICT (table_name, day) DO UPDATE SET
        first_at = LEAST(gap.first_at, excluded.first_at), last_at = GREATEST(gap.last_at, excluded.last_at)"""


def noting(table: str, time: str, rows: str, condition: str = "true") -> str:
    """Write a statement that notes those of the dropped rows that were not archived; `rows` have `time` and `xid`."""
    moment = in_range(time)
    return f"""
    INSERT INTO {{schema}}.archive_gaps AS gap (table_name, day, first_at, last_at)
    SELECT '{table}', CAST({moment} AT TIME ZONE 'UTC' AS date), min({moment}), max({moment})
    FROM {rows} WHERE xid >= {{schema}}.gap_begins('{table}') AND {condition} GROUP BY 2
    {_WIDEN}"""


READ_GAPS = Statement("SELECT first_at, last_at FROM {schema}.archive_gaps WHERE table_name = :table ORDER BY day")
NOTE_GAPS = Statement(f"""
INSERT INTO {{schema}}.archive_gaps AS gap (table_name, day, first_at, last_at)
SELECT :table, day, first_at, last_at
FROM unnest(CAST(:days AS date[]), CAST(:firsts AS timestamptz[]), CAST(:lasts AS timestamptz[]))
    AS gone (day, first_at, last_at)
{_WIDEN}
""")
