"""What happens within one process: storing what is sent, and handling what has arrived."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

from durable import Bus
from durable.application.handlers import MaxBatch
from durable.envelope import Envelope, new_id
from durable.telemetry import Event
from tests.benchmarks import floor
from tests.benchmarks.databases import Databases
from tests.benchmarks.floor import Note
from tests.benchmarks.racing import until
from tests.benchmarks.rows import Row, counting

FloorWork = Callable[[floor.Pool, list[Envelope]], Awaitable[None]]


async def rate(count: int, work: Callable[[], Awaitable[object]]) -> float:
    began = time.perf_counter()
    await work()
    return count / (time.perf_counter() - began)


class Local:
    """Rows of durable in this process against asyncpg and SQLAlchemy in this process."""

    def __init__(self, databases: Databases, count: int) -> None:
        self._databases = databases
        self._count = count
        self._stored = Row("store a send in a business transaction", "asyncpg: two INSERTs in a transaction")
        self._stored_plainly = Row("the same", "SQLAlchemy session: two INSERTs in a transaction")
        self._singly = Row("handle, a transaction each", "asyncpg: effect and completion in a transaction")
        self._auto = Row('handle, max_batch="auto"', "asyncpg: effect and completion in a transaction")
        self._grouped = Row("handle, max_batch=100", "asyncpg: 100 effects and a completion in a transaction")
        self._listed = Row("handle, max_batch=100 as a list", "asyncpg: 100 effects by one statement, and a completion")

    @property
    def storing(self) -> list[Row]:
        return [self._stored, self._stored_plainly]

    @property
    def handling(self) -> list[Row]:
        return [self._singly, self._auto, self._grouped, self._listed]

    async def run_round(self) -> None:
        await self._store(self._stored, self._stored_plainly)
        await self._handle(self._singly, _take, floor.handle_singly, max_batch=1)
        await self._handle(self._auto, _take, floor.handle_singly, max_batch="auto")
        await self._handle(self._grouped, _take, floor.handle_in_groups, max_batch=100)
        await self._handle(self._listed, _take_list, floor.handle_lists, max_batch=100)

    async def _store(self, row: Row, plain: Row) -> None:
        url = self._databases.fresh()
        async with floor.open_pool(url) as pool:
            row.floor = max(row.floor, await rate(self._count, lambda: floor.store(pool, self._count)))
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

    async def _handle(
        self, row: Row, handler: Callable[..., Awaitable[None]], work: FloorWork, *, max_batch: MaxBatch
    ) -> None:
        items = floor.envelopes(self._count)
        async with floor.open_pool(self._databases.fresh()) as pool:
            await floor.fill_inbox(pool, items)
            row.floor = max(row.floor, await rate(self._count, lambda: work(pool, items)))

        url = self._databases.fresh()
        async with floor.open_pool(url) as pool:
            await floor.fill_inbox(pool, items)
            await pool.execute("UPDATE durable.incoming_envelopes SET owner_id = 0")
        bus = Bus("bench", url, pool_size=floor.CONNECTIONS)
        bus.handles(Note, max_batch=max_batch, concurrency=floor.CONNECTIONS)(handler)
        with counting(bus.runtime.sessions.engine) as counts:
            began = time.perf_counter()
            async with bus:
                await until(lambda: bus.runtime.counters[Event.HANDLED] >= self._count)
                elapsed = time.perf_counter() - began
        row.ours = max(row.ours, self._count / elapsed)
        effects = self._count if handler is _take else counts.commits
        row.statements_per_message = (counts.statements - effects) / self._count
        row.commits_per_message = counts.commits / self._count


async def _take(note: Note, session: AsyncSession) -> None:
    await session.execute(_BUSINESS, {"number": 1})


async def _take_list(notes: list[Note], session: AsyncSession) -> None:
    await session.execute(_BUSINESS_LIST, {"numbers": [1] * len(notes)})


_BUSINESS_LIST = text("INSERT INTO business (number) SELECT unnest(CAST(:numbers AS integer[]))")
_BUSINESS = text("INSERT INTO business (number) VALUES (:number)")
