"""Counts what goes to the database between two moments: statements, commits and round trips by engine, WAL by server.

Preparing a statement is no round trip here: a connection does that once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import psycopg
from sqlalchemy import event
from sqlalchemy.ext.asyncio import AsyncEngine

from tests.benchmarks.costs.comparing import MessageCost
from tests.benchmarks.rows import Counts, counting


@dataclass
class Meter:
    """Counts of the block that it was made for."""

    statements: int = 0
    commits: int = 0
    transaction_commands: int = 0
    wal_bytes: int = 0

    def cost(self, name: str, messages: int) -> MessageCost:
        return MessageCost(
            name,
            statements=self.statements / messages,
            commits=self.commits / messages,
            round_trips=(self.statements + self.transaction_commands) / messages,
            wal_bytes=self.wal_bytes / messages,
        )


@contextmanager
def metering(url: str, engines: Sequence[AsyncEngine]) -> Iterator[Meter]:
    """Count what these engines do, and the WAL of the server of this database. Nothing else may run there."""
    meter = Meter()
    with psycopg.connect(url, autocommit=True) as conn, ExitStack() as stack:
        began = _wal(conn)
        counts = [stack.enter_context(counting(engine)) for engine in engines]
        commands = [stack.enter_context(_commands(engine)) for engine in engines]
        yield meter
        meter.wal_bytes = _wal(conn) - began
        meter.statements = sum(count.statements for count in counts)
        meter.commits = sum(count.commits for count in counts)
        meter.transaction_commands = sum(count.statements for count in commands)


@contextmanager
def _commands(engine: AsyncEngine) -> Iterator[Counts]:
    """Count the commands without parameters, which the driver sends by itself: BEGIN, COMMIT and ROLLBACK."""
    counts = Counts()

    def logged(_: object) -> None:
        counts.statements += 1

    def checked_out(connection: Any, *_: object) -> None:
        connection.driver_connection.add_query_logger(logged)  # a second time adds nothing

    event.listen(engine.sync_engine, "checkout", checked_out)
    try:
        yield counts
    finally:
        event.remove(engine.sync_engine, "checkout", checked_out)


def _wal(conn: psycopg.Connection) -> int:
    row = conn.execute("SELECT pg_current_wal_insert_lsn() - '0/0'").fetchone()
    assert row is not None
    return int(row[0])
