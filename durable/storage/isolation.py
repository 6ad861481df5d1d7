"""The row that the database refuses never takes its batch along.

    all together --refused--> halves --refused--> ... --refused--> one row, which becomes a dead letter,
          |                     |                                  or is marked where not even that can be done
          v                     v                                  (owner -1), or is left where it is, with a log line
        done                  done

Each try is a savepoint of the caller's transaction. Refusals are about data: limits of an index, constraints, triggers,
pages that cannot be read. What passes (locks, connections, resources) and what concerns every row alike (rights, tables
that are missing) is raised as before.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, TypeVar

from sqlalchemy import Connection, Row
from sqlalchemy.exc import DBAPIError

from durable.envelope import Lease, NodeId
from durable.errors import InvalidMessage
from durable.storage.recovery_statements import REFUSED_OWNER, Recovery
from durable.storage.rows import Letter, storable
from durable.storage.statements import Batched
from durable.telemetry import log

R = TypeVar("R")
T = TypeVar("T")
Refused = Callable[[R, str], None]
"""Takes a row that the database refuses, with its reason."""

_REFUSALS: Final = ("09", "21", "22", "23", "27", "38", "39", "44", "54", "P0", "XX001", "XX002")
# triggers · cardinality · data · constraints · triggered changes · functions in triggers · checks of views · limits of
# the program, as of an index · RAISE · rows and indexes that are corrupt
_DRIVERS_PREFIX: Final = re.compile(r"^<class '[^']*'>: ")


def refusal(error: DBAPIError) -> str | None:
    """The reason why the database refuses the data, in one line and without the row; None: that is not the trouble."""
    state = getattr(error.orig, "sqlstate", None) or ""
    if not state.startswith(_REFUSALS):
        return None
    return storable(_DRIVERS_PREFIX.sub("", str(error.orig)).partition("\n")[0], 1_000)


@contextmanager
def refusals_named() -> Iterator[None]:
    """Raise InvalidMessage where the database refuses the data."""
    try:
        yield
    except DBAPIError as error:
        if (reason := refusal(error)) is None:
            raise
        raise InvalidMessage(f"the database refuses the data: {reason}") from error


def isolated(conn: Connection, rows: Sequence[R], work: Callable[[Sequence[R]], T], refused: Refused[R]) -> list[T]:
    """Do the work for all these rows at once; where the database refuses it, for each half of them.

    Returns what the work returned, once for each part of the rows, in their order. A row that is refused alone goes to
    `refused`.
    """
    if not rows:
        return []
    done, reason = tried(conn, lambda: work(rows))
    if reason is None:
        return done
    if len(rows) == 1:
        refused(rows[0], reason)
        return []
    middle = len(rows) // 2
    return [*isolated(conn, rows[:middle], work, refused), *isolated(conn, rows[middle:], work, refused)]


def batch(
    conn: Connection, schema: str, statement: Batched, params: Mapping[str, Any], refused: Refused[Row[Any]]
) -> list[Row[Any]]:
    """Run a statement over the next rows; where the database refuses one of them, over the others.

    `refused` takes the row as the statement's `key` names it. What it can do nothing about stays in the way: the next
    rows behind it are taken all the same.
    """
    done, reason = tried(conn, lambda: conn.execute(statement.whole.within(schema), params).all())
    if reason is None:
        return list(done[0])
    keys = conn.execute(statement.keys.within(schema), params).all()

    def named(part: Sequence[Row[Any]]) -> Sequence[Row[Any]]:
        return conn.execute(statement.named.within(schema), {**params, **_columns(part)}).all()

    return [row for rows in isolated(conn, keys, named, refused) for row in rows]


def count(conn: Connection, schema: str, statement: Batched, params: Mapping[str, Any], refused: Refused[Any]) -> int:
    """batch(), of a statement that returns a count."""
    return sum(int(row[0]) for row in batch(conn, schema, statement, params, refused))


def quarantining(conn: Connection, schema: str, table: Recovery, node: NodeId, doing: str) -> Refused[Any]:
    """Puts a refused row of this table of work aside, whoever owns it: as a dead letter, or else by a mark.

    Rows are named by id, address and epoch, as leases are; `doing` is a verb for the reason.
    """

    def refused(row: Lease, reason: str) -> None:
        envelope_id, address, epoch = row
        key = {"id": envelope_id, "address": address, "epoch": epoch}
        letter = Letter.because(f"the database refuses to {doing} this row: {reason}", "refused by the database")
        params = key | {"node": node} | letter.parameters()
        buried, why_not = tried(conn, lambda: conn.execute(table.quarantine.within(schema), params).all())
        if why_not is None:
            if buried[0]:
                log.error("the database refuses to %s %s at %s, dead-lettered: %s", doing, envelope_id, address, reason)
            return
        _, why_unmarked = tried(conn, lambda: conn.execute(table.mark_refused.within(schema), key).all())
        outcome = "left as it is" if why_unmarked else f"marked by owner_id {REFUSED_OWNER}"
        log.error(
            "the database refuses to %s %s at %s, and to make it a dead letter, %s: %s; %s",
            doing, envelope_id, address, outcome, reason, why_not,
        )  # fmt: skip

    return refused


def left_alone(doing: str) -> Refused[Any]:
    """Leaves a refused row as it is, and tells it to the log."""

    def refused(row: Any, reason: str) -> None:
        log.error("the database refuses to %s %s, left as it is: %s", doing, row, reason)

    return refused


def _columns(keys: Sequence[Row[Any]]) -> dict[str, list[Any]]:
    return {f"only_{number}": list(column) for number, column in enumerate(zip(*keys, strict=True))}


def tried(conn: Connection, work: Callable[[], T]) -> tuple[list[T], str | None]:
    """The result, in a list, or why the database refuses it: then it is as if it had not been tried."""
    try:
        with conn.begin_nested():
            return [work()], None
    except DBAPIError as error:
        if (reason := refusal(error)) is None:
            raise
        return [], reason
