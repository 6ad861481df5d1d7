"""Runs the benchmarks and prints them: `make bench`, or `python -m tests.benchmarks --json`.

Every row is the best of three rounds; in each round floor and durable take turns on the same server, so a ratio holds
when the machine's speed drifts. Statements and commits are counted per message on the engines of the part that the
row is about: a unit of work's for storing, the agents' for sending, the handlers' for handling.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
import warnings
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table
from sqlalchemy import Engine, event, text
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine

from durable import Bus, message
from durable.embedded import Embedded, postgres
from durable.envelope import ANY_NODE, Envelope, new_id
from durable.storage import migrator, outbox
from durable.storage.database import sync_url
from durable.telemetry import Event
from tests.benchmarks import floor

ROUNDS = 3
FloorWork = Callable[[floor.Pool, list[Envelope]], Awaitable[None]]


@message("bench.note")
class Note(msgspec.Struct):
    number: int
    text: str


@dataclass
class Row:
    """One comparison: messages per second of durable and of the floor, and what each message cost."""

    name: str
    floor_name: str
    floor: float = 0.0
    ours: float = 0.0
    statements_per_message: float = 0.0
    commits_per_message: float = 0.0

    @property
    def ratio(self) -> float:
        return self.ours / self.floor


@dataclass
class Counts:
    statements: int = 0
    commits: int = 0


@contextmanager
def counting(engine: AsyncEngine) -> Iterator[Counts]:
    """Count what this engine executes and commits."""
    counts = Counts()
    sync: Engine = engine.sync_engine

    def executed(*_: object) -> None:
        counts.statements += 1

    def committed(*_: object) -> None:
        counts.commits += 1

    event.listen(sync, "after_cursor_execute", executed)
    event.listen(sync, "commit", committed)
    try:
        yield counts
    finally:
        event.remove(sync, "after_cursor_execute", executed)
        event.remove(sync, "commit", committed)


async def rate(count: int, work: Callable[[], Awaitable[object]]) -> float:
    began = time.perf_counter()
    await work()
    return count / (time.perf_counter() - began)


class Benchmarks:
    """The rows, on one server with fresh databases for each round."""

    def __init__(self, server: Embedded, count: int) -> None:
        self._server = server
        self._count = count
        self._made = 0

    async def run(self) -> list[Row]:
        store = Row("store a send in a business transaction", "asyncpg: two INSERTs in a transaction")
        plain = Row("the same", "SQLAlchemy session: two INSERTs in a transaction")
        ship = Row("outbox to peer's inbox over TCP", "asyncpg: claim, insert at the peer, delete")
        singly = Row("handle, a transaction each", "asyncpg: effect and completion in a transaction")
        grouped = Row("handle, group=100", "asyncpg: 100 effects and a completion in a transaction")
        listed = Row("handle, group=100 as a list", "asyncpg: 100 effects by one statement, and a completion")
        for _ in range(ROUNDS):
            await self._store(store, plain)
            await self._ship(ship)
            await self._handle(singly, _take, floor.handle_singly, group=1)
            await self._handle(grouped, _take, floor.handle_in_groups, group=100)
            await self._handle(listed, _take_list, floor.handle_lists, group=100)
        return [store, plain, ship, singly, grouped, listed]

    async def _store(self, row: Row, plain: Row) -> None:
        url = self._fresh_database()
        pool = await floor.pool(url)
        row.floor = max(row.floor, await rate(self._count, lambda: floor.store(pool, self._count)))
        await pool.close()
        plain.floor = max(plain.floor, await rate(self._count, lambda: self._store_with_sqlalchemy(url)))
        bus = Bus("bench", url, pool_size=floor.CONNECTIONS)
        bus.route(Note, to=floor.DESTINATION)
        with counting(bus.runtime.sessions.engine) as counts:
            ours = await rate(self._count, lambda: self._store_with_durable(bus))
        await bus.runtime.stop()
        row.ours = plain.ours = max(row.ours, ours)
        # Without the business INSERT and the business transaction: what enlisting a send adds.
        row.statements_per_message = plain.statements_per_message = counts.statements / self._count - 1
        row.commits_per_message = plain.commits_per_message = counts.commits / self._count - 1

    async def _store_with_durable(self, bus: Bus) -> None:
        numbers = iter(range(self._count))
        note_text = "x" * 256

        async def work() -> None:
            for number in numbers:
                async with bus.unit_of_work() as uow:
                    await uow.session.execute(_BUSINESS, {"number": number})
                    bus.send(Note(number, note_text))

        await asyncio.gather(*(work() for _ in range(floor.CONNECTIONS)))

    async def _store_with_sqlalchemy(self, url: str) -> None:
        engine = create_async_engine(url.replace("postgresql:", "postgresql+asyncpg:"), pool_size=floor.CONNECTIONS)
        numbers = iter(range(self._count))
        insert = text(
            "INSERT INTO durable.outgoing_envelopes (id, destination, message_type, source, correlation_id,"
            " content_type, headers, body, sent_at, owner_id)"
            " VALUES (:id, :destination, 'bench.note', 'floor', :id, 'application/json', '{}', :body, now(), 1)"
        )

        async def work() -> None:
            for number in numbers:
                async with AsyncSession(engine) as session:
                    await session.execute(_BUSINESS, {"number": number})
                    params = {"id": new_id(), "destination": floor.DESTINATION, "body": floor.BODY}
                    await session.execute(insert, params)
                    await session.commit()

        await asyncio.gather(*(work() for _ in range(floor.CONNECTIONS)))
        await engine.dispose()

    async def _ship(self, row: Row) -> None:
        sender_url, receiver_url = self._fresh_database(), self._fresh_database()
        await self._fill_outbox(sender_url, floor.DESTINATION)
        from_pool, to_pool = await floor.pool(sender_url), await floor.pool(receiver_url)
        row.floor = max(row.floor, await rate(self._count, lambda: floor.ship(from_pool, to_pool, self._count)))
        await from_pool.close()
        await to_pool.close()

        sender_url, receiver_url = self._fresh_database(), self._fresh_database()
        receiver = Bus("receiver", receiver_url, buffer_size=self._count + 1, drain_timeout=0.1)

        @receiver.handles(Note, concurrency=1)
        async def wait(note: Note) -> None:
            await asyncio.Event().wait()  # arrival is what is measured

        receiver.listen("tcp://127.0.0.1:7391")
        sender = Bus("sender", sender_url)
        sender.route(Note, to="tcp://127.0.0.1:7391")
        await self._fill_outbox(sender_url, "tcp://127.0.0.1:7391")
        async with receiver:
            with counting(sender.runtime.database.engine) as counts:
                began = time.perf_counter()
                async with sender:
                    await _until(lambda: sender.runtime.counters[Event.SENT] >= self._count)
                    elapsed = time.perf_counter() - began
        row.ours = max(row.ours, self._count / elapsed)
        row.statements_per_message = counts.statements / self._count
        row.commits_per_message = counts.commits / self._count

    async def _handle(self, row: Row, handler: Callable[..., Awaitable[None]], work: FloorWork, *, group: int) -> None:
        items = floor.envelopes(self._count)
        url = self._fresh_database()
        pool = await floor.pool(url)
        await floor.fill_inbox(pool, items)
        row.floor = max(row.floor, await rate(self._count, lambda: work(pool, items)))
        await pool.close()

        url = self._fresh_database()
        pool = await floor.pool(url)
        await floor.fill_inbox(pool, items)
        await pool.execute("UPDATE durable.incoming_envelopes SET owner_id = 0")
        await pool.close()
        bus = Bus("bench", url, pool_size=floor.CONNECTIONS)
        bus.handles(Note, group=group, concurrency=floor.CONNECTIONS)(handler)
        with counting(bus.runtime.sessions.engine) as counts:
            began = time.perf_counter()
            async with bus:
                await _until(lambda: bus.runtime.counters[Event.HANDLED] >= self._count)
                elapsed = time.perf_counter() - began
        row.ours = max(row.ours, self._count / elapsed)
        effects = self._count if handler is _take else counts.commits
        row.statements_per_message = (counts.statements - effects) / self._count
        row.commits_per_message = counts.commits / self._count

    async def _fill_outbox(self, url: str, destination: str) -> None:
        bus = Bus("bench", url)
        items = [msgspec.structs.replace(item, destination=destination) for item in floor.envelopes(self._count)]
        for batch in floor.batches(items):
            sent = [outbox.Sent(envelope, None, ANY_NODE) for envelope in batch]
            await bus.runtime.database.transaction(outbox.store, sent)
        await bus.runtime.stop()

    def _fresh_database(self) -> str:
        self._made += 1
        url = self._server.url(f"bench_{self._made}")
        migrator.upgrade(sync_url(Bus("bench", url).settings), "durable")
        import psycopg

        with psycopg.connect(url) as conn:
            conn.execute("CREATE TABLE business (number integer NOT NULL)")
        return url


async def _take(note: Note, session: AsyncSession) -> None:
    await session.execute(_BUSINESS, {"number": 1})


async def _take_list(notes: list[Note], session: AsyncSession) -> None:
    await session.execute(_BUSINESS_LIST, {"numbers": [1] * len(notes)})


_BUSINESS_LIST = text("INSERT INTO business (number) SELECT unnest(CAST(:numbers AS integer[]))")
_BUSINESS = text("INSERT INTO business (number) VALUES (:number)")


async def _until(reached: Callable[[], bool]) -> None:
    while not reached():  # noqa: ASYNC110  counters have no event, and an event would be work that is measured
        await asyncio.sleep(0.002)


def show(rows: list[Row], count: int) -> None:
    table = Table(title=f"{count} messages of {len(floor.BODY)} bytes, best of {ROUNDS} rounds")
    for column in ("durable", "floor", "floor/s", "durable/s", "ratio", "statements/msg", "commits/msg"):
        table.add_column(column, justify="left" if column in ("durable", "floor") else "right")
    for row in rows:
        table.add_row(
            row.name,
            row.floor_name,
            f"{row.floor:,.0f}",
            f"{row.ours:,.0f}",
            f"{row.ratio:.2f}",
            f"{row.statements_per_message:.3f}",
            f"{row.commits_per_message:.3f}",
        )
    Console(width=150).print(table)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks", description=__doc__)
    parser.add_argument("--count", type=int, default=5_000, help="messages in each round")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as folder, postgres(Path(folder)) as server:
        rows = asyncio.run(Benchmarks(server, arguments.count).run())
    if arguments.json:
        json.dump([asdict(row) | {"ratio": row.ratio} for row in rows], sys.stdout, indent=2)
    else:
        show(rows, arguments.count)
    return 0


if __name__ == "__main__":
    sys.exit(main())
