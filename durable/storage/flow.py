"""The flow of messages: what came to an end in the last hour, and how long it took, as the newest history tells.

Counts are of the newest rows alone: when they do not reach back for an hour, the times say how far they do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from functools import lru_cache
from typing import Final, NamedTuple

from sqlalchemy import Connection

from durable.storage.sql import flow as statements
from durable.storage.sql.statement import Statement

SLICES: Final = 60
LONGEST: Final = timedelta(hours=1)
_MOST_PAGES: Final = 400  # some 15,000 rows without bodies
_NONE: Final = "envelope_history_default"


class Slice(NamedTuple):
    """Messages that came to an end within a slice of the time, and seconds from send() to the end of handling."""

    handled: int = 0
    sent: int = 0
    failed: int = 0
    p50: float | None = None
    p99: float | None = None


class Flow(NamedTuple):
    """The flow from `since` to `now`, in slices of one length, and for each handled message type."""

    now: datetime
    since: datetime
    slices: Sequence[Slice]
    types: Mapping[str, Slice]

    @property
    def length(self) -> timedelta:
        return self.now - self.since

    @property
    def minutes(self) -> float:
        """Length of the whole, never 0."""
        return max(1.0, self.length.total_seconds()) / 60


def read(conn: Connection, schema: str) -> Flow | None:
    """Read the flow; None when no day has any history."""
    parent = {"parent": f'"{schema}".envelope_history'}
    days = [*conn.execute(statements.READ_NEWEST_DAYS.within(schema), parent)]
    if not days:
        return None
    first = _first_page(days[0].pages, _MOST_PAGES)
    day_before = days[1].name if len(days) > 1 else _NONE
    room = max(0, _MOST_PAGES - days[0].pages)
    first_before = _first_page(days[1].pages, room) if len(days) > 1 else 0
    statement = _of_days(days[0].name, day_before)
    params = {
        "first": f"({first},0)",
        "first_before": f"({first_before},0)",
        "longest": LONGEST,
        "slices": SLICES,
    }
    slices, types = [Slice()] * SLICES, dict[str, Slice]()
    now = since = None
    for row in conn.execute(statement.within(schema), params):
        found = Slice(row.incoming, row.outgoing, row.failed, row.p50, row.p99)
        if row.what == "bounds":
            now, since = row.now, row.since
        elif row.what == "type":
            types[row.name] = found
        else:
            slices[row.slice - 1] = found
    return None if now is None or since is None else Flow(now, since, slices, types)


@lru_cache(maxsize=4)
def _of_days(day: str, day_before: str) -> Statement:
    return Statement(statements.READ_FLOW.replace("{day}", day).replace("{day_before}", day_before))


def _first_page(pages: int, most: int) -> int:
    """Return the page from which on the last of them are read: beyond all when none is to be read."""
    return max(0, pages - most) if most else pages
