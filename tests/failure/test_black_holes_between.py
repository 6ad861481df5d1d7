"""Connections between services that carry nothing any more, over each transport: noticed, told, and nothing is lost."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession

from durable import Bus, message
from durable.embedded import Embedded
from tests.contract.links import through_proxy
from tests.failure.waiting import eventually
from tests.support.proxy import DOWN, UP, ChaosProxy
from tests.support.servers import AnyBroker, Names
from tests.support.tables import Tables, shared_tables

Hole = Callable[[ChaosProxy], None]

HOLES: dict[str, Hole] = {
    "stranded": ChaosProxy.strand,
    "no answers": lambda proxy: proxy.swallow(DOWN),
    "no questions": lambda proxy: proxy.swallow(UP),
}
BOUND = 60.0  # seconds; a broker's heartbeats are the slowest to be missed
BEFORE, AFTER = range(20), range(20, 40)
QUICK: dict[str, Any] = {
    "send_timeout": 1.0,
    "connect_timeout": 1.0,
    "frame_timeout": 1.0,
    "idle_timeout": 3.0,
    "ping_interval": 0.2,
    "poll_interval": 0.1,
    "drain_timeout": 2.0,
}


@message("between.noted")
class Noted(msgspec.Struct):
    number: int


@dataclass
class Services:
    """A sender, a receiver, and the proxy on the stretch between that is about to fail."""

    sender: Bus
    receiver: Bus
    proxy: ChaosProxy
    to: str


@pytest.fixture
def orders(server: Embedded) -> Iterator[Tables]:
    with shared_tables(server) as tables:
        yield tables


@pytest.fixture
def billing(server: Embedded) -> Iterator[Tables]:
    with shared_tables(server) as tables:
        tables.execute("CREATE TABLE notes (number int)")
        yield tables


def make(name: str, tables: Tables, **settings: Any) -> Bus:
    return Bus(name, database=tables.url, **QUICK | settings)


def handling(bus: Bus) -> Bus:
    @bus.handles(Noted)
    async def note(noted: Noted, session: AsyncSession) -> None:
        await session.execute(text("INSERT INTO notes VALUES (:number)"), {"number": noted.number})

    return bus


@asynccontextmanager
async def direct(scheme: str, orders: Tables, billing: Tables) -> AsyncIterator[Services]:
    sender, receiver = make("orders", orders), handling(make("billing", billing))
    receiver.listen(f"{scheme}://127.0.0.1:0")
    async with sender, receiver:
        assert receiver.runtime.node is not None
        address = receiver.runtime.node.listeners[0].address.replace(f"{scheme}://", "tcp://")
        async with ChaosProxy(address) as proxy:
            yield Services(sender, receiver, proxy, proxy.uri.replace("tcp://", f"{scheme}://"))


@asynccontextmanager
async def brokered(
    at: str, orders: Tables, billing: Tables, broker: AnyBroker, names: Names
) -> AsyncIterator[Services]:
    """The proxy is before the broker, or behind it."""
    queue = f"rabbitmq://default/queue/{names('holes')}"
    async with ChaosProxy(broker.url) as proxy:
        through = through_proxy(proxy, broker.url)
        sender = make("orders", orders, amqp_url=through if at == "before" else broker.url)
        receiver = handling(make("billing", billing, amqp_url=through if at == "behind" else broker.url))
        receiver.listen(queue)
        async with receiver, sender:
            yield Services(sender, receiver, proxy, queue)


@asynccontextmanager
async def services(
    transport: str, orders: Tables, billing: Tables, broker: AnyBroker, names: Names
) -> AsyncIterator[Services]:
    kind, _, at = transport.partition(" ")
    made = brokered(at, orders, billing, broker, names) if at else direct(kind, orders, billing)
    async with made as found:
        yield found


async def send(found: Services, numbers: range) -> None:
    for number in numbers:
        async with found.sender.unit_of_work() as uow:
            uow.send(Noted(number), to=found.to)


def notes(billing: Tables) -> Counter[int]:
    return Counter(billing.rows("SELECT number FROM notes"))


@pytest.mark.parametrize("hole", HOLES)
@pytest.mark.parametrize("transport", ["tcp", "http", "rabbitmq before", "rabbitmq behind"])
async def test_a_hole_is_noticed_and_loses_nothing(
    transport: str, hole: str, orders: Tables, billing: Tables, broker: AnyBroker, queue_name: Names
) -> None:
    async with services(transport, orders, billing, broker, queue_name) as found:
        await send(found, BEFORE)
        await eventually(lambda: sum(notes(billing).values()) == len(BEFORE), within=BOUND)
        HOLES[hole](found.proxy)
        await send(found, AFTER)
        if hole != "stranded":  # a new connection would work: nothing is down for long
            await eventually(lambda: is_told(found, orders, transport), within=BOUND)
            found.proxy.restore()
        await eventually(lambda: len(notes(billing)) == len(BEFORE) + len(AFTER), within=BOUND)
        await eventually(lambda: orders.count("outgoing_envelopes") == 0, within=BOUND)
        await eventually(lambda: orders.count("circuits") == 0, within=BOUND)
    assert set(notes(billing).values()) == {1}


def is_told(found: Services, orders: Tables, transport: str) -> bool:
    """The destination is latched for all to see; the listener counts itself as down."""
    if transport != "rabbitmq behind":
        return orders.count("circuits") == 1
    assert found.receiver.runtime.node is not None
    (listener,) = found.receiver.runtime.node.listener_statistics().values()
    return listener["down"] == 1
