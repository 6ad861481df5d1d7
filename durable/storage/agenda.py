"""The agenda of a round of recovery, read at one moment: an idle node costs its database one transaction a round."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import NamedTuple

from sqlalchemy import Connection

from durable.storage import circuits
from durable.storage.circuits import OpenCircuit
from durable.storage.sql.agenda import READ_AGENDA
from durable.storage.sql.work import ALONG_THE_INDEX_BY_ONE_PLAN


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
    took: timedelta = timedelta(0)
    """The time that the database has spent on it."""


class Lanes(NamedTuple):
    """Lanes of a short look, each with the place in its queue at which it begins."""

    destinations: Mapping[str, int]
    message_types: Mapping[str, int]


def read(conn: Connection, schema: str, *, after: str, count: int, known: Lanes | None = None) -> Agenda:
    """Read the agenda, with at most `count` destinations behind this one.

    `known`: look for nothing else than these, as far as neither keys nor shares are concerned.
    """
    conn.execute(ALONG_THE_INDEX_BY_ONE_PLAN.within(schema))
    open_now = circuits.read(conn, schema)
    destinations, types = known or Lanes({}, {})
    params = {
        "after": after,
        "count": count,
        "is_short": known is not None,
        "known_destinations": list(destinations),
        "destination_floors": list(destinations.values()),
        "known_types": list(types),
        "type_floors": list(types.values()),
    }
    return Agenda(open_now, *conn.execute(READ_AGENDA.within(schema), params).one())
