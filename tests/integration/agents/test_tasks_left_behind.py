"""Tasks that are left behind in a statement of the session: it ends all the same, with its locks and its place in the
pool, and the error that is told is that of the handler, or of the block.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from random import Random
from typing import Any

import psycopg
import pytest
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session
from sqlalchemy.util import greenlet_spawn

from durable import Bus, HandleNext, Incoming, Middleware, Retry, message
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


@pytest.fixture(autouse=True)
def nothing_goes_wrong_in_ends(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """A warning tells of the task; nobody has to read of errors that follow from it."""
    yield
    errors = [each.getMessage() for each in caplog.get_records("call") if each.levelno >= logging.ERROR]
    assert not [each for each in errors if not each.startswith("dead letter")]


LEFT: set[asyncio.Task[Any]] = set()
"""A reference to each task, so that no collection of garbage ends its connection."""


def left_behind(work: Awaitable[Any]) -> asyncio.Task[Any]:
    async def run() -> Any:
        return await work

    task = asyncio.create_task(run())
    task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
    LEFT.add(task)
    return task


async def left_tasks_end() -> None:
    loop = asyncio.get_running_loop()
    await asyncio.gather(*(task for task in LEFT if task.get_loop() is loop), return_exceptions=True)


Way = Callable[[AsyncSession, Tables], Awaitable[None]]


async def shield(session: AsyncSession, _: Tables) -> None:
    await session.execute(_LOCK)
    await asyncio.shield(left_behind(session.execute(_SLOW)))


async def _leave_a_statement(session: AsyncSession, tables: Tables) -> None:
    await session.execute(_LOCK)
    left_behind(session.execute(_SLOW))
    await eventually(lambda: tables.rows(_ASLEEP))


async def fail(session: AsyncSession, tables: Tables) -> None:
    await _leave_a_statement(session, tables)
    raise Gone


async def close_and_fail(session: AsyncSession, tables: Tables) -> None:
    await _leave_a_statement(session, tables)
    left_behind(session.close())
    await asyncio.sleep(0)  # it has begun
    raise Gone


async def fail_beside_statements_of_the_connection(session: AsyncSession, _: Tables) -> None:
    connection = await session.connection()
    await connection.execute(_LOCK)
    for statement in (_SLOW, _SLOW):
        left_behind(connection.execute(statement))
    await asyncio.sleep(0)  # they have begun
    raise Gone


async def shield_statements_of_the_connection(session: AsyncSession, _: Tables) -> None:
    connection = await session.connection()
    await connection.execute(_LOCK)
    await asyncio.gather(*(asyncio.shield(left_behind(connection.execute(_SLOW))) for _ in range(2)))


async def fail_in_the_first_statement(session: AsyncSession, _: Tables) -> None:
    left_behind(session.execute(_LOCK))
    await asyncio.sleep(0)  # it has begun
    raise Gone


async def go_on(session: AsyncSession, _: Tables) -> None:
    async def statements() -> None:
        for _ in range(60):
            await session.execute(text("SELECT pg_sleep(0.02)"))

    await session.execute(_LOCK)
    await asyncio.shield(left_behind(statements()))


async def go_on_in_a_function(session: AsyncSession, _: Tables) -> None:
    def statements(sync_session: Session) -> None:
        for _ in range(60):
            sync_session.execute(text("SELECT pg_sleep(0.02)"))

    await session.execute(_LOCK)
    await asyncio.shield(left_behind(session.run_sync(statements)))


async def shield_in_a_block(session: AsyncSession, _: Tables) -> None:
    async with session.begin():
        await session.execute(_LOCK)
        await asyncio.shield(left_behind(session.execute(_SLOW)))


async def end_well(session: AsyncSession, tables: Tables) -> None:
    await _leave_a_statement(session, tables)


async def commit(session: AsyncSession, tables: Tables) -> None:
    await _leave_a_statement(session, tables)
    await session.commit()


WAYS: dict[Way, type[Exception]] = {
    shield: TimeoutError,
    fail: Gone,
    close_and_fail: Gone,
    fail_beside_statements_of_the_connection: Gone,
    shield_statements_of_the_connection: TimeoutError,
    fail_in_the_first_statement: Gone,
    go_on: TimeoutError,
    go_on_in_a_function: TimeoutError,
}
OF_UNITS_OF_WORK: dict[Way, type[Exception]] = {shield_in_a_block: TimeoutError}
COMMITS: tuple[Way, ...] = (end_well, commit)
"""They wait for the statement."""


def _time(way: Way) -> float:
    return 0.3 if (WAYS | OF_UNITS_OF_WORK).get(way) is TimeoutError else 20


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
        if placed.number < 4:
            await way(session, tables)
        await session.execute(_LOCK)
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


@pytest.mark.parametrize("driver", DRIVERS)
async def test_error_of_a_handler_stays_when_a_statement_outlasts_its_time(tables: Tables, driver: str) -> None:
    bus = bus_of(tables, driver)

    @bus.handles(Placed, timeout=1, retry=Retry.never())
    async def handle(_: Placed, session: AsyncSession) -> None:
        await fail(session, tables)

    await has_failed(bus, tables)


async def work(bus: Bus, tables: Tables, *ways: Way) -> None:
    async with asyncio.timeout(_time(ways[-1])), bus.unit_of_work() as uow:
        for way in ways:
            await way(uow.session, tables)


async def is_whole(bus: Bus, tables: Tables) -> None:
    """No lock and no connection is left, and what follows commits."""
    await eventually(lambda: is_unlocked(tables))
    await eventually(lambda: bus.statistics().pools["async"].in_use == 0)
    before = tables.one("SELECT number FROM effects")
    for _ in range(3):
        async with bus.unit_of_work() as uow:
            await uow.session.execute(_LOCK)
    assert tables.one("SELECT number FROM effects") == before + 3


def warnings(caplog: pytest.LogCaptureFixture) -> int:
    return sum("cannot be rolled back, and is ended" in each for each in caplog.messages)


@pytest.mark.parametrize("driver", DRIVERS)
@pytest.mark.parametrize("way", WAYS | OF_UNITS_OF_WORK)
async def test_unit_of_work_with_a_task_in_a_statement_keeps_no_lock_and_no_connection(
    tables: Tables, caplog: pytest.LogCaptureFixture, way: Way, driver: str
) -> None:
    async with bus_of(tables, driver) as bus:
        for _ in range(3):
            with pytest.raises((WAYS | OF_UNITS_OF_WORK)[way]):
                await work(bus, tables, way)
        if way is not fail_in_the_first_statement:
            assert warnings(caplog) in (range(1, 4) if driver == "asyncpg" else (0,))
        assert tables.one("SELECT number FROM effects") == 0
        await is_whole(bus, tables)


@pytest.mark.parametrize("driver", DRIVERS)
@pytest.mark.parametrize("way", COMMITS)
async def test_commit_with_a_task_in_a_statement_keeps_no_lock_and_no_connection(
    tables: Tables, caplog: pytest.LogCaptureFixture, way: Way, driver: str
) -> None:
    async with bus_of(tables, driver) as bus:
        for _ in range(2):
            await work(bus, tables, way)
        assert warnings(caplog) == 0
        assert tables.one("SELECT number FROM effects") == 2
        await is_whole(bus, tables)


async def test_commit_of_a_task_ends_as_its_connection_does(tables: Tables) -> None:
    """It waits for its turn while the unit of work ends the connection."""
    pooled: Any = None
    adapted: Any = None
    commit: asyncio.Task[Any] | None = None

    async def commit_in_a_task(session: AsyncSession, tables: Tables) -> None:
        nonlocal pooled, adapted, commit
        pooled = await (await session.connection()).get_raw_connection()
        adapted = pooled.dbapi_connection
        await _leave_a_statement(session, tables)
        engine: Any = session.get_bind()
        commit = left_behind(greenlet_spawn(engine.dialect.do_commit, pooled))
        await asyncio.sleep(0)  # it waits
        raise Gone

    async with bus_of(tables, "asyncpg") as bus:
        with pytest.raises(Gone):
            await work(bus, tables, commit_in_a_task)
        assert commit is not None
        with suppress(adapted.dbapi.Error):
            await commit
        assert not adapted._execute_mutex.locked()


async def connect(session: AsyncSession, _: Tables) -> None:
    await session.connection()


async def fail_at_once(_: AsyncSession, __: Tables) -> None:
    raise Gone


async def end_backend(session: AsyncSession, tables: Tables) -> None:
    pid = (await session.execute(text("SELECT pg_backend_pid()"))).scalar_one()
    tables.execute(f"SELECT pg_terminate_backend({pid})")
    await eventually(lambda: not tables.rows(f"SELECT 1 FROM pg_stat_activity WHERE pid = {pid}"))


@pytest.mark.parametrize("driver", DRIVERS)
async def test_unit_of_work_blames_no_task_when_postgres_has_ended_its_connection(
    tables: Tables, caplog: pytest.LogCaptureFixture, driver: str
) -> None:
    async with bus_of(tables, driver) as bus:
        with pytest.raises(Gone):
            await work(bus, tables, end_backend, fail_at_once)
        with pytest.raises(DBAPIError):
            await work(bus, tables, end_backend)
        assert warnings(caplog) == 0
        await is_whole(bus, tables)


@pytest.mark.parametrize("driver", DRIVERS)
async def test_first_statement_of_a_task_does_not_run_in_the_next_transaction(tables: Tables, driver: str) -> None:
    """Its BEGIN is on the way when the connection comes back."""
    async with bus_of(tables, driver) as bus:
        for _ in range(20):
            with pytest.raises(Gone):
                await work(bus, tables, connect, fail_in_the_first_statement)
        await is_whole(bus, tables)


_NOTES = "CREATE TABLE notes (number integer, kind text, transaction bigint DEFAULT txid_current())"
_STRAY = """
SELECT count(*) FROM notes
WHERE (number, transaction) NOT IN (SELECT number, transaction FROM notes WHERE kind = 'main')
"""


async def note(session: AsyncSession, number: int, kind: str) -> None:
    await session.execute(
        text("INSERT INTO notes (number, kind) VALUES (:number, :kind)"), {"number": number, "kind": kind}
    )


async def note_often(session: AsyncSession, number: int, after: float) -> None:
    await asyncio.sleep(after)
    for _ in range(20):
        await note(session, number, "left")


async def leave_statements(session: AsyncSession, number: int) -> None:
    """Leave tasks behind, each with statements one after another, and go on at some time beside them."""
    chance = Random(number)
    for _ in range(3):
        left_behind(note_often(session, number, chance.random() / 100))
    await asyncio.sleep(chance.random() * 3 / 100)


async def fail_beside_statements(session: AsyncSession, number: int) -> None:
    await leave_statements(session, number)
    raise Gone


async def fail_in_a_gathering(session: AsyncSession, number: int) -> None:
    """One fails, and the others go on."""
    chance = Random(number)
    others = [left_behind(note_often(session, number, chance.random() / 100)) for _ in range(3)]
    await asyncio.gather(fail_after(chance.random() * 3 / 100), *others)


async def fail_after(seconds: float) -> None:
    await asyncio.sleep(seconds)
    raise Gone


ENDS = (fail_beside_statements, fail_in_a_gathering, leave_statements)
End = Callable[[AsyncSession, int], Awaitable[None]]


@pytest.mark.parametrize("driver", DRIVERS)
@pytest.mark.parametrize("end", ENDS)
async def test_statements_of_tasks_are_in_the_transaction_of_their_handler_or_in_none(
    tables: Tables, end: End, driver: str
) -> None:
    bus = bus_of(tables, driver)
    tables.execute(f"DROP TABLE IF EXISTS notes; {_NOTES}")

    @bus.handles(Placed, retry=Retry.never())
    async def handle(placed: Placed, session: AsyncSession) -> None:
        await note(session, placed.number, "main")
        await end(session, placed.number)

    async with bus:
        async with bus.unit_of_work():
            for number in range(100):
                bus.send(Placed(number))
        await eventually(lambda: tables.count("incoming_envelopes") == 0)
        await left_tasks_end()
        await is_whole(bus, tables)
    assert tables.one(_STRAY) == 0
    assert tables.one("SELECT count(*) FROM notes WHERE kind = 'main'") + tables.count("dead_letters") == 100


@pytest.mark.parametrize("driver", DRIVERS)
@pytest.mark.parametrize("end", ENDS)
async def test_statements_of_tasks_are_in_the_transaction_of_their_unit_of_work_or_in_none(
    tables: Tables, end: End, driver: str
) -> None:
    tables.execute(f"DROP TABLE IF EXISTS notes; {_NOTES}")

    async def work_in(number: int) -> None:
        async with bus.unit_of_work() as uow:
            await note(uow.session, number, "main")
            await end(uow.session, number)

    async with bus_of(tables, driver) as bus:
        for number in range(0, 100, 2):
            await asyncio.gather(work_in(number), work_in(number + 1), return_exceptions=True)
        await left_tasks_end()
        await is_whole(bus, tables)
    assert tables.one(_STRAY) == 0


class Passing(Middleware):
    """Beside it, the steps of a sync handler run in threads, one at a time."""

    async def handle(self, incoming: Incoming, call_next: HandleNext) -> object:
        return await call_next(incoming)


@pytest.mark.parametrize("driver", DRIVERS)
async def test_async_handler_keeps_its_error_when_postgres_has_ended_its_connection(
    tables: Tables, caplog: pytest.LogCaptureFixture, driver: str
) -> None:
    bus = bus_of(tables, driver)

    @bus.handles(Placed, retry=Retry.never())
    async def handle(_: Placed, session: AsyncSession) -> None:
        await end_backend(session, tables)
        raise Gone

    await has_failed(bus, tables)
    assert warnings(caplog) == 0


@pytest.mark.parametrize("in_steps", [False, True])
async def test_sync_handler_keeps_its_error_when_postgres_has_ended_its_connection(
    tables: Tables, in_steps: bool
) -> None:
    bus = bus_of(tables, "psycopg")
    if in_steps:
        bus.use(Passing())

    @bus.handles(Placed, retry=Retry.never())
    def handle(_: Placed, session: Session) -> None:
        pid = session.execute(text("SELECT pg_backend_pid()")).scalar_one()
        tables.execute(f"SELECT pg_terminate_backend({pid}, 5000)")
        raise Gone

    await has_failed(bus, tables)


async def has_failed(bus: Bus, tables: Tables) -> None:
    async with bus:
        async with bus.unit_of_work():
            bus.send(Placed(1))
        await eventually(lambda: tables.count("dead_letters") == 1)
        await is_whole(bus, tables)
    assert tables.one("SELECT exception_type FROM durable.dead_letters").endswith(".Gone")


async def test_ended_connection_comes_back_in_peace(tables: Tables, caplog: pytest.LogCaptureFixture) -> None:
    """asyncpg cannot tell of one that was terminated whether it is in a transaction."""
    bus = Bus("shop", tables.url)

    async def lose() -> None:
        async with bus.unit_of_work() as uow:
            connection = await uow.session.connection()
            driver: Any = (await connection.get_raw_connection()).driver_connection
            driver.terminate()
            raise Gone

    for _ in range(2):
        with pytest.raises(Gone):
            await lose()
    assert "left behind" not in caplog.text
    async with bus.unit_of_work() as uow:
        assert await uow.session.scalar(text("SELECT 1")) == 1
    await bus.runtime.stop()
