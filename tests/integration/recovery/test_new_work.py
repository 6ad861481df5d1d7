"""Work that a commit of another process names to the nodes: claimed before the next poll, whatever it is."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any

import msgspec
import pytest

from durable import Bus, message
from durable.embedded import Embedded
from durable.settings import load_settings
from durable.storage import agenda
from durable.testing import eventually
from durable.transports.memory import MemoryTransport
from tests.support.tables import Tables, shared_tables

ADDRESS = "memory://shop"
COUNT = 40


@message("new-work.placed")
class Placed(msgspec.Struct):
    number: int


@message("new-work.unknown")
class Unknown(msgspec.Struct):
    number: int


@pytest.fixture
def tables(server: Embedded) -> Iterator[Tables]:
    with shared_tables(server) as tables:
        yield tables


class Looks:
    """The looks for work of this process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        self._read = agenda.read
        monkeypatch.setattr(agenda, "read", self._noted)

    def _noted(self, *args: Any, **options: Any) -> agenda.Agenda:
        self.count += 1
        return self._read(*args, **options)

    async def are_over(self) -> None:
        """Wait until none has been made for a while."""
        before = -1
        while before != self.count:
            before = self.count
            await asyncio.sleep(0.5)


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> Looks:
    return Looks(monkeypatch)


class Shop:
    """A node that polls every ten minutes, and a bus beside it that stores messages for any node."""

    def __init__(self, tables: Tables, **options: Any) -> None:
        settings: dict[str, Any] = {"buffer_size": options.pop("buffer_size", 1_000)}
        memory = MemoryTransport(load_settings())
        self.node = Bus("shop", tables.url, transports=[memory], poll_interval=timedelta(minutes=10), **settings)
        self.node.listen(ADDRESS)
        self.sender = Bus("shop", tables.url, transports=[memory], mode="send-only")
        self.sender.handles(Unknown)(self._handle_unknown)
        self.handled: list[int] = []
        for bus in (self.node, self.sender):
            bus.handles(Placed, **options)(self._handle)

    async def _handle(self, placed: Placed) -> None:
        self.handled.append(placed.number)

    async def _handle_unknown(self, unknown: Unknown) -> None:
        raise AssertionError("the sender handles nothing")

    @asynccontextmanager
    async def idle(self, looks: Looks) -> AsyncIterator[None]:
        """Run; begin when the node has nothing left to look for until its next poll."""
        async with self.node, self.sender:
            await looks.are_over()
            yield

    async def send(self, kind: type[Any], numbers: range, **options: Any) -> None:
        for number in numbers:
            async with self.sender.unit_of_work() as uow:
                uow.send(kind(number), **options)


BY_NAME: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "in groups": ({"max_batch": 10}, {}),
    "to a destination": ({}, {"to": ADDRESS}),
}
BY_A_LOOK: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "with a key": ({}, {"key": "a"}),
    "with a key, to a destination": ({}, {"key": "a", "to": ADDRESS}),
    "of a tenant": ({"fair_by": "tenant"}, {"tenant": "blue"}),
    "ordered": ({"ordered": True}, {}),
    "with a delay": ({}, {"delay": timedelta(seconds=0.3)}),
    "with little room": ({"buffer_size": 1, "concurrency": 1}, {}),
}


@pytest.mark.parametrize("kind", [*BY_NAME, *BY_A_LOOK])
async def test_message_stored_by_another_process_is_handled_before_the_next_poll(
    tables: Tables, looks: Looks, kind: str
) -> None:
    handling, sending = (BY_NAME | BY_A_LOOK)[kind]
    shop = Shop(tables, **handling)
    async with shop.idle(looks):
        before = looks.count
        await shop.send(Placed, range(COUNT), **sending)
        await eventually(lambda: sorted(shop.handled) == list(range(COUNT)), within=30)
        if kind in BY_NAME:
            assert looks.count == before
    assert sorted(shop.handled) == list(range(COUNT))


def forged(destinations: Sequence[str] = (), types: Sequence[str] = ()) -> str:
    return json.dumps({"types": list(types), "destinations": list(destinations)})


