"""The state of the database itself: sizes, dead rows, what holds vacuum up, connections, slow statements."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import NamedTuple

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from durable.storage.sql import sizes as statements


class TableSize(NamedTuple):
    """A table, with all its partitions. Rows are the estimates of Postgres."""

    name: str
    parts: int
    table_bytes: int
    index_bytes: int
    live_rows: int
    dead_rows: int
    vacuumed_at: datetime | None
    first_day: str | None
    """The days of the oldest and newest partition, as YYYYMMDD."""
    last_day: str | None


class Holder(NamedTuple):
    """A transaction, prepared transaction or replication slot that keeps dead rows from being vacuumed away."""

    kind: str
    name: str
    application: str | None
    role: str | None
    state: str | None
    age: timedelta | None
    query: str | None
    is_harmless: bool


class Application(NamedTuple):
    """Connections of one application to this database."""

    name: str
    connections: int
    active: int
    idle_in_transaction: int


class SlowStatement(NamedTuple):
    """A statement of durable's, with its times in seconds."""

    query: str
    calls: int
    mean_seconds: float
    total_seconds: float


class Sizes(NamedTuple):
    """The state of the database, as far as this role may see it."""

    version: str
    database_bytes: int
    connections: int
    most_connections: int
    sees_all: bool
    """False when the role lacks pg_read_all_stats, and sees the statements of its own connections alone."""
    tables: Sequence[TableSize]
    holders: Sequence[Holder]
    applications: Sequence[Application]
    statements: Sequence[SlowStatement]
    are_measured: bool
    """True when `statements` are means since the statistics began, by pg_stat_statements; else they run now."""


def read(conn: Connection, schema: str) -> Sizes:
    """Read the state of the database, from catalog and statistics alone."""
    server = conn.execute(statements.READ_SERVER.within(schema)).one()
    measured = _measured(conn, schema) if server.has_statements else None
    running = [SlowStatement(*row) for row in conn.execute(statements.READ_RUNNING.within(schema), {"schema": schema})]
    return Sizes(
        version=server.version,
        database_bytes=server.database_bytes,
        connections=server.connections,
        most_connections=server.most_connections,
        sees_all=server.sees_all,
        tables=[TableSize(*row) for row in conn.execute(statements.READ_TABLES.within(schema), {"schema": schema})],
        holders=[Holder(*row) for row in conn.execute(statements.READ_HOLDERS.within(schema))],
        applications=[Application(*row) for row in conn.execute(statements.READ_CONNECTIONS.within(schema))],
        statements=running if measured is None else measured,
        are_measured=measured is not None,
    )


def _measured(conn: Connection, schema: str) -> list[SlowStatement] | None:
    """Read the slowest statements; None where the extension is not loaded, or may not be read."""
    try:
        with conn.begin_nested():
            rows = conn.execute(statements.READ_STATEMENTS.within(schema), {"schema": schema})
            return [SlowStatement(*row) for row in rows]
    except DBAPIError:
        return None
