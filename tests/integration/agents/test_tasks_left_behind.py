"""Tasks that are left behind in a statement of the session: it ends all the same, with its locks and its place in the
pool, and the error that is told is that of the handler, or of the block.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import psycopg
import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession

from durable import Bus, Retry, message
from tests.failure.waiting import eventually
from tests.support.tables import Tables

DRIVERS = ("asyncpg", "psycopg")
_SLOW = text("SELECT pg_sleep(2)")
_ASLEEP = "SELECT pid FROM pg_stat_activity WHERE wait_event = 'PgSleep' AND datname = current_database()"
_LOCK = text("UPDATE effects SET number = number + 1")


@message("left.placed")
@dataclass
class Placed:
    number: int


class Gone(Exception):
    pass


LEFT: set[asyncio.Task[Any]] = set()
"""A reference to each task, so that no collection of garbage ends its connection."""


def left_behind(work: Awaitable[Any]) -> asyncio.Task[Any]:
    async def run() -> Any:
        return await work

    task = asyncio.create_task(run())
    task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
    LEFT.add(task)
    return task


Way = Callable[[AsyncSession, Tables], Awaitable[None]]


async def shield(session: AsyncSession, _: Tables) -> None:
    await asyncio.shield(left_behind(session.execute(_SLOW)))


async def fail(session: AsyncSession, tables: Tables) -> None:
    left_behind(session.execute(_SLOW))
    await eventually(lambda: tables.rows(_ASLEEP))
    raise Gone


async def close_and_fail(session: AsyncSession, tables: Tables) -> None:
    left_behind(session.execute(_SLOW))
    await eventually(lambda: tables.rows(_ASLEEP))
    left_behind(session.close())
    await asyncio.sleep(0)  # it has begun
    raise Gone


WAYS: dict[Way, type[Exception]] = {
    shield: TimeoutError,
    fail: Gone,
    close_and_fail: Gone,
}


def _time(way: Way) -> float:
    return 0.3 if way is shield else 20


def bus_of(tables: Tables, driver: str) -> Bus:
    url = tables.url.replace("postgresql://", f"postgresql+{driver}://", 1)
    tables.execute("DROP TABLE IF EXISTS effects")
    tables.execute("CREATE TABLE effects (number integer)")
    tables.execute("INSERT INTO effects VALUES (0)")
    return Bus("shop", url, poll_interval="50ms", pool_size=2, pool_timeout="5s")


def is_unlocked(tables: Tables) -> bool:
    with psycopg.connect(tables.url) as conn:
        return bool(conn.execute("SELECT 1 FROM effects FOR UPDATE SKIP LOCKED").fetchall())


@pytest.mark.parametrize("driver", DRIVERS)
@pytest.mark.parametrize("way", WAYS)
async def test_handler_with_a_task_in_a_statement_keeps_no_lock_and_no_connection(
    tables: Tables, way: Way, driver: str
) -> None:
    bus, handled = bus_of(tables, driver), []

    @bus.handles(Placed, timeout=_time(way), retry=Retry.never())
    async def handle(placed: Placed, session: AsyncSession) -> None:
        await session.execute(_LOCK)
        if placed.number < 4:
            await way(session, tables)
        handled.append(placed.number)

    async with bus:
        for number in range(4):
            async with bus.unit_of_work():
                bus.send(Placed(number))
        await eventually(lambda: tables.count("dead_letters") == 4)
        told = tables.one("SELECT array_agg(DISTINCT exception_type) FROM durable.dead_letters")
        assert [each.rpartition(".")[2] for each in told] == [WAYS[way].__name__]
        await eventually(lambda: is_unlocked(tables))
        async with bus.unit_of_work():
            bus.send(Placed(4))
        await eventually(lambda: handled == [4])
        await eventually(lambda: bus.statistics().pools["async"].in_use == 0)


async def work(bus: Bus, tables: Tables, way: Way) -> None:
    async with asyncio.timeout(_time(way)), bus.unit_of_work() as uow:
        await uow.session.execute(_LOCK)
        await way(uow.session, tables)


@pytest.mark.parametrize("driver", DRIVERS)
@pytest.mark.parametrize("way", WAYS)
async def test_unit_of_work_with_a_task_in_a_statement_keeps_no_lock_and_no_connection(
    tables: Tables, caplog: pytest.LogCaptureFixture, way: Way, driver: str
) -> None:
    async with bus_of(tables, driver) as bus:
        for _ in range(3):
            with pytest.raises(WAYS[way]):
                await work(bus, tables, way)
        assert any("cannot be rolled back, and is ended" in each for each in caplog.messages) is (driver == "asyncpg")
        await eventually(lambda: is_unlocked(tables))
        async with bus.unit_of_work() as uow:
            await uow.session.execute(_LOCK)
        assert bus.statistics().pools["async"].in_use == 0
    assert tables.one("SELECT number FROM effects") == 1
