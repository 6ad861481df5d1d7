"""Units of work and sessions that are cancelled again while they end, beside a task in a statement of them: the pool is
whole afterwards, and the process lives.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass

import anyio
import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine

from durable import Bus
from tests.failure.waiting import eventually
from tests.support.tables import Tables

_SIZE = 2
_TIME = 0.03
_SLOW = text("SELECT pg_sleep(0.15)")

LEFT: list[asyncio.Task[object]] = []
"""A reference to each task, so that no collection of garbage ends its connection."""


@pytest.fixture(autouse=True)
def nothing_goes_wrong_in_ends(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    yield
    assert not [each.getMessage() for each in caplog.get_records("call") if each.levelno >= logging.ERROR]


async def leave_a_statement(session: AsyncSession) -> None:
    await session.execute(text("SELECT 1"))
    await asyncio.shield(left(session.execute(_SLOW)))


async def leave_two_statements_of_the_connection(session: AsyncSession) -> None:
    connection = await session.connection()
    await asyncio.gather(*(asyncio.shield(left(connection.execute(_SLOW))) for _ in range(2)))


def left(statement: Coroutine[object, object, object]) -> asyncio.Task[object]:
    task = asyncio.create_task(statement)
    task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
    LEFT.append(task)
    return task


@dataclass
class Place:
    bus: Bus
    engine: AsyncEngine


Leave = Callable[[AsyncSession], Awaitable[None]]
Holder = Callable[[Place], AbstractAsyncContextManager[AsyncSession]]


@asynccontextmanager
async def unit_of_work(place: Place) -> AsyncIterator[AsyncSession]:
    async with place.bus.unit_of_work() as uow:
        yield uow.session


@asynccontextmanager
async def enlisted(place: Place) -> AsyncIterator[AsyncSession]:
    async with AsyncSession(place.engine) as session:
        with place.bus.enlist(session):
            yield session


@asynccontextmanager
async def enlisted_and_closed_by_hand(place: Place) -> AsyncIterator[AsyncSession]:
    session = AsyncSession(place.engine)
    try:
        with place.bus.enlist(session):
            yield session
    finally:
        await session.close()


Work = Callable[[], Awaitable[None]]
End = Callable[[Work], Awaitable[None]]


def cancelled(times: int) -> End:
    async def end(work: Work) -> None:
        task = asyncio.ensure_future(work())
        await asyncio.sleep(_TIME)
        for _ in range(times):
            task.cancel()
            await asyncio.sleep(0)
        await asyncio.wait([task])

    return end


async def move_on_after(work: Work) -> None:
    with anyio.move_on_after(_TIME):
        await work()


async def fail_after(work: Work) -> None:
    with anyio.fail_after(_TIME):
        await work()


async def cancel_scope(work: Work) -> None:
    with anyio.CancelScope() as scope:
        asyncio.get_running_loop().call_later(_TIME, scope.cancel)
        await work()


async def timeout(work: Work) -> None:
    async with asyncio.timeout(_TIME):
        await work()


async def wait_for(work: Work) -> None:
    await asyncio.wait_for(work(), _TIME)


ENDS: dict[str, End] = {
    "once": cancelled(1),
    "twice": cancelled(2),
    "thrice": cancelled(3),
    "move_on_after": move_on_after,
    "fail_after": fail_after,
    "cancel scope": cancel_scope,
    "timeout": timeout,
    "wait_for": wait_for,
}
HOLDERS = (unit_of_work, enlisted, enlisted_and_closed_by_hand)
DRIVERS = pytest.mark.parametrize("driver", ["asyncpg", "psycopg"])
OWN_OR_GIVEN = pytest.mark.parametrize("is_given", [False, True], ids=["own", "given"])


@asynccontextmanager
async def place_of(tables: Tables, driver: str, *, is_given: bool) -> AsyncIterator[Place]:
    url = tables.url.replace("postgresql:", f"postgresql+{driver}:")
    given = create_async_engine(url, pool_size=_SIZE, max_overflow=0, pool_timeout=5) if is_given else None
    bus = Bus("shop", url, engine=given, mode="send-only", pool_size=_SIZE, pool_timeout="5s")
    async with bus:
        yield Place(bus, bus.runtime.sessions.engine)
    if given is not None:
        await given.dispose()


async def is_whole(place: Place) -> None:
    """All places of the pool are free, and may be taken at once."""
    await eventually(lambda: place.bus.statistics().pools["async"].in_use == 0)
    taken = asyncio.Barrier(_SIZE)

    async def take() -> None:
        async with place.bus.unit_of_work() as uow:
            await uow.session.execute(text("SELECT 1"))
            await taken.wait()

    await asyncio.gather(*(take() for _ in range(_SIZE)))


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("holder", HOLDERS)
@OWN_OR_GIVEN
@DRIVERS
@pytest.mark.parametrize("leave", [leave_a_statement, leave_two_statements_of_the_connection])
async def test_session_beside_a_statement_gives_its_connection_back_when_cancelled(
    tables: Tables, leave: Leave, driver: str, is_given: bool, holder: Holder, end: str
) -> None:
    async with place_of(tables, driver, is_given=is_given) as place:

        async def work() -> None:
            async with holder(place) as session:
                await leave(session)

        for _ in range(_SIZE + 1):
            with suppress(Exception):  # of the timeout, or of the driver
                await ENDS[end](work)
        await is_whole(place)


@pytest.mark.parametrize("holder", HOLDERS)
@OWN_OR_GIVEN
@DRIVERS
async def test_session_without_a_statement_ends_without_a_warning(
    tables: Tables, caplog: pytest.LogCaptureFixture, driver: str, is_given: bool, holder: Holder
) -> None:
    async with place_of(tables, driver, is_given=is_given) as place:
        for _ in range(_SIZE + 1):
            async with holder(place) as session:
                await leave_a_statement(session)
        await is_whole(place)
    assert "left behind" not in caplog.text


async def test_unit_of_work_waits_for_its_rollback_when_cancelled_again(tables: Tables) -> None:
    """psycopg rolls back after the statement, which nobody cancels, and the connection goes on."""
    async with place_of(tables, "psycopg", is_given=False) as place:

        async def work() -> None:
            async with unit_of_work(place) as session:
                await leave_a_statement(session)

        before = len(LEFT)
        task = asyncio.ensure_future(work())
        await eventually(lambda: len(LEFT) > before)
        for _ in range(3):
            await asyncio.sleep(0.01)
            task.cancel()
        await asyncio.wait([task])
        assert LEFT[-1].done()
        assert LEFT[-1].exception() is None
