"""What happens within one process: storing what is sent, and handling what has arrived."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from typing import NamedTuple

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession

from durable import Bus
from durable.application.handlers import MaxBatch
from durable.envelope import Envelope
from durable.storage.database import channel
from durable.telemetry import Event
from tests.benchmarks import floor, session_floor
from tests.benchmarks.databases import Databases
from tests.benchmarks.floor import Note
from tests.benchmarks.racing import until
from tests.benchmarks.rows import Counts, Row, counting

FloorWork = Callable[[floor.Pool, list[Envelope]], Awaitable[None]]


class Pace(NamedTuple):
    """Messages a second, and the seconds that this process computes for each."""

    rate: float
    computed: float


async def pace(count: int, work: Callable[[], Awaitable[object]]) -> Pace:
    began, computed = time.perf_counter(), time.process_time()
    await work()
    return Pace(count / (time.perf_counter() - began), (time.process_time() - computed) / count)


class Local:
    """Rows of durable in this process against asyncpg, and against a session of SQLAlchemy, in this process."""

    def __init__(self, databases: Databases, count: int) -> None:
        self._databases = databases
        self._count = count
        inserts = "two INSERTs in a transaction"
        self._sent = _rows("store a send to a destination", inserts)
        self._kept = _rows("store a send to a local handler", inserts)
        self._singly = _rows("handle, max_batch=1", "effect and completion in a transaction")
        self._auto = _rows("handle, as by default", "effect and completion in a transaction")
        self._grouped = _rows("handle, max_batch=100", "100 effects and a completion in a transaction")
        self._listed = _rows("handle, max_batch=100 as a list", "100 effects by one statement, and a completion")[:1]

    @property
    def storing(self) -> list[Row]:
        return [*self._sent, *self._kept]

    @property
    def handling(self) -> list[Row]:
        return [*self._singly, *self._auto, *self._grouped, *self._listed]

    async def run_round(self) -> None:
        await self._store()
        singly = await self._floors_of_handling(floor.handle_singly, 1)
        grouped = await self._floors_of_handling(floor.handle_in_groups, floor.BATCH)
        listed = await self._floors_of_handling(floor.handle_lists, None)
        await self._handle(self._singly, singly, _take, max_batch=1)
        await self._handle(self._auto, singly, _take, max_batch="auto")
        await self._handle(self._grouped, grouped, _take, max_batch=100)
        await self._handle(self._listed, listed, _take_list, max_batch=100)

    # ------------------------------------------------------------------ storing

    async def _store(self) -> None:
        url = self._databases.fresh()
        async with floor.open_pool(url) as pool:
            by_driver = await pace(self._count, lambda: floor.store(pool, self._count))
        async with session_floor.open_engine(url) as engine:
            by_session = await pace(self._count, lambda: session_floor.store(engine, self._count))
        for rows, destination in ((self._sent, floor.DESTINATION), (self._kept, None)):
            bus = Bus("bench", url, pool_size=floor.CONNECTIONS)
            if destination:
                bus.route(Note, to=destination)
            else:
                bus.handles(Note)(_take)
            with counting(bus.runtime.sessions.engine) as counts:
                ours = await pace(self._count, lambda: self._store_with_durable(bus))  # noqa: B023  runs at once
            await bus.runtime.stop()
            # Without the business INSERT and the business transaction: what enlisting a send adds.
            added = Counts(counts.statements - self._count, counts.commits - self._count)
            _note(rows, (by_driver, by_session), ours, added, self._count)

    async def _store_with_durable(self, bus: Bus) -> None:
        numbers = iter(range(self._count))
        note_text = "x" * 256

        async def work() -> None:
            for number in numbers:
                async with bus.unit_of_work() as uow:
                    await uow.session.execute(session_floor.BUSINESS, {"number": number})
                    bus.send(Note(number, note_text))

        await asyncio.gather(*(work() for _ in range(floor.CONNECTIONS)))

    # ------------------------------------------------------------------ handling

    async def _floors_of_handling(self, work: FloorWork, batch: int | None) -> Sequence[Pace]:
        """The paces of asyncpg, and of a session with batches of this size."""
        items = floor.envelopes(self._count)
        async with floor.open_pool(self._databases.fresh()) as pool:
            await floor.fill_inbox(pool, items)
            paces = [await pace(self._count, lambda: work(pool, items))]
        if batch is not None:
            url = self._databases.fresh()
            async with floor.open_pool(url) as pool:
                await floor.fill_inbox(pool, items)
            async with session_floor.open_engine(url) as engine:
                batches = (items[start : start + batch] for start in range(0, self._count, batch))
                paces.append(await pace(self._count, lambda: session_floor.handle(engine, batches)))
        return paces

    async def _handle(
        self, rows: Sequence[Row], floors: Sequence[Pace], handler: Callable[..., Awaitable[None]], max_batch: MaxBatch
    ) -> None:
        url = self._databases.fresh()
        bus = Bus("bench", url, pool_size=floor.CONNECTIONS)
        bus.handles(Note, max_batch=max_batch, concurrency=floor.CONNECTIONS)(handler)
        async with AsyncExitStack() as stack:
            pool = await stack.enter_async_context(floor.open_pool(url))
            await floor.fill_inbox(pool, floor.envelopes(self._count))
            conn = await stack.enter_async_context(pool.acquire())
            release = conn.transaction()
            await release.start()  # claims pass by the rows until its commit, when the node has opened its connections
            await conn.execute("UPDATE durable.incoming_envelopes SET owner_id = 0")
            await conn.execute("SELECT pg_notify($1, '')", channel("durable"))
            counts = stack.enter_context(counting(bus.runtime.sessions.engine))
            await stack.enter_async_context(bus)

            async def handle_all() -> None:
                await release.commit()
                await until(lambda: bus.runtime.counters[Event.HANDLED] >= self._count)

            ours = await pace(self._count, handle_all)
        effects = self._count if handler is _take else counts.commits
        added = Counts(counts.statements - effects, counts.commits)
        _note(rows, floors, ours, added, self._count)


def _rows(name: str, work: str) -> list[Row]:
    return [Row(name, f"asyncpg: {work}"), Row("the same", f"SQLAlchemy session: {work}")]


def _note(rows: Sequence[Row], floors: Sequence[Pace], ours: Pace, added: Counts, count: int) -> None:
    for row, of_floor in zip(rows, floors, strict=True):
        row.floor, row.ours = max(row.floor, of_floor.rate), max(row.ours, ours.rate)
        row.floor_computed = min(row.floor_computed, of_floor.computed)
        row.ours_computed = min(row.ours_computed, ours.computed)
        row.cost(added, count)


async def _take(note: Note, session: AsyncSession) -> None:
    await session.execute(session_floor.BUSINESS, {"number": 1})


async def _take_list(notes: list[Note], session: AsyncSession) -> None:
    await session.execute(_BUSINESS_LIST, {"numbers": [1] * len(notes)})


_BUSINESS_LIST = text("INSERT INTO business (number) SELECT unnest(CAST(:numbers AS integer[]))")
