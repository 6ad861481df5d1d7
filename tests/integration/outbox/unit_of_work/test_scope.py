"""The unit of work that `bus.send()` finds: generators, context managers, scoped sessions, threads and tasks."""

from __future__ import annotations

import asyncio
import contextvars
import gc
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import msgspec
import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.ext.asyncio import async_scoped_session, async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, scoped_session, sessionmaker

from durable import Bus, NoUnitOfWork, message
from tests.integration.outbox.unit_of_work.sessions import insert
from tests.support.tables import Tables

BILLING = "tcp://127.0.0.1:1"


@message("scope.noted")
class Noted(msgspec.Struct):
    number: int


@pytest.fixture
async def bus(tables: Tables) -> AsyncIterator[Bus]:
    bus = Bus("shop", tables.url)
    bus.route(Noted, to=BILLING)
    yield bus
    await bus.runtime.stop()


def stored(tables: Tables) -> list[int]:
    bodies = tables.rows("SELECT body FROM durable.outgoing_envelopes ORDER BY seq")
    return [msgspec.json.decode(bytes(body))["number"] for body in bodies]


def note(bus: Bus, *numbers: int) -> None:
    for number in numbers:
        bus.send(Noted(number))


# ---------------------------------------------------------------- generators

Rows = Callable[[], AsyncIterator[int]]


def reads(bus: Bus) -> Rows:
    """As an application reads rows: in a unit of work of their own, which is rolled back at the end."""

    async def rows() -> AsyncIterator[int]:
        async with bus.unit_of_work() as uow:
            for number in range(1, 4):
                yield number
                note(bus, -number)
            await uow.session.rollback()

    return rows


def reads_by_a_sync_generator(bus: Bus, session: Session) -> Callable[[], Iterator[int]]:
    def rows() -> Iterator[int]:
        with session, bus.enlist(session):
            for number in range(1, 4):
                yield number
                note(bus, -number)

    return rows


async def test_consumer_of_a_generator_names_its_unit_of_work(bus: Bus, tables: Tables) -> None:
    async def send(number: int) -> None:
        with pytest.raises(
            NoUnitOfWork, match=r"either may be meant here: send with the unit of work itself, by its se"
        ):
            note(bus, number)
        uow.send(Noted(number))

    async with bus.unit_of_work() as uow:
        async for number in reads(bus)():
            await send(number)
            await asyncio.create_task(send(10 * number))
        note(bus, 99)
    assert stored(tables) == [1, 10, 2, 20, 3, 30, 99]


async def test_consumer_breaking_off_goes_on_in_its_own_unit_of_work(bus: Bus, tables: Tables) -> None:
    closed = asyncio.Event()

    async def rows() -> AsyncIterator[int]:
        try:
            async with bus.unit_of_work():
                for number in range(1, 4):
                    yield number
        finally:
            closed.set()

    async with bus.unit_of_work() as uow:
        async for number in rows():
            uow.send(Noted(number))
            if number == 2:
                break
        gc.collect()
        await closed.wait()  # the event loop closes the generator, in a task of its own
        note(bus, 100)
    assert stored(tables) == [1, 2, 100]


async def test_generator_sends_in_its_own_unit_of_work(bus: Bus, tables: Tables) -> None:
    async def rows() -> AsyncIterator[int]:
        async with bus.unit_of_work():
            note(bus, 1)
            yield 2
            note(bus, 3)

    async def fail() -> None:
        async with bus.unit_of_work() as uow:
            async for number in rows():
                uow.send(Noted(number))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await fail()
    assert stored(tables) == [1, 3]


def test_consumer_of_a_sync_generator_names_its_outbox(bus: Bus, tables: Tables) -> None:
    engine = create_engine(tables.url.replace("postgresql://", "postgresql+psycopg://"))
    with Session(engine) as session, bus.enlist(session) as outbox:
        for number in reads_by_a_sync_generator(bus, Session(engine))():
            with pytest.raises(NoUnitOfWork):
                note(bus, number)
            outbox.send(Noted(number))
        session.commit()
    assert stored(tables) == [1, 2, 3]
    engine.dispose()


