"""Errors of the database: which are outages, and what their texts may say."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from typing import Any

import asyncpg
import pytest
from asyncpg.exceptions import InternalClientError
from sqlalchemy import Connection, create_engine, make_url, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from durable.cli.endings import ending_of
from durable.database_url import for_asyncpg
from durable.errors import InvalidMessage, StorageUnavailable
from durable.settings import load_settings
from durable.storage import engines
from durable.storage.database import Database, answer, sync_url
from durable.storage.outages import advice_of, described, is_outage, is_outage_itself, is_shortage, translated
from tests.support.refusals import LASTING, REFUSALS, refusing, with_parameters
from tests.support.roles import runtime_role

SECRET = "4711-top-secret"
DRIVERS = ["asyncpg", "psycopg"]


def of(driver: str, url: str) -> str:
    return url.replace("postgresql://", f"postgresql+{driver}://", 1)


@pytest.fixture(params=DRIVERS)
async def engine(request: pytest.FixtureRequest, database_url: str) -> AsyncIterator[AsyncEngine]:
    engine = create_async_engine(of(request.param, database_url))
    yield engine
    await engine.dispose()


async def error_of(engine: AsyncEngine, *statements: str, **values: object) -> Exception:
    try:
        async with engine.connect() as conn:
            for statement in statements:
                await conn.execute(text(statement), values)
    except Exception as error:
        return error
    raise AssertionError("there was no error")


LOST = ["SELECT pg_terminate_backend(pg_backend_pid())", "SELECT 1"]
FULL = "DO $$ BEGIN RAISE EXCEPTION 'too many notifications in the NOTIFY queue' USING ERRCODE = '54000'; END $$"
RAISE = "DO $$ BEGIN RAISE EXCEPTION 'told' USING ERRCODE = '{}'; END $$"


@pytest.mark.parametrize(
    "statements",
    [
        LOST,
        [FULL],
        *([RAISE.format(state)] for state in ("53100", "53300", "58030", "57P03", "08P01", "26000", "25006", "25P03")),
    ],
    ids=lambda statements: statements[0][-30:],
)
async def test_a_failure_of_the_infrastructure_is_an_outage(engine: AsyncEngine, statements: list[str]) -> None:
    error = await error_of(engine, *statements)
    assert is_outage(error)
    with pytest.raises(RuntimeError) as caught:
        raise RuntimeError("told in words of the application") from error
    assert is_outage(caught.value)


@pytest.mark.parametrize(
    "statements",
    [
        ["SELECT 1 / 0"],
        ["SELECT FROM nothing_of_the_kind"],
        *([RAISE.format(state)] for state in ("40001", "40P01", "55P03", "57014", "23505", "22P02", "54000")),
        ["SET LOCAL statement_timeout = 10", "SELECT pg_sleep(20)"],
    ],
    ids=lambda statements: statements[-1][-30:],
)
async def test_a_failure_of_the_work_is_no_outage(engine: AsyncEngine, statements: list[str]) -> None:
    assert not is_outage(await error_of(engine, *statements))


async def test_full_queue_of_notifications_is_told_with_advice(engine: AsyncEngine) -> None:
    error = await error_of(engine, FULL)
    assert is_shortage(error)
    advice = r"too many notifications in the NOTIFY queue; end the session that"
    with pytest.raises(StorageUnavailable, match=advice), translated():
        raise error


@pytest.mark.parametrize(
    "statement",
    [
        "INSERT INTO durable.nodes (node_id) VALUES (NULL)",
        "UPDATE durable.nodes SET node_id = node_id",
        "SELECT FROM durable.nodes FOR UPDATE",
        "CREATE TABLE more ()",
    ],
)
async def test_read_only_database_is_told_with_advice(engine: AsyncEngine, statement: str) -> None:
    error = await error_of(engine, "SET TRANSACTION READ ONLY", statement)
    assert ending_of(error).message.endswith("name the primary in the setting database_url (DURABLE_DATABASE_URL)")
    advice = "was set READ ONLY, or the server is a standby, or default_transaction_read_only is on"
    with pytest.raises(StorageUnavailable, match=advice) as caught, translated():
        raise error
    assert ending_of(caught.value).message == str(caught.value)


async def test_value_refused_by_the_driver_is_no_outage(engine: AsyncEngine) -> None:
    assert not is_outage(await error_of(engine, "SELECT CAST(:value AS integer)", value=2**70))
    assert not is_outage(await error_of(engine, "SELECT CAST(:value AS text)", value=object()))


@pytest.mark.parametrize("driver", DRIVERS)
async def test_unreachable_server_is_an_outage(driver: str) -> None:
    engine = create_async_engine(f"postgresql+{driver}://nobody@127.0.0.1:1/none")
    error = await error_of(engine, "SELECT 1")
    assert is_outage(error)
    assert "refused" in described(error) or "onnect" in described(error)


async def error_of_durables(url: str) -> Exception:
    """Return what the agents meet."""
    database = Database(load_settings(database_url=url))
    try:
        async with database.engine.connect() as conn:
            await conn.execute(text("SELECT 1"))
    except Exception as error:
        return error
    finally:
        await database.close()
    raise AssertionError("there was no error")


async def error_of_commands(url: str) -> Exception:
    """Return what commands and sync handlers meet."""
    settings = load_settings(database_url=url)
    engine = engines.make_engine(sync_url(settings), settings, engines.Limits.of(settings.statement_timeout))
    try:
        await asyncio.to_thread(engine.connect)
    except Exception as error:
        return error
    raise AssertionError("there was no error")


async def error_of_the_applications(url: str) -> Exception:
    """Return what an async engine of the application meets."""
    place = make_url(url)
    given: dict[str, Any] = {name: str(value) for name, value in place.query.items()}
    arguments = for_asyncpg(given) if place.drivername.endswith("asyncpg") else given
    engine = create_async_engine(place.set(query={}), connect_args=arguments)
    return await error_of(engine, "SELECT 1")


async def error_of_a_sync_one(url: str) -> Exception:
    """Return what a sync engine of the application meets."""
    engine = create_engine(url.replace("+asyncpg", "+psycopg", 1))
    try:
        await asyncio.to_thread(engine.connect)
    except Exception as error:
        return error
    raise AssertionError("there was no error")


ENGINES = [error_of_durables, error_of_commands, error_of_the_applications, error_of_a_sync_one]


@pytest.mark.parametrize("meet", ENGINES)
@pytest.mark.parametrize("refusal", [*REFUSALS, *LASTING])
@pytest.mark.parametrize("driver", DRIVERS)
async def test_refused_connection_is_an_outage(
    database_url: str, driver: str, refusal: str, meet: Callable[[str], Awaitable[Exception]]
) -> None:
    """Whatever its reason: no work has begun."""
    kind = (REFUSALS | LASTING)[refusal]
    with runtime_role(database_url) as url, refusing(url, refusal):
        error = await meet(of(driver, with_parameters(url, kind.parameters)))
    assert is_outage(error)
    assert is_outage_itself(error)
    assert not isinstance(error, DBAPIError) or advice_of(error) is None  # rights on tables do not help
    with pytest.raises(StorageUnavailable, match=kind.said), translated():
        raise error


BARE = [asyncpg.TargetServerAttributeNotMatched("no host fits"), asyncpg.RaiseError("closed"), OSError("gone")]


@pytest.mark.parametrize("error", BARE, ids=repr)
async def test_error_passed_on_while_connecting_is_an_outage(
    database_url: str, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """SQLAlchemy passes those of asyncpg on as they are while it sets types up."""

    async def refuse(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(asyncpg.Connection, "set_type_codec", refuse)
    for meet in (error_of_durables, error_of_the_applications):
        met = await meet(of("asyncpg", database_url))
        assert met is error
        assert is_outage(met)
        with pytest.raises(StorageUnavailable, match=str(error)), translated():
            raise met


async def test_a_handlers_own_network_error_is_no_outage() -> None:
    with pytest.raises(ConnectionRefusedError) as caught:
        await asyncio.open_connection("127.0.0.1", 1)
    assert not is_outage(caught.value)


def whole_text(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))


@pytest.mark.parametrize("driver", DRIVERS)
@pytest.mark.parametrize(
    ("statement", "value", "expected"),
    [
        ("SELECT CAST(CAST(:value AS text) AS integer)", SECRET, InvalidMessage),
        ("SELECT CAST(:value AS integer)", SECRET, InvalidMessage),
        ("SELECT CAST(:value AS integer)", 2**70, InvalidMessage),
        ("SELECT CAST(:value AS text)", f"{SECRET}\0", InvalidMessage),
        ("SELECT CAST(:value AS text)", f"{SECRET}\ud800", InvalidMessage),
        ("SELECT :value, pg_terminate_backend(pg_backend_pid())", SECRET, StorageUnavailable),
        ("SELECT set_config('statement_timeout', '10', true), CAST(:value AS text)", SECRET, StorageUnavailable),
    ],
    ids=lambda value: str(value).encode("unicode_escape").decode()[:20],
)
async def test_a_translated_error_has_one_line_without_data(
    database_url: str, driver: str, statement: str, value: object, expected: type[Exception]
) -> None:
    def work(conn: Connection, _: str) -> None:
        conn.execute(text(statement), {"value": value}).all()
        conn.exec_driver_sql("SELECT pg_sleep(1)")

    database = Database(load_settings(database_url=of(driver, database_url)))
    with pytest.raises(expected) as caught:
        await database.transaction(work)
    await database.close()
    assert "\n" not in str(caught.value)
    shown = whole_text(caught.value)
    assert SECRET not in shown
    assert "[SQL:" not in shown
    assert "[parameters:" not in shown


async def test_the_description_of_a_violated_key_holds_no_row(engine: AsyncEngine) -> None:
    create = "CREATE TEMPORARY TABLE customers (name text PRIMARY KEY)"
    insert = "INSERT INTO customers VALUES (:name)"
    error = await error_of(engine, create, insert, insert, name=SECRET)
    assert isinstance(error, DBAPIError)
    assert SECRET not in described(error)
    assert "duplicate key" in described(error)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            InternalClientError("cannot switch to state 15; another operation (2) is in progress"),
            "the connection broke off in the middle of a statement",
        ),
        (TimeoutError(), "no answer in time"),
        (TimeoutError("no connection within 5 s"), "no connection within 5 s"),
        (ConnectionResetError(), "ConnectionResetError"),
    ],
)
def test_description_of_an_outage_is_a_sentence(error: Exception, said: str) -> None:
    assert described(error) == said


_SAID = b"SFATAL\0VFATAL\0C08P01\0Mserver conn crashed?\0\0"
UNASKED = b"E" + (len(_SAID) + 4).to_bytes(4, "big") + _SAID
"""An error that nobody has asked for, as a pooler or an ending server sends it before it closes the connection."""


async def test_error_sent_unasked_on_a_new_connection_is_an_outage(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SQLAlchemy does not call it a lost connection: to it, there is none yet."""
    is_pooled = engines.is_pooled

    def told_unasked(connection: Any) -> bool:
        connection.driver_connection._protocol.data_received(UNASKED)
        return is_pooled(connection)

    monkeypatch.setattr(engines, "is_pooled", told_unasked)
    database = Database(load_settings(database_url=of("asyncpg", database_url)))
    with pytest.raises(StorageUnavailable, match="broke off in the middle of a statement"):
        await database.transaction(answer)
    await database.close()


