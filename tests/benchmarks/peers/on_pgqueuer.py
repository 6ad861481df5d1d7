"""PgQueuer: a job is a row that is inserted through a connection of asyncpg, in the caller's transaction.

As its guide on performance says: one connection for the manager, a batch that is larger than the default for short
jobs, autovacuum set for its tables, logged tables. The worker runs in uvloop, as `pgq run` does. A bound on jobs at
once must be twice the batch at least, so there is none; the pool of connections bounds the effects.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import asyncpg
import uvloop
from pgqueuer import PgQueuer
from pgqueuer.db import AsyncpgDriver
from pgqueuer.models import Job
from pgqueuer.queries import Queries
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

from tests.benchmarks.peers.program import AT_ONCE, INSERT, POOL, TEXT, Enlist, Order, Program, main

BATCH = 100


async def install(order: Order) -> None:
    connection = await asyncpg.connect(order.url)
    queries = Queries(AsyncpgDriver(connection))
    await queries.install()
    await queries.optimize_autovacuum()
    await connection.close()


@asynccontextmanager
async def enlisting(order: Order) -> AsyncIterator[Enlist]:
    async with asyncpg.create_pool(order.url, min_size=AT_ONCE, max_size=AT_ONCE) as pool:

        async def enlist(number: int) -> None:
            async with pool.acquire() as connection, connection.transaction():
                await connection.execute("INSERT INTO business (number) VALUES ($1)", number)
                await Queries(AsyncpgDriver(connection)).enqueue("note", f"{number}:{TEXT}".encode())

        yield enlist


async def _handle(order: Order) -> None:
    engine = create_async_engine(order.url_for("asyncpg"), **POOL)
    manager = PgQueuer(AsyncpgDriver(await asyncpg.connect(order.url)))

    @manager.entrypoint("note")
    async def take(job: Job) -> None:
        number = int((job.payload or b"").partition(b":")[0])
        async with AsyncSession(engine) as session:
            await session.execute(text(INSERT), {"number": -number})
            await session.commit()

    await manager.run(batch_size=BATCH)


def handle(order: Order) -> None:
    uvloop.run(_handle(order))


if __name__ == "__main__":
    main(Program("pgqueuer", install, enlisting, handle))