async def test_context_manager_holds_in_the_block_of_its_user(bus: Bus, tables: Tables) -> None:
    @asynccontextmanager
    async def inner() -> AsyncIterator[None]:
        async with bus.unit_of_work():
            yield

    @asynccontextmanager
    async def twice() -> AsyncIterator[None]:
        async with inner():
            yield

    async def fail() -> None:
        async with bus.unit_of_work():
            async with twice():
                note(bus, 1)
            note(bus, 2)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await fail()
    assert stored(tables) == [1]


def test_sync_context_manager_holds_in_the_block_of_its_user(bus: Bus, tables: Tables) -> None:
    engine = create_engine(tables.url.replace("postgresql://", "postgresql+psycopg://"))

    @contextmanager
    def transaction() -> Iterator[Session]:
        with Session(engine) as session, bus.enlist(session):
            yield session
            session.commit()

    with Session(engine) as outer, bus.enlist(outer):
        with transaction():
            note(bus, 1)
        note(bus, 2)
    assert stored(tables) == [1]
    engine.dispose()


async def test_block_of_a_generator_holds_where_there_is_no_other(bus: Bus, tables: Tables) -> None:
    """As in a fixture of a test."""

    async def fixture() -> AsyncIterator[None]:
        async with bus.unit_of_work():
            yield

    running = fixture()
    await anext(running)
    note(bus, 1)
    with pytest.raises(StopAsyncIteration):
        await anext(running)
    assert stored(tables) == [1]
    with pytest.raises(NoUnitOfWork):
        note(bus, 2)


# ---------------------------------------------------------------- contexts


async def test_block_may_be_left_in_another_context(bus: Bus, tables: Tables) -> None:
    uow = bus.unit_of_work()
    await asyncio.create_task(_enter(uow))
    uow.send(Noted(1))
    await asyncio.create_task(_leave(uow))
    assert stored(tables) == [1]


async def _enter(block: Any) -> None:
    await block.__aenter__()


async def _leave(block: Any) -> None:
    await block.__aexit__(None, None, None)


def test_parts_of_a_sync_dependency_run_in_contexts_of_their_own(bus: Bus, tables: Tables) -> None:
    engine = create_engine(tables.url.replace("postgresql://", "postgresql+psycopg://"))

    @contextmanager
    def dependency() -> Iterator[Any]:
        with Session(engine) as session, bus.enlist(session) as outbox:
            yield outbox
            session.commit()

    block = dependency()
    outbox = contextvars.copy_context().run(block.__enter__)
    outbox.send(Noted(1))
    contextvars.copy_context().run(block.__exit__, None, None, None)
    assert stored(tables) == [1]
    engine.dispose()


# ---------------------------------------------------------------- scoped sessions


async def test_scoped_session_is_the_one_of_the_sending_thread(bus: Bus, tables: Tables) -> None:
    engine = create_engine(tables.url.replace("postgresql://", "postgresql+psycopg://"))
    sessions = scoped_session(sessionmaker(engine))

    def work(number: int) -> None:
        insert(sessions(), number)
        note(bus, number)
        sessions.commit()
        sessions.remove()

    with bus.enlist(sessions):
        await asyncio.gather(*(asyncio.to_thread(work, number) for number in (1, 2)))
        for number in (3, 4):  # the session is removed between them
            work(number)
    sessions.remove()
    assert sorted(tables.rows("SELECT number FROM orders")) == sorted(stored(tables)) == [1, 2, 3, 4]
    engine.dispose()


async def test_async_scoped_session_is_the_one_of_the_sending_task(bus: Bus, tables: Tables) -> None:
    engine = create_async_engine(tables.url.replace("postgresql://", "postgresql+asyncpg://"))
    sessions = async_scoped_session(async_sessionmaker(engine), scopefunc=asyncio.current_task)

    async def work(number: int) -> None:
        await sessions.execute(text("INSERT INTO orders (number) VALUES (:number)"), {"number": number})
        note(bus, number)
        await sessions.commit()
        await sessions.remove()

    with bus.enlist(sessions):
        await asyncio.gather(*(asyncio.create_task(work(number)) for number in (1, 2)))
        await work(3)
    await sessions.remove()
    assert sorted(tables.rows("SELECT number FROM orders")) == sorted(stored(tables)) == [1, 2, 3]
    await engine.dispose()
