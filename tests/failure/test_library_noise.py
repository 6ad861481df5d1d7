"""What the libraries below say of connections that failed or were given up: nothing. durable tells it by itself."""

from __future__ import annotations

import asyncio
import gc
import logging
import socket
import threading
import warnings
from contextlib import closing, suppress

import pytest
from sqlalchemy import Connection

from durable.errors import StorageUnavailable, TransportError
from durable.settings import load_settings
from durable.storage.database import Database, answer
from durable.transports.rabbitmq.broker import Connection as BrokerConnection
from tests.failure.test_black_holes import BOUND, proxied
from tests.support.proxy import DOWN


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """Garbage of earlier tests speaks before."""
    gc.collect()
    caplog.clear()
    return caplog


def of_libraries(caplog: pytest.LogCaptureFixture, level: int = logging.WARNING) -> list[str]:
    found = [record for record in caplog.records if record.levelno >= level]
    return [record.getMessage() for record in found if record.name.split(".")[0] in ("asyncio", "psycopg", "asyncpg")]


async def test_opening_cancelled_at_any_step_leaves_no_task_and_no_log_line(said: pytest.LogCaptureFixture) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        server.settimeout(0.01)
        url = f"postgresql+asyncpg://u@127.0.0.1:{server.getsockname()[1]}/x"
        for steps in range(60):
            database = Database(load_settings(database_url=url))
            opening = asyncio.create_task(database.ping())
            for _ in range(1 + steps % 12):
                await asyncio.sleep(0)
            opening.cancel()
            with suppress(asyncio.CancelledError):
                await opening
            with suppress(OSError):
                server.accept()[0].close()
            await database.close()
    unfinished = {task for task in asyncio.all_tasks() if task.get_name() == "open a connection"}
    if unfinished:
        await asyncio.wait(unfinished, timeout=BOUND)
    gc.collect()
    await asyncio.sleep(0)
    assert of_libraries(said) == []


async def test_connection_opened_after_a_cancellation_is_closed(database_url: str) -> None:
    async with proxied(database_url, "asyncpg") as (proxy, url):
        database = Database(load_settings(database_url=url))
        proxy.hold(DOWN)
        opening = asyncio.create_task(database.ping())
        await proxy.held(DOWN)
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening
        proxy.release(DOWN)
        async with asyncio.timeout(BOUND):
            await proxy.closed(1)
        await database.close()


async def test_connection_to_a_silent_broker_is_not_left_to_the_garbage_collector() -> None:
    async with asyncio.timeout(BOUND):
        silent = await asyncio.start_server(lambda _, writer: writers.append(writer), "127.0.0.1", 0)
        writers: list[asyncio.StreamWriter] = []
        url = f"amqp://guest:guest@127.0.0.1:{silent.sockets[0].getsockname()[1]}/"
        settings = load_settings(amqp_url=url, connect_timeout="200ms")
        gc.disable()
        try:
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                async with BrokerConnection("default", url, "x", settings) as connection:
                    for _ in range(3):
                        with pytest.raises(TransportError):
                            await connection.get()
                collector = threading.Thread(target=gc.collect)  # it runs in whatever thread
                collector.start()
                await asyncio.to_thread(collector.join)
        finally:
            gc.enable()
            for writer in writers:
                writer.transport.abort()
            silent.close()
    assert [str(warning.message) for warning in told if "never awaited" in str(warning.message)] == []


async def test_failed_cancellation_of_a_query_is_logged_at_debug(
    database_url: str, said: pytest.LogCaptureFixture
) -> None:
    said.set_level(logging.DEBUG)
    async with proxied(database_url, "psycopg") as (proxy, url):
        database = Database(load_settings(database_url=url))
        await database.ping()
        proxy.swallow(DOWN)
        stuck = asyncio.create_task(database.ping())
        await proxy.swallowed(DOWN)
        stuck.cancel()
        async with asyncio.timeout(BOUND):
            with pytest.raises(asyncio.CancelledError):
                await stuck
            await database.close()
    assert of_libraries(said) == []
    assert any("psycopg: query " in record.getMessage() for record in said.records)


# ---------------------------------------------------------------- the reason that is told


def sleep(conn: Connection, schema: str) -> None:
    conn.exec_driver_sql("SELECT pg_sleep(60)")


@pytest.mark.parametrize("driver", ["asyncpg", "psycopg"])
async def test_transaction_exceeding_its_time_raises_with_the_bound(database_url: str, driver: str) -> None:
    async with proxied(database_url, driver) as (_, url):
        database = Database(load_settings(database_url=url))
        database._longest = 0.5
        async with asyncio.timeout(BOUND):
            with pytest.raises(StorageUnavailable, match=r"the transaction was not done within 0.5 s$"):
                await database.transaction(sleep)
        await database.close()


async def test_connection_not_opened_in_time_is_not_reported_as_a_slow_transaction() -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as silent:
        url = f"postgresql+asyncpg://u@127.0.0.1:{silent.getsockname()[1]}/x"
        database = Database(load_settings(database_url=url, connect_timeout=1.0))
        async with asyncio.timeout(BOUND):
            with pytest.raises(StorageUnavailable, match=r"no connection within 1 s$"):
                await database.transaction(answer)
        await database.close()
