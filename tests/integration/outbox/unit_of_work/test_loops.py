"""A bus that was not started, used in several event loops: each commit that returns has stored its message, or the use
is refused before anything is lost."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import threading
from collections.abc import Callable
from typing import Any

import msgspec
import psycopg
import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection, create_async_engine
from sqlalchemy.pool import NullPool

from durable import Bus, message
from durable.errors import WiringError
from tests.failure.workbench import QUICK

OTHERS = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
pytestmark = pytest.mark.usefixtures("connections_of_closed_loops")

DRIVERS = pytest.mark.parametrize("driver", ["asyncpg", "psycopg"])


@message("loops.noted")
class Noted(msgspec.Struct):
    number: int


@pytest.fixture
def make_bus(database_url: str) -> Callable[..., Bus]:
    def make(driver: str, **options: Any) -> Bus:
        with psycopg.connect(database_url, autocommit=True) as conn:
            conn.execute("CREATE TABLE IF NOT EXISTS notes (number integer)")
        bus = Bus("shop", database_url.replace("postgresql:", f"postgresql+{driver}:"), **QUICK, **options)
        bus.route(Noted, to="tcp://127.0.0.1:1")
        return bus

    return make


async def note(bus: Bus, number: int, hold: float = 0.0) -> None:
    async with bus.unit_of_work() as uow:
        await uow.session.execute(text("INSERT INTO notes VALUES (:number)"), {"number": number})
        bus.send(Noted(number))
        await asyncio.sleep(hold)


def stored(database_url: str) -> tuple[int, int]:
    """The numbers of rows and of messages."""
    with psycopg.connect(database_url) as conn:
        counts = "SELECT (SELECT count(*) FROM notes), (SELECT count(*) FROM durable.outgoing_envelopes)"
        found = conn.execute(counts).fetchone()
    assert found is not None
    return found[0], found[1]


@DRIVERS
def test_loops_in_turn_store_all_their_commits(
    make_bus: Callable[..., Bus], database_url: str, driver: str, caplog: pytest.LogCaptureFixture
) -> None:
    bus = make_bus(driver)

    async def several(begin: int) -> None:
        await asyncio.gather(*(note(bus, begin + number, 0.02) for number in range(3)))

    for begin in range(0, 12, 3):
        asyncio.run(several(begin))

    assert stored(database_url) == (12, 12)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@DRIVERS
async def test_use_in_a_second_loop_is_refused_and_costs_the_first_nothing(
    make_bus: Callable[..., Bus], database_url: str, driver: str
) -> None:
    bus = make_bus(driver)
    await asyncio.gather(*(note(bus, number, 0.05) for number in range(3)))

    def elsewhere() -> None:
        with pytest.raises(WiringError, match="belongs to another event loop"):
            asyncio.run(note(bus, 100))

    await asyncio.gather(*(asyncio.to_thread(elsewhere) for _ in range(3)))
    for number in range(3, 9):
        await note(bus, number)
    await bus.runtime.stop()

    assert stored(database_url) == (9, 9)


@DRIVERS
async def test_start_in_a_second_loop_is_refused(make_bus: Callable[..., Bus], driver: str) -> None:
    bus = make_bus(driver)
    await note(bus, 1)

    async def start() -> None:
        async with bus:
            pass

    def elsewhere() -> None:
        with pytest.raises(WiringError, match="belongs to another event loop"):
            asyncio.run(start())

    await asyncio.to_thread(elsewhere)
    async with bus:
        await note(bus, 2)


@DRIVERS
async def test_actions_in_a_second_loop_are_refused(make_bus: Callable[..., Bus], driver: str) -> None:
    bus = make_bus(driver)
    await bus.pause(key="k")

    def elsewhere() -> None:
        with pytest.raises(WiringError, match="belongs to another event loop"):
            asyncio.run(bus.resume(key="k"))

    await asyncio.to_thread(elsewhere)
    await bus.resume(key="k")
    await bus.runtime.stop()


@DRIVERS
async def test_unit_of_work_made_outside_loops_is_refused_with_a_connection_of_another(
    make_bus: Callable[..., Bus], database_url: str, driver: str
) -> None:
    bus = make_bus(driver)
    await note(bus, 1)
    made = await asyncio.to_thread(bus.unit_of_work)

    async def use() -> None:
        async with made as uow:
            await uow.session.execute(text("INSERT INTO notes VALUES (7)"))

    def elsewhere() -> None:
        with pytest.raises(WiringError, match="belongs to another event loop"):
            asyncio.run(use())

    await asyncio.to_thread(elsewhere)
    await note(bus, 2)
    await bus.runtime.stop()

    assert stored(database_url) == (2, 2)


def test_engine_without_a_pool_may_be_used_in_any_loop(make_bus: Callable[..., Bus], database_url: str) -> None:
    engine = create_async_engine(database_url.replace("postgresql:", "postgresql+asyncpg:"), poolclass=NullPool)
    bus = make_bus("asyncpg", engine=engine)

    async def outer() -> None:
        await note(bus, 1)
        await asyncio.to_thread(lambda: asyncio.run(note(bus, 2)))
        await note(bus, 3)

    asyncio.run(outer())

    assert stored(database_url) == (3, 3)


@DRIVERS
async def test_connection_given_back_amid_a_transaction_is_closed(
    make_bus: Callable[..., Bus], database_url: str, driver: str
) -> None:
    """Its COMMIT would end a savepoint, or nothing."""
    bus = make_bus(driver)
    await note(bus, 1)
    connection = await bus.runtime.sessions.engine.connect()
    raw = (await connection.get_raw_connection()).driver_connection
    await connection.close()
    assert raw is not None
    await raw.execute("BEGIN")

    for number in (2, 3):
        await note(bus, number)

    assert stored(database_url) == (3, 3)
    assert raw.is_closed() if driver == "asyncpg" else raw.closed
    await bus.runtime.stop()


@DRIVERS
def test_connections_of_a_closed_loop_are_closed_by_the_next(
    make_bus: Callable[..., Bus], database_url: str, driver: str
) -> None:
    bus = make_bus(driver)

    async def several(begin: int) -> None:
        await asyncio.gather(*(note(bus, begin + number, 0.05) for number in range(4)))

    gc.disable()
    try:
        for begin in range(0, 20, 4):
            asyncio.run(several(begin))
            with psycopg.connect(database_url) as conn:
                others = conn.execute(OTHERS).fetchone()
            assert others is not None
            assert others[0] <= 6  # those of the last loop, and one that wakes nodes
    finally:
        gc.enable()

    assert stored(database_url) == (20, 20)


@DRIVERS
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_connection_in_use_when_its_loop_was_closed_is_closed_by_the_next(
    make_bus: Callable[..., Bus], database_url: str, driver: str
) -> None:
    bus = make_bus(driver, pool_size=1, pool_timeout="2s")
    held: list[AsyncConnection] = []

    async def hold() -> None:
        await note(bus, 1)
        held.append(await bus.runtime.sessions.engine.connect())
        await held[-1].execute(text("SELECT 1 -- held"))

    async def finish() -> None:
        await note(bus, 2)
        await bus.runtime.stop()

    for _ in range(3):
        asyncio.run(hold())
    asyncio.run(finish())
    with psycopg.connect(database_url) as conn:
        open_still = conn.execute("SELECT count(*) FROM pg_stat_activity WHERE query LIKE '%-- held'").fetchone()

    assert open_still == (0,)


@DRIVERS
async def test_refused_start_changes_nothing(make_bus: Callable[..., Bus], database_url: str, driver: str) -> None:
    bus = make_bus(driver)
    await note(bus, 1)
    runtime = bus.runtime

    async def start() -> None:
        async with bus:
            pass

    def elsewhere() -> None:
        for work in (start, lambda: note(bus, 100), start, lambda: bus.__aexit__(None, None, None)):
            with contextlib.suppress(WiringError):
                asyncio.run(work())

    await asyncio.to_thread(elsewhere)
    await note(bus, 2)

    assert bus.runtime is runtime
    assert runtime.sessions.pools()["async"].in_use == 0
    assert stored(database_url) == (2, 2)
    await bus.runtime.stop()


async def test_second_start_leaves_the_first_alone(make_bus: Callable[..., Bus], database_url: str) -> None:
    bus = make_bus("asyncpg")

    async with bus:
        runtime = bus.runtime
        with pytest.raises(WiringError, match="the bus runs already"):
            await bus.__aenter__()
        await note(bus, 1)
        assert bus.runtime is runtime
        assert runtime.node is not None

    assert stored(database_url) == (1, 1)


@DRIVERS
async def test_start_is_refused_in_another_loop_than_the_agents_connections(
    make_bus: Callable[..., Bus], driver: str
) -> None:
    bus = make_bus(driver)
    await bus.pause(key="k")

    async def start() -> None:
        async with bus:
            pass

    def elsewhere() -> None:
        with pytest.raises(WiringError, match="belongs to another event loop"):
            asyncio.run(start())
        with pytest.raises(WiringError, match="belongs to another event loop"):
            asyncio.run(bus.resume(key="k"))

    await asyncio.to_thread(elsewhere)
    assert await bus.resume(key="k")
    async with bus:
        await note(bus, 1)


def test_one_of_several_starts_at_once_wins(make_bus: Callable[..., Bus], database_url: str) -> None:
    bus = make_bus("asyncpg", mode="send-only")
    rounds = 8
    results: list[str] = []

    def start(number: int, together: threading.Barrier, done: threading.Barrier) -> None:
        async def run() -> None:
            together.wait(10)
            try:
                async with bus:
                    await note(bus, number)
                    await asyncio.to_thread(done.wait, 10)  # the others have come, and were refused
                    await note(bus, number)
                results.append("stored")
            except WiringError:
                await asyncio.to_thread(done.wait, 10)
                results.append("refused")

        asyncio.run(run())

    for number in range(rounds):
        together, done = threading.Barrier(2), threading.Barrier(2)
        threads = [threading.Thread(target=start, args=(number, together, done)) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)

    assert results.count("stored") == results.count("refused") == rounds
    assert stored(database_url) == (2 * rounds, 2 * rounds)
