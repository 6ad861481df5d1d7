"""A database with a table of effects, reached by each driver."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator

import pytest
from sqlalchemy import make_url

from durable.embedded import Embedded
from durable.settings import load_settings
from durable.storage.database import Database
from tests.support.tables import Tables, shared_tables


@pytest.fixture(scope="module")
def shared(servers: Callable[[int], Embedded]) -> Iterator[Tables]:
    with shared_tables(servers(18)) as tables:
        tables.execute("CREATE TABLE effects (effect serial, number integer)")
        yield tables


@pytest.fixture
def tables(shared: Tables) -> Tables:
    shared.clear()
    shared.execute("TRUNCATE effects")
    return shared


@pytest.fixture(params=["asyncpg", "psycopg"])
async def database(request: pytest.FixtureRequest, tables: Tables) -> AsyncIterator[Database]:
    """The same statements, with one driver and the other."""
    url = make_url(tables.url).set(drivername=f"postgresql+{request.param}").render_as_string(hide_password=False)
    database = Database(load_settings(database_url=url))
    yield database
    await database.close()
