"""The history of a run: the ledgers of both services, and what durable's tables say at the end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, NamedTuple
from uuid import UUID

import psycopg

from tests.chaos.fleet import SERVICES

Connect = Callable[[str], psycopg.Connection[Any]]


class Sent(NamedTuple):
    """A message of a committed transaction."""

    id: UUID
    kind: str
    key: str
    number: int
    behaviour: str
    due_at: datetime | None
    deliver_by: datetime | None
    at: datetime


class Effect(NamedTuple):
    """The effect of a handler that was committed; `position` is its place in the table of its service."""

    id: UUID
    kind: str
    key: str
    number: int
    at: datetime
    position: int


class Waiting(NamedTuple):
    """A row of work that is not finished."""

    service: str
    side: str
    id: UUID
    message_type: str
    owner_id: int
    text: str


@dataclass
class History:
    """Everything that the checker judges."""

    sent: dict[UUID, Sent] = field(default_factory=dict)
    effects: list[Effect] = field(default_factory=list)
    dead: Counter[UUID] = field(default_factory=Counter)
    reasons: dict[UUID, str] = field(default_factory=dict)
    """Why each dead letter is one."""
    ended: Counter[tuple[str, str, UUID]] = field(default_factory=Counter)
    """How often a message has ended on a side (service and side), and how."""
    waiting: list[Waiting] = field(default_factory=list)
    circuits: list[str] = field(default_factory=list)
    nodes: list[str] = field(default_factory=list)
    """Registered nodes."""
    complaints: list[str] = field(default_factory=list)
    """Processes that ended in another way than they should."""

    def accounted(self) -> set[UUID]:
        """Ids of messages that are handled, dead-lettered, expired or cancelled."""
        gone = {id for (_, outcome, id) in self.ended if outcome in ("expired", "cancelled")}
        return {effect.id for effect in self.effects} | set(self.dead) | gone

    def progress(self) -> int:
        """Number of messages' ends so far: while it grows, what waits is not stuck."""
        return len(self.effects) + self.dead.total() + self.ended.total()

    def missing(self) -> set[UUID]:
        """Ids of messages that were committed and have no end yet."""
        return set(self.sent) - self.accounted()

    def unfinished(self) -> list[Waiting]:
        """Rows of work; the schedule goes on, and its newest message may always wait."""
        return [row for row in self.waiting if row.message_type != "chaos.tick"]


def read(connect: Connect) -> History:
    """Read the databases of both services, one after the other."""
    history = History()
    for service in SERVICES:
        with connect(service) as conn:
            _read(conn, service, history)
    return history


def _read(conn: psycopg.Connection[Any], service: str, history: History) -> None:
    conn.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
    sent = "SELECT envelope_id, kind, key, number, behaviour, due_at, deliver_by, at FROM sent"
    history.sent |= {row[0]: Sent(*row) for row in conn.execute(sent)}
    effects = "SELECT envelope_id, kind, key, number, at, position FROM effects ORDER BY position"
    history.effects += [Effect(*row) for row in conn.execute(effects)]
    for id, reason in conn.execute("SELECT id, side || ': ' || exception_type FROM durable.dead_letters"):
        history.dead[id] += 1
        history.reasons[id] = reason
    ends = "SELECT side, outcome, id FROM durable.envelope_history WHERE outcome <> 'dead-lettered'"
    history.ended.update((f"{service} {side}", outcome, id) for side, outcome, id in conn.execute(ends))
    for side in ("outgoing", "incoming"):
        rows = conn.execute(
            "SELECT id, message_type, owner_id, attempts || ' attempts, until ' || coalesce(execution_time::text, '-') "
            f"|| ', key ' || coalesce(ordering_key, '-') FROM durable.{side}_envelopes"
        )
        history.waiting += [Waiting(service, side, *row) for row in rows]
    circuits = conn.execute("SELECT kind, key, reason FROM durable.circuits").fetchall()
    history.circuits += [f"{service}: {kind} {key}: {reason}" for kind, key, reason in circuits]
    history.nodes += [f"{service} {name}" for (name,) in conn.execute("SELECT description FROM durable.nodes")]
    conn.execute("COMMIT")
