"""Recurring schedules, one row each for all nodes of the service.

declare()                  by each node that starts; the youngest that lives has the say
lock_due() -> move_on()          an occurrence: in one transaction with the message that it brings
           -> fail()             it brought none, and is tried again
           -> ran_as_asked()     a run by hand, besides the occurrences
           -> fail_as_asked()    it brought no message, and is tried again
ask(), reschedule(), remove_orphan()    by people
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import NamedTuple

from sqlalchemy import Connection

from durable.envelope import NodeId
from durable.storage.database import channel
from durable.storage.sql import schedules as statements


class Declaration(NamedTuple):
    """Declaration of a schedule by a version of the code; `destination` is None where the routes decide."""

    name: str
    cron: str
    tz: str
    misfire: str
    message_type: str | None
    destination: str | None
    declaration: str


class Row(NamedTuple):
    """A schedule. It is an orphan unless the node that declared it lives: then another will have it in a moment, or no
    running code knows of it any more."""

    name: str
    cron: str
    tz: str
    misfire: str
    message_type: str | None
    destination: str | None
    declaration: str
    declared_by: NodeId
    declared_at: datetime
    is_live: bool
    is_paused: bool
    occurrence_at: datetime | None
    due_at: datetime
    due_in: timedelta
    asked_in: timedelta | None
    last_at: datetime | None
    ran_at: datetime | None
    changed_by: str | None
    changed_at: datetime | None
    error: str | None


class Late(NamedTuple):
    """A schedule with an occurrence that is due and has not run."""

    name: str
    is_live: bool
    """Does the node live that has declared it?"""
    late: timedelta
    error: str | None
    """The last one of its function, or of the database, if it was tried."""


class Due(NamedTuple):
    """A locked schedule that is due, or was asked for (`asked_at`); `now` is by the database's clock."""

    occurrence_at: datetime | None
    due_at: datetime
    has_failed: bool
    """Has its last run failed? Then the occurrence that is waited for gives way to a later one only when tried."""
    is_due: bool
    asked_at: datetime | None
    is_paused: bool
    now: datetime
    paused_since: datetime | None
    paused_until: datetime | None
    """The pause that it is in, or the last one, if that ended after it was looked at."""

    def is_same_run(self, other: Due) -> bool:
        """Tell whether the same is to run, by hand or an occurrence: nobody has run or moved it since."""
        if other.asked_at is not None:
            return self.asked_at == other.asked_at
        return (self.occurrence_at, self.due_at) == (other.occurrence_at, other.due_at)


def read(conn: Connection, schema: str, names: Sequence[str] | None = None) -> list[Row]:
    """Read these schedules, or all, by name."""
    params = {"names": None if names is None else list(names)}
    return [Row(*row) for row in conn.execute(statements.READ_SCHEDULES.within(schema), params)]


def names(conn: Connection, schema: str) -> list[str]:
    """Read the names of all schedules that a node has declared."""
    return list(conn.execute(statements.READ_NAMES.within(schema)).scalars())


def troubled_first(rows: Sequence[Row]) -> list[Row]:
    """Sort schedules for a list: those that do not run first."""
    return sorted(rows, key=lambda row: row.is_live and not row.is_paused and row.error is None)


def late(conn: Connection, schema: str, most: int) -> list[Late]:
    """Read the schedules with an occurrence that is due and has not run, the latest first; none of those paused."""
    return [Late(*row) for row in conn.execute(statements.READ_LATE.within(schema), {"most": most})]


def declare(conn: Connection, schema: str, node: NodeId, declared: Sequence[Declaration]) -> None:
    """Store the declarations of this node's code, unless a younger living node has declared them."""
    columns = dict(zip(Declaration._fields, map(list, zip(*declared, strict=True)), strict=True))
    conn.execute(statements.DECLARE_SCHEDULES.within(schema), columns | {"node": node})


def lock_due(conn: Connection, schema: str, name: str, declaration: str) -> Due | None:
    """Lock it until the transaction ends; None when there is nothing to do, or another node is at it."""
    params = {"name": name, "declaration": declaration}
    row = conn.execute(statements.LOCK_DUE_SCHEDULE.within(schema), params).first()
    return None if row is None else Due(*row)


def move_on(
    conn: Connection,
    schema: str,
    name: str,
    *,
    occurrence_at: datetime,
    last_at: datetime | None,
    message_type: str | None,
) -> None:
    """Move a schedule on to this occurrence; `last_at` is the one that ran now, if any did, and `message_type` the type
    of its messages, if it had any.
    """
    params = {"name": name, "occurrence_at": occurrence_at, "last_at": last_at, "message_type": message_type}
    conn.execute(statements.MOVE_SCHEDULE_ON.within(schema), params)


def fail(conn: Connection, schema: str, name: str, *, occurrence_at: datetime, due_at: datetime, error: str) -> None:
    """Show why an occurrence brought no message, and wait for this one: it gives way to a later one only when tried."""
    params = {"name": name, "occurrence_at": occurrence_at, "due_at": due_at, "error": error}
    conn.execute(statements.SCHEDULE_FAILED.within(schema), params)


def ran_as_asked(conn: Connection, schema: str, name: str, *, message_type: str | None) -> None:
    """Note the run that was asked for; `message_type` is that of its messages, if it had any."""
    conn.execute(statements.SCHEDULE_RAN_AS_ASKED.within(schema), {"name": name, "message_type": message_type})


def fail_as_asked(conn: Connection, schema: str, name: str, *, delay: timedelta, error: str) -> None:
    """Show why a run that was asked for brought no message, and try it again after the delay."""
    params = {"name": name, "delay": delay, "error": error}
    conn.execute(statements.SCHEDULE_FAILED_AS_ASKED.within(schema), params)


def ask(conn: Connection, schema: str, name: str, *, actor: str) -> bool:
    """Run a schedule now, besides its occurrences. False when no node is alive to run it."""
    params = {"name": name, "actor": actor, "channel": channel(schema)}
    return conn.execute(statements.ASK_FOR_SCHEDULE.within(schema), params).first() is not None


def reschedule(conn: Connection, schema: str, name: str, *, at: datetime, actor: str) -> bool:
    """Move the next occurrence to this time. False when there is no such schedule, or no next occurrence yet."""
    params = {"name": name, "at": at, "actor": actor, "channel": channel(schema)}
    return conn.execute(statements.RESCHEDULE.within(schema), params).first() is not None


def remove_orphan(conn: Connection, schema: str, name: str) -> bool:
    """Forget a schedule that no living node declares. False when one does, or there is none."""
    return conn.execute(statements.REMOVE_ORPHAN.within(schema), {"name": name}).first() is not None
