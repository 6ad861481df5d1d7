"""The last statement of a transaction, sent together with its COMMIT."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from datetime import timedelta
from typing import Any

import psycopg
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError, IntegrityError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

from durable.embedded import Embedded
from durable.envelope import NodeId
from durable.errors import LeaseLost, TransactionEnded
from durable.settings import load_settings
from durable.storage import inbox
from durable.storage.database import async_url
from durable.storage.engines import Limits, make_async_engine, own_asyncpg
from durable.storage.inbox import Arrival
from durable.storage.piggyback import literal, send_with_commit
from durable.storage.sql.statement import Statement
from tests.support.one_handler import envelope
from tests.support.tables import Tables, shared_tables

NODE = NodeId(7)
NOTE = Statement("INSERT INTO notes (number) VALUES (CAST(:number AS integer))")


@pytest.fixture(scope="module")
def database(servers: Callable[[int], Embedded]) -> Iterator[Tables]:
    with shared_tables(servers(18)) as tables:
        tables.execute("CREATE TABLE notes (number integer, UNIQUE (number) DEFERRABLE INITIALLY DEFERRED)")
        yield tables


@pytest.fixture
def tables(database: Tables) -> Tables:
    database.clear()
    database.execute("TRUNCATE notes")
    return database


def own_engine(url: str) -> AsyncEngine:
    made = load_settings(database_url=url, pool_size=1)
    return make_async_engine(async_url(made), made, Limits.of(timedelta(minutes=1)), pool_size=1, max_overflow=0)


@pytest.fixture
async def engine(tables: Tables) -> AsyncIterator[AsyncEngine]:
    """Of one connection, so that each transaction meets what the last one has left."""
    engine = own_engine(tables.url)
    yield engine
    await engine.dispose()


def notes(tables: Tables) -> list[int]:
    return tables.rows("SELECT number FROM notes ORDER BY number")


async def note(conn: AsyncConnection, number: int, **options: Any) -> None:
    """Insert a number, and the next one together with the COMMIT."""
    await conn.execute(text("INSERT INTO notes VALUES (:number)"), {"number": number})
    assert await conn.run_sync(send_with_commit, "durable", NOTE, {"number": number + 1}, **options)


# ---------------------------------------------------------------- transactions


async def test_statement_is_committed_with_the_transaction(tables: Tables, engine: AsyncEngine) -> None:
    for number in (1, 3, 5):
        async with engine.begin() as conn:
            await note(conn, number)
            assert number + 1 not in notes(tables)
    assert notes(tables) == [1, 2, 3, 4, 5, 6]


async def test_rollback_forgets_the_statement(tables: Tables, engine: AsyncEngine) -> None:
    async with engine.connect() as conn:
        await note(conn, 1)
        await conn.rollback()
        await conn.execute(text("INSERT INTO notes VALUES (7)"))
        await conn.commit()
    assert notes(tables) == [7]


async def test_rollback_to_a_savepoint_keeps_the_statement(tables: Tables, engine: AsyncEngine) -> None:
    async with engine.begin() as conn:
        await note(conn, 1)
        savepoint = await conn.begin_nested()
        await savepoint.rollback()
    assert notes(tables) == [1, 2]


@pytest.mark.parametrize("fault", ["the statement", "the COMMIT", "a value"])
async def test_failure_commits_nothing_and_leaves_no_transaction(
    tables: Tables, engine: AsyncEngine, fault: str
) -> None:
    refused = Statement("SELECT 1 / CAST(:number AS integer)")
    sent = {
        "the statement": (refused, {"number": 0}),
        "the COMMIT": (NOTE, {"number": 1}),
        "a value": (NOTE, {"number": 2**40}),
    }
    statement, values = sent[fault]

    async def send() -> None:
        async with engine.begin() as conn:
            await conn.execute(text("INSERT INTO notes VALUES (1)"))
            await conn.run_sync(send_with_commit, "durable", statement, values)

    for _ in range(2):
        with pytest.raises(DBAPIError) as caught:
            await send()
        assert isinstance(caught.value, IntegrityError) == (fault == "the COMMIT")
        assert notes(tables) == []
        assert tables.one("SELECT count(*) FROM pg_stat_activity WHERE state ~ 'in transaction'") == 0
    async with engine.begin() as conn:
        await note(conn, 1)
    assert notes(tables) == [1, 2]


async def test_only_one_statement_goes_with_a_commit(tables: Tables, engine: AsyncEngine) -> None:
    async with engine.begin() as conn:
        await note(conn, 1)
        assert not await conn.run_sync(send_with_commit, "durable", NOTE, {"number": 9})
    assert notes(tables) == [1, 2]


async def test_statement_does_not_commit_by_itself_when_the_transaction_is_over(
    tables: Tables, engine: AsyncEngine
) -> None:
    """The driver's own ROLLBACK, of which SQLAlchemy hears nothing."""
    async with engine.connect() as conn:
        await note(conn, 1)
        driver = await conn.run_sync(own_asyncpg)
        assert driver is not None
        await driver.execute("ROLLBACK")
        with pytest.raises(TransactionEnded):
            await conn.commit()
    assert notes(tables) == []


