"""Latched and paused things, one row each, read by every node."""

from __future__ import annotations

from datetime import datetime, timedelta
from enum import StrEnum
from typing import NamedTuple

from sqlalchemy import Connection

from durable.storage import housekeeping


class Kind(StrEnum):
    DESTINATION = "destination"
    HANDLER = "handler"
    LISTENER = "listener"


class OpenCircuit(NamedTuple):
    kind: str
    key: str
    reason: str
    since: datetime
    until: datetime | None
    actor: str


def open_circuit(
    conn: Connection, schema: str, kind: Kind, key: str, *, reason: str, actor: str, duration: timedelta | None = None
) -> None:
    """Record that it is open; one that is open already keeps its reason and its start."""
    conn.execute(
        housekeeping.OPEN_CIRCUIT.within(schema),
        {"kind": kind.value, "key": key, "reason": reason, "duration": duration, "actor": actor},
    )


def close_circuit(conn: Connection, schema: str, kind: Kind, key: str) -> None:
    conn.execute(housekeeping.CLOSE_CIRCUIT.within(schema), {"kind": kind.value, "key": key})


def read(conn: Connection, schema: str) -> list[OpenCircuit]:
    return [OpenCircuit(*row) for row in conn.execute(housekeeping.READ_CIRCUITS.within(schema))]
