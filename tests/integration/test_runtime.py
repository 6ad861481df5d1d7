"""A node's life: what it leaves behind when it ends, and that another begins."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from datetime import timedelta
from typing import Any

import msgspec
import pytest
from sqlalchemy import create_engine
from sqlalchemy.ext.asyncio import create_async_engine

from durable import Bus, Retry, WiringError, message
from durable.bus import Mode
from durable.cli.doctor.database import database_checks
from durable.embedded import Embedded
from durable.envelope import ANY_NODE
from durable.errors import DurableError
from durable.outcomes import STORED
from durable.settings import load_settings
from durable.testing import eventually
from durable.transports.memory import MemoryTransport
from tests.support.receivers import envelope
from tests.support.tables import Tables, shared_tables

HERE = "memory://shop"


@message("runtime.placed")
class Placed(msgspec.Struct):
    number: int


@pytest.fixture(scope="module")
def database(servers: Callable[[int], Embedded]) -> Iterator[Tables]:
    with shared_tables(servers(18)) as tables:
        yield tables


@pytest.fixture
def tables(database: Tables) -> Tables:
    database.clear()
    return database


@pytest.fixture
async def bus(tables: Tables) -> AsyncIterator[Bus]:
    bus = Bus(
        "shop",
        tables.url,
        heartbeat_interval=timedelta(milliseconds=50),
        poll_interval=timedelta(milliseconds=30),
        drain_timeout=timedelta(seconds=2),
    )
    bus.application.transports.append(MemoryTransport(bus.settings))
    bus.listen(HERE)
    async with bus:
        yield bus


async def test_unregistered_node_comes_back_under_another_id_with_its_listener(bus: Bus, tables: Tables) -> None:
    transport = bus.runtime.transports.of(HERE)
    first = bus.runtime.node_id
    await tables.change("DELETE FROM durable.nodes")
    await eventually(lambda: bus.runtime.node_id not in (first, ANY_NODE), within=15, what="another node")
    assert await transport.sender(HERE).send([envelope("runtime.placed")]) == [STORED]
    assert tables.count("nodes") == 1


@pytest.mark.parametrize("name", ["engine", "sync_engine"])
async def test_engine_in_autocommit_is_refused_when_the_bus_starts(tables: Tables, name: str) -> None:
    url = tables.url.replace("postgresql://", "postgresql+psycopg://")
    engine = (create_async_engine if name == "engine" else create_engine)(url, isolation_level="AUTOCOMMIT")
    options: dict[str, Any] = {name: engine}
    bus = Bus("shop", tables.url, **options)

    @bus.handles(Placed)
    async def handle(placed: Placed) -> None: ...

    with pytest.raises(WiringError, match=rf"Bus\({name}=...\) is in AUTOCOMMIT"):
        async with bus:
            pass


async def test_bus_ended_from_outside_is_reported(bus: Bus, caplog: pytest.LogCaptureFixture) -> None:
    """As by an application that cancels every task of its loop."""
    for task in asyncio.all_tasks():
        if task.get_name() == "durable":
            task.cancel()
    await eventually(lambda: not bus.runtime.node_id, within=20)
    await eventually(lambda: "the bus has ended by itself" in caplog.text, within=20)
    assert any("is no node now" in problem for problem in (await bus.runtime.monitor.read()).problems)
    with pytest.raises((asyncio.CancelledError, DurableError)):
        await bus.runtime.life.ended()


def watchdogs() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "durable watchdog"]


@pytest.mark.parametrize("mode", ["full", "send-only"])
async def test_application_goes_on_after_a_stop_in_time(tables: Tables, mode: Mode) -> None:
    """With on_stuck="exit", a bus that has stopped must not end the process some seconds later."""
    async with Bus("shop", tables.url, on_stuck="exit", mode=mode):
        pass
    await eventually(lambda: watchdogs() == [], what="the end of the watchdog")


async def test_process_of_the_bus_is_watched_to_its_end(tables: Tables) -> None:
    bus = Bus("shop", tables.url)
    life = bus.runtime.life
    life.owns_process = True
    async with bus:
        pass
    (watchdog,) = watchdogs()
    watchdog.join(0.5)
    assert watchdog.is_alive()
    life.end_watch()
    await eventually(lambda: watchdogs() == [], what="the end of the watchdog")


async def test_stopped_node_owns_nothing_and_is_unregistered(tables: Tables) -> None:
    bus = Bus("shop", tables.url, drain_timeout=timedelta(milliseconds=200))
    bus.route(Placed, to="tcp://127.0.0.1:1")  # nobody is there
    async with bus, bus.unit_of_work():
        for number in range(50):
            bus.send(Placed(number))
    assert tables.rows("SELECT owner_id, count(*) FROM durable.outgoing_envelopes GROUP BY 1") == [(0, 50)]
    assert tables.count("nodes") == 0


@pytest.mark.parametrize("key", [None, "k"])
async def test_short_delay_of_a_retry_ends_before_the_next_poll(tables: Tables, key: str | None) -> None:
    bus, attempts = Bus("shop", tables.url, poll_interval=timedelta(minutes=5)), list[int]()

    @bus.handles(Placed, retry=Retry(immediate=0, delays=[0.05, 0.3]))
    async def place(placed: Placed) -> None:
        attempts.append(placed.number)
        if len(attempts) < 3:
            raise ValueError("not yet")

    async with bus:
        async with bus.unit_of_work():
            bus.send(Placed(1), key=key)
        await eventually(lambda: len(attempts) == 3)


async def test_another_service_on_the_same_tables_is_told_of(
    bus: Bus, tables: Tables, caplog: pytest.LogCaptureFixture
) -> None:
    def told() -> list[str]:
        return [record.getMessage() for record in caplog.records if "shares the tables" in record.getMessage()]

    async with Bus("shop", tables.url):
        assert told() == []
    async with Bus("billing", tables.url):
        assert told() == [
            "service billing shares the tables of schema durable with shop, and each handles messages of the other: "
            "give every service a schema of its own (db_schema)"
        ]
        checks = await asyncio.to_thread(database_checks, load_settings(database_url=tables.url))
        (services,) = (check for check in checks if check.name == "services")
    assert services.verdict == "warn"
    assert "nodes of billing, shop work on the tables of durable" in services.detail
