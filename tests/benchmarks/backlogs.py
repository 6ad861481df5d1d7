"""Handling beside a large backlog: the rate, and the time of a claim, relative to a backlog of 10,000.

    10,000 rows        filled anew in each round     a node handles 8,000 of them
    1,000,000 rows     filled once                   a node handles 8,000 of them in each round
    100,000 rows       behind 300,000 that were handled since another transaction began, whose snapshot keeps them from
                       vacuum: ten minutes of 500 messages a second. Its node handles 80,000, and the claim is one that
                       looks for what may have come back, from the beginning of the queue

The first two once without keys, and once with a key of its own for each row. The rate is that of the messages behind
the first 1,000, so that the start of the node is not in it. The last 2,000 would be in memory, and their node without
claims, in the small one alone. A claim is durable's own, of a batch: a transaction that is rolled back, on a warm
connection; with keys, the look for the next keys is a part of it.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Final

import psycopg
from sqlalchemy import Connection, text
from sqlalchemy.ext.asyncio import AsyncSession

from durable import Bus
from durable.embedded import postgres
from durable.envelope import NodeId
from durable.errors import InvalidSetting
from durable.settings import load_settings
from durable.storage import inbox, ordering
from durable.storage.database import Database
from durable.storage.ordering import Lane, Turn, Turns
from durable.telemetry import Event
from tests.benchmarks import filling, floor
from tests.benchmarks.databases import Databases
from tests.benchmarks.floor import Note
from tests.benchmarks.progressing import progress
from tests.benchmarks.racing import until
from tests.benchmarks.rows import Relation

ROWS: Final = 1_000_000
SMALL: Final = 10_000
HANDLED: Final = 8_000
WARM_UP: Final = 1_000
CLAIMS: Final = 25
_NODE: Final = NodeId(1)
_INSERT: Final = text("INSERT INTO business (number) SELECT unnest(CAST(:numbers AS integer[]))")

KEPT: Final = 300_000
"""Handled rows that the snapshot keeps."""

Claim = Callable[[Connection, str], int]
"""Claims a batch, and returns how many rows that were."""


@dataclass
class Backlog:
    """What was measured beside so many rows: messages a second, and milliseconds of a claim; the best of each round."""

    rate: float = 0.0
    claim: float = float("inf")

    def measured(self, rate: float, claim: float) -> None:
        self.rate = max(self.rate, rate)
        self.claim = min(self.claim, claim)


def relations(small: Backlog, large: Backlog, rows: int, kind: str) -> list[Relation]:
    """Compare the large backlog with the small one."""
    beside = f"{SMALL:,} rows wait"
    return [
        Relation(f"handle while {rows:,} rows wait, {kind}", beside, "messages/s", small.rate, large.rate),
        Relation(f"claim a batch of {rows:,} rows, {kind}", beside, "ms", small.claim, large.claim),
    ]


def run(rounds: int, rows: int | None = None) -> list[Relation]:
    """Measure both kinds of rows. Raises InvalidSetting for a backlog that the rounds would use up."""
    count = rows or ROWS
    if count < 2 * rounds * HANDLED:
        raise InvalidSetting(f"--rows {count}: {rounds} rounds use up {rounds * HANDLED}; give at least twice as many")
    with tempfile.TemporaryDirectory() as folder, postgres(Path(folder)) as server:
        databases = Databases(server)
        return [
            *_compare(databases, rounds, count, is_keyed=False),
            *_compare(databases, rounds, count, is_keyed=True),
            *_compare_kept(databases, rounds, min(count, KEPT)),
        ]


def _compare(databases: Databases, rounds: int, rows: int, *, is_keyed: bool) -> list[Relation]:
    small, large = Backlog(), Backlog()
    kind = "a key each" if is_keyed else "no keys"
    large_url = databases.fresh()
    with progress(f"{rows:,} rows, {kind}", rows) as advance:
        filling.fill_inbox(large_url, rows, is_keyed=is_keyed, advance=advance)
    with progress(f"backlogs, {kind}", rounds) as advance:
        for _ in range(rounds):
            small_url = databases.fresh()
            filling.fill_inbox(small_url, SMALL, is_keyed=is_keyed)
            for backlog, url in ((small, small_url), (large, large_url)):
                claim = asyncio.run(_time_claims(url, _claim_keys if is_keyed else _claim_free))
                backlog.measured(asyncio.run(_rate(url)), claim)
            advance(1)
    return relations(small, large, rows, kind)


def _compare_kept(databases: Databases, rounds: int, rows: int) -> list[Relation]:
    free, kept = Backlog(), Backlog()
    with progress("an open snapshot", rounds) as advance:
        for _ in range(rounds):
            for backlog, handled in ((free, 0), (kept, rows)):
                url = databases.fresh()
                with psycopg.connect(url) as snapshot:
                    _open_snapshot(snapshot)
                    _leave_handled(url, handled)
                    filling.fill_inbox(url, 10 * SMALL)
                    claim = asyncio.run(_time_claims(url, _claim_free))
                    backlog.measured(asyncio.run(_rate(url, 10)), claim)
            advance(1)
    name, beside = f"behind {rows:,} handled rows that a snapshot keeps", "no such rows"
    return [
        Relation(f"handle {name}", beside, "messages/s", free.rate, kept.rate),
        Relation(f"claim a batch {name}, from the beginning", beside, "ms", free.claim, kept.claim),
    ]


def _open_snapshot(conn: psycopg.Connection) -> None:
    conn.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
    conn.execute("SELECT")


def _leave_handled(url: str, rows: int) -> None:
    """Let so many rows be claimed and finished."""
    filling.fill_inbox(url, rows)
    with psycopg.connect(url, autocommit=True) as conn:
        conn.execute("UPDATE durable.incoming_envelopes SET owner_id = 1, epoch = 1")
        conn.execute("DELETE FROM durable.incoming_envelopes")


async def _rate(url: str, times: int = 1) -> float:
    """Return the messages a second of a node that handles so many times as many."""
    bus = Bus("bench", url, pool_size=floor.CONNECTIONS)
    bus.handles(Note, max_batch=floor.BATCH, concurrency=floor.CONNECTIONS)(_take)
    counters = bus.runtime.counters
    async with bus:
        await until(lambda: counters[Event.HANDLED] >= times * WARM_UP)
        began, before = time.perf_counter(), counters[Event.HANDLED]
        await until(lambda: counters[Event.HANDLED] >= times * HANDLED)
        return (counters[Event.HANDLED] - before) / (time.perf_counter() - began)


async def _time_claims(url: str, claim: Claim) -> float:
    """Return the median milliseconds of a claim."""
    database = Database(load_settings(database_url=url))
    times: list[float] = []
    async with database.engine.connect() as conn:
        for _ in range(CLAIMS):
            began = time.perf_counter()
            claimed = await conn.run_sync(claim, database.schema)
            times.append((time.perf_counter() - began) * 1_000)
            await conn.rollback()
            assert claimed == floor.BATCH
    await database.engine.dispose()
    return median(times)


def _claim_free(conn: Connection, schema: str) -> int:
    return len(inbox.claim(conn, schema, message_type=floor.MESSAGE_TYPE, batch_size=floor.BATCH, node=_NODE))


def _claim_keys(conn: Connection, schema: str) -> int:
    lane = Lane(message_type=floor.MESSAGE_TYPE)
    turns = [Turn(found.key) for found in ordering.scan(conn, schema, {lane: ""}, count=floor.BATCH)[lane]]
    handlers = {floor.MESSAGE_TYPE: floor.MESSAGE_TYPE}
    claimed = ordering.claim(conn, schema, Turns(turns, handlers), batch_size=floor.BATCH, node=_NODE)
    return len(claimed.leases)


async def _take(notes: list[Note], session: AsyncSession) -> None:
    await session.execute(_INSERT, {"numbers": [1] * len(notes)})
