"""A world for each test of a bus."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator

import pytest
from sqlalchemy import create_engine
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine
from sqlalchemy.orm import sessionmaker

from durable.embedded import Embedded
from durable.recovery import membership
from tests.contract.bus.worlds import InMemory, OnPostgres, World
from tests.support.tables import Tables, shared_tables


@pytest.fixture(scope="module")
def database(servers: Callable[[int], Embedded]) -> Iterator[Tables]:
    with shared_tables(servers(18)) as tables:
        tables.execute("CREATE TABLE effects (number integer)")
        yield tables


@pytest.fixture(autouse=True)
def leaving_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node's thread listens for 0.2 s before it sees that it is to leave: most of the time that a test takes."""
    monkeypatch.setattr(membership, "_LISTEN_SECONDS", 0.02)


@pytest.fixture(params=["postgres", "memory"])
def world(request: pytest.FixtureRequest) -> World:
    if request.param == "memory":
        return InMemory()
    database = request.getfixturevalue("database")
    database.clear()
    return OnPostgres(database)


@pytest.fixture(params=["postgres", "memory"])
async def world_with_tables(request: pytest.FixtureRequest, database: Tables) -> AsyncIterator[World]:
    """A world whose sessions are those of a database, the one in memory too."""
    database.clear()
    await database.change("DELETE FROM effects")
    if request.param == "postgres":
        yield OnPostgres(database)
        return
    engine = create_async_engine(database.url.replace("postgresql://", "postgresql+asyncpg://"))
    sync_engine = create_engine(database.url.replace("postgresql://", "postgresql+psycopg://"))
    yield InMemory(session_factory=async_sessionmaker(engine), sync_session_factory=sessionmaker(sync_engine))
    sync_engine.dispose()
    await engine.dispose()
