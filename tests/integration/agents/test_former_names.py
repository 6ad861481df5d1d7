"""Names of listeners that a renamed service has no more: a bus warns of them when it starts."""

from __future__ import annotations

from uuid import uuid4

import pytest
from sqlalchemy import create_engine, text

from durable import Bus
from durable.envelope import new_id
from durable.storage import known_names
from tests.failure.workbench import QUICK
from tests.support.tables import Tables

LISTEN = "tcp://127.0.0.1:0"
WARNING = "messages were received under the name"
IDS = {"received_ids": new_id, "undated_ids": uuid4}


@pytest.fixture
def tables(shared: Tables) -> Tables:
    shared.clear()
    return shared


def remember(tables: Tables, table: str, *endpoints: str, count: int = 1) -> None:
    """Put ids of messages, each later than the one before."""
    columns, values = ("id, endpoint, message_digest", ":id, :endpoint, 1")
    if table == "undated_ids":
        columns, values = f"{columns}, sent_at", f"{values}, now()"
    engine = create_engine(tables.url)
    with engine.begin() as conn:
        rows = [{"id": IDS[table](), "endpoint": each} for each in endpoints for _ in range(count)]
        conn.execute(text(f"INSERT INTO durable.{table} ({columns}) VALUES ({values})"), rows)
    engine.dispose()


WAYS = ("listen", "asgi", "asgi of a process that only stores")


async def warnings(
    tables: Tables, caplog: pytest.LogCaptureFixture, name: str | None = None, way: str = "listen"
) -> list[str]:
    """Start a service once, and return what it has said of names."""
    caplog.clear()
    store = Bus("store", tables.url, **QUICK, mode="send-only" if "only stores" in way else "full")
    if way == "listen":
        store.listen(LISTEN, name=name)
    elif way.startswith("asgi"):
        store.asgi(name)
    async with store:
        pass
    return [each for each in caplog.messages if WARNING in each]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("table", IDS)
async def test_renamed_service_warns_of_its_former_name(
    tables: Tables, caplog: pytest.LogCaptureFixture, table: str, way: str
) -> None:
    remember(tables, table, "shop", "shop<-orders", "local", "store", "store<-orders")

    [warning] = await warnings(tables, caplog, way=way)
    assert warning.startswith(f"{WARNING} shop, where this bus does not listen")
    assert await warnings(tables, caplog, way="none") == []


@pytest.mark.parametrize("way", WAYS)
async def test_service_with_its_former_name_at_the_listener_warns_of_nothing(
    tables: Tables, caplog: pytest.LogCaptureFixture, way: str
) -> None:
    assert await warnings(tables, caplog, way=way) == []
    remember(tables, "received_ids", "shop", "shop<-orders", "local")

    assert await warnings(tables, caplog, name="shop", way=way) == []


def test_only_the_oldest_thousand_rows_are_read(tables: Tables) -> None:
    for table in IDS:
        remember(tables, table, "old", "new", count=1_000)
    engine = create_engine(tables.url)
    with engine.begin() as conn:
        assert known_names.oldest_endpoints(conn, "durable") == ["old"]
    engine.dispose()