@pytest.mark.parametrize("end", ["close", "terminate it"])
async def test_connection_lost_before_its_types_are_set_up_is_an_outage(
    database_url: str, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    """SQLAlchemy passes asyncpg's own error on there, in durable's engines and in those of the application."""
    set_type_codec = asyncpg.Connection.set_type_codec

    async def broken_off(connection: Any, *args: Any, **options: Any) -> None:
        if end == "close":
            connection.terminate()
        else:
            with suppress(Exception):
                await connection.execute(LOST[0])
        await set_type_codec(connection, *args, **options)

    monkeypatch.setattr(asyncpg.Connection, "set_type_codec", broken_off)
    engine = create_async_engine(of("asyncpg", database_url))
    assert is_outage(await error_of(engine, "SELECT 1"))
    await engine.dispose()
    database = Database(load_settings(database_url=of("asyncpg", database_url)))
    with pytest.raises(StorageUnavailable, match="connection is closed"):
        await database.transaction(answer)
    await database.close()


async def test_error_of_a_connection_of_the_application_itself_is_no_outage(database_url: str) -> None:
    connection = await asyncpg.connect(database_url)
    await connection.close()
    with pytest.raises(asyncpg.InterfaceError) as caught:
        await connection.fetchval("SELECT 1")
    assert not is_outage(caught.value)
