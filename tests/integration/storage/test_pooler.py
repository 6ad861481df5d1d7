"""The core of messaging through a real PgBouncer in transaction mode, with both drivers and sync sessions."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any

import msgspec
import pytest
from sqlalchemy import Connection, text
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from durable import Bus, Context, Retry, message
from durable.embedded import Embedded
from durable.errors import InvalidSetting
from durable.storage.engines import OWN_PATH
from tests.failure.waiting import eventually
from tests.support.pooler import pooler
from tests.support.tables import Tables, shared_tables

DRIVERS = ["asyncpg", "psycopg"]
MESSAGES = 60


@message("pooled.noted")
class Noted(msgspec.Struct):
    number: int
    key: str = ""


@message("pooled.answered")
class Answered(msgspec.Struct):
    number: int


@pytest.fixture
def tables(server: Embedded) -> Iterator[Tables]:
    with shared_tables(server) as tables:
        tables.execute("CREATE TABLE notes (seq bigint GENERATED ALWAYS AS IDENTITY, key text, number int)")
        yield tables


@pytest.fixture
def pooled(tables: Tables) -> Iterator[str]:
    with pooler(tables.url) as url:
        yield url


@pytest.fixture(params=DRIVERS)
def driver(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=["auto", "transaction"])
def make_bus(request: pytest.FixtureRequest, driver: str, pooled: str, tables: Tables) -> Callable[..., Bus]:
    def make(**settings: Any) -> Bus:
        url = pooled.replace("postgresql://", f"postgresql+{driver}://", 1)
        options = {"pooler": request.param, "lock_database_url": tables.url, "poll_interval": 0.1}
        return Bus("pooled", database=url, **options | settings)

    return make


INSERT = text("INSERT INTO notes (key, number) VALUES (:key, :number)")


def notes(tables: Tables) -> list[tuple[str, int]]:
    return tables.rows("SELECT key, number FROM notes ORDER BY seq")


@asynccontextmanager
async def running_without_complaints(bus: Bus, caplog: pytest.LogCaptureFixture) -> AsyncIterator[None]:
    with caplog.at_level(logging.WARNING):
        async with bus:
            yield
    assert [record.getMessage() for record in caplog.records] == []


async def test_every_message_is_handled_once_by_an_async_handler(
    make_bus: Callable[..., Bus], tables: Tables, caplog: pytest.LogCaptureFixture
) -> None:
    bus = make_bus()

    @bus.handles(Noted)
    async def note(noted: Noted, session: AsyncSession) -> Answered:
        await session.execute(INSERT, {"key": noted.key, "number": noted.number})
        return Answered(noted.number)

    @bus.handles(Answered, max_batch=10)
    async def answered(answer: Answered, session: AsyncSession) -> None:
        await session.execute(INSERT, {"key": "answered", "number": answer.number})

    async with running_without_complaints(bus, caplog):
        for number in range(MESSAGES):
            async with bus.unit_of_work() as uow:
                uow.send(Noted(number))
        await eventually(lambda: len(notes(tables)) >= 2 * MESSAGES)
    assert Counter(notes(tables)) == Counter({(key, n): 1 for n in range(MESSAGES) for key in ("", "answered")})
    assert tables.dead_letters() == []
    assert tables.rows("SELECT DISTINCT attempts FROM durable.envelope_history WHERE outcome = 'handled'") == [0]


async def test_every_message_is_handled_once_by_a_sync_handler(
    make_bus: Callable[..., Bus], tables: Tables, caplog: pytest.LogCaptureFixture
) -> None:
    bus = make_bus()

    @bus.handles(Noted)
    def note(noted: Noted, session: Session) -> None:
        session.execute(INSERT, {"key": noted.key, "number": noted.number})

    async with running_without_complaints(bus, caplog):
        for number in range(MESSAGES):
            async with bus.unit_of_work() as uow:
                uow.send(Noted(number))
        await eventually(lambda: len(notes(tables)) >= MESSAGES)
    assert Counter(notes(tables)) == Counter({("", n): 1 for n in range(MESSAGES)})


async def test_messages_are_retried_delayed_and_dead_lettered(make_bus: Callable[..., Bus], tables: Tables) -> None:
    bus = make_bus()

    @bus.handles(Noted, retry=Retry(immediate=1, delays=[timedelta(milliseconds=50)]))
    async def note(noted: Noted, session: AsyncSession, ctx: Context) -> None:
        if noted.key == "bad" or (noted.key == "retried" and ctx.attempt < 3):
            raise LookupError(noted.key)
        await session.execute(INSERT, {"key": noted.key, "number": ctx.attempt})

    async with bus:
        async with bus.unit_of_work() as uow:
            uow.send(Noted(1, "bad"))
            uow.send(Noted(2, "retried"))
            uow.send(Noted(3, "delayed"), delay=timedelta(milliseconds=300))
        await eventually(lambda: (len(notes(tables)), len(tables.dead_letters())) == (2, 1))
    assert sorted(notes(tables)) == [("delayed", 1), ("retried", 3)]
    assert [letter[1:3] for letter in tables.dead_letters()] == [("LookupError", "bad")]


async def test_messages_of_a_key_are_handled_in_their_order(
    make_bus: Callable[..., Bus], tables: Tables, caplog: pytest.LogCaptureFixture
) -> None:
    bus = make_bus()

    @bus.handles(Noted, ordered=True)
    async def note(noted: Noted, session: AsyncSession) -> None:
        await session.execute(INSERT, {"key": noted.key, "number": noted.number})

    async with running_without_complaints(bus, caplog):
        for number in range(20):
            async with bus.unit_of_work() as uow:
                for key in "abc":
                    uow.send(Noted(number, key), key=key)
        await eventually(lambda: len(notes(tables)) >= 60)
    for key in "abc":
        assert [number for noted, number in notes(tables) if noted == key] == list(range(20))


async def test_messages_cross_to_another_service(
    make_bus: Callable[..., Bus], tables: Tables, caplog: pytest.LogCaptureFixture
) -> None:
    bus = make_bus()
    bus.listen("tcp://127.0.0.1:0")

    @bus.handles(Noted)
    async def note(noted: Noted, session: AsyncSession) -> None:
        await session.execute(INSERT, {"key": noted.key, "number": noted.number})

    async with running_without_complaints(bus, caplog):
        assert bus.runtime.node is not None
        address = bus.runtime.node.listeners[0].address
        for number in range(MESSAGES):
            async with bus.unit_of_work() as uow:
                uow.send(Noted(number), to=address)
        await eventually(lambda: len(notes(tables)) >= MESSAGES)
        await eventually(lambda: tables.count("outgoing_envelopes") == 0)
    assert Counter(notes(tables)) == Counter({("", n): 1 for n in range(MESSAGES)})


async def test_server_connections_keep_no_settings_and_no_prepared_statements(
    make_bus: Callable[..., Bus], tables: Tables, pooled: str
) -> None:
    bus = make_bus()

    @bus.handles(Noted, timeout=timedelta(minutes=10))
    async def note(noted: Noted, session: AsyncSession) -> None:
        await session.execute(INSERT, {"key": noted.key, "number": noted.number})

    async with bus:
        for number in range(MESSAGES):
            async with bus.unit_of_work() as uow:
                uow.send(Noted(number))
        await eventually(lambda: len(notes(tables)) >= MESSAGES)
    for number in range(6):  # each on the next of the three connections
        bus = make_bus()
        async with bus.runtime.sessions.engine.execution_options(isolation_level="AUTOCOMMIT").connect() as conn:
            changed = "SELECT name FROM pg_settings WHERE source = 'session' AND name LIKE '%timeout'"
            assert (await conn.execute(text(changed))).all() == [], number
            assert (await conn.execute(text("SELECT name FROM pg_prepared_statements"))).all() == []
        await bus.runtime.sessions.close()


async def test_statement_of_its_own_has_the_limits_of_a_transaction(make_bus: Callable[..., Bus]) -> None:
    def found(conn: Connection, schema: str) -> tuple[str, str]:
        limits = conn.execute(text("SELECT current_setting('statement_timeout'), current_setting('search_path')"))
        return tuple(limits.one())

    bus = make_bus(statement_timeout=timedelta(seconds=7))
    assert await bus.runtime.database.statement(found) == ("7s", OWN_PATH)
    await bus.runtime.database.close()


async def test_node_without_a_direct_connection_names_the_setting(make_bus: Callable[..., Bus]) -> None:
    bus = make_bus(lock_database_url=None)
    with pytest.raises(InvalidSetting, match=r"goes through a pooler.* set DURABLE_LOCK_DATABASE_URL to a direct"):
        await bus.__aenter__()
