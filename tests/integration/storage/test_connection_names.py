"""Names of connections, as the server and a pooler see them."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import psycopg
import pytest
from sqlalchemy.orm import Session

from durable import Bus, message
from durable.cli.target import connection
from durable.embedded import Embedded
from durable.settings import load_settings
from durable.testing import eventually
from tests.support.pooler import pooler
from tests.support.tables import Tables, shared_tables


@message("named.placed")
class Placed(msgspec.Struct):
    number: int


@pytest.fixture
def tables(server: Embedded, monkeypatch: pytest.MonkeyPatch) -> Iterator[Tables]:
    monkeypatch.delenv("PGAPPNAME", raising=False)
    with shared_tables(server) as tables:
        yield tables


def names(tables: Tables) -> set[str]:
    query = "SELECT DISTINCT application_name FROM pg_stat_activity WHERE datname = current_database()"
    with psycopg.connect(tables.url, application_name="the test") as conn:
        return {name for (name,) in conn.execute(query)} - {"the test"}


async def names_of(bus: Bus, tables: Tables) -> set[str]:
    """Return the names while the bus runs, after a sync handler and an async unit of work."""
    handled: list[int] = []

    @bus.handles(Placed)
    def place(placed: Placed, session: Session) -> None:
        handled.append(placed.number)

    async with bus:
        async with bus.unit_of_work():
            bus.send(Placed(1))
        await eventually(lambda: handled == [1], within=20)
        return {name for name in names(tables) if name.startswith(("durable", "mine"))}


@pytest.fixture(params=["asyncpg", "psycopg"])
def driver(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def by(driver: str, url: str) -> str:
    return url.replace("postgresql://", f"postgresql+{driver}://", 1)


async def test_each_pool_of_a_node_has_its_name(tables: Tables, driver: str) -> None:
    found = await names_of(Bus("orders", by(driver, tables.url)), tables)
    assert found == {f"durable orders {purpose}" for purpose in ("agents", "async", "sync", "node")}


async def test_name_of_the_url_comes_first(tables: Tables, driver: str) -> None:
    url = by(driver, tables.url)
    assert await names_of(Bus("orders", f"{url}{'&' if '?' in url else '?'}application_name=mine"), tables) == {"mine"}


async def test_pgappname_comes_first(tables: Tables, driver: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PGAPPNAME", "mine")
    assert await names_of(Bus("orders", by(driver, tables.url)), tables) == {"mine"}


@pytest.mark.parametrize("mode", ["auto", "transaction"])
async def test_pooler_takes_one_name_for_all_pools_of_a_service(tables: Tables, driver: str, mode: str) -> None:
    with pooler(tables.url) as url:
        bus = Bus("orders", by(driver, url), pooler=mode, lock_database_url=tables.url)  # type: ignore[arg-type]
        found = await names_of(bus, tables)
    assert found == {"durable orders", "durable orders node"}


def test_commands_are_named(tables: Tables) -> None:
    with connection(load_settings(database_url=tables.url)):
        assert "durable-agent" in names(tables)