FORGED = {
    "addresses": [forged([f"memory://{number}" for number in range(100)])],
    "other addresses each time": [forged([f"memory://{number}.{each}" for each in range(9)]) for number in range(30)],
    "more addresses than are claimed by name": [forged([f"memory://{number}" for number in range(300)])],
    "no addresses": [forged(["x", "tcp://", "http://["])],
    "texts that no column holds": [forged([text], [text]) for text in ("\0", "\ud800", "", "x" * 3_000)],
    "types": [forged(types=[f"new-work.{number}" for number in range(100)])],
}


@pytest.mark.parametrize("kind", FORGED)
async def test_named_lane_without_rows_starts_no_sender(
    tables: Tables, looks: Looks, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    """Any role of the database may send a NOTIFY."""
    shop = Shop(tables)
    async with shop.idle(looks):
        for payload in FORGED[kind]:
            tables.execute("SELECT pg_notify('durable_durable', %s)", payload)
            await asyncio.sleep(0.01)
        await shop.send(Placed, range(1), to=ADDRESS)
        await eventually(lambda: shop.handled == [0], within=30)
        assert senders_of(shop.node) == {ADDRESS}
        await looks.are_over()
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []


async def test_named_destination_starts_a_sender_on_one_node(tables: Tables, looks: Looks) -> None:
    shop, other = Shop(tables), Shop(tables)
    async with shop.idle(looks), other.node:
        await looks.are_over()
        await shop.send(Placed, range(1), to=ADDRESS)
        await eventually(lambda: shop.handled == [0] or other.handled == [0], within=30)
        assert len(senders_of(shop.node)) + len(senders_of(other.node)) == 1


async def test_row_without_a_transport_goes_back_when_its_destination_is_named(
    tables: Tables, looks: Looks, caplog: pytest.LogCaptureFixture
) -> None:
    shop, told = Shop(tables), "envelopes for smoke://signal stay in the outbox"
    async with shop.idle(looks):
        await shop.send(Placed, range(1), to=ADDRESS, delay=timedelta(hours=1))
        await looks.are_over()
        tables.execute("UPDATE durable.outgoing_envelopes SET destination = 'smoke://signal', execution_time = NULL")
        tables.execute("SELECT pg_notify('durable_durable', %s)", forged(["smoke://signal"]))
        await eventually(lambda: told in caplog.text, within=30)
        await eventually(lambda: tables.one("SELECT owner_id FROM durable.outgoing_envelopes") == 0, within=5)
        assert senders_of(shop.node) == set()


def senders_of(bus: Bus) -> set[str]:
    node = bus.runtime.node
    assert node is not None
    return set(node.agents.senders)


async def test_named_work_of_slow_looks_is_looked_for(
    tables: Tables, looks: Looks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A claim begins where the last one has ended, and would pass by what commits late, or has come back."""
    monkeypatch.setattr("durable.recovery.floors.SLOW", -1.0)
    shop = Shop(tables)
    async with shop.idle(looks):
        before = looks.count
        await shop.send(Placed, range(COUNT))
        await eventually(lambda: sorted(shop.handled) == list(range(COUNT)), within=30)
        assert looks.count > before


async def test_named_work_without_a_handler_becomes_a_dead_letter_before_the_next_poll(
    tables: Tables, looks: Looks
) -> None:
    shop = Shop(tables)
    async with shop.idle(looks):
        await shop.send(Unknown, range(1))
        await eventually(lambda: tables.count("dead_letters") == 1, within=30)
        await shop.send(Placed, range(1))
        await eventually(lambda: shop.handled == [0], within=30)


async def test_named_work_of_a_paused_handler_is_handled_when_the_handler_is_resumed(
    tables: Tables, looks: Looks
) -> None:
    shop = Shop(tables)
    async with shop.idle(looks):
        await shop.sender.pause(Placed, reason="a test")
        await looks.are_over()
        await shop.send(Placed, range(COUNT))
        await asyncio.sleep(0.5)
        assert shop.handled == []
        await shop.sender.resume(Placed)
        await eventually(lambda: sorted(shop.handled) == list(range(COUNT)), within=30)
