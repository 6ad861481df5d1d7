"""The horizon: the transaction below which all are finished, what is to be archived below it, and who holds it back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from typing import Any, Final, NamedTuple

from sqlalchemy import Connection, Row
from sqlalchemy.exc import OperationalError

from durable.errors import DurableError
from durable.storage.outages import sqlstate
from durable.storage.slices import relation
from durable.storage.sql import archive as statements
from durable.storage.sql.housekeeping import READ_CLOCK

_LOCKED: Final = "55P03"


class Lag(NamedTuple):
    """Rows that are not archived yet."""

    rows: int
    age: timedelta | None


class LastRow(NamedTuple):
    """Last row of a batch, by which it is told later whether the database still has what was read."""

    xid: int
    key: str
    moment: str


class Holder(NamedTuple):
    """The transaction that holds the horizon back."""

    who: str
    age: timedelta | None
    """None where this role may not see it."""
    query: str


class Running(NamedTuple):
    """Transactions of the whole cluster that had a number at a moment."""

    moment: datetime
    number: int
    """No transaction with a later number had it at that moment."""
    oldest: datetime | None
    """The beginning of the oldest one that shows it."""
    is_hidden: bool
    """True if one of them does not show when it began."""

    def complete_until(self, horizon: int) -> datetime | None:
        """Return a moment before which no row was written that lies at or above this later horizon; None where none
        is known. Such rows were written after the oldest transaction that still runs took its number.
        """
        if self.number < horizon:
            return self.moment
        return None if self.is_hidden else min(self.moment, self.oldest or self.moment)


def horizon(conn: Connection, schema: str) -> int:
    """Every transaction below it is finished."""
    return int(conn.execute(statements.READ_HORIZON.within(schema)).scalar_one())


def running(conn: Connection, schema: str) -> Running:
    """Look at what runs now."""
    moment = conn.execute(READ_CLOCK.within(schema)).scalar_one()
    number = conn.execute(statements.TAKE_NUMBER.within(schema)).scalar_one()
    return Running(moment, number, *conn.execute(statements.READ_RUNNING.within(schema)).one())


def begins_at(conn: Connection, schema: str) -> datetime | None:
    """Return the time from which every outcome is here: that of the first day that was not dropped."""
    params = {"table": relation(schema, "envelope_history")}
    oldest: datetime | None = conn.execute(statements.READ_OLDEST_DAY.within(schema), params).scalar_one()
    return oldest


def start(conn: Connection, schema: str, table: str) -> int:
    """Below it there is no row, and none will appear."""
    params = {"high": horizon(conn, schema)}
    return int(conn.execute(statements.BY_TRANSACTION[table].find_start.within(schema), params).scalar_one())


def last_of_batch(conn: Connection, schema: str, table: str, low: int, high: int, rows: int | None) -> LastRow | None:
    """Return the last row of a batch from `low` on, up to `high` or of about so many rows; None when it is empty."""
    of_table = statements.BY_TRANSACTION[table]
    if rows is not None:
        params = {"low": low, "high": high, "rows": rows}
        high = conn.execute(of_table.find_end.within(schema), params).scalar_one() or low
    found = conn.execute(of_table.read_last.within(schema), {"low": low, "high": high}).one_or_none()
    return None if found is None else LastRow(*found)


def is_of_another_life(conn: Connection, schema: str, table: str, last: LastRow) -> bool:
    """Tell whether this row, which was here once, shows that the database was put back to a state of before it."""
    params = {"table": relation(schema, table), **last._asdict()}
    return bool(conn.execute(statements.BY_TRANSACTION[table].is_of_another_life.within(schema), params).scalar_one())


def lag(conn: Connection, schema: str, table: str, low: int, most: int | None = None) -> Lag:
    """Count the rows from `low` on. `most` bounds the work: the age is then that of the first so many rows."""
    of_table = statements.BY_TRANSACTION[table]
    if most is not None:
        return Lag(*conn.execute(of_table.lag_up_to.within(schema), {"low": low, "most": most}).one())
    return Lag(*conn.execute(of_table.lag.within(schema), {"low": low}).one())


def holder(conn: Connection, schema: str) -> Holder | None:
    """Return the holder of the oldest transaction number; a prepared transaction holds it until it is ended."""
    row = conn.execute(statements.READ_HOLDER.within(schema)).one_or_none()
    return None if row is None else _holder(row)


def _holder(row: Row[Any]) -> Holder:
    if row.gid is not None:
        return Holder(f"prepared transaction {row.gid}", row.age, "")
    who = f"process {row.pid} ({row.application_name or 'unnamed'}, role {row.role}), {row.state or 'hidden'}"
    return Holder(who, row.age, row.query or "")


@contextmanager
def naming_users(conn: Connection, schema: str, *tables: str) -> Iterator[None]:
    """Say who uses one of the tables where its lock cannot be had."""
    try:
        yield
    except OperationalError as error:
        if sqlstate(error) != _LOCKED:
            raise
        params = {"tables": [relation(schema, table) for table in tables]}
        row = conn.execute(statements.READ_USER.within(schema), params).one_or_none()
        user = "a transaction that has just ended" if row is None else _holder(row).who
        raise DurableError(f"{' or '.join(tables)} is in use by {user}; run this again when that has ended") from error
