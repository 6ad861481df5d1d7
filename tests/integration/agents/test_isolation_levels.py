"""Databases whose transactions have another isolation level by default: conflicts that are nobody's fault."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

import psycopg
import pytest
from sqlalchemy import Connection, TextClause, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncSession

from durable import Reject, Retry
from durable.clock import SystemClock
from durable.embedded import Embedded
from durable.settings import load_settings
from durable.storage.database import Database
from durable.telemetry import Event
from tests.support.one_handler import Placed, Shop, shop_tables
from tests.support.tables import Tables

CODES = ["40001", "40P01"]
"""A serialization failure, and a deadlock."""


def conflict(code: str) -> TextClause:
    return text(f"DO $$ BEGIN RAISE EXCEPTION 'could not serialize access' USING ERRCODE = '{code}'; END $$")


@pytest.fixture(params=["repeatable read", "serializable"])
def tables(servers: Callable[[int], Embedded], request: pytest.FixtureRequest) -> Iterator[Tables]:
    with shop_tables(servers(18)) as tables:
        name = tables.one("SELECT current_database()")
        tables.execute(f"ALTER DATABASE \"{name}\" SET default_transaction_isolation = '{request.param}'")
        yield tables


@pytest.fixture
async def shop(tables: Tables) -> AsyncIterator[Shop]:
    shop = Shop(tables, SystemClock(), pool_size=8)
    yield shop
    await shop.close()


@pytest.mark.parametrize("driver", ["asyncpg", "psycopg"])
async def test_agents_work_in_read_committed(tables: Tables, driver: str) -> None:
    def level(conn: Connection, schema: str) -> str:
        return str(conn.execute(text("SHOW transaction_isolation")).scalar_one())

    database = Database(load_settings(database_url=tables.url.replace("postgresql:", f"postgresql+{driver}:")))
    assert await database.transaction(level) == "read committed"
    assert await database.statement(level) == "read committed"
    await database.close()


async def test_messages_conflicting_only_in_own_tables_are_all_handled(shop: Shop) -> None:
    async def handle(order: Placed, session: AsyncSession) -> None:
        await shop.write(session, order.number)

    shop.handles(handle, concurrency=8)
    async with shop.open():
        await shop.receive(*range(100))
        await shop.settled()
    assert (sorted(shop.effects()), shop.tables.count("dead_letters")) == (list(range(100)), 0)


async def as_it_is(session: AsyncSession, code: str) -> None:
    await session.execute(conflict(code))


async def as_a_cause(session: AsyncSession, code: str) -> None:
    try:
        await session.execute(conflict(code))
    except DBAPIError as error:
        raise LookupError("the account is busy") from error


async def in_other_words(session: AsyncSession, code: str) -> None:
    try:
        await session.execute(conflict(code))
    except DBAPIError:
        raise LookupError("the account is busy") from None


async def in_a_task_group(session: AsyncSession, code: str) -> None:
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(as_it_is(session, code))


async def beside_other_errors(session: AsyncSession, code: str) -> None:
    try:
        await session.execute(conflict(code))
    except DBAPIError as error:
        raise ExceptionGroup("both", [Reject("not there"), ExceptionGroup("inner", [error])]) from None


async def of_the_driver(session: AsyncSession, code: str) -> None:
    raise psycopg.errors.lookup(code)("could not serialize access")


IN_ITS_PLACE = (in_other_words, in_a_task_group, beside_other_errors)


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("meet", [as_it_is, as_a_cause, of_the_driver, *IN_ITS_PLACE])
async def test_conflict_is_repeated_uncounted_as_a_cause_too(
    shop: Shop, meet: Callable[[AsyncSession, str], Awaitable[None]], code: str
) -> None:
    left = [1]

    async def handle(order: Placed, session: AsyncSession) -> None:
        await shop.write(session, order.number)
        if left:
            left.pop()
            await meet(session, code)

    shop.handles(handle)
    async with shop.open():
        await shop.receive(1)
        await shop.settled()
    assert (shop.effects(), shop.counters[Event.ATTEMPT_FAILED], shop.tables.count("dead_letters")) == ([1], 0, 0)


CONSTANTS = (Reject("no such order"), LookupError("no such order"))


@pytest.mark.parametrize("chained", ["in its place", "from the conflict", "from none"])
@pytest.mark.parametrize("constant", CONSTANTS, ids=lambda error: type(error).__name__)
async def test_error_object_is_not_taken_for_an_old_conflict(shop: Shop, constant: Exception, chained: str) -> None:
    """A constant of a module: Python, and the application, give it a cause that stays."""
    runs = Counter[int]()
    before = constant.__cause__

    async def handle(order: Placed, session: AsyncSession) -> None:
        runs[order.number] += 1
        if order.number or runs[0] > 1:
            raise constant
        try:
            await session.execute(conflict("40001"))
        except DBAPIError as error:
            match chained:
                case "in its place":
                    raise constant  # noqa: B904
                case "from the conflict":
                    raise constant from error
                case _:
                    raise constant from None

    shop.handles(handle, retry=Retry.never())
    async with shop.open():
        for number in range(3):
            await shop.receive(number)
            await shop.settled()
    assert runs == {0: 2, 1: 1, 2: 1}
    assert shop.tables.count("dead_letters") == 3
    if chained == "in its place":
        assert constant.__cause__ is before, "an object of the application is left as it is"


@pytest.mark.parametrize(("conflicts", "failed"), [(20, 0), (21, 1)])
async def test_conflicts_in_a_row_count_beyond_a_bound(shop: Shop, conflicts: int, failed: int) -> None:
    left = conflicts

    async def handle(order: Placed, session: AsyncSession) -> None:
        nonlocal left
        await shop.write(session, order.number)
        left -= 1
        if left >= 0:
            await session.execute(conflict("40001"))

    shop.handles(handle)
    async with shop.open():
        await shop.receive(1)
        await shop.settled()
    assert (shop.counters[Event.ATTEMPT_FAILED], shop.tables.count("dead_letters")) == (failed, failed)
    assert shop.effects() == [1] * (1 - failed)


async def test_pauses_after_conflicts_double_up_to_a_bound(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    longest = list[float]()

    def none_at_all(shortest: float, high: float) -> float:
        longest.append(high)
        return shortest

    async def handle(order: Placed, session: AsyncSession) -> None:
        await shop.write(session, order.number)
        if len(longest) < 9:
            await session.execute(conflict("40001"))

    monkeypatch.setattr("durable.agents.delivery.random.uniform", none_at_all)
    shop.handles(handle)
    async with shop.open():
        await shop.receive(1)
        await shop.settled()
    assert longest == [0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.0, 1.0]
    assert shop.effects() == [1]
