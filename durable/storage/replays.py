"""Replays that were begun: under each name what it chose, in which order and for where."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from sqlalchemy import Connection

from durable.storage.sql import replays as statements


class Begun(NamedTuple):
    """Replay by its name, and the time at which it was begun."""

    name: str
    at: datetime


def newest(conn: Connection, schema: str, limit: int) -> list[Begun]:
    """The replays that were begun last."""
    return [Begun(*row) for row in conn.execute(statements.READ_REPLAYS.within(schema), {"limit": limit})]


def find(conn: Connection, schema: str, name: str) -> dict[str, Any] | None:
    """Read the plan of the replay of this name; None when none was begun."""
    row = conn.execute(statements.FIND_REPLAY.within(schema), {"name": name}).first()
    return None if row is None else dict(row.plan)


def begin(conn: Connection, schema: str, name: str, plan: Mapping[str, Any]) -> dict[str, Any]:
    """Write the plan of a replay, unless it has one; return the plan that it has."""
    conn.execute(statements.BEGIN_REPLAY.within(schema), {"name": name, "plan": json.dumps(plan)})
    found = find(conn, schema, name)
    assert found is not None
    return found


def purge(conn: Connection, schema: str, *, keep: timedelta) -> None:
    """Forget the replays of long ago."""
    conn.execute(statements.PURGE_REPLAYS.within(schema), {"keep": keep})
