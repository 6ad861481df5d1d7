"""Every function of storage is tried on every supported Postgres and with both drivers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator

import pytest
from sqlalchemy import make_url

from durable.embedded import Embedded
from durable.settings import load_settings
from durable.storage.database import Database
from tests.conftest import fresh_databases
from tests.integration.storage.functions.stores import PLACES, Store


@pytest.fixture(params=PLACES, ids=lambda place: f"pg{place[0]}-{place[1]}")
def place(request: pytest.FixtureRequest, servers: Callable[[int], Embedded]) -> tuple[Embedded, str]:
    version, driver = request.param
    return servers(version), driver


@pytest.fixture
def url(place: tuple[Embedded, str]) -> Iterator[str]:
    with fresh_databases(place[0]) as make:
        yield make("storage")


@pytest.fixture
async def database(place: tuple[Embedded, str], url: str) -> AsyncIterator[Database]:
    """A migrated database, as agents use it, with one driver or the other."""
    through = make_url(url).set(drivername=f"postgresql+{place[1]}").render_as_string(hide_password=False)
    database = Database(load_settings(database_url=through))
    yield database
    await database.close()


@pytest.fixture
def store(database: Database) -> Store:
    return Store(database)
