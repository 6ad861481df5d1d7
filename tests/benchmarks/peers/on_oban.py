"""Oban: a job is a row that is inserted through a connection of psycopg, in the caller's transaction.

Its queue has as many jobs at once as a batch of the others, because it claims as many as are free; the pool of
connections bounds the effects. It runs in uvloop, as `oban start` does.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import psycopg_pool
import uvloop
from oban import Oban, worker
from oban.schema import install as install_tables
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine

from tests.benchmarks.peers.program import AT_ONCE, INSERT, POOL, TEXT, Enlist, Order, Program, main

LIMIT = 100
_engines: list[AsyncEngine] = []


def make_pool(order: Order) -> psycopg_pool.AsyncConnectionPool[Any]:
    return psycopg_pool.AsyncConnectionPool(order.url, min_size=AT_ONCE, max_size=AT_ONCE, open=False)


async def install(order: Order) -> None:
    async with make_pool(order) as pool:
        await install_tables(pool)


@worker(queue="notes")
class Note:
    async def process(self, job: Any) -> None:
        async with AsyncSession(_engines[0]) as session:
            await session.execute(text(INSERT), {"number": -job.args["number"]})
            await session.commit()


@asynccontextmanager
async def enlisting(order: Order) -> AsyncIterator[Enlist]:
    async with make_pool(order) as pool, make_pool(order) as own, Oban(pool=own) as oban:

        async def enlist(number: int) -> None:
            async with pool.connection() as connection:  # a transaction, which the end of the block commits
                await connection.execute("INSERT INTO business (number) VALUES (%s)", (number,))
                await oban.enqueue(Note.new({"number": number, "text": TEXT}), conn=connection)

        yield enlist


async def _handle(order: Order) -> None:
    _engines.append(create_async_engine(order.url_for("asyncpg"), **POOL))
    async with make_pool(order) as pool, Oban(pool=pool, queues={"notes": LIMIT}):
        await asyncio.Event().wait()


def handle(order: Order) -> None:
    uvloop.run(_handle(order))


if __name__ == "__main__":
    main(Program("oban", install, enlisting, handle))
