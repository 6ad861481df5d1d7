"""What the log says of an outage: one line for each thing that happens, with its cause and without data."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import msgspec
import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession

from durable import Bus, message
from durable.embedded import Broker, Embedded
from durable.envelope import ANY_NODE
from durable.errors import StorageUnavailable
from durable.storage import migrator
from tests.failure.waiting import eventually
from tests.failure.workbench import QUICK
from tests.support.servers import EMBEDDED, Names, own_postgres

SECRET = "4929 1234 5678 9012"


@message("outages.paid")
class Paid(msgspec.Struct):
    card: str


@message("outages.shipped")
class Shipped(msgspec.Struct):
    card: str


@pytest.fixture
def own_server() -> Iterator[Embedded]:
    with own_postgres(EMBEDDED) as server:
        yield server


def stop_at_once(server: Embedded) -> None:
    pid_file = server.server.data / "postmaster.pid"
    os.kill(int(pid_file.read_text().split()[0]), signal.SIGQUIT)
    while pid_file.exists():
        time.sleep(0.01)


def migrated(server: Embedded) -> str:
    url = server.url("shop")
    migrator.upgrade(url.replace("postgresql://", "postgresql+psycopg://"), "durable")
    return url


def lines(records: Sequence[logging.LogRecord]) -> Counter[str]:
    """What was said, from INFO on, and how often."""
    return Counter(f"{record.name}: {record.getMessage()}" for record in records if record.levelno >= logging.INFO)


def ours(records: Sequence[logging.LogRecord]) -> list[logging.LogRecord]:
    """Without those of the server that the test starts itself."""
    return [record for record in records if record.name.split(".")[0] in ("durable", "aiormq", "aio_pika", "asyncio")]


def assert_readable(records: Sequence[logging.LogRecord]) -> None:
    """One line each, without a traceback, a statement or data, and none of them again and again."""
    for record in records:
        said = record.getMessage()
        assert record.exc_info is None or record.exc_info[0] is None, said
        assert "\n" not in said
        assert SECRET not in said
        assert "SELECT" not in said
        assert "INSERT" not in said
    assert max(lines(records).values(), default=0) <= 1, lines(records)


def joined_again(bus: Bus, before: int) -> Callable[[], bool]:
    return lambda: bus.runtime.node_id not in (before, ANY_NODE)


async def test_outage_of_postgres_is_told_once_with_its_cause(
    own_server: Embedded, caplog: pytest.LogCaptureFixture
) -> None:
    bus = Bus("shop", migrated(own_server), **QUICK)
    bus.route(Shipped, to="tcp://127.0.0.1:1")
    bus.listen("tcp://127.0.0.1:0")

    @bus.handles(Paid, concurrency=1)
    async def handle(paid: Paid, session: AsyncSession) -> None:
        await session.execute(text("SELECT pg_sleep(0.01)"))

    caplog.set_level(logging.INFO)
    async with bus:
        async with bus.unit_of_work() as uow:
            for _ in range(20):
                uow.send(Paid(SECRET))
                uow.send(Shipped(SECRET))
        await eventually(lambda: any("latched" in record.getMessage() for record in caplog.records))
        for _ in range(2):  # the next outage is told, too
            before = bus.runtime.node_id
            caplog.clear()
            await asyncio.to_thread(stop_at_once, own_server)
            await eventually(lambda: any("no node now" in record.getMessage() for record in caplog.records))
            await asyncio.sleep(3)  # many tries to join
            await asyncio.to_thread(own_server.server.run)
            await eventually(joined_again(bus, before))
            told = [record for record in ours(caplog.records) if "attempt 1" not in record.getMessage()]
            assert_readable(told)
            said = [record.getMessage() for record in told if record.levelno >= logging.INFO]
            assert sum("no node now" in each for each in said) == 1, said  # whatever its text
            assert sum("joined" in each for each in said) == 1, said
            assert any("is no member any more" in each for each in said)
            assert any("cannot join the nodes: " in each for each in said)
            assert any("took back" in each for each in said)


async def test_outage_of_rabbitmq_is_told_once_with_its_cause(
    database_url: str, own_broker: Broker, queue_name: Names, caplog: pytest.LogCaptureFixture
) -> None:
    queue = f"rabbitmq://default/queue/{queue_name('outage')}"
    bus = Bus("shop", database_url, **dict[str, Any](QUICK, amqp_url=own_broker.url, amqp_queue_type="classic"))
    bus.route(Shipped, to=queue)
    bus.listen(queue)
    seen: list[object] = []

    @bus.handles(Shipped)
    async def handle(shipped: Shipped) -> None:
        seen.append(shipped)

    async def send() -> None:
        async with bus.unit_of_work() as uow:
            uow.send(Shipped(SECRET))

    caplog.set_level(logging.INFO)
    async with bus:
        await send()
        await eventually(lambda: len(seen) == 1)
        caplog.clear()
        await asyncio.to_thread(own_broker.kill)
        await eventually(lambda: any("is down" in record.getMessage() for record in caplog.records))
        await send()
        await eventually(lambda: any("latched" in record.getMessage() for record in caplog.records))
        await asyncio.sleep(1)  # some pings
        await asyncio.to_thread(own_broker.start)
        await eventually(lambda: len(seen) == 2, within=60)
        told = [record for record in ours(caplog.records) if not record.getMessage().startswith("batch of")]
    assert_readable(told)
    assert {record.name.split(".")[0] for record in told} == {"durable"}


# ---------------------------------------------------------------- at the start


async def test_process_started_during_an_outage_of_postgres_waits(
    own_server: Embedded, caplog: pytest.LogCaptureFixture
) -> None:
    bus = Bus("shop", migrated(own_server), **QUICK, start_timeout=timedelta(minutes=2))
    await asyncio.to_thread(stop_at_once, own_server)
    starting = asyncio.create_task(bus.__aenter__())
    await eventually(lambda: any("waiting for the database" in record.getMessage() for record in caplog.records))
    await asyncio.sleep(1)
    assert not starting.done()
    await asyncio.to_thread(own_server.server.run)
    async with asyncio.timeout(30):
        await starting
    assert bus.runtime.node_id != ANY_NODE
    await bus.__aexit__(None, None, None)
    assert_readable(ours(caplog.records))


@pytest.mark.parametrize("mode", ["full", "send-only"])
async def test_process_gives_up_an_unreachable_database_after_start_timeout(own_server: Embedded, mode: Any) -> None:
    bus = Bus("shop", migrated(own_server), mode=mode, start_timeout=timedelta(seconds=1))
    await asyncio.to_thread(stop_at_once, own_server)
    try:
        with pytest.raises(StorageUnavailable):
            await bus.__aenter__()
    finally:
        await asyncio.to_thread(own_server.server.run)


async def test_missing_database_raises_at_once(database_url: str, caplog: pytest.LogCaptureFixture) -> None:
    bus = Bus("shop", database_url.replace("/app_", "/no_app_"), start_timeout=timedelta(hours=1))
    async with asyncio.timeout(60):
        with pytest.raises(StorageUnavailable, match="does not exist"):
            await bus.__aenter__()
    assert "waiting for the database" not in caplog.text