async def test_statement_does_not_wait_for_another_transaction(tables: Tables, engine: AsyncEngine) -> None:
    async with engine.connect() as conn:
        await note(conn, 1)
        driver = await conn.run_sync(own_asyncpg)
        assert driver is not None
        await driver.execute("ROLLBACK")
        for each in ("BEGIN;", "INSERT INTO notes VALUES (8)", "COMMIT;"):
            await driver.execute(each)
        await conn.invalidate()
    assert notes(tables) == [8]


async def test_prepared_statements_may_be_discarded(tables: Tables, engine: AsyncEngine) -> None:
    """By the application, which is told of it by the next transaction alone."""
    async with engine.begin() as conn:
        await note(conn, 1)
    async with engine.connect() as conn:
        driver = await conn.run_sync(own_asyncpg)
        assert driver is not None
        for each in await driver.fetch("SELECT name FROM pg_prepared_statements WHERE name LIKE 'durable_%'"):
            await driver.execute(f"DEALLOCATE {each['name']}")
    async with engine.connect() as conn:
        await note(conn, 3)
        with pytest.raises(DBAPIError, match="prepared statement"):
            await conn.commit()
    async with engine.begin() as conn:
        await note(conn, 5)
    assert notes(tables) == [1, 2, 5, 6]


@pytest.mark.parametrize("driver", ["asyncpg", "psycopg"])
async def test_engine_of_the_application_sends_statements_alone(tables: Tables, driver: str) -> None:
    engine = create_async_engine(tables.url.replace("postgresql://", f"postgresql+{driver}://"))
    async with engine.begin() as conn:
        await conn.execute(text("SELECT 1"))
        assert not await conn.run_sync(send_with_commit, "durable", NOTE, {"number": 1})
    await engine.dispose()
    assert notes(tables) == []


async def test_statement_is_sent_alone_when_no_transaction_has_begun(engine: AsyncEngine) -> None:
    """For asyncpg's adapter there would be no COMMIT."""
    async with engine.begin() as conn:
        assert not await conn.run_sync(send_with_commit, "durable", NOTE, {"number": 1})


# ---------------------------------------------------------------- completions


async def test_lost_lease_commits_nothing(tables: Tables, engine: AsyncEngine) -> None:
    arrivals = [Arrival("shop", envelope(number), NODE) for number in (1, 2)]
    async with engine.begin() as conn:
        await conn.run_sync(inbox.store, "durable", arrivals)
    async with engine.begin() as conn:
        await conn.execute(text("UPDATE durable.incoming_envelopes SET owner_id = 0"))
        claimed = await conn.run_sync(inbox.claim, "durable", message_type="handling.placed", batch_size=10, node=NODE)
    tables.execute("UPDATE durable.incoming_envelopes SET epoch = epoch + 1 WHERE id = %s", claimed[0].envelope.id)
    async with engine.connect() as conn:
        await conn.execute(text("INSERT INTO notes VALUES (1)"))
        assert await conn.run_sync(inbox.finish_handled_with_commit, "durable", NODE, claimed)
        with pytest.raises(LeaseLost):
            await conn.commit()
    assert (notes(tables), tables.count("incoming_envelopes"), tables.count("envelope_history")) == ([], 2, 0)
    async with engine.begin() as conn:
        await conn.execute(text("INSERT INTO notes VALUES (2)"))
        assert await conn.run_sync(inbox.finish_handled_with_commit, "durable", NODE, claimed[1:])
    assert (notes(tables), tables.count("incoming_envelopes"), tables.count("envelope_history")) == ([2], 1, 1)


TEXTS = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=20) | st.sampled_from(
    ["'", "\\", "\\'", "''; DROP TABLE notes; --", "E'\\x", "$1", ":name", "{}", '"', "é\u2028", "\U0001f600", "%s"]
)


# ---------------------------------------------------------------- literals


VALUES = st.booleans() | st.integers(-(2**63), 2**63 - 1) | TEXTS | st.uuids()


@pytest.mark.parametrize("setting", ["on", "off"])
def test_literal_is_the_value(tables: Tables, setting: str) -> None:
    with psycopg.connect(tables.url, autocommit=True) as conn:
        conn.execute("SET backslash_quote = 'safe_encoding'")
        conn.execute(f"SET standard_conforming_strings = {setting}".encode())

        @settings(deadline=None)
        @given(value=VALUES, of=st.lists(TEXTS, min_size=1, max_size=4))
        def check(value: object, of: list[str]) -> None:
            assert conn.execute(f"SELECT {literal(value)}, {literal(of)}".encode()).fetchone() == (value, of)

        check()


@pytest.mark.parametrize("value", ["a\0b", b"a body", None])
def test_literal_of_another_type_is_refused(value: object) -> None:
    with pytest.raises((TypeError, ValueError)):
        literal(value)
