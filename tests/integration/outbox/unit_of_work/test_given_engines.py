"""An engine that the application made, used in several event loops: each commit that returns is stored, or the use is
refused before anything is lost."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import psycopg
import pytest
from sqlalchemy import Engine, create_engine, event, text
from sqlalchemy.exc import TimeoutError as NoConnection
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine
from sqlalchemy.orm import Session
from sqlalchemy.pool import AssertionPool, AsyncAdaptedQueuePool, NullPool, Pool, SingletonThreadPool, StaticPool

from durable import Bus, message
from durable.errors import WiringError
from tests.failure.workbench import QUICK

pytestmark = pytest.mark.usefixtures("connections_of_closed_loops")

DRIVERS = pytest.mark.parametrize("driver", ["asyncpg", "psycopg"])
SHARED = "the engine has a {}, which may give one connection to two units of work at once"
REFUSED = "belongs to another event loop"


@message("loops.counted")
class Counted(msgspec.Struct):
    number: int


@pytest.fixture
def make_engine(database_url: str) -> Callable[..., AsyncEngine]:
    def make(driver: str, **options: Any) -> AsyncEngine:
        with psycopg.connect(database_url, autocommit=True) as conn:
            conn.execute("CREATE TABLE IF NOT EXISTS counts (number integer)")
        return create_async_engine(database_url.replace("postgresql:", f"postgresql+{driver}:"), **options)

    return make


@pytest.fixture
def make_bus(database_url: str) -> Callable[..., Bus]:
    def make(engine: AsyncEngine | None, **options: Any) -> Bus:
        bus = Bus("shop", database_url, engine=engine, mode="send-only", **QUICK, **options)
        bus.route(Counted, to="tcp://127.0.0.1:1")
        return bus

    return make


async def count(bus: Bus, number: int) -> None:
    async with bus.unit_of_work() as uow:
        await uow.session.execute(text("INSERT INTO counts VALUES (:number)"), {"number": number})
        bus.send(Counted(number))


async def count_enlisted(bus: Bus, engine: AsyncEngine, number: int) -> None:
    async with AsyncSession(engine) as session:
        with bus.enlist(session):
            await session.execute(text("INSERT INTO counts VALUES (:number)"), {"number": number})
            bus.send(Counted(number))
            await session.commit()


def stored(database_url: str) -> tuple[int, int]:
    """The numbers of rows and of messages."""
    with psycopg.connect(database_url) as conn:
        counts = "SELECT (SELECT count(*) FROM counts), (SELECT count(*) FROM durable.outgoing_envelopes)"
        found = conn.execute(counts).fetchone()
    assert found is not None
    return found[0], found[1]


async def refused_elsewhere(work: Callable[[], Any]) -> None:
    def elsewhere() -> None:
        with pytest.raises(WiringError, match=REFUSED):
            asyncio.run(work())

    await asyncio.to_thread(elsewhere)


@DRIVERS
async def test_second_loop_is_refused_after_an_enlisted_session(
    make_engine: Callable[..., AsyncEngine], make_bus: Callable[..., Bus], database_url: str, driver: str
) -> None:
    engine = make_engine(driver)
    bus = make_bus(engine)

    await count_enlisted(bus, engine, 1)
    await refused_elsewhere(lambda: count(bus, 100))
    await count_enlisted(bus, engine, 2)

    assert stored(database_url) == (2, 2)
    await engine.dispose()


@DRIVERS
async def test_enlisted_session_is_refused_in_a_second_loop(
    make_engine: Callable[..., AsyncEngine], make_bus: Callable[..., Bus], database_url: str, driver: str
) -> None:
    engine = make_engine(driver)
    bus = make_bus(engine)

    await count(bus, 1)
    await refused_elsewhere(lambda: count_enlisted(bus, engine, 100))
    await refused_elsewhere(lambda: count_enlisted(bus, engine.execution_options(logging_token="t"), 100))
    await count(bus, 2)

    assert stored(database_url) == (2, 2)
    await engine.dispose()


@DRIVERS
async def test_two_buses_of_one_engine_share_its_loop(
    make_engine: Callable[..., AsyncEngine], make_bus: Callable[..., Bus], database_url: str, driver: str
) -> None:
    engine = make_engine(driver)
    first, second = make_bus(engine), make_bus(engine)

    await count(first, 1)
    await refused_elsewhere(lambda: count(second, 100))
    await count(second, 2)

    assert stored(database_url) == (2, 2)
    await engine.dispose()


@DRIVERS
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_bus_is_started_in_one_loop_after_another(
    make_engine: Callable[..., AsyncEngine], make_bus: Callable[..., Bus], database_url: str, driver: str
) -> None:
    bus = make_bus(make_engine(driver))

    async def several(begin: int) -> None:
        async with bus:
            await asyncio.gather(*(count(bus, begin + number) for number in range(3)))

    for begin in range(0, 9, 3):
        asyncio.run(several(begin))

    assert stored(database_url) == (9, 9)


@DRIVERS
async def test_disposed_engine_is_used_in_another_loop(
    make_engine: Callable[..., AsyncEngine], make_bus: Callable[..., Bus], database_url: str, driver: str
) -> None:
    engine = make_engine(driver)
    bus = make_bus(engine)

    async def elsewhere() -> None:
        await count(bus, 2)
        await engine.dispose()

    await count(bus, 1)
    await engine.dispose()
    await asyncio.to_thread(lambda: asyncio.run(elsewhere()))
    await count(bus, 3)

    assert stored(database_url) == (3, 3)
    await engine.dispose()


@DRIVERS
async def test_connection_from_before_the_bus_is_given_up_in_another_loop(
    make_engine: Callable[..., AsyncEngine], make_bus: Callable[..., Bus], database_url: str, driver: str
) -> None:
    engine = make_engine(driver)
    async with engine.begin() as conn:
        before = (await conn.get_raw_connection()).driver_connection
        await conn.execute(text("INSERT INTO counts VALUES (0)"))
    bus = make_bus(engine)

    async def elsewhere() -> None:
        await count(bus, 1)
        await engine.dispose()

    await asyncio.to_thread(asyncio.run, elsewhere())

    assert before is not None
    assert before.is_closed() if driver == "asyncpg" else before.closed
    assert stored(database_url) == (2, 1)


@DRIVERS
async def test_plain_session_of_a_second_loop_opens_no_connection(
    make_engine: Callable[..., AsyncEngine], make_bus: Callable[..., Bus], database_url: str, driver: str
) -> None:
    engine = make_engine(driver, pool_size=2, max_overflow=0, pool_timeout=1)
    bus = make_bus(engine)
    opened: list[object] = []
    event.listen(engine.sync_engine, "connect", lambda connection, _: opened.append(connection))

    async def plain() -> None:
        async with AsyncSession(engine) as session:
            await session.execute(text("SELECT 1"))

    await count(bus, 1)
    async with engine.connect():  # the pool has none that is free
        for _ in range(3):
            await refused_elsewhere(plain)
    await asyncio.gather(*(count(bus, number) for number in range(2, 8)))

    assert len(opened) <= 2
    assert stored(database_url) == (7, 7)
    await engine.dispose()


@DRIVERS
async def test_waiting_second_loop_costs_the_first_nothing(
    make_engine: Callable[..., AsyncEngine], make_bus: Callable[..., Bus], database_url: str, driver: str
) -> None:
    """SQLAlchemy's queue belongs to the loop that waits first."""
    engine = make_engine(driver, pool_size=1, max_overflow=0, pool_timeout=0.5)

    async def wait() -> None:
        async with AsyncSession(engine) as session:
            await session.execute(text("SELECT 1"))

    def elsewhere() -> None:
        with pytest.raises((RuntimeError, NoConnection)):
            asyncio.run(wait())

    async with engine.connect():
        await asyncio.to_thread(elsewhere)  # before the bus has used it
    bus = make_bus(engine)
    await count(bus, 1)
    async with engine.connect():
        await asyncio.to_thread(elsewhere)
    await asyncio.gather(*(count(bus, number) for number in range(2, 6)))

    assert stored(database_url) == (5, 5)
    await engine.dispose()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_connection_of_a_closed_loop_is_given_up(
    make_engine: Callable[..., AsyncEngine], make_bus: Callable[..., Bus], database_url: str
) -> None:
    engine = make_engine("asyncpg")

    async def use() -> None:
        async with engine.connect() as conn:
            await conn.execute(text("SELECT 1"))

    asyncio.run(use())
    bus = make_bus(engine)
    asyncio.run(count(bus, 1))

    assert stored(database_url) == (1, 1)


