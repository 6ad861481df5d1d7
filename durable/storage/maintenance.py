"""Partitions made ahead and dropped after their retention, and what lies in none of them purged.

The runtime role needs no DDL rights: functions of the schema's owner do it. Each of them waits some milliseconds for
its locks, so that a long reader holds up no insert that queues behind it; then it fails, and can be tried again.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date, timedelta
from typing import Final, NamedTuple

from sqlalchemy import Connection

from durable.storage.isolation import count, left_alone
from durable.storage.locks import Job, try_lock
from durable.storage.sql import housekeeping
from durable.storage.sql.statement import Batched

IDS: Final = "received_ids"
HISTORY: Final = "envelope_history"
PURGES: Final[Sequence[Batched]] = (
    housekeeping.PURGE_UNDATED_IDS,
    housekeeping.PURGE_DEFAULT_IDS,
    housekeeping.PURGE_DEFAULT_HISTORY,
)
PURGE_BATCH: Final = 10_000


class Day(NamedTuple):
    """A day of a table that is kept in days, which is a partition."""

    parent: str
    day: date

    @property
    def name(self) -> str:
        return f"{self.parent}_{self.day:%Y%m%d}"


def missing_days(conn: Connection, schema: str, parent: str, days_ahead: int) -> list[Day]:
    """The days of this table that have yet to be made, from yesterday on."""
    today: date = conn.execute(housekeeping.READ_TODAY.within(schema)).scalar_one()
    wanted = [Day(parent, today + timedelta(days=number)) for number in range(-1, days_ahead + 1)]
    made = set(_days(conn, schema, parent))
    return [day for day in wanted if day not in made]


def make_day(conn: Connection, schema: str, day: Day) -> bool:
    """Make the partition of a day. False when it is there, or another node is at it."""
    return bool(conn.execute(housekeeping.MAKE_PARTITION.within(schema), day._asdict()).scalar_one())


def past_days(conn: Connection, schema: str, parent: str, keep: timedelta) -> list[Day]:
    """The days of this table all of which is past its retention."""
    now = conn.execute(housekeeping.READ_CLOCK.within(schema)).scalar_one()
    return [day for day in _days(conn, schema, parent) if day.day + timedelta(days=1) <= (now - keep).date()]


def drop_day(conn: Connection, schema: str, day: Day, keep: timedelta) -> bool:
    """Drop the partition of a day that is past its retention. False when it is of a history that is archived, which
    `pipeline purge` drops, or another node is at it."""
    params = day._asdict() | {"keep": keep}
    return bool(conn.execute(housekeeping.DROP_PARTITION.within(schema), params).scalar_one())


def purge(conn: Connection, schema: str, statement: Batched, *, keep: timedelta, batch_size: int = PURGE_BATCH) -> int:
    """Let a bounded number of rows go that are older than this, by one of PURGES or its like. Returns how many were
    looked at: a full batch means that there may be more."""
    if not try_lock(conn, schema, Job.PARTITIONS):
        return 0
    params = {"keep": keep, "batch_size": batch_size}
    return count(conn, schema, statement, params, left_alone("purge"))


def partitioned_days(conn: Connection, schema: str) -> int:
    """Count the days in a row, from today on, that have every partition."""
    rows = conn.execute(housekeeping.READ_PARTITION_DAYS.within(schema), {"schema": schema})
    found = {(row.parent, row.days_from_today) for row in rows}
    days = 0
    while all((parent, days) in found for parent in (IDS, HISTORY)):
        days += 1
    return days


def _days(conn: Connection, schema: str, parent: str) -> list[Day]:
    rows = conn.execute(housekeeping.READ_PARTITION_DAYS.within(schema), {"schema": schema})
    return sorted(Day(row.parent, row.day) for row in rows if row.parent == parent)
