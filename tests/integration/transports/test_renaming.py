"""A service with peers is renamed by the steps of the page on deployment; it has a peer on each side."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest

from durable import Bus, message
from durable.embedded import Embedded
from durable.embedded.ports import free_port
from durable.testing import eventually
from tests.failure.workbench import QUICK
from tests.support.tables import Tables, shared_tables

OLD, NEW = "a secret of orders and shop", "a secret of orders and store"


@message("renaming.placed")
class Placed(msgspec.Struct):
    number: int


@message("renaming.confirmed")
class Confirmed(msgspec.Struct):
    number: int
    by: str


@dataclass
class Town:
    """The database of each service, its address, and what it has handled."""

    orders: Tables
    shop: Tables
    orders_at: str
    shop_at: str
    placed: list[int] = field(default_factory=list)
    confirmed: list[tuple[int, str]] = field(default_factory=list)

    def sender(self, **peers: dict[str, Any]) -> Bus:
        bus = Bus("orders", self.orders.url, peers=peers, **QUICK)
        bus.listen(self.orders_at)
        bus.route(Placed, to=self.shop_at)

        @bus.handles(Confirmed)
        async def note(confirmed: Confirmed) -> None:
            self.confirmed.append((confirmed.number, confirmed.by))

        return bus

    @asynccontextmanager
    async def service(self, name: str, secret: dict[str, str]) -> AsyncIterator[None]:
        bus = Bus(name, self.shop.url, peers={"orders": {"secrets": secret, "at": [self.orders_at]}}, **QUICK)
        bus.listen(self.shop_at, name="shop")
        bus.route(Confirmed, to=self.orders_at)

        @bus.handles(Placed)
        async def confirm(placed: Placed) -> None:
            self.placed.append(placed.number)
            bus.send(Confirmed(placed.number, name))

        async with bus:
            yield

    async def is_confirmed(self, *confirmed: tuple[int, str]) -> None:
        """Return when these, and no others, are confirmed, and nothing is left in an outbox."""
        await eventually(lambda: len(self.confirmed) >= len(confirmed), within=20, what=f"{confirmed}")
        await eventually(self._is_all_sent, within=20, what="empty outboxes")
        assert sorted(self.confirmed) == [*confirmed]

    def _is_all_sent(self) -> bool:
        return not any(each.count("outgoing_envelopes") for each in (self.orders, self.shop))


@pytest.fixture
def town(shared: Tables, servers: Callable[[int], Embedded], request: pytest.FixtureRequest) -> Any:
    shared.clear()
    orders_at, shop_at = (f"{request.param}://127.0.0.1:{free_port()}" for _ in range(2))
    with shared_tables(servers(18)) as orders:
        yield Town(orders, shared, orders_at, shop_at)


async def send(bus: Bus, number: int) -> None:
    async with bus.unit_of_work():
        bus.send(Placed(number))


@pytest.mark.parametrize("town", ["tcp", "http"], indirect=True)
async def test_renamed_service_gets_messages_of_its_peers_when_at_moves(
    town: Town, caplog: pytest.LogCaptureFixture
) -> None:
    old, new = {"secrets": {"1": OLD}}, {"secrets": {"2": NEW}}
    at = {"at": [town.shop_at]}
    async with town.service("shop", {"1": OLD}):
        async with town.sender(shop=old | at) as orders:
            await send(orders, 1)
            await town.is_confirmed((1, "shop"))
        prepared = town.sender(shop=old | at, store=new)
        async with prepared:
            await send(prepared, 2)
            await town.is_confirmed((1, "shop"), (2, "shop"))
        await send(prepared, 3)

    async with town.service("store", {"2": NEW}):
        async with prepared:
            await eventually(lambda: town.orders.count("circuits") == 1, within=20, what="the latch")
        assert town.placed == [1, 2]
        async with town.sender(shop=old, store=new | at) as orders:
            await send(orders, 4)
            await town.is_confirmed((1, "shop"), (2, "shop"), (3, "store"), (4, "store"))
    assert sorted(town.placed) == [1, 2, 3, 4]
    assert set(town.shop.rows("SELECT endpoint FROM durable.received_ids")) == {"shop<-orders"}
    assert town.orders.count("dead_letters") == town.shop.count("dead_letters") == 0
    assert [each for each in caplog.messages if "where this bus does not listen" in each] == []
