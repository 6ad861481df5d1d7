"""Procrastinate: a job is a row that is inserted through a connection of psycopg, in the caller's transaction.

The worker has the concurrency of the benchmark, and deletes the jobs that succeeded.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import procrastinate
import psycopg_pool
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

from tests.benchmarks.peers.program import AT_ONCE, INSERT, POOL, TEXT, Enlist, Order, Program, main


def make_app(order: Order) -> procrastinate.App:
    connector = procrastinate.PsycopgConnector(conninfo=order.url, min_size=AT_ONCE, max_size=AT_ONCE + 2)
    return procrastinate.App(connector=connector)


async def install(order: Order) -> None:
    async with make_app(order).open_async() as app:
        await app.schema_manager.apply_schema_async()


@asynccontextmanager
async def enlisting(order: Order) -> AsyncIterator[Enlist]:
    async with (
        make_app(order).open_async() as app,
        psycopg_pool.AsyncConnectionPool(order.url, min_size=AT_ONCE, max_size=AT_ONCE, open=False) as pool,
    ):

        async def enlist(number: int) -> None:
            async with pool.connection() as connection:  # a transaction, which the end of the block commits
                await connection.execute("INSERT INTO business (number) VALUES (%s)", (number,))
                await app.configure_task("note", connection=connection).defer_async(number=number, text=TEXT)

        yield enlist


async def handle(order: Order) -> None:
    app = make_app(order)
    engine = create_async_engine(order.url_for("asyncpg"), **POOL)

    @app.task(name="note")
    async def take(number: int, text: str) -> None:
        async with AsyncSession(engine) as session:
            await session.execute(_INSERT, {"number": -number})
            await session.commit()

    async with app.open_async():
        await app.run_worker_async(concurrency=AT_ONCE, delete_jobs="successful")


_INSERT = text(INSERT)

if __name__ == "__main__":
    main(Program("procrastinate", install, enlisting, handle))