@DRIVERS
async def test_connection_given_back_amid_a_transaction_is_given_up(
    make_engine: Callable[..., AsyncEngine], make_bus: Callable[..., Bus], database_url: str, driver: str
) -> None:
    engine = make_engine(driver)
    bus = make_bus(engine)
    await count(bus, 1)
    connection = await engine.connect()
    raw = (await connection.get_raw_connection()).driver_connection
    await connection.close()
    assert raw is not None
    await raw.execute("BEGIN")

    for number in (2, 3):
        await count(bus, number)

    assert stored(database_url) == (3, 3)
    await engine.dispose()


@DRIVERS
async def test_listeners_of_the_application_may_begin_a_transaction(
    make_engine: Callable[..., AsyncEngine], make_bus: Callable[..., Bus], database_url: str, driver: str
) -> None:
    engine = make_engine(driver, pool_size=1)
    pids: set[int] = set()

    @event.listens_for(engine.sync_engine, "connect")
    def connected(connection: Any, _: object) -> None:
        connection.cursor().execute("SET application_name = 'shop'")

    @event.listens_for(engine.sync_engine, "checkout")
    def checked_out(connection: Any, *_: object) -> None:
        cursor = connection.cursor()
        cursor.execute("SELECT pg_backend_pid()")
        pids.add(cursor.fetchone()[0])
        cursor.close()

    bus = make_bus(engine)
    for number in range(3):
        await count(bus, number)

    assert stored(database_url) == (3, 3)
    assert len(pids) == 1
    await engine.dispose()


