"""No transaction is idle for ever, and none is ended while its handler or unit of work may still run."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any

import msgspec
import pytest
from sqlalchemy import Connection, pool, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from durable import Bus, message
from durable.embedded import Embedded
from durable.settings import load_settings
from durable.storage import database, engines
from durable.storage.database import Database, sync_url
from durable.storage.engines import Limits, make_engine
from durable.storage.locks import Job, try_lock
from tests.failure.waiting import eventually
from tests.support.tables import Tables, shared_tables

DRIVERS = ["asyncpg", "psycopg"]
SHOW = "SELECT current_setting('statement_timeout'), current_setting('idle_in_transaction_session_timeout')"


@message("idle.asked")
class Asked(msgspec.Struct):
    number: int = 1


@pytest.fixture
def tables(server: Embedded) -> Iterator[Tables]:
    with shared_tables(server) as tables:
        tables.execute("CREATE TABLE answers (answer text)")
        yield tables


def url_of(tables: Tables, driver: str) -> str:
    return tables.url.replace("postgresql://", f"postgresql+{driver}://", 1)


async def test_node_stopped_with_the_lock_of_a_job_loses_the_lock(database_url: str) -> None:
    settings = load_settings(database_url=database_url)
    limits = Limits(timedelta(seconds=15), timedelta(milliseconds=100))
    engine = make_engine(sync_url(settings), settings, limits, poolclass=pool.NullPool)

    with engine.connect() as paused, engine.connect() as other:
        assert try_lock(paused, "durable", Job.SWEEP)

        def taken_over() -> bool:
            got = try_lock(other, "durable", Job.SWEEP)
            other.rollback()
            return got

        await eventually(taken_over)
        with pytest.raises(DBAPIError, match="idle-in-transaction timeout"):
            paused.exec_driver_sql("SELECT 1")


@pytest.mark.parametrize("pooler", ["none", "transaction"])
@pytest.mark.parametrize("driver", DRIVERS)
async def test_the_agents_transactions_have_limits(
    tables: Tables, driver: str, pooler: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "AGENTS_LONGEST_IDLE", timedelta(seconds=7))
    agents = Database(load_settings(database_url=url_of(tables, driver), statement_timeout=9, pooler=pooler))

    def show(conn: Connection, _: str) -> tuple[str, str]:
        statement, idle = conn.exec_driver_sql(SHOW).one()
        return statement, idle

    assert await agents.transaction(show) == ("9s", "7s")
    await agents.close()


def make_bus(tables: Tables, driver: str, **settings: Any) -> Bus:
    return Bus("idle", database=url_of(tables, driver), **settings)


@asynccontextmanager
async def asked(bus: Bus) -> AsyncIterator[None]:
    async with bus:
        async with bus.unit_of_work() as uow:
            uow.send(Asked())
        yield


def answers(tables: Tables) -> list[Any]:
    return tables.rows("SELECT answer FROM answers")


@pytest.mark.parametrize("pooler", ["none", "transaction"])
@pytest.mark.parametrize("driver", DRIVERS)
@pytest.mark.parametrize(("seconds", "limit"), [(None, "65s"), (30, "65s"), (600, "605s")])
async def test_the_limits_of_an_attempt_are_those_of_its_handler(
    tables: Tables, driver: str, pooler: str, seconds: float | None, limit: str
) -> None:
    bus = make_bus(tables, driver, pooler=pooler)

    @bus.handles(Asked, timeout=None if seconds is None else timedelta(seconds=seconds))
    async def answer(asked: Asked, session: AsyncSession) -> None:
        statement, idle = (await session.execute(text(SHOW))).one()
        await session.execute(text("INSERT INTO answers VALUES (:answer)"), {"answer": f"{statement} {idle}"})

    async with asked(bus):
        await eventually(lambda: answers(tables))
    assert answers(tables) == [f"{limit} {limit}"]


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Settings under which a transaction is ended soon."""
    monkeypatch.setattr(engines, "GRACE", timedelta(milliseconds=100))
    return {"handler_timeout": 0.5, "unit_of_work_timeout": 0.5}


@pytest.mark.parametrize("driver", DRIVERS)
async def test_handler_waiting_within_its_own_timeout_is_not_cut(
    tables: Tables, driver: str, hasty: dict[str, float]
) -> None:
    bus = make_bus(tables, driver, **hasty)

    @bus.handles(Asked, timeout=timedelta(seconds=60))
    async def answer(asked: Asked, session: AsyncSession) -> None:
        await session.execute(text("INSERT INTO answers VALUES ('waited')"))
        await asyncio.sleep(1.5)
        await session.execute(text("SELECT pg_sleep(1.5)"))

    async with asked(bus):
        await eventually(lambda: tables.count("envelope_history"))
    assert (answers(tables), tables.dead_letters()) == (["waited"], [])


async def test_sync_handler_waiting_within_its_own_timeout_is_not_cut(tables: Tables, hasty: dict[str, float]) -> None:
    bus = make_bus(tables, "psycopg", **hasty)

    @bus.handles(Asked, timeout=timedelta(seconds=60))
    def answer(asked: Asked, session: Session) -> None:
        session.execute(text("INSERT INTO answers VALUES ('waited')"))
        time.sleep(1.5)
        session.execute(text("SELECT pg_sleep(1.5)"))

    async with asked(bus):
        await eventually(lambda: tables.count("envelope_history"))
    assert (answers(tables), tables.dead_letters()) == (["waited"], [])


@pytest.mark.parametrize("driver", DRIVERS)
async def test_unit_of_work_has_its_own_limits(tables: Tables, driver: str) -> None:
    bus = make_bus(tables, driver, unit_of_work_timeout=90)
    for timeout, limit in ((None, "95s"), (30, "95s"), (600, "605s"), (None, "95s")):
        async with bus.unit_of_work(timeout=timeout) as uow:
            assert (await uow.session.execute(text(SHOW))).one() == (limit, limit)
    await bus.runtime.sessions.close()


@pytest.mark.parametrize("driver", DRIVERS)
async def test_unit_of_work_waiting_within_its_timeout_is_not_cut(
    tables: Tables, driver: str, hasty: dict[str, float]
) -> None:
    bus = make_bus(tables, driver, **hasty)
    async with bus.unit_of_work(timeout=60) as uow:
        await uow.session.execute(text("INSERT INTO answers VALUES ('waited')"))
        await asyncio.sleep(1.5)
    assert answers(tables) == ["waited"]
    await bus.runtime.sessions.close()
