"""The agenda of a round of recovery, read at one moment: an idle node costs its database one transaction a round."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import NamedTuple

from sqlalchemy import Connection

from durable.storage import circuits
from durable.storage.circuits import OpenCircuit
from durable.storage.sql.agenda import READ_AGENDA


class Agenda(NamedTuple):
    """Work that has no owner, and the circuits that are open."""

    circuits: Sequence[OpenCircuit] = ()
    destinations: Sequence[str] = ()
    """The next ones behind a given one."""
    message_types: Sequence[str] = ()
    shared_destinations: Sequence[str] = ()
    shared_types: Sequence[str] = ()
    is_ordered: bool = False
    """Does something wait in an order?"""
    is_due: bool = False
    """Has a message come to its time that is not marked as due?"""
    is_late: bool = False
    """Has one passed its deadline?"""
    next_due_in: timedelta | None = None
    """The time until the next message is due; None when none waits for its time."""


def read(conn: Connection, schema: str, *, after: str, count: int) -> Agenda:
    """Read the agenda, with at most `count` destinations behind this one."""
    open_now = circuits.read(conn, schema)
    return Agenda(open_now, *conn.execute(READ_AGENDA.within(schema), {"after": after, "count": count}).one())
