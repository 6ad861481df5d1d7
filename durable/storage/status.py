"""Status of a schema for operators: read here, judged elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import NamedTuple

from sqlalchemy import Connection

from durable.envelope import NodeId
from durable.listed import SHOWN, Listed
from durable.storage import circuits, gauges, leases
from durable.storage.circuits import OpenCircuit
from durable.storage.gauges import Gauges
from durable.storage.leases import Backlog
from durable.storage.sql import housekeeping
from durable.storage.sql.recovery import INCOMING, OUTGOING, Recovery


class Server(NamedTuple):
    """The Postgres behind a connection; `number` is its version as an integer, such as 160004."""

    version: str
    number: int
    database: str
    role: str
    pid: int


@dataclass(frozen=True, slots=True)
class DeadLetterCount:
    exception_type: str
    message_type: str
    count: int
    first: datetime
    last: datetime


class ConnectionLimits(NamedTuple):
    """Limits of open connections; None: no limit of this kind."""

    server: int
    role: int | None
    database: int | None


class StatusSnapshot(NamedTuple):
    """The state of one schema, by the database's clock, with every row counted."""

    gauges: Gauges
    outgoing: list[Backlog]
    incoming: list[Backlog]
    owned_outgoing: Mapping[NodeId, int]
    owned_incoming: Mapping[NodeId, int]
    dead_letters: list[DeadLetterCount]
    circuits: Listed[OpenCircuit]
    """The first of the open circuits and pauses."""
    parked: Mapping[str, int]
    """The number of messages that wait in each order that one of them stops."""


def read(conn: Connection, schema: str, size: int = SHOWN) -> StatusSnapshot:
    """Read the whole status, with so many circuits. Owners before nodes: a node that registers in between owns nothing
    that was seen.
    """
    stopped = circuits.listed(conn, schema, size)
    owned = [_owned_counts(conn, schema, table) for table in (OUTGOING, INCOMING)]
    return StatusSnapshot(
        outgoing=leases.backlog(conn, schema, OUTGOING),
        incoming=leases.backlog(conn, schema, INCOMING),
        owned_outgoing=owned[0],
        owned_incoming=owned[1],
        gauges=gauges.read(conn, schema),
        dead_letters=[DeadLetterCount(*row) for row in conn.execute(housekeeping.COUNT_DEAD_LETTERS.within(schema))],
        circuits=stopped,
        parked=circuits.count_behind(conn, schema, circuits.orders_of(stopped.rows)),
    )


def server(conn: Connection, schema: str) -> Server:
    return Server(*conn.execute(housekeeping.READ_SERVER.within(schema)).one())


def is_read_only(conn: Connection, schema: str) -> bool:
    """Tell whether no node can work here: on a standby, or where transactions are read-only unless they say more."""
    named = {"name": "transaction_read_only"}
    return bool(conn.execute(housekeeping.READ_SERVER_SETTING.within(schema), named).scalar_one() == "on")


def is_encrypted(conn: Connection, schema: str) -> bool:
    """Tell whether this connection is, as far as the server sees it."""
    return bool(conn.execute(housekeeping.READ_ENCRYPTION.within(schema)).scalar_one())


def transaction_limit(conn: Connection, schema: str) -> timedelta:
    """Return the time after which the server ends a transaction of this role; zero: it does not."""
    return timedelta(milliseconds=conn.execute(housekeeping.READ_TRANSACTION_LIMIT.within(schema)).scalar_one())


def clock(conn: Connection, schema: str) -> datetime:
    """The database's time now."""
    now: datetime = conn.execute(housekeeping.READ_CLOCK.within(schema)).scalar_one()
    return now


def connection_limits(conn: Connection, schema: str) -> ConnectionLimits:
    return ConnectionLimits(*conn.execute(housekeeping.READ_CONNECTION_LIMITS.within(schema)).one())


def missing_rights(conn: Connection, schema: str) -> list[str]:
    """Return the rights that the connection's role lacks to run a node."""
    return list(conn.execute(housekeeping.READ_MISSING_RIGHTS.within(schema), {"schema": schema}).scalars())


def wide_rights(conn: Connection, schema: str) -> list[str]:
    """Return the rights of the connection's role, and of everybody, that no node needs."""
    return list(conn.execute(housekeeping.READ_WIDE_RIGHTS.within(schema), {"schema": schema}).scalars())


def _owned_counts(conn: Connection, schema: str, table: Recovery) -> dict[NodeId, int]:
    rows = conn.execute(table.owned_counts.within(schema))
    return {NodeId(row.owner_id): int(row[1]) for row in rows}
