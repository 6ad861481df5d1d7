"""Days of received ids and history, as maintenance makes and drops them, all in one transaction."""

from __future__ import annotations

from datetime import timedelta

from sqlalchemy import Connection

from durable.storage import maintenance
from durable.storage.maintenance import HISTORY, IDS


def make_partitions(conn: Connection, schema: str, days_ahead: int) -> list[str]:
    """The names of the days that were made."""
    missing = [day for parent in (IDS, HISTORY) for day in maintenance.missing_days(conn, schema, parent, days_ahead)]
    return [day.name for day in missing if maintenance.make_day(conn, schema, day)]


def drop_partitions(conn: Connection, schema: str, *, keep_ids: timedelta, keep_history: timedelta) -> list[str]:
    """The names of the days that were dropped, because they were past their retention."""
    return [
        day.name
        for parent, keep in ((IDS, keep_ids), (HISTORY, keep_history))
        for day in maintenance.past_days(conn, schema, parent, keep)
        if maintenance.drop_day(conn, schema, day, keep)
    ]


def purge_undated(conn: Connection, schema: str, *, keep_ids: timedelta, keep_history: timedelta) -> list[int]:
    """How many rows each purge has looked at: of ids without a day, and of the default partitions."""
    keeps = (keep_ids, keep_ids, keep_history)
    return [
        maintenance.purge(conn, schema, statement, keep=keep)
        for statement, keep in zip(maintenance.PURGES, keeps, strict=True)
    ]
