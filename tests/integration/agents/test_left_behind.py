"""No connection outlives its engine: one that is in use while that is disposed of is closed when it comes back."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest
from sqlalchemy import Connection, Engine, create_engine, text
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from durable.settings import load_settings
from durable.storage.database import Database
from durable.storage.fair_pool import FairAsyncPool, FairPool
from tests.failure.waiting import eventually


@pytest.fixture(autouse=True)
def no_collection() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


def make_async_engine(url: str, driver: str, **options: Any) -> AsyncEngine:
    url = url.replace("postgresql://", f"postgresql+{driver}://", 1)
    return create_async_engine(url, poolclass=FairAsyncPool, **options)


def make_engine(url: str, **options: Any) -> Engine:
    return create_engine(url.replace("postgresql://", "postgresql+psycopg://", 1), poolclass=FairPool, **options)


def count_others(url: str) -> int:
    with psycopg.connect(url) as conn:
        others = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
        (found,) = conn.execute(others).fetchone() or (0,)
        return int(found)


@pytest.mark.parametrize("driver", ["asyncpg", "psycopg"])
async def test_async_connection_left_behind_is_closed(database_url: str, driver: str) -> None:
    engine = make_async_engine(database_url, driver)
    async with engine.connect() as conn:
        await conn.exec_driver_sql("SELECT 1")
        await engine.dispose()
        assert count_others(database_url) == 1
    await eventually(lambda: count_others(database_url) == 0)


@pytest.mark.parametrize("driver", ["asyncpg", "psycopg"])
async def test_connection_opened_while_its_engine_is_disposed_of_is_closed(database_url: str, driver: str) -> None:
    engine = make_async_engine(database_url, driver)
    pool = engine.pool

    async def use() -> None:
        async with engine.connect() as conn:
            await conn.exec_driver_sql("SELECT 1")

    using = asyncio.create_task(use())
    await asyncio.sleep(0)
    await engine.dispose()
    assert not using.done()
    assert engine.pool is not pool
    await using
    await eventually(lambda: count_others(database_url) == 0)


@pytest.mark.parametrize("driver", ["asyncpg", "psycopg"])
@pytest.mark.parametrize("is_closed", [True, False])
async def test_connections_of_waiting_tasks_are_closed_when_their_pool_is_replaced(
    database_url: str, driver: str, *, is_closed: bool
) -> None:
    """They get the entries of the pool at which they stand, though the engine has another by now."""
    engine = make_async_engine(database_url, driver, pool_size=1, max_overflow=0)

    async def use() -> None:
        async with engine.connect() as conn:
            await conn.exec_driver_sql("SELECT 1")

    async with engine.connect() as conn:
        await conn.exec_driver_sql("SELECT 1")
        waiting = [asyncio.create_task(use()) for _ in range(3)]
        await asyncio.sleep(0)
        await engine.dispose(close=is_closed)
    await asyncio.gather(*waiting)
    await eventually(lambda: count_others(database_url) == 0)


async def test_connections_of_waiting_threads_are_closed_when_their_pool_is_replaced(database_url: str) -> None:
    engine = make_engine(database_url, pool_size=1, max_overflow=0)
    pool: Any = engine.pool

    def use() -> None:
        with engine.connect() as conn:
            conn.exec_driver_sql("SELECT 1")

    with ThreadPoolExecutor(3) as threads:
        with engine.connect() as conn:
            conn.exec_driver_sql("SELECT 1")
            waiting = [threads.submit(use) for _ in range(3)]
            await eventually(lambda: len(pool._pool._waiting) == len(waiting))
            engine.dispose()
        for each in waiting:
            each.result(10)
    await eventually(lambda: count_others(database_url) == 0)


async def test_sync_connection_left_behind_is_closed(database_url: str) -> None:
    engine = make_engine(database_url)
    with engine.connect() as conn:
        conn.exec_driver_sql("SELECT 1")
        engine.dispose()
        assert count_others(database_url) == 1
    await eventually(lambda: count_others(database_url) == 0)


async def test_engine_used_again_pools_its_connections(database_url: str) -> None:
    engine = make_engine(database_url)
    engine.dispose()
    with engine.connect() as conn:
        conn.exec_driver_sql("SELECT 1")
    assert count_others(database_url) == 1
    engine.dispose()


@pytest.mark.parametrize("driver", ["asyncpg", "psycopg"])
async def test_connection_of_durable_serves_one_transaction_after_another(database_url: str, driver: str) -> None:
    url = database_url.replace("postgresql://", f"postgresql+{driver}://", 1)
    database = Database(load_settings(database_url=url))

    def pid(conn: Connection, schema: str) -> int:
        return int(conn.execute(text("SELECT pg_backend_pid()")).scalar_one())

    assert len({await database.transaction(pid) for _ in range(3)}) == 1
    await database.close()
