"""One migrated database for the tests of a module, emptied before each; a console on it, mounted in an application."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator

import pytest
import pytest_asyncio
from starlette.applications import Starlette
from starlette.routing import Mount

from durable import Bus
from durable.console import console_app
from durable.embedded import Embedded
from tests.integration.console.visiting import TOKENS
from tests.support.tables import Tables, shared_tables


@pytest.fixture(scope="module")
def database(servers: Callable[[int], Embedded]) -> Iterator[Tables]:
    with shared_tables(servers(18)) as tables:
        yield tables


@pytest.fixture
def tables(database: Tables) -> Tables:
    database.clear()
    return database


@pytest_asyncio.fixture
async def bus(tables: Tables) -> AsyncIterator[Bus]:
    """A bus without handlers; modules with handlers have one of their own."""
    bus = Bus("shop", tables.url)
    yield bus
    await bus.runtime.stop()


@pytest.fixture
def app(bus: Bus) -> Starlette:
    return Starlette(routes=[Mount("/console", console_app(bus, tokens=TOKENS))])
