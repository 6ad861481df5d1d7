"""Parts of a page that are read side by side in one transaction: a part that takes too long leaves the others."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Concatenate, Final, Generic, NamedTuple, ParamSpec, TypeVar

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from durable.storage.outages import GRANT, sqlstate
from durable.storage.sql import upkeep

P = ParamSpec("P")
T = TypeVar("T")

LONGEST: Final = timedelta(seconds=2)
LONGEST_LOCK: Final = timedelta(milliseconds=500)

_REFUSALS: Final = {
    "57014": "the database did not answer in time: it is busy, or has much to look at",
    "55P03": "a table is locked just now, such as by VACUUM FULL or a change of its columns; load the page again",
    "42501": f"this role may not read it; {GRANT}",
    "55000": "pg_stat_statements is installed, and the server has not loaded it",
}


class Look(NamedTuple, Generic[T]):
    """A part that was read, or why it was not."""

    found: T | None
    refusal: str = ""


def limit_times(conn: Connection, schema: str, longest: timedelta = LONGEST) -> None:
    """Bound each statement, and each wait for a lock, until the end of the transaction or the next call."""
    limits = {"statement": _milliseconds(longest), "lock": _milliseconds(LONGEST_LOCK)}
    conn.execute(upkeep.LIMIT_TIMES.within(schema), limits)


def look(
    conn: Connection, schema: str, work: Callable[Concatenate[Connection, str, P], T], *args: P.args, **kwargs: P.kwargs
) -> Look[T]:
    """Run `work(connection, schema, ...)` in a savepoint; tell why where the database refuses it for now."""
    try:
        with conn.begin_nested():
            return Look(work(conn, schema, *args, **kwargs))
    except DBAPIError as error:
        refusal = _REFUSALS.get(sqlstate(error))
        if refusal is None:
            raise
        return Look(None, refusal)


def _milliseconds(time: timedelta) -> str:
    return str(round(time.total_seconds() * 1_000))
