"""faststream-outbox, its table as the queue: a row is inserted through the caller's AsyncSession.

As its page on performance says for much traffic and handlers that may be repeated: rows are deleted by the hundred, and
autovacuum is set for the table.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from faststream import FastStream
from faststream_outbox import OutboxBroker, make_outbox_table, outbox_autovacuum_ddl
from sqlalchemy import MetaData, text
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine

from tests.benchmarks.peers.program import AT_ONCE, INSERT, POOL, TEXT, Enlist, Order, Program, main

BATCH = 100
QUEUE = "notes"

_metadata = MetaData()
_table = make_outbox_table(_metadata)


def make_engine(order: Order) -> AsyncEngine:
    return create_async_engine(order.url_for("asyncpg"), **POOL)


async def install(order: Order) -> None:
    engine = make_engine(order)
    async with engine.begin() as connection:
        await connection.run_sync(_metadata.create_all)
        await connection.execute(text(outbox_autovacuum_ddl(_table.name)))
    await engine.dispose()


@asynccontextmanager
async def enlisting(order: Order) -> AsyncIterator[Enlist]:
    engine = make_engine(order)
    broker = OutboxBroker(engine, outbox_table=_table)

    async def enlist(number: int) -> None:
        async with AsyncSession(engine) as session:
            await session.execute(text(INSERT), {"number": number})
            await broker.publish({"number": number, "text": TEXT}, queue=QUEUE, session=session)
            await session.commit()

    await broker.connect()
    yield enlist
    await engine.dispose()


async def handle(order: Order) -> None:
    connections = AT_ONCE + 1  # the broker's own, as long as it runs: one for each worker, and one that fetches
    broker = OutboxBroker(create_async_engine(order.url_for("asyncpg"), pool_size=connections), outbox_table=_table)
    engine = make_engine(order)

    @broker.subscriber(QUEUE, max_workers=AT_ONCE, fetch_batch_size=BATCH, terminal_flush_batch_size=BATCH)
    async def take(number: int, text: str) -> None:
        async with AsyncSession(engine) as session:
            await session.execute(_INSERT, {"number": -number})
            await session.commit()

    await FastStream(broker).run()


_INSERT = text(INSERT)

if __name__ == "__main__":
    main(Program("faststream-outbox", install, enlisting, handle))