def test_one_loop_is_the_first_when_several_come_at_once(
    make_engine: Callable[..., AsyncEngine], make_bus: Callable[..., Bus], database_url: str
) -> None:
    engine = make_engine("asyncpg")
    buses = [make_bus(engine) for _ in range(4)]
    together = threading.Barrier(len(buses))
    done = threading.Barrier(len(buses))
    results: list[str] = []

    async def use(bus: Bus) -> None:
        together.wait(10)
        try:
            await count(bus, 1)
            results.append("stored")
        except WiringError:
            results.append("refused")
        done.wait(10)

    threads = [threading.Thread(target=lambda bus=bus: asyncio.run(use(bus))) for bus in buses]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)

    assert sorted(results) == ["refused", "refused", "refused", "stored"]
    assert stored(database_url) == (1, 1)


@DRIVERS
def test_engine_without_a_pool_is_used_by_several_loops_at_once(
    make_engine: Callable[..., AsyncEngine], make_bus: Callable[..., Bus], database_url: str, driver: str
) -> None:
    bus = make_bus(make_engine(driver, poolclass=NullPool))
    together = threading.Barrier(4)

    async def use() -> None:
        together.wait(10)
        async with asyncio.timeout(10):
            await asyncio.gather(*(count(bus, number) for number in range(3)))

    with ThreadPoolExecutor(together.parties) as threads:
        for used in [threads.submit(asyncio.run, use()) for _ in range(together.parties)]:
            used.result()

    assert stored(database_url) == (12, 12)


