"""What the databases of a sender and a receiver say in the end, and which invariants that breaks.

Both services keep books of their own, in tables that durable knows nothing of: `orders` gets a row in the transaction
that sends, `effects` one in the transaction that handles. durable's promise is about these two tables.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from uuid import UUID

import psycopg

TABLES = """
CREATE TABLE orders (order_id integer PRIMARY KEY, envelope_id uuid NOT NULL);
CREATE TABLE effects (envelope_id uuid NOT NULL, order_id integer NOT NULL, process integer NOT NULL);
CREATE TABLE gate (opened boolean NOT NULL);
"""

STEPS = """
CREATE TABLE steps (position bigint GENERATED ALWAYS AS IDENTITY, key text NOT NULL, number integer NOT NULL,
    process integer NOT NULL);
"""


class Row(NamedTuple):
    """A row of work that is not finished."""

    side: str
    id: UUID
    owner_id: int
    epoch: int
    scheduled: bool


@dataclass
class Books:
    """Everything that the invariants are about."""

    sent: dict[UUID, int] = field(default_factory=dict)
    effects: Counter[UUID] = field(default_factory=Counter)
    dead: Counter[UUID] = field(default_factory=Counter)
    settled: Counter[tuple[str, str, UUID]] = field(default_factory=Counter)
    pending: list[Row] = field(default_factory=list)
    nodes: list[int] = field(default_factory=list)
    """The process of each registered node."""

    def violations(self, *, at_rest: bool = True) -> list[str]:
        """One sentence for each breach of an invariant. `at_rest`: everything should be finished by now."""
        waiting = {row.id for row in self.pending}
        expired = self.finished("outgoing", "expired") | self.finished("incoming", "expired")
        cancelled = self.finished("outgoing", "cancelled") | self.finished("incoming", "cancelled")
        accounted = self.effects.keys() | self.dead.keys() | expired | cancelled | waiting
        found = [f"I1 lost: {self._name(lost)} was committed and is nowhere" for lost in self.sent.keys() - accounted]
        found += [f"I2 {self._name(key)} has {count} effects" for key, count in self.effects.items() if count > 1]
        found += [f"I3 ghost: {key} has an effect and was never committed" for key in self.effects.keys() - self.sent]
        found += [f"I8 {self._name(key)} has an effect, and is dead too" for key in self.dead.keys() & self.effects]
        found += [
            f"I8 {self._name(key)} was settled {count} times as {side}"
            for (side, key), count in self._endings().items()
            if count > 1
        ]
        if at_rest:
            found += [f"I1 {self._name(row.id)} still waits: {row}" for row in self.pending]
        return sorted(found)

    def violations_after_shutdown(self) -> list[str]:
        """After every service has stopped in good order."""
        found = self.violations()
        found += [f"I9 {self._name(row.id)} is still owned: {row}" for row in self.pending if row.owner_id]
        found += [f"the node of process {process} is still registered" for process in self.nodes]
        return found

    def waiting(self, side: str, *, owned: bool | None = None) -> list[Row]:
        """Unfinished rows of this side; only those that have an owner, or have none."""
        return [row for row in self.pending if row.side == side and owned in (None, bool(row.owner_id))]

    def finished(self, side: str, outcome: str) -> set[UUID]:
        return {key for (each_side, each_outcome, key) in self.settled if (each_side, each_outcome) == (side, outcome)}

    def _endings(self) -> Counter[tuple[str, UUID]]:
        endings = Counter[tuple[str, UUID]]()
        for (side, _, key), count in self.settled.items():
            endings[side, key] += count
        return endings

    def _name(self, envelope_id: UUID) -> str:
        return f"order {self.sent.get(envelope_id, '?')} ({envelope_id})"


def open_books(*urls: str) -> None:
    """Make the business tables in these databases."""
    for url in urls:
        with psycopg.connect(url) as conn:
            conn.execute(TABLES)


def read_books(*urls: str) -> Books:
    """The books of these databases together: a sender's and a receiver's, or one that is both."""
    books = Books()
    for url in urls:
        with _look(url) as conn:
            conn.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
            _read(conn, books)
    return books


def close_books() -> None:
    """Close the connections that were kept for reading."""
    while _kept:
        _kept.popitem()[1].close()


_kept: dict[str, psycopg.Connection[Any]] = {}


@contextmanager
def _look(url: str) -> Iterator[psycopg.Connection[Any]]:
    """A transaction on the connection that is kept to this database: tests look many times, and a new connection takes
    the server longer than all that they ask.
    """
    conn = _kept.get(url)
    if conn is None or not _answers(conn):
        conn = _kept[url] = psycopg.connect(url)
    with conn.transaction():
        yield conn


def _answers(conn: psycopg.Connection[Any]) -> bool:
    try:
        conn.execute("SELECT 1")
        conn.rollback()
    except psycopg.OperationalError:  # the server was restarted
        conn.close()
        return False
    return True


def _read(conn: psycopg.Connection[Any], books: Books) -> None:
    books.sent |= dict(conn.execute("SELECT envelope_id, order_id FROM orders").fetchall())
    books.effects.update(row[0] for row in conn.execute("SELECT envelope_id FROM effects"))
    books.dead.update(row[0] for row in conn.execute("SELECT id FROM durable.dead_letters WHERE id IS NOT NULL"))
    books.settled.update(conn.execute("SELECT side, outcome, id FROM durable.envelope_history").fetchall())
    for side in ("outgoing", "incoming"):
        rows = conn.execute(
            f"SELECT '{side}', id, owner_id, epoch, execution_time IS NOT NULL FROM durable.{side}_envelopes"
        )
        books.pending += [Row(*row) for row in rows]
    # A node describes itself as host:process.
    nodes = conn.execute("SELECT CAST(split_part(description, ':', 2) AS integer) FROM durable.nodes ORDER BY 1")
    books.nodes += [process for (process,) in nodes]


def count_old_ids(url: str) -> int:
    """How many ids that carry no day are remembered."""
    with _look(url) as conn:
        row = conn.execute("SELECT count(*) FROM durable.undated_ids").fetchone()
    assert row is not None
    return int(row[0])


def waits_for_a_lock(url: str) -> bool:
    """Does anybody in this database wait for what another transaction holds?"""
    with psycopg.connect(url) as conn:
        waiting = "SELECT 1 FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
        return conn.execute(waiting).fetchone() is not None


def violations_of_order(url: str, keys: int, numbers: int) -> list[str]:
    """I5: of each key the steps 0, 1, 2, ... once each, in this order."""
    with psycopg.connect(url) as conn:
        steps = conn.execute("SELECT key, array_agg(number ORDER BY position) FROM steps GROUP BY key").fetchall()
    found = [f"I5 {key} was handled as {order}" for key, order in steps if order != list(range(numbers))]
    if len(steps) != keys:
        found.append(f"I1 {keys - len(steps)} keys were never handled")
    return sorted(found)
