"""Latched and paused things, one row each, read by every node."""

from __future__ import annotations

from datetime import datetime, timedelta
from enum import StrEnum
from typing import NamedTuple

from sqlalchemy import Connection

from durable.storage import housekeeping
from durable.storage.database import channel


class Kind(StrEnum):
    DESTINATION = "destination"
    HANDLER = "handler"
    LISTENER = "listener"
    KEY = "key"


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


def pause(
    conn: Connection, schema: str, kind: Kind, key: str, *, reason: str, actor: str, duration: timedelta | None
) -> None:
    """Open it now, for this time or until resume(), and tell the nodes at once."""
    conn.execute(
        housekeeping.PAUSE.within(schema),
        _named(schema, kind, key) | {"reason": reason, "duration": duration, "actor": actor},
    )


def resume(conn: Connection, schema: str, kind: Kind, key: str) -> bool:
    """Close it and tell the nodes at once. False when it was not open."""
    return int(conn.execute(housekeeping.RESUME.within(schema), _named(schema, kind, key)).scalar_one()) == 1


def close_ended(conn: Connection, schema: str) -> None:
    """Close those whose time is over."""
    conn.execute(housekeeping.CLOSE_ENDED_CIRCUITS.within(schema))


def _named(schema: str, kind: Kind, key: str) -> dict[str, str]:
    return {"kind": kind.value, "key": key, "channel": channel(schema)}


def count_parked(conn: Connection, schema: str) -> dict[str, int]:
    """How many messages wait of each key that is paused."""
    return {row.key: row.waiting for row in conn.execute(housekeeping.COUNT_PARKED.within(schema))}


def read(conn: Connection, schema: str) -> list[OpenCircuit]:
    """Those that are open now."""
    return [OpenCircuit(*row) for row in conn.execute(housekeeping.READ_CIRCUITS.within(schema))]
