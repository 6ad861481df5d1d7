"""A database with business tables, and a session of each kind on it."""

from __future__ import annotations

import gc
import warnings
from collections.abc import AsyncIterator, Callable, Iterator

import pytest
from sqlalchemy import create_engine
from sqlalchemy.ext.asyncio import create_async_engine

from durable.embedded import Embedded
from tests.integration.outbox.unit_of_work.sessions import Flavour
from tests.support.tables import Tables, shared_tables


@pytest.fixture
def connections_of_closed_loops() -> Iterator[None]:
    """Their sockets are closed, and their transports do not know it, which warns."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        yield
        gc.collect()


@pytest.fixture(scope="module")
def database(servers: Callable[[int], Embedded]) -> Iterator[Tables]:
    with shared_tables(servers(18)) as tables:
        tables.execute("CREATE TABLE orders (number integer PRIMARY KEY)")
        tables.execute(
            "CREATE TABLE lines (line serial PRIMARY KEY, "
            "number integer REFERENCES orders DEFERRABLE INITIALLY DEFERRED)"
        )
        yield tables


@pytest.fixture
def tables(database: Tables) -> Tables:
    database.clear()
    database.execute("TRUNCATE orders, lines")
    return database


@pytest.fixture(params=["asyncpg", "psycopg", "sync"])
async def flavour(request: pytest.FixtureRequest, tables: Tables) -> AsyncIterator[Flavour]:
    if request.param == "sync":
        sync_engine = create_engine(tables.url.replace("postgresql://", "postgresql+psycopg://"))
        yield Flavour(sync_engine)
        sync_engine.dispose()
        return
    engine = create_async_engine(tables.url.replace("postgresql://", f"postgresql+{request.param}://"))
    yield Flavour(engine)
    await engine.dispose()
