"""Days that end, made to happen: what came today is copied into a day that is past its retention, and tomorrow is taken
away. The nodes are to drop the one and to make the other while messages pass.
"""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta
from typing import Any, Final, LiteralString

import psycopg
from psycopg import sql

from durable.storage.maintenance import HISTORY, IDS, Day

PAST_DAYS: Final = 40
"""Longer ago than any retention."""

_SHIFTED_ID: Final[LiteralString] = """
SELECT (substr(moment, 1, 8) || '-' || substr(moment, 9, 4) || substr(id::text, 14))::uuid AS id FROM (
    SELECT lpad(to_hex(('x' || lpad(substr(replace(row.id::text, '-', ''), 1, 12), 16, '0'))::bit(64)::bigint
        - %s * 86400000::bigint), 12, '0') AS moment
) AS shifted
"""
_COPIES: Final[dict[str, LiteralString]] = {
    HISTORY: "SELECT row.finished_at - make_interval(days => %s) AS finished_at",
    IDS: _SHIFTED_ID,
}


def end_day(conn: psycopg.Connection[Any]) -> int:
    """Return the number of rows that were copied into the past."""
    today, copied = datetime.now(UTC).date(), 0
    for parent, changed in _COPIES.items():
        past = today - timedelta(days=PAST_DAYS)
        for day in (past, past - timedelta(days=1)):
            conn.execute("SELECT durable.make_partition(%s, %s)", (parent, day))
        table = sql.Identifier("durable", parent)
        copy = sql.SQL(
            "INSERT INTO {table} SELECT (jsonb_populate_record(row, to_jsonb(changed))).* FROM {table} AS row,"
            " LATERAL ({changed}) AS changed ON CONFLICT DO NOTHING"
        )
        copied += conn.execute(copy.format(table=table, changed=sql.SQL(changed)), (PAST_DAYS,)).rowcount
        tomorrow = Day(parent, today + timedelta(days=1)).name
        conn.execute(sql.SQL("DROP TABLE IF EXISTS {}").format(sql.Identifier("durable", tomorrow)))
    return copied


def is_over(conn: psycopg.Connection[Any]) -> bool:
    """Tell whether the past is gone, and tomorrow there."""
    today = datetime.now(UTC).date()
    names = {name for (name,) in conn.execute("SELECT tablename FROM pg_tables WHERE schemaname = 'durable'")}
    days = {parent: _days(parent, names) for parent in _COPIES}
    return all(
        today + timedelta(days=1) in found and min(found) > today - timedelta(days=PAST_DAYS - 1)
        for found in days.values()
    )


def _days(parent: str, names: set[str]) -> set[date]:
    ends = (name.removeprefix(f"{parent}_") for name in names if name.startswith(f"{parent}_"))
    return {datetime.strptime(end, "%Y%m%d").replace(tzinfo=UTC).date() for end in ends if end.isdigit()}
