"""Messages of a service whose tables are missing, or of another version."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import psycopg
import pytest
from sqlalchemy import create_engine
from sqlalchemy.orm import Session

from durable import Bus, SchemaMismatch, message
from durable.embedded import Embedded

BILLING = "tcp://127.0.0.1:1"
NO_TABLES = r"schema .durable. has no durable tables \(.*does not exist\); run: durable-agent migrate APP:BUS"


@message("unmigrated.placed")
@dataclass
class Placed:
    number: int


@pytest.fixture(scope="module")
def empty(servers: Callable[[int], Embedded]) -> str:
    return servers(18).url("unmigrated")


@asynccontextmanager
async def bus_on(url: str) -> AsyncIterator[Bus]:
    bus = Bus("orders", database=url)
    bus.route(Placed, to=BILLING)
    yield bus
    await bus.runtime.sessions.close()


async def send(bus: Bus, count: int) -> None:
    async with bus.unit_of_work():
        for number in range(count):
            bus.send(Placed(number))


@pytest.mark.parametrize("count", [1, 2])
async def test_commit_names_the_command_when_tables_are_missing(empty: str, count: int) -> None:
    async with bus_on(empty) as bus:
        with pytest.raises(SchemaMismatch, match=NO_TABLES):
            await send(bus, count)


async def test_commit_of_an_enlisted_session_names_the_command_when_tables_are_missing(empty: str) -> None:
    engine = create_engine(empty.replace("postgresql://", "postgresql+psycopg://"))
    async with bus_on(empty) as bus:
        with Session(engine) as session, bus.enlist(session):
            bus.send(Placed(1))
            with pytest.raises(SchemaMismatch, match=NO_TABLES):
                session.commit()
    engine.dispose()


async def test_commit_names_the_command_when_tables_are_of_another_version(database_url: str) -> None:
    with psycopg.connect(database_url) as conn:
        conn.execute("ALTER TABLE durable.outgoing_envelopes RENAME COLUMN partition_key TO another")
    async with bus_on(database_url) as bus:
        with pytest.raises(
            SchemaMismatch, match=r"is at another version than this code \(.*\); run: durable-agent migrate"
        ):
            await send(bus, 1)
