"""DBOS: a job is a workflow that is enqueued in the caller's transaction by DBOSClient.enqueue_in_transaction().

    plain         the workflow opens a session of its own: its effect may be repeated after a crash
    datasource    the effect is a step in the transaction of an AsyncSQLAlchemyDatasource, which also records it: once

A queue is polled, and each poll takes as many workflows as the worker may run at once. With worker_concurrency=8 a poll
would take 8: slower than a queue without a limit, which is the default. The pool of connections bounds the effects.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from dbos import DBOS, AsyncSQLAlchemyDatasource, DBOSClient, DBOSConfig
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from tests.benchmarks.peers.program import INSERT, POOL, TEXT, Enlist, Order, Program, main

QUEUE = "notes"
POLLING_SECONDS = 0.1


def configure(order: Order) -> None:
    config: DBOSConfig = {
        "name": "bench",
        "system_database_url": order.url_for("psycopg"),
        "application_version": "1",
        "log_level": "ERROR",
    }
    DBOS(config=config)


async def install(order: Order) -> None:
    await asyncio.to_thread(_install, order)


def _install(order: Order) -> None:
    configure(order)
    DBOS.launch()
    DBOS.register_queue(QUEUE, polling_interval_sec=POLLING_SECONDS)
    if order.variant == "datasource":
        asyncio.run(AsyncSQLAlchemyDatasource.migrate(order.url_for("psycopg")))
    DBOS.destroy()


@asynccontextmanager
async def enlisting(order: Order) -> AsyncIterator[Enlist]:
    engine = create_async_engine(order.url_for("asyncpg"), **POOL)
    client = await asyncio.to_thread(lambda: DBOSClient(system_database_url=order.url_for("psycopg")))

    def enqueue(session: Session, number: int) -> None:
        client.enqueue_in_transaction(session, {"workflow_name": "note", "queue_name": QUEUE}, number, TEXT)

    async def enlist(number: int) -> None:
        async with AsyncSession(engine) as session:
            await session.execute(text(INSERT), {"number": number})
            await session.run_sync(enqueue, number)
            await session.commit()

    yield enlist
    await asyncio.to_thread(client.destroy)
    await engine.dispose()


def handle(order: Order) -> None:
    configure(order)
    if order.variant == "datasource":
        _register_with_datasource(asyncio.run(_make_datasource(order)))
    else:
        _register(create_async_engine(order.url_for("asyncpg"), **POOL))
    DBOS.launch()
    threading.Event().wait()


async def _make_datasource(order: Order) -> AsyncSQLAlchemyDatasource:
    """Make one over psycopg, the driver whose conflicts it knows."""
    engine = create_async_engine(order.url_for("psycopg"), **POOL)
    source = await AsyncSQLAlchemyDatasource.create(order.url_for("psycopg"), engine=engine, run_migrations=False)
    await engine.dispose()  # of the connection that belongs to this loop
    return source


def _register(engine: AsyncEngine) -> None:
    @DBOS.workflow(name="note")
    async def take(number: int, note: str) -> None:
        async with AsyncSession(engine) as session:
            await session.execute(text(INSERT), {"number": -number})
            await session.commit()


def _register_with_datasource(source: AsyncSQLAlchemyDatasource) -> None:
    async def insert(number: int) -> None:
        await source.sql_session().execute(text(INSERT), {"number": -number})

    @DBOS.workflow(name="note")
    async def take(number: int, note: str) -> None:
        await source.run_tx_step_async({"isolation_level": "READ COMMITTED"}, insert, number)


if __name__ == "__main__":
    main(Program("dbos", install, enlisting, handle))
