"""Replays that were begun: under each name what it chose, in which order and for where; and the lock that they share.

An erasure holds the same lock alone: what a replay has yet to publish, it would bring back.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from sqlalchemy import Connection

from durable.storage.locks import Job, jobs_class
from durable.storage.sql import replays as statements


class Begun(NamedTuple):
    """Replay by its name, and the time at which it was begun."""

    name: str
    at: datetime


class Readdressed(NamedTuple):
    """Replay under the same ids to this destination, as it was given, and the time at which it was begun."""

    destination: str
    began_at: datetime


def try_lock(conn: Connection, schema: str, *, is_shared: bool) -> bool:
    """Take the lock of replays until unlock(), for as long as this connection lasts, or return False at once."""
    statement = statements.LOCK_SHARED if is_shared else statements.LOCK_ALONE
    return bool(conn.execute(statement.within(schema), _lock(schema)).scalar_one())


def unlock(conn: Connection, schema: str, *, is_shared: bool) -> None:
    """Give it back now, as it was taken."""
    statement = statements.UNLOCK_SHARED if is_shared else statements.UNLOCK_ALONE
    conn.execute(statement.within(schema), _lock(schema))


def has_lock(conn: Connection, schema: str) -> bool:
    """Tell whether this connection still holds it: a new one in its place does not."""
    return bool(conn.execute(statements.HAS_LOCK.within(schema), _lock(schema)).scalar_one())


def newest(conn: Connection, schema: str, limit: int) -> list[Begun]:
    """The replays that were begun last."""
    return [Begun(*row) for row in conn.execute(statements.READ_REPLAYS.within(schema), {"limit": limit})]


def find(conn: Connection, schema: str, name: str) -> dict[str, Any] | None:
    """Read the plan of the replay of this name; None when none was begun."""
    row = conn.execute(statements.FIND_REPLAY.within(schema), {"name": name}).first()
    return None if row is None else dict(row.plan)


def readdressed(conn: Connection, schema: str) -> list[Readdressed]:
    """Read the replays under the same ids that had a destination given, the oldest first."""
    return [Readdressed(*row) for row in conn.execute(statements.READ_READDRESSED.within(schema))]


def begin(conn: Connection, schema: str, name: str, plan: Mapping[str, Any]) -> dict[str, Any]:
    """Write the plan of a replay, unless it has one; return the plan that it has."""
    conn.execute(statements.BEGIN_REPLAY.within(schema), {"name": name, "plan": json.dumps(plan)})
    found = find(conn, schema, name)
    assert found is not None
    return found


def purge(conn: Connection, schema: str, *, keep: timedelta) -> None:
    """Forget the replays of long ago."""
    conn.execute(statements.PURGE_REPLAYS.within(schema), {"keep": keep})


def _lock(schema: str) -> dict[str, int]:
    return {"class_id": jobs_class(schema), "key": int(Job.REPLAY)}
