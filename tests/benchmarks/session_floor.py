"""A second floor: the same rows written and finished by hand in an AsyncSession of SQLAlchemy, as handlers have one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine

from durable.envelope import Envelope, new_id
from durable.storage.sql import inbox
from tests.benchmarks import floor

BUSINESS = text("INSERT INTO business (number) VALUES (:number)")
_INSERT = text(
    "INSERT INTO durable.outgoing_envelopes (id, destination, message_type, source, correlation_id,"
    " content_type, headers, body, sent_at, owner_id)"
    " VALUES (:id, :destination, 'bench.note', 'floor', :id, 'application/json', '{}', :body, now(), 1)"
)


@asynccontextmanager
async def open_engine(url: str) -> AsyncIterator[AsyncEngine]:
    """An engine with a connection for each of those at work."""
    engine = create_async_engine(url.replace("postgresql:", "postgresql+asyncpg:"), pool_size=floor.CONNECTIONS)
    try:
        yield engine
    finally:
        await engine.dispose()


async def store(engine: AsyncEngine, count: int) -> None:
    """One business row and one outgoing row in a session of their own, `CONNECTIONS` at a time."""
    numbers = iter(range(count))

    async def work() -> None:
        for number in numbers:
            async with AsyncSession(engine) as session:
                await session.execute(BUSINESS, {"number": number})
                await session.execute(_INSERT, {"id": new_id(), "destination": floor.DESTINATION, "body": floor.BODY})
                await session.commit()

    await _at_once(work)


async def handle(engine: AsyncEngine, batches: Iterator[Sequence[Envelope]]) -> None:
    """An effect for each envelope, and one completion for all of a batch, in a session of their own."""
    finish = inbox.FINISH_HANDLED.within("durable")

    async def work() -> None:
        for batch in batches:
            async with AsyncSession(engine) as session:
                for _ in batch:
                    await session.execute(BUSINESS, {"number": 1})
                await session.execute(finish, floor.finished(batch))
                await session.commit()

    await _at_once(work)


async def _at_once(work: Callable[[], Awaitable[None]]) -> None:
    await asyncio.gather(*(work() for _ in range(floor.CONNECTIONS)))
