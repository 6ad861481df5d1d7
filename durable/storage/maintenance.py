"""Partitions made ahead and dropped after their retention.

The runtime role needs no DDL rights: functions of the schema's owner do it.
"""

from __future__ import annotations

from datetime import timedelta

from sqlalchemy import Connection

from durable.storage import housekeeping
from durable.storage.locks import Job, try_lock


def make_partitions(conn: Connection, schema: str, days_ahead: int) -> list[str]:
    """Make the days that are missing, from yesterday on; returns the names of the new partitions."""
    return list(conn.execute(housekeeping.MAKE_PARTITIONS.within(schema), {"days_ahead": days_ahead}).scalars())


def drop_partitions(conn: Connection, schema: str, *, keep_ids: timedelta, keep_history: timedelta) -> list[str]:
    """Drop whole days that are past their retention; returns their names."""
    params = {"keep_ids": keep_ids, "keep_history": keep_history}
    return list(conn.execute(housekeeping.DROP_PARTITIONS.within(schema), params).scalars())


def purge_defaults(
    conn: Connection, schema: str, *, keep_ids: timedelta, keep_history: timedelta, batch_size: int = 10_000
) -> int:
    """Delete a bounded number of old rows that belong to no day. Returns how many."""
    if not try_lock(conn, schema, Job.PARTITIONS):
        return 0
    ids = conn.execute(housekeeping.PURGE_DEFAULT_IDS.within(schema), {"keep_ids": keep_ids, "batch_size": batch_size})
    history = conn.execute(
        housekeeping.PURGE_DEFAULT_HISTORY.within(schema), {"keep_history": keep_history, "batch_size": batch_size}
    )
    return ids.rowcount + history.rowcount


def partitioned_days(conn: Connection, schema: str) -> int:
    """For how many days in a row, from today on, every partition is there."""
    rows = conn.execute(housekeeping.READ_PARTITION_DAYS.within(schema), {"schema": schema})
    found = {(row.parent, row.days_from_today) for row in rows}
    days = 0
    while all((parent, days) in found for parent in ("received_ids", "envelope_history")):
        days += 1
    return days
