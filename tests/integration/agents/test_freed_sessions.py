"""Sessions of durable's own, and what it keeps with them: freed when they end, and not by a search for garbage.

A search for garbage visits every object of the process. Without it a node handles an eighth more of single messages.
"""

from __future__ import annotations

import gc
from collections.abc import AsyncIterator, Iterator
from typing import Any
from weakref import ref

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from durable import Bus
from durable.clock import SystemClock
from durable.embedded import Embedded
from durable.testing import eventually
from tests.support.one_handler import Placed, Shop, shop_tables
from tests.support.tables import Tables

DRIVERS = ("asyncpg", "psycopg")


@pytest.fixture
def tables(server: Embedded) -> Iterator[Tables]:
    with shop_tables(server) as tables:
        yield tables


@pytest.fixture
def without_searches() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture(params=DRIVERS)
async def shop(tables: Tables, request: pytest.FixtureRequest) -> AsyncIterator[Shop]:
    url = tables.url.replace("postgresql:", f"postgresql+{request.param}:")
    shop = Shop(tables, SystemClock(), database_url=url)
    yield shop
    await shop.close()


async def freed(seen: set[ref[Session]]) -> None:
    await eventually(lambda: not any(each() for each in seen), what="no session")
    assert seen


async def handled_and_freed(shop: Shop, seen: set[ref[Session]]) -> None:
    async with shop.open():
        await shop.receive(*range(5))
        await shop.settled()
        await freed(seen)
    assert sorted(shop.effects()) == [*range(5)]


@pytest.mark.usefixtures("without_searches")
@pytest.mark.parametrize("max_batch", ["auto", 1, 10])
async def test_session_of_an_async_handler_is_freed(shop: Shop, max_batch: Any) -> None:
    seen = set[ref[Session]]()

    async def handle(order: Placed, session: AsyncSession) -> None:
        await shop.write(session, order.number)
        seen.add(ref(session.sync_session))

    shop.handles(handle, max_batch=max_batch)
    await handled_and_freed(shop, seen)


@pytest.mark.usefixtures("without_searches")
async def test_session_of_a_sync_handler_is_freed(shop: Shop) -> None:
    seen = set[ref[Session]]()

    def handle(order: Placed, session: Session) -> None:
        session.execute(text("INSERT INTO effects (number) VALUES (:number)"), {"number": order.number})
        seen.add(ref(session))

    shop.handles(handle)
    await handled_and_freed(shop, seen)


@pytest.mark.usefixtures("without_searches")
@pytest.mark.parametrize("driver", DRIVERS)
@pytest.mark.parametrize("commits", [True, False])
async def test_session_of_a_unit_of_work_is_freed(tables: Tables, driver: str, commits: bool) -> None:
    bus = Bus("shop", tables.url.replace("postgresql:", f"postgresql+{driver}:"))
    bus.route(Placed, to="tcp://127.0.0.1:1")
    seen = set[ref[Session]]()

    async def work() -> None:
        async with bus.unit_of_work() as uow:
            await uow.session.execute(text("INSERT INTO effects (number) VALUES (1)"))
            bus.send(Placed(1))
            seen.add(ref(uow.session.sync_session))
            if not commits:
                await uow.session.rollback()

    await work()
    await freed(seen)
    await bus.runtime.stop()
    assert tables.count("outgoing_envelopes") == int(commits)
