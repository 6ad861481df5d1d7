"""Engines with fewer connections than there is work: who takes one again in the moment of giving it back waits, too."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from itertools import pairwise
from typing import Any, Final

import msgspec
import pytest
from sqlalchemy import URL, make_url, text
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

from durable import Bus, message
from durable.settings import Settings
from durable.storage.engines import Limits, make_async_engine, make_engine
from durable.testing import eventually

LIMITS: Final = Limits.of(timedelta(seconds=10))
ONE: Final[dict[str, Any]] = {"pool_size": 1, "max_overflow": 0}
_ROUNDS = 50
_SELECT = text("SELECT 1")


@message("fair.step")
class Step(msgspec.Struct):
    number: int


def url(database_url: str, driver: str) -> URL:
    return make_url(database_url).set(drivername=f"postgresql+{driver}")


def changes(turns: Sequence[str]) -> int:
    """How often the next turn was the other one's."""
    return sum(one != other for one, other in pairwise(turns))


@pytest.mark.parametrize("driver", ["asyncpg", "psycopg"])
async def test_tasks_take_turns(database_url: str, driver: str) -> None:
    turns: list[str] = []
    engine = make_async_engine(url(database_url, driver), Settings(), LIMITS, **ONE)

    async def use(name: str) -> None:
        for _ in range(_ROUNDS):
            connection = await engine.connect()
            await connection.execute(_SELECT)
            await connection.close()
            turns.append(name)

    try:
        await asyncio.gather(use("one"), use("other"))
    finally:
        await engine.dispose()
    assert changes(turns) > _ROUNDS, turns


async def test_unit_of_work_is_not_passed_by_a_worker_in_a_given_engine(database_url: str) -> None:
    """Such an engine has a pool of SQLAlchemy."""
    calls: list[int] = []
    passed: list[int] = []
    engine = create_async_engine(url(database_url, "asyncpg"), **ONE)
    bus = Bus("shop", database_url, engine=engine, concurrency=1, max_batch=1)

    async def look() -> None:
        before = len(calls)
        async with bus.unit_of_work() as uow:
            await uow.session.execute(_SELECT)
            passed.append(len(calls) - before)

    @bus.handles(Step)
    async def handle(step: Step, session: AsyncSession) -> None:
        await session.execute(_SELECT)
        calls.append(step.number)
        if step.number == 1:
            looking.append(asyncio.create_task(look(), name="look"))

    looking: list[asyncio.Task[None]] = []
    async with bus:
        async with bus.unit_of_work() as uow:
            for number in range(_ROUNDS):
                uow.send(Step(number))
        await eventually(lambda: len(calls) == _ROUNDS, within=30)
        await asyncio.gather(*looking)
    await engine.dispose()
    assert passed[0] < 5


def test_threads_take_turns(database_url: str) -> None:
    turns: list[str] = []
    began = threading.Barrier(2)
    engine = make_engine(url(database_url, "psycopg"), Settings(), LIMITS, **ONE)

    def use(name: str) -> None:
        began.wait(10)
        for _ in range(_ROUNDS):
            with engine.connect() as connection:
                connection.execute(_SELECT)
            turns.append(name)

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(use, ("one", "other")))
    engine.dispose()
    assert changes(turns) > _ROUNDS, turns
