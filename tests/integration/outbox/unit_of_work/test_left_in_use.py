"""Connections that are given back, or closed, while a thread or a task is in a statement of them."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import Any

import psycopg
import pytest
from sqlalchemy import Engine, create_engine, text
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine
from sqlalchemy.orm import Session
from sqlalchemy.util import greenlet_spawn

from durable import Bus, Retry, message
from durable.storage.left_in_use import watch
from tests.failure.waiting import eventually
from tests.support.tables import Tables

_SLOW = "SELECT pg_sleep(20)"
_ASLEEP = "SELECT pid FROM pg_stat_activity WHERE wait_event = 'PgSleep' AND datname = current_database()"
_PID = text("SELECT pg_backend_pid()")
_INSERT = "INSERT INTO effects VALUES (1)"


@message("left.in-use")
@dataclass
class Placed:
    number: int


@pytest.fixture
def effects(tables: Tables) -> Tables:
    tables.execute("DROP TABLE IF EXISTS effects")
    tables.execute("CREATE TABLE effects (number integer, attempt integer)")
    return tables


def url_of(tables: Tables) -> str:
    return tables.url.replace("postgresql:", "postgresql+psycopg:")


@pytest.fixture
def engine(effects: Tables) -> Iterator[Engine]:
    engine = create_engine(url_of(effects), pool_size=1, max_overflow=0, pool_reset_on_return=None)
    watch(engine)
    yield engine
    engine.dispose()


def begin(function: Callable[[], object]) -> tuple[threading.Thread, list[Exception]]:
    errors: list[Exception] = []

    def run() -> None:
        try:
            function()
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, errors


@pytest.mark.parametrize("way", ["close", "invalidate"])
async def test_connection_amid_a_statement_of_a_thread_is_set_aside(engine: Engine, effects: Tables, way: str) -> None:
    """It comes back without a ROLLBACK, which would wait for the statement."""
    taken = engine.raw_connection()
    pid = taken.driver_connection.info.backend_pid  # type: ignore[union-attr]
    thread, errors = begin(lambda: taken.cursor().execute(_SLOW))
    await eventually(lambda: pid in effects.rows(_ASLEEP))
    began = time.monotonic()
    getattr(taken, way)()
    assert time.monotonic() - began < 5
    with engine.connect() as other:
        assert other.scalar(_PID) != pid
    thread.join(10)
    assert [type(each) for each in errors] == [psycopg.errors.QueryCanceled]
    await eventually(lambda: not effects.rows("SELECT 1 FROM pg_stat_activity WHERE pid = %s", pid))


def test_connection_given_back_amid_a_transaction_is_not_handed_out(engine: Engine, effects: Tables) -> None:
    taken = engine.raw_connection()
    taken.cursor().execute(_INSERT)
    taken.close()
    with engine.connect() as other:
        other.execute(text("SELECT 1"))
        other.commit()
        assert not effects.rows("SELECT 1 FROM effects")


@pytest.fixture
async def asyncpg_engine(effects: Tables) -> AsyncIterator[AsyncEngine]:
    url = effects.url.replace("postgresql:", "postgresql+asyncpg:")
    engine = create_async_engine(url, pool_size=1, max_overflow=0, pool_reset_on_return=None)
    watch(engine.sync_engine)
    yield engine
    await engine.dispose()


async def test_connection_of_asyncpg_given_back_amid_a_transaction_is_not_handed_out(
    asyncpg_engine: AsyncEngine, effects: Tables
) -> None:
    async with asyncpg_engine.connect() as taken:
        driver: Any = (await taken.get_raw_connection()).driver_connection
        await driver.execute(f"BEGIN; {_INSERT}")
        pid = driver.get_server_pid()
    async with asyncpg_engine.connect() as other:
        assert await other.scalar(_PID) != pid
    assert not effects.rows("SELECT 1 FROM effects")


async def test_connection_of_asyncpg_given_back_amid_a_begin_is_not_handed_out(
    asyncpg_engine: AsyncEngine, effects: Tables
) -> None:
    async with asyncpg_engine.connect() as taken:
        adapted: Any = (await taken.get_raw_connection()).dbapi_connection
        pid = adapted.driver_connection.get_server_pid()
        left_behind = asyncio.create_task(greenlet_spawn(adapted.cursor().execute, _INSERT))
        await asyncio.sleep(0)
        assert adapted._execute_mutex.locked()
    async with asyncpg_engine.connect() as other:
        assert await other.scalar(_PID) != pid
    await asyncio.gather(left_behind, return_exceptions=True)
    assert not effects.rows("SELECT 1 FROM effects")


@pytest.mark.parametrize("name", [(), ("named",)], ids=["cursor", "server's cursor"])
def test_cursor_of_a_former_user_executes_nothing(engine: Engine, effects: Tables, name: tuple[str, ...]) -> None:
    taken = engine.raw_connection()
    cursor: Any = taken.cursor(*name)
    taken.close()
    with engine.connect() as other:
        with pytest.raises(psycopg.ProgrammingError, match="given back to its pool before this statement began"):
            cursor.execute(_INSERT if not name else "SELECT 1")
        cursor.close()
        other.execute(text("SELECT 1"))
        other.commit()
    assert not effects.rows("SELECT 1 FROM effects")


@pytest.fixture
async def async_engine(effects: Tables) -> AsyncEngine:
    engine = create_async_engine(url_of(effects), pool_size=1, max_overflow=0)
    watch(engine.sync_engine)
    return engine


async def test_connection_amid_a_statement_of_a_task_is_closed_afterwards(
    async_engine: AsyncEngine, effects: Tables
) -> None:
    taken = await async_engine.connect()
    pid = await taken.scalar(_PID)
    statement = asyncio.ensure_future(taken.execute(text(_SLOW)))
    await eventually(lambda: pid in effects.rows(_ASLEEP))
    await taken.invalidate()
    with pytest.raises(Exception, match="canceling statement"):
        await statement
    await eventually(lambda: not effects.rows("SELECT 1 FROM pg_stat_activity WHERE pid = %s", pid))
    await async_engine.dispose()


async def test_cursor_of_a_former_user_executes_nothing_in_a_task(async_engine: AsyncEngine, effects: Tables) -> None:
    taken = await async_engine.connect()
    driver: Any = (await taken.get_raw_connection()).driver_connection
    cursor = driver.cursor()
    await taken.close()
    async with async_engine.connect() as other:
        with pytest.raises(psycopg.ProgrammingError, match="given back"):
            await cursor.execute(_INSERT)
        await other.execute(text("SELECT 1"))
        await other.commit()
    assert not effects.rows("SELECT 1 FROM effects")
    await async_engine.dispose()


def test_cursor_of_a_former_user_executes_nothing_on_a_given_engine(effects: Tables) -> None:
    engine = create_engine(url_of(effects), pool_size=1, max_overflow=0)
    _bus = Bus("shop", url_of(effects), sync_engine=engine)
    taken = engine.raw_connection()
    cursor = taken.cursor()
    taken.close()
    with engine.connect(), pytest.raises(psycopg.ProgrammingError, match="given back"):
        cursor.execute(_INSERT)
    engine.dispose()


async def test_connection_is_given_up_without_waiting(effects: Tables, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = create_async_engine(effects.url.replace("postgresql:", "postgresql+asyncpg:"))
    watch(engine.sync_engine)
    taken = await engine.connect()
    driver: Any = (await taken.get_raw_connection()).driver_connection
    monkeypatch.setattr(type(driver), "close", lambda *_, **__: asyncio.sleep(60))
    async with asyncio.timeout(5):
        await taken.invalidate()
    assert driver.is_closed()
    monkeypatch.undo()
    await taken.close()
    await engine.dispose()


@pytest.mark.parametrize("is_given", [False, True], ids=["own", "given"])
async def test_thread_of_a_sync_handler_commits_nothing_of_a_failed_attempt(effects: Tables, is_given: bool) -> None:
    given = create_engine(url_of(effects), pool_size=3, max_overflow=0) if is_given else None
    bus = Bus("shop", url_of(effects), sync_engine=given, concurrency=3, poll_interval="50ms")
    attempts: dict[int, int] = {}

    @bus.handles(Placed, retry=Retry(immediate=4, delays=["50ms"] * 3))
    def handle(placed: Placed, session: Session) -> None:
        attempt = attempts[placed.number] = attempts.get(placed.number, 0) + 1
        session.execute(_values(placed, attempt))
        begin(lambda: [session.execute(_values(placed, attempt)) for _ in range(6)])
        time.sleep(placed.number % 10 * 0.0004)
        if attempt == 1:
            raise ValueError

    async with bus:
        async with bus.unit_of_work():
            for number in range(60):
                bus.send(Placed(number))
        await eventually(lambda: len(attempts) == 60 and not effects.count("incoming_envelopes"))
        assert effects.count("dead_letters") == 0
        await eventually(lambda: bus.statistics().pools["sync"].in_use == 0)
    assert not effects.rows("SELECT 1 FROM effects WHERE attempt = 1")
    assert effects.one("SELECT count(DISTINCT number) FROM effects") == 60
    if given is not None:
        given.dispose()


def _values(placed: Placed, attempt: int) -> Any:
    return text(f"INSERT INTO effects VALUES ({placed.number}, {attempt})")
