"""The database as a whole, for operators: sizes, dead rows, what holds vacuum up, connections and statements.

Everything is read in the caller's transaction, each part in a savepoint with a bound of its own. No row of a table is
counted: the figures are the server's own estimates.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date, datetime, timedelta
from typing import Final, Literal, NamedTuple

from sqlalchemy import Connection, text

from durable.storage import status
from durable.storage.bounded import Look, limit_times, look
from durable.storage.sql import upkeep as statements
from durable.storage.status import ConnectionLimits

_MOST_TABLES: Final = 50
_MOST_INDEXES: Final = 20
_MOST_HOLDERS: Final = 10
_MOST_APPLICATIONS: Final = 20
_MOST_STATEMENTS: Final = 10


class Sight(NamedTuple):
    """The database, the role that looks at it, and whether that role sees the sessions of others whole."""

    now: datetime
    database: str
    role: str
    version: str
    sees_all: bool


class TableSize(NamedTuple):
    """A table with all its partitions; rows are estimates. `vacuumed_at` is that of the partition vacuumed last."""

    name: str
    parts: int
    rows: int
    dead: int
    table_bytes: int
    index_bytes: int
    vacuumed_at: datetime | None


class IndexSize(NamedTuple):
    """An index, over all partitions. Scans are counted since the statistics of the server were reset."""

    name: str
    table: str
    size_bytes: int
    scans: int


class Days(NamedTuple):
    """Daily partitions of a table. `other_bytes` is the size of the partition for rows of no day."""

    name: str
    days: int
    oldest: date | None
    newest: date | None
    size_bytes: int
    other_bytes: int
    today: date


class VacuumHolder(NamedTuple):
    """A snapshot, prepared transaction or slot that may see old rows, which vacuum has to keep.

    `age` and `state` are None where this role may not see them, and `age` for slots. `transactions` is the number of
    transactions that have begun since.
    """

    kind: Literal["session", "prepared", "slot"]
    name: str | None
    pid: int | None
    role: str | None
    application: str | None
    state: str | None
    age: timedelta | None
    transactions: int
    is_standby: bool


class Application(NamedTuple):
    """Connections of one application and role, `here` to this database. States of `hidden` ones are not visible."""

    name: str
    role: str
    connections: int
    here: int
    active: int
    idle_in_transaction: int
    hidden: int


class Connections(NamedTuple):
    """Connections of clients to the whole server, of which it takes `most`."""

    in_use: int
    most: int
    limits: ConnectionLimits
    applications: Sequence[Application]


class SlowStatement(NamedTuple):
    """A statement of durable, as pg_stat_statements counts it."""

    query: str
    calls: int
    total: timedelta
    mean: timedelta
    longest: timedelta


class RunningStatement(NamedTuple):
    """A statement that runs now."""

    pid: int
    role: str
    application: str
    age: timedelta
    waits_for: str | None
    query: str


class Statements(NamedTuple):
    """The statements that took the most time; where these are not to be had, those that run now."""

    is_installed: bool
    is_readable: bool
    slowest: Look[list[SlowStatement]]
    running: Look[list[RunningStatement]]


class Upkeep(NamedTuple):
    """The state of the database."""

    sight: Sight
    size_bytes: Look[int]
    tables: Look[list[TableSize]]
    indexes: Look[list[IndexSize]]
    days: Look[list[Days]]
    holders: Look[list[VacuumHolder]]
    connections: Look[Connections]
    statements: Statements


def read(conn: Connection, schema: str) -> Upkeep:
    """Read all of it."""
    limit_times(conn, schema)
    return Upkeep(
        sight=Sight(*conn.execute(statements.READ_SIGHT.within(schema)).one()),
        size_bytes=look(conn, schema, _size),
        tables=look(conn, schema, tables),
        indexes=look(conn, schema, _indexes),
        days=look(conn, schema, days),
        holders=look(conn, schema, holders),
        connections=look(conn, schema, _connections),
        statements=_statements(conn, schema),
    )


def tables(conn: Connection, schema: str) -> list[TableSize]:
    """The tables, the largest first."""
    params = {"schema": schema, "limit": _MOST_TABLES}
    return [TableSize(*row) for row in conn.execute(statements.READ_TABLES.within(schema), params)]


def days(conn: Connection, schema: str) -> list[Days]:
    """The tables that are kept in days."""
    return [Days(*row) for row in conn.execute(statements.READ_DAYS.within(schema), {"schema": schema})]


def holders(conn: Connection, schema: str) -> list[VacuumHolder]:
    """Read the holders of old rows that vacuum has to keep, the oldest first."""
    params = {"limit": _MOST_HOLDERS}
    return [VacuumHolder(*row) for row in conn.execute(statements.READ_HOLDERS.within(schema), params)]


def _size(conn: Connection, schema: str) -> int:
    return int(conn.execute(statements.READ_SIZE.within(schema)).scalar_one())


def _indexes(conn: Connection, schema: str) -> list[IndexSize]:
    params = {"schema": schema, "limit": _MOST_INDEXES}
    return [IndexSize(*row) for row in conn.execute(statements.READ_INDEXES.within(schema), params)]


def _connections(conn: Connection, schema: str) -> Connections:
    rows = conn.execute(statements.READ_CONNECTIONS.within(schema), {"limit": _MOST_APPLICATIONS}).all()
    limits = status.connection_limits(conn, schema)
    return Connections(rows[0].in_use, rows[0].most, limits, [Application(*row[:7]) for row in rows])


def _statements(conn: Connection, schema: str) -> Statements:
    place = conn.execute(statements.FIND_STATEMENTS.within(schema)).one_or_none()
    is_readable = place is not None and place.is_readable
    slowest = Look[list[SlowStatement]](None)
    if place is not None and is_readable:
        slowest = look(conn, schema, _slowest, place.place)
    running = look(conn, schema, _running) if slowest.found is None else Look[list[RunningStatement]](None)
    return Statements(place is not None, is_readable, slowest, running)


def _slowest(conn: Connection, schema: str, place: str) -> list[SlowStatement]:
    query = text(statements.READ_SLOWEST.within(schema).text.replace("{place}", place))
    rows = conn.execute(query, {"mark": f'"{schema}".', "limit": _MOST_STATEMENTS})
    return [SlowStatement(*row) for row in rows]


def _running(conn: Connection, schema: str) -> list[RunningStatement]:
    params = {"limit": _MOST_STATEMENTS}
    return [RunningStatement(*row) for row in conn.execute(statements.READ_RUNNING.within(schema), params)]
