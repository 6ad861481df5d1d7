"""Purging of what has been archived and is past its retention: found, counted and dropped."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import date, datetime, timedelta
from typing import Any, Final, NamedTuple

from sqlalchemy import Connection, TextClause

from durable.storage.days import midnight
from durable.storage.horizons import naming_users
from durable.storage.readiness import refuse_veil
from durable.storage.slices import relation
from durable.storage.sql import absent
from durable.storage.sql import archive as statements

_BATCH_SIZE: Final = 10_000


class Dropped(NamedTuple):
    """Days of rows that are not in the database any more."""

    first_day: date
    last_day: date


def unarchived_days(conn: Connection, schema: str, low: int, until: date) -> dict[date, int]:
    """Count the rows of the days before `until` that are not archived, by day."""
    params = {"low": low, "until": midnight(until)}
    return {row.day: row.rows for row in conn.execute(statements.COUNT_UNARCHIVED.within(schema), params)}


def days_older_than(conn: Connection, schema: str, keep: timedelta) -> list[date]:
    """The days of history that have a partition and are past this retention, the oldest first."""
    params = {"table": relation(schema, "envelope_history"), "keep": keep}
    return list(conn.execute(statements.READ_OLD_DAYS.within(schema), params).scalars())


def first_day_kept(conn: Connection, schema: str, keep: timedelta) -> date:
    """Every day before it is past this retention."""
    day: date = conn.execute(statements.READ_FIRST_DAY_KEPT.within(schema), {"keep": keep}).scalar_one()
    return day


def stray_rows(conn: Connection, schema: str, high: int, until: date) -> int:
    """Count the archived rows of the days before `until` that lie in no day's partition."""
    params = {"high": high, "until": midnight(until)}
    return int(conn.execute(statements.COUNT_STRAY_HISTORY.within(schema), params).scalar_one())


def drop_stray_rows(conn: Connection, schema: str, high: int, until: date) -> int:
    """Delete them, and return how many."""
    refuse_veil(conn, schema)
    params = {"high": high, "until": midnight(until), "batch_size": _BATCH_SIZE}
    return _drained(conn, statements.PURGE_STRAY_HISTORY.within(schema), params)


def resolved_letters(conn: Connection, schema: str, high: int, keep: timedelta) -> int:
    """Count the archived dead letters that were resolved longer ago than this."""
    params = {"high": high, "keep": keep}
    return int(conn.execute(statements.COUNT_RESOLVED_LETTERS.within(schema), params).scalar_one())


def drop_resolved_letters(conn: Connection, schema: str, high: int, keep: timedelta) -> int:
    """Delete them, and return how many."""
    refuse_veil(conn, schema)
    params = {"high": high, "keep": keep, "batch_size": _BATCH_SIZE}
    return _drained(conn, statements.PURGE_RESOLVED_LETTERS.within(schema), params)


def drop_attempts(conn: Connection, schema: str, until: date) -> int:
    """Delete the failed attempts of before this day that no letter needs, and return how many: once their history is
    gone, nothing tells of whose key they are.
    """
    params = {"until": midnight(until), "batch_size": _BATCH_SIZE}
    return _drained(conn, statements.PURGE_OLD_ATTEMPTS.within(schema), params)


def dropped_until(conn: Connection, schema: str, keep: timedelta) -> datetime | None:
    """The time up to which history may have been dropped; None when none was. `keep`: the retention of nodes, which
    drop history unless it is archived.
    """
    moment: datetime | None = conn.execute(statements.READ_DROPPED_UNTIL.within(schema), {"keep": keep}).scalar_one()
    return moment


def last_drop(conn: Connection, schema: str, table: str) -> int:
    """Return the number of the last drop of rows of this table; 0 before the first one."""
    return int(conn.execute(absent.READ_LAST_DROP.within(schema), {"table": table}).scalar_one())


def dropped_since(conn: Connection, schema: str, table: str, number: int, low: int) -> Dropped | None:
    """Return the days that have lost a row of the transaction `low`, or of a later one; None unless a drop after this
    one took such a row.
    """
    params = {"table": table, "number": number, "low": low}
    row = conn.execute(absent.READ_DROPPED_SINCE.within(schema), params).one_or_none()
    return None if row is None else Dropped(*row)


def drop_day(conn: Connection, schema: str, day: date) -> str:
    """Detach and drop this day's partition. The database refuses unless all of it is archived.

    Raises DurableError when others use the history just now, InvalidSetting where rows of it may be hidden.
    """
    refuse_veil(conn, schema)
    with naming_users(conn, schema, "envelope_history"):
        return str(conn.execute(statements.DROP_ARCHIVED_HISTORY.within(schema), {"day": day}).scalar_one())


def _drained(conn: Connection, statement: TextClause, params: Mapping[str, Any]) -> int:
    """Repeat a bounded statement, of which each run is a transaction, until nothing is left to it."""
    count = 0
    while rows := conn.execute(statement, params).scalar_one():
        count += rows
    return count