def test_engine_without_a_pool_is_used_by_another_loop_when_the_first_cannot_connect(
    make_engine: Callable[..., AsyncEngine],
    make_bus: Callable[..., Bus],
    database_url: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("durable.storage.first_connections._LONGEST", 0.2)
    engine = make_engine("asyncpg", poolclass=NullPool)
    bus = make_bus(engine)
    failures = [OSError("no network")]

    @event.listens_for(engine.sync_engine, "do_connect")
    def connecting(*_: object) -> None:
        if failures:
            raise failures.pop()

    async def use() -> None:
        with pytest.raises(OSError, match="no network"):
            await count(bus, 1)
        await asyncio.to_thread(asyncio.run, count(bus, 2))

    asyncio.run(use())

    assert stored(database_url) == (1, 1)


class OwnPool(AsyncAdaptedQueuePool):
    """A pool of the application."""


@DRIVERS
@pytest.mark.parametrize("pool", [StaticPool, AssertionPool])
@pytest.mark.parametrize("door", ["unit of work", "made outside", "enlisted", "copy", "start"])
async def test_pool_with_shared_connections_is_refused(
    make_engine: Callable[..., AsyncEngine],
    make_bus: Callable[..., Bus],
    database_url: str,
    driver: str,
    pool: type[Pool],
    door: str,
) -> None:
    engine = make_engine(driver, poolclass=pool)
    bus = make_bus(engine)

    async def use() -> None:
        match door:
            case "unit of work":
                await count(bus, 1)
            case "made outside":
                async with await asyncio.to_thread(bus.unit_of_work) as uow:
                    await uow.session.execute(text("INSERT INTO counts VALUES (1)"))
                    bus.send(Counted(1))
            case "enlisted":
                await count_enlisted(make_bus(None), engine, 1)
            case "copy":
                await count(make_bus(engine.execution_options(isolation_level="SERIALIZABLE")), 1)
            case _:
                await started(bus)

    with pytest.raises(WiringError, match=SHARED.format(pool.__name__)):
        await use()

    assert stored(database_url) == (0, 0)
    await engine.dispose()


@pytest.mark.parametrize("pool", [StaticPool, AssertionPool, SingletonThreadPool])
@pytest.mark.parametrize("door", ["enlisted", "start"])
async def test_pool_with_shared_sync_connections_is_refused(
    make_engine: Callable[..., AsyncEngine], database_url: str, pool: type[Pool], door: str
) -> None:
    await make_engine("psycopg").dispose()
    engine = create_engine(database_url.replace("postgresql:", "postgresql+psycopg:"), poolclass=pool)
    bus = Bus("shop", database_url, sync_engine=engine, **QUICK)

    @bus.handles(Counted)
    def handle(counted: Counted) -> None: ...

    with pytest.raises(WiringError, match=SHARED.format(pool.__name__)):
        await started(bus) if door == "start" else count_in_session(bus, engine, 1)

    assert stored(database_url) == (0, 0)
    engine.dispose()


@DRIVERS
async def test_pool_of_the_application_is_used(
    make_engine: Callable[..., AsyncEngine], make_bus: Callable[..., Bus], database_url: str, driver: str
) -> None:
    engine = make_engine(driver, poolclass=OwnPool)

    await count(make_bus(engine), 1)

    assert stored(database_url) == (1, 1)
    await engine.dispose()


async def started(bus: Bus) -> None:
    async with bus:
        pass


def count_in_session(bus: Bus, engine: Engine, number: int) -> None:
    with Session(engine) as session, bus.enlist(session):
        session.execute(text("INSERT INTO counts VALUES (:number)"), {"number": number})
        bus.send(Counted(number))
        session.commit()


def in_child(work: Callable[[], object]) -> int:
    """Run this in a forked process; returns 0 when it has worked."""
    if (child := os.fork()) == 0:
        status = 1
        try:
            work()
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@DRIVERS
def test_forked_process_has_connections_of_its_own(
    make_engine: Callable[..., AsyncEngine], make_bus: Callable[..., Bus], database_url: str, driver: str
) -> None:
    engine = make_engine(driver)
    bus = make_bus(engine)

    async def process_of_server() -> object:
        async with engine.connect() as conn:
            return await conn.scalar(text("SELECT pg_backend_pid()"))

    async def use() -> None:
        await process_of_server()
        await count(bus, 2)

    with asyncio.Runner() as runner:
        runner.run(count(bus, 1))
        before = runner.run(process_of_server())
        child = in_child(lambda: asyncio.run(use()))
        runner.run(count(bus, 3))
        after = runner.run(process_of_server())
        runner.run(engine.dispose())

    assert child == 0
    assert after == before
    assert stored(database_url) == (3, 3)


def test_forked_process_has_sync_connections_of_its_own(
    make_engine: Callable[..., AsyncEngine], database_url: str
) -> None:
    make_engine("psycopg")
    engine = create_engine(database_url.replace("postgresql:", "postgresql+psycopg:"))
    bus = Bus("shop", database_url, sync_engine=engine, **QUICK)
    bus.route(Counted, to="tcp://127.0.0.1:1")

    def process_of_server() -> object:
        with engine.connect() as conn:
            return conn.scalar(text("SELECT pg_backend_pid()"))

    count_in_session(bus, engine, 1)
    before = process_of_server()

    def use() -> None:
        count_in_session(bus, engine, 2)
        assert process_of_server() != before

    child = in_child(use)
    count_in_session(bus, engine, 3)

    assert child == 0
    assert stored(database_url) == (3, 3)
    engine.dispose()
