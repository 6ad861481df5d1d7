"""The row that the database refuses never takes its batch along.

    all together --refused--> halves --refused--> ... --refused--> one row, which becomes a dead letter,
          |                     |                                  or is marked where not even that can be done
          v                     v                                  (owner -1), or is left where it is, with a log line
        done                  done

Each try is a savepoint of the caller's transaction. That takes two round trips, and hardly any row is refused: so
durable.storage.database first runs a transaction without_savepoints(), and once more, by try_by_try(), when one is
needed. A constraint or a trigger that is put off to the COMMIT is checked at the end of each try then.

A trigger may choose any code for its error; so all are tried but what passes (locks, connections, resources:
durable.storage.outages) and what is missing altogether (tables, columns, functions): these are raised. A code that may
as well tell of the wiring, such as a missing right, is the row's own only where others pass, or, of a row that is
alone, where the statement works over no rows.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, Concatenate, Final, NamedTuple, ParamSpec, TypeVar

from sqlalchemy import Connection, Row
from sqlalchemy.exc import DBAPIError

from durable.envelope import LeasedEnvelope, LeaseKey, NodeId
from durable.errors import InvalidMessage
from durable.storage.outages import is_passing, sqlstate
from durable.storage.rows import REFUSED, UNREADABLE, Letter, key_of, leased, storable
from durable.storage.sql.recovery import INCOMING, REFUSED_OWNER, Recovery
from durable.storage.sql.statement import Batched
from durable.telemetry import log

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
Refused = Callable[[R, str], None]
"""Takes a row that the database refuses, with its reason."""
Buried = Callable[[Connection, str, NodeId, Row[Any], Letter], None]
"""Takes a message of the inbox that has become a dead letter because of its row, in the transaction of its letter."""

_MISSING: Final = ("42P01", "42703", "42883")
"""No such table, column or function: of every row alike, also where a trigger meets it."""
_OF_THE_WIRING: Final = ("0A", "3F", "42")
"""What is not supported, a schema that is missing, rights and syntax: of every row alike, unless others pass."""
_SINGLING_OUT: Final = 10.0
"""Seconds of a transaction; each refused row takes some twenty round trips, and the transaction has a limit."""
_TRUSTING: Final = "durable_tries_without_savepoints"  # among the attributes of a connection, as the next
_CHECKING: Final = "durable_checks_what_is_put_off"
_BURYING: Final = "durable_hears_of_burials"
_DRIVERS_PREFIX: Final = re.compile(r"^<class '[^']*'>: ")


class Refusal(NamedTuple):
    """An error of a statement that may be the fault of a row."""

    reason: str
    """The error in one line and without the row."""
    error: DBAPIError

    @property
    def may_be_of_the_wiring(self) -> bool:
        """True for an error that may concern every row alike."""
        return sqlstate(self.error).startswith(_OF_THE_WIRING)


def refusal(error: DBAPIError) -> Refusal | None:
    """Return the likely reason why the database refuses the data; None when the cause is another."""
    state = sqlstate(error)
    if not state or state.startswith(_MISSING) or is_passing(error):
        return None
    return Refusal(storable(_DRIVERS_PREFIX.sub("", str(error.orig)).partition("\n")[0], 1_000), error)


class SavepointsNeeded(Exception):
    """The database refuses a row in a transaction without savepoints, or its COMMIT: nothing of it is done."""


def without_savepoints(work: Callable[Concatenate[Connection, P], T]) -> Callable[Concatenate[Connection, P], T]:
    """The same work, which raises SavepointsNeeded instead of trying again; it is the whole of a transaction."""

    def trusting(conn: Connection, /, *args: P.args, **kwargs: P.kwargs) -> T:
        vars(conn)[_TRUSTING] = True
        return work(conn, *args, **kwargs)

    return trusting


def try_by_try(work: Callable[Concatenate[Connection, P], T]) -> Callable[Concatenate[Connection, P], T]:
    """The same work, in which each try ends as a COMMIT would; it is the whole of a transaction.

    Raises InvalidMessage when the COMMIT would refuse what is outside any try.
    """

    def checking(conn: Connection, /, *args: P.args, **kwargs: P.kwargs) -> T:
        vars(conn)[_CHECKING] = True
        result = work(conn, *args, **kwargs)
        with refusals_named():
            _check_what_was_put_off(conn)
        return result

    return checking


def hear_of_burials(conn: Connection, buried: Buried) -> None:
    """Let this hear of the messages that a transaction of this connection buries."""
    vars(conn)[_BURYING] = buried


def _ignored(conn: Connection, schema: str, node: NodeId, buried: Row[Any], letter: Letter) -> None:
    pass


def _check_what_was_put_off(conn: Connection) -> None:
    conn.exec_driver_sql("SET CONSTRAINTS ALL IMMEDIATE")


def commit(conn: Connection) -> None:
    """Commit. Raises SavepointsNeeded where the database refuses the COMMIT, of a transaction without savepoints,
    because of the data.
    """
    try:
        conn.commit()
    except DBAPIError as error:
        if _TRUSTING not in vars(conn) or refusal(error) is None:
            raise
        raise SavepointsNeeded from error


class RefusedPerhaps(InvalidMessage):
    """The database refuses these rows, with a code that may as well tell of the wiring."""

    def __init__(self, text: str, code: str) -> None:
        super().__init__(text)
        self.code = code


@contextmanager
def refusals_named() -> Iterator[None]:
    """Raise InvalidMessage where the database refuses the data, and RefusedPerhaps where that is not certain."""
    try:
        yield
    except DBAPIError as error:
        if (found := refusal(error)) is None:
            raise
        text = f"the database refuses the data: {found.reason}"
        if found.may_be_of_the_wiring:
            raise RefusedPerhaps(text, sqlstate(error)) from error
        raise InvalidMessage(text) from error


def isolated(
    conn: Connection,
    rows: Sequence[R],
    work: Callable[[Sequence[R]], T],
    refused: Refused[R],
    *,
    until: float = math.inf,
) -> list[T]:
    """Run the work for all rows at once; where the database refuses it, for each half of them.

    Returns what the work returned, once for each part of the rows, in their order. A row that is refused alone goes to
    `refused`, unless it seems that the trouble is none of the rows': then the error is raised. The work must be able to
    do nothing, for no rows. After `until`, on the monotonic clock, no further rows are singled out: they are left.
    """
    if not rows:
        return []
    done, found = _tried(conn, lambda: work(rows))
    if found is None:
        return done
    if found.may_be_of_the_wiring and _tried(conn, lambda: work(()))[1] is not None:
        raise found.error
    parts = _halved(conn, rows, work, found, until)
    if len(rows) > 1 and all(failed for _, failed in parts) and _alike([each for _, [(_, each)] in parts]):
        raise found.error
    results: list[T] = []
    for done, failed in parts:
        results += done
        for row, before in failed:
            again, why_not = _tried_again(conn, row, work, before)
            results += again
            if why_not is not None:
                refused(row, why_not.reason)
    return results


_Part = tuple[list[T], list[tuple[R, Refusal]]]
"""The result of the work for some rows, or a row that is refused alone."""


def _halved(
    conn: Connection, rows: Sequence[R], work: Callable[[Sequence[R]], T], found: Refusal, until: float
) -> list[_Part[T, R]]:
    """Run the work for halves of rows that are refused together; return the parts in the order of the rows."""
    if len(rows) == 1:
        return [([], [(rows[0], found)])]
    parts: list[_Part[T, R]] = []
    middle = len(rows) // 2
    for part in (rows[:middle], rows[middle:]):
        if any(failed for _, failed in parts) and time.monotonic() > until:
            break
        done, why_not = _tried(conn, partial(work, part))
        parts += [(done, [])] if why_not is None else _halved(conn, part, work, why_not, until)
    return parts


def _tried_again(
    conn: Connection, row: R, work: Callable[[Sequence[R]], T], before: Refusal
) -> tuple[list[T], Refusal | None]:
    """Try a row again that was refused, perhaps because of the wiring, which may have been put right meanwhile. Raises
    the error when it was not.
    """
    if not before.may_be_of_the_wiring:
        return [], before
    if _tried(conn, lambda: work(()))[1] is not None:
        raise before.error
    return _tried(conn, lambda: work([row]))


def _alike(found: Sequence[Refusal]) -> bool:
    """Tell whether all refusals have the same code, of the wiring."""
    return len({sqlstate(each.error) for each in found}) == 1 and found[0].may_be_of_the_wiring


def batch(
    conn: Connection, schema: str, statement: Batched, params: Mapping[str, Any], refused: Refused[Row[Any]]
) -> list[Row[Any]]:
    """Run a statement over the next rows; where the database refuses one of them, over the others.

    `refused` takes the row as the statement's `key` names it. A row that cannot be put aside stays in the way: the next
    rows behind it are taken all the same. Many refused rows may take long on a distant database: those that are not
    reached in time are of the next call.
    """
    done, reason = tried(conn, lambda: conn.execute(statement.whole.within(schema), params).all())
    if reason is None:
        return list(done[0])
    keys = conn.execute(statement.keys.within(schema), params).all()
    width = len(keys[0]) if keys else 0

    def named(part: Sequence[Row[Any]]) -> Sequence[Row[Any]]:
        only = {f"only_{number}": [row[number] for row in part] for number in range(width)}
        return conn.execute(statement.named.within(schema), {**params, **only}).all()

    found = isolated(conn, keys, named, refused, until=time.monotonic() + _SINGLING_OUT)
    return [row for rows in found for row in rows]


def count(conn: Connection, schema: str, statement: Batched, params: Mapping[str, Any], refused: Refused[Any]) -> int:
    """batch(), of a statement that returns a count."""
    return sum(int(row[0]) for row in batch(conn, schema, statement, params, refused))


def quarantining(conn: Connection, schema: str, table: Recovery, node: NodeId, doing: str) -> Refused[Any]:
    """Put a refused row of this table of work aside, whoever owns it: as a dead letter, or else by a mark.

    Rows are named by id, address and epoch, as leases are; `doing` is a verb for the reason.
    """

    def refused(row: LeaseKey, reason: str) -> None:
        letter = Letter.because(f"the database refuses to {doing} this row: {reason}", REFUSED)
        _put_aside(conn, schema, table, node, row, letter, f"the database refuses to {doing} it: {reason}")

    return refused


class Claimed(NamedTuple):
    """Rows that a node owns now: messages, and rows that cannot be read, each with the reason."""

    leases: list[LeasedEnvelope]
    unreadable: list[tuple[LeaseKey, str]]


def read(claimed: Iterable[Row[Any]]) -> Claimed:
    """Read claimed rows. Those that cannot be read are for put_aside()."""
    found = Claimed([], [])
    for row in claimed:
        try:
            found.leases.append(leased(row))
        except InvalidMessage as error:
            found.unreadable.append((key_of(row), str(error)))
    return found


def put_aside(
    conn: Connection, schema: str, table: Recovery, node: NodeId, unreadable: Iterable[tuple[LeaseKey, str]]
) -> None:
    """Make dead letters of rows that this node owns and cannot read; where that is refused, mark them."""
    for row, why in unreadable:
        letter = Letter.because(f"the row cannot be read: {why}", UNREADABLE)
        _put_aside(conn, schema, table, node, row, letter, f"cannot be read: {why}")


def readable(
    conn: Connection, schema: str, table: Recovery, node: NodeId, claimed: Iterable[Row[Any]]
) -> list[LeasedEnvelope]:
    """Return the claimed rows, in the transaction of their claim; one that cannot be read becomes a dead letter, and
    the others go on.
    """
    leases, unreadable = read(claimed)
    put_aside(conn, schema, table, node, unreadable)
    return leases


def _put_aside(
    conn: Connection,
    schema: str,
    table: Recovery,
    node: NodeId,
    row: LeaseKey,
    letter: Letter,
    why: str,
) -> None:
    envelope_id, address, epoch = row
    key = {"id": envelope_id, "address": address, "epoch": epoch}
    params = key | {"node": node} | letter.parameters()

    def bury() -> bool:
        moved = conn.execute(table.quarantine.within(schema), params).all()
        hears: Buried = vars(conn).get(_BURYING, _ignored)
        for message in moved if table is INCOMING else ():
            hears(conn, schema, node, message, letter)
        return bool(moved)

    buried, why_not = tried(conn, bury)
    if why_not is None:
        if buried[0]:
            log.error("row %s at %s dead-lettered: %s", envelope_id, address, why)
        return
    _, why_unmarked = tried(conn, lambda: conn.execute(table.mark_refused.within(schema), key).all())
    outcome = "left as it is" if why_unmarked else f"marked by owner_id {REFUSED_OWNER}"
    log.error(
        "row %s at %s cannot become a dead letter, %s: %s; %s", envelope_id, address, outcome, why, why_not,
    )  # fmt: skip


def left_alone(doing: str, name: Callable[[Any], object] = lambda row: row) -> Refused[Any]:
    """Leave a refused row as it is, and log it by this name."""

    def refused(row: Any, reason: str) -> None:
        log.error("the database refuses to %s %s, left as it is: %s", doing, name(row), reason)

    return refused


def tried(conn: Connection, work: Callable[[], T]) -> tuple[list[T], str | None]:
    """The result, in a list, or why the database refuses it: then it is as if it had not been tried."""
    done, found = _tried(conn, work)
    return done, None if found is None else found.reason


def _tried(conn: Connection, work: Callable[[], T]) -> tuple[list[T], Refusal | None]:
    is_trusting = _TRUSTING in vars(conn)
    try:
        with nullcontext() if is_trusting else conn.begin_nested():
            done = work()
            if _CHECKING in vars(conn):
                _check_what_was_put_off(conn)
            return [done], None
    except DBAPIError as error:
        if (found := refusal(error)) is None:
            raise
        if is_trusting:
            raise SavepointsNeeded from error
        return [], found
