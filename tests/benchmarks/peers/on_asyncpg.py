"""asyncpg alone, as a floor for the time from commit to effect: NOTIFY in the transaction of the business row wakes a
worker, which deletes a job and inserts its effect in one transaction.

It promises what durable promises within one database, for one worker that never dies: no owner, no retries, no history.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final

import asyncpg

from tests.benchmarks.peers.program import AT_ONCE, TEXT, Enlist, Order, Program, main

_CHANNEL: Final = "jobs"
_INSERT: Final = "INSERT INTO business (number) VALUES ($1)"
_ENLIST: Final = "INSERT INTO jobs (number, body) VALUES ($1, $2)"
_TAKE: Final = """
WITH taken AS MATERIALIZED (SELECT id FROM jobs ORDER BY id LIMIT 1 FOR UPDATE SKIP LOCKED)
DELETE FROM jobs USING taken WHERE jobs.id = taken.id RETURNING number
"""


async def install(order: Order) -> None:
    connection = await asyncpg.connect(order.url)
    await connection.execute("CREATE TABLE jobs (id bigserial PRIMARY KEY, number integer, body text)")
    await connection.close()


@asynccontextmanager
async def enlisting(order: Order) -> AsyncIterator[Enlist]:
    async with asyncpg.create_pool(order.url, min_size=AT_ONCE, max_size=AT_ONCE) as pool:

        async def enlist(number: int) -> None:
            async with pool.acquire() as connection, connection.transaction():
                await connection.execute(_INSERT, number)
                await connection.execute(_ENLIST, number, TEXT)
                await connection.execute(f"NOTIFY {_CHANNEL}")

        yield enlist


async def handle(order: Order) -> None:
    news = asyncio.Event()
    listening = await asyncpg.connect(order.url)
    await listening.add_listener(_CHANNEL, lambda *_: news.set())
    async with asyncpg.create_pool(order.url, min_size=AT_ONCE, max_size=AT_ONCE) as pool:
        while True:
            news.clear()
            await asyncio.gather(*(_handle_all(pool) for _ in range(AT_ONCE)))
            await news.wait()


async def _handle_all(pool: Any) -> None:
    async with pool.acquire() as connection:
        while True:
            async with connection.transaction():
                number = await connection.fetchval(_TAKE)
                if number is None:
                    return
                await connection.execute(_INSERT, -number)


if __name__ == "__main__":
    main(Program("asyncpg", install, enlisting, handle))
