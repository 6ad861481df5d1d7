"""What operators look at: read in one go, judged elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import NamedTuple

from sqlalchemy import Connection

from durable.envelope import NodeId
from durable.storage import circuits, housekeeping, leases, nodes, statements
from durable.storage.circuits import OpenCircuit
from durable.storage.leases import Backlog
from durable.storage.nodes import Node


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
    """How many connections may be open; None: no limit of this kind."""

    server: int
    role: int | None
    database: int | None


class Picture(NamedTuple):
    """The state of one schema, by the database's clock."""

    now: datetime
    uptime: timedelta
    outgoing: list[Backlog]
    incoming: list[Backlog]
    owned_outgoing: Mapping[NodeId, int]
    owned_incoming: Mapping[NodeId, int]
    nodes: list[Node]
    locked: set[NodeId]
    circuits: list[OpenCircuit]
    parked: Mapping[str, int]
    dead_letters: list[DeadLetterCount]
    partitioned_days: int


def read(conn: Connection, schema: str) -> Picture:
    """Everything. Owners are read before nodes: a node that registers in between owns nothing that was seen."""
    owned = [_owned_counts(conn, schema, table) for table in (statements.OUTGOING, statements.INCOMING)]
    return Picture(
        now=clock(conn, schema),
        uptime=nodes.server_uptime(conn, schema),
        outgoing=leases.backlog(conn, schema, statements.OUTGOING),
        incoming=leases.backlog(conn, schema, statements.INCOMING),
        owned_outgoing=owned[0],
        owned_incoming=owned[1],
        nodes=nodes.read(conn, schema),
        locked=nodes.locked(conn, schema),
        circuits=circuits.read(conn, schema),
        parked=circuits.count_parked(conn, schema),
        dead_letters=[DeadLetterCount(*row) for row in conn.execute(housekeeping.COUNT_DEAD_LETTERS.within(schema))],
        partitioned_days=partitioned_days(conn, schema),
    )


def server(conn: Connection, schema: str) -> Server:
    return Server(*conn.execute(housekeeping.READ_SERVER.within(schema)).one())


def clock(conn: Connection, schema: str) -> datetime:
    """The database's time now."""
    now: datetime = conn.execute(housekeeping.READ_CLOCK.within(schema)).scalar_one()
    return now


def partitioned_days(conn: Connection, schema: str) -> int:
    """For how many days in a row, from today on, every partition is there."""
    rows = conn.execute(housekeeping.READ_PARTITION_DAYS.within(schema), {"schema": schema})
    found = {(row.parent, row.days_from_today) for row in rows}
    days = 0
    while all((parent, days) in found for parent in ("received_ids", "envelope_history")):
        days += 1
    return days


def connection_limits(conn: Connection, schema: str) -> ConnectionLimits:
    return ConnectionLimits(*conn.execute(housekeeping.READ_CONNECTION_LIMITS.within(schema)).one())


def missing_rights(conn: Connection, schema: str) -> list[str]:
    """What the connection's role would need to run a node, and does not have."""
    return list(conn.execute(housekeeping.READ_MISSING_RIGHTS.within(schema), {"schema": schema}).scalars())


def _owned_counts(conn: Connection, schema: str, table: statements.Recovery) -> dict[NodeId, int]:
    rows = conn.execute(table.owned_counts.within(schema))
    return {NodeId(row.owner_id): int(row[1]) for row in rows}
