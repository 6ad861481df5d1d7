"""Faults of the database in an attempt, whatever the handler raises in their place: none counts as an attempt."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator

import pytest
from sqlalchemy import event, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from durable import Reject, Release, Retry, RetryLater
from durable.clock import SystemClock
from durable.embedded import Embedded
from durable.errors import StorageUnavailable
from durable.telemetry import Event
from tests.support.one_handler import Placed, Shop, shop_tables
from tests.support.tables import Tables

FAULTS = {
    "conflict": "DO $$ BEGIN RAISE EXCEPTION 'could not serialize access' USING ERRCODE = '40001'; END $$",
    "deadlock": "DO $$ BEGIN RAISE EXCEPTION 'deadlock detected' USING ERRCODE = '40P01'; END $$",
    "full disk": "DO $$ BEGIN RAISE EXCEPTION 'no space left' USING ERRCODE = '53100'; END $$",
    "lost connection": "SELECT pg_terminate_backend(pg_backend_pid())",
}


class Panic(BaseException):
    pass


RAISED: dict[str, Callable[[], BaseException]] = {
    "error": lambda: ValueError("no"),
    "reject": lambda: Reject("no"),
    "group": lambda: ExceptionGroup("no", [ValueError("a"), KeyError("b")]),
    "panic": lambda: Panic("no"),
    "exit": lambda: SystemExit(3),
    "cancellation": lambda: asyncio.CancelledError("a task of the handler"),
    "group of panics": lambda: BaseExceptionGroup("no", [Panic("a"), asyncio.CancelledError()]),
}


@pytest.fixture
def tables(server: Embedded) -> Iterator[Tables]:
    with shop_tables(server) as tables:
        yield tables


@pytest.fixture(params=["asyncpg", "psycopg"])
async def shop(tables: Tables, request: pytest.FixtureRequest) -> AsyncIterator[Shop]:
    url = tables.url.replace("postgresql:", f"postgresql+{request.param}:")
    shop = Shop(tables, SystemClock(), database_url=url)
    yield shop
    await shop.close()


def meet(session: Session, fault: str, error: BaseException) -> None:
    """Swallow the fault, and raise the error in its place."""
    try:
        session.execute(text(FAULTS[fault]))
    except DBAPIError:
        raise error from None


@pytest.mark.parametrize("kind", ["async", "sync"])
@pytest.mark.parametrize("raised", RAISED)
@pytest.mark.parametrize("fault", FAULTS)
async def test_fault_of_the_database_counts_no_attempt_in_other_words(
    shop: Shop, fault: str, raised: str, kind: str
) -> None:
    runs, times = 0, {"full disk": 1, "lost connection": 2}.get(fault, 3)  # more of those are the message's own fault

    def begin() -> BaseException | None:
        nonlocal runs
        runs += 1
        return RAISED[raised]() if runs <= times else None

    async def handle(order: Placed, session: AsyncSession) -> None:
        await shop.write(session, order.number)
        if error := begin():
            await session.run_sync(meet, fault, error)

    def handle_in_a_thread(order: Placed, session: Session) -> None:
        session.execute(text("INSERT INTO effects (number) VALUES (:number)"), {"number": order.number})
        if error := begin():
            meet(session, fault, error)

    shop.handles(handle if kind == "async" else handle_in_a_thread, retry=Retry.never())
    async with shop.open():
        await shop.receive(7)
        await shop.settled()
    assert (shop.effects(), runs) == ([7], times + 1)
    assert (shop.counters[Event.ATTEMPT_FAILED], shop.tables.count("dead_letters")) == (0, 0)


DECISIONS: dict[str, Callable[[], Exception]] = {
    "reject": lambda: Reject("sold out"),
    "later": lambda: RetryLater("1h"),
    "release": lambda: Release(),
}


@pytest.mark.parametrize("decision", DECISIONS)
async def test_decision_of_a_handler_counts_when_a_savepoint_has_survived_the_conflict(
    shop: Shop, decision: str
) -> None:
    runs = 0

    async def handle(order: Placed, session: AsyncSession) -> None:
        nonlocal runs
        runs += 1
        if runs > 1:
            return
        try:
            async with session.begin_nested():
                await session.execute(text(FAULTS["deadlock"]))
        except DBAPIError:
            await session.execute(text("SELECT 1"))
            raise DECISIONS[decision]() from None

    shop.handles(handle)
    async with shop.open():
        await shop.receive(1)
        await shop.settled()
    assert runs == 1
    assert shop.tables.count("dead_letters") == (decision == "reject")


async def test_error_object_is_not_taken_for_an_old_outage(shop: Shop) -> None:
    """A constant of a module, which was raised from a lost connection once."""
    constant = LookupError("no such order")
    constant.__cause__ = StorageUnavailable("the database cannot be used: an hour ago")
    runs = 0

    def fail(_: Session) -> None:
        raise constant

    async def handle(order: Placed, session: AsyncSession) -> None:
        nonlocal runs
        runs += 1
        await shop.write(session, order.number)
        event.listen(session.sync_session, "before_commit", fail)

    shop.handles(handle, retry=Retry(immediate=2, delays=[]))
    async with shop.open():
        await shop.receive(1)
        await shop.settled()
    assert runs == 3
    assert shop.tables.rows("SELECT reason FROM durable.dead_letters") == ["no such order"]
