"""Services that are offered and called in memory: by the bus itself, and by buses that are connected."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Protocol

import pytest

from durable import Bus
from durable.calls import service
from durable.errors import IncompatibleService, NoProvider, WiringError
from durable.testing import InMemoryBus, ManualClock

AT = "tcp://127.0.0.1:2304"


@service("greeter", version="1.0")
class Greeter(Protocol):
    async def greet(self, name: str) -> str: ...


@service("greeter", version="2.0")
class Loud(Protocol):
    async def greet(self, name: str) -> str: ...


class Polite:
    def __init__(self, word: str = "hello") -> None:
        self._word = word

    async def greet(self, name: str) -> str:
        return f"{self._word} {name}"


def offering(word: str, **options: Any) -> Bus:
    bus = Bus("stock")
    bus.offer(Greeter, Polite(word), **options)
    return bus


async def test_own_offer_is_called_and_listed_by_the_virtual_clock() -> None:
    clock = ManualClock()
    bus = offering("hello")
    async with InMemoryBus(bus, clock=clock):
        assert await bus.caller(Greeter).greet("A") == "hello A"
        (provider,) = await bus.providers(Greeter)
        assert (provider.application, provider.node, provider.since) == ("stock", 0, clock.now())
        clock.advance(timedelta(hours=1))
        bus.withdraw(Greeter)
        assert await bus.providers(Greeter) == []
        with pytest.raises(NoProvider):
            await bus.caller(Greeter).greet("A")
        bus.offer(Greeter, Polite("again"))
        assert [each.since for each in await bus.providers(Greeter)] == [clock.now()]
        assert await bus.caller(Greeter).greet("A") == "again A"


async def test_singleton_is_held_in_memory_and_nowhere_before_and_after() -> None:
    bus = offering("hello", singleton=True)
    greeter = bus.caller(Greeter, greet={"timeout": 0.1})
    singletons = bus.application.offers.singletons
    assert singletons.epoch_of("greeter") == 0
    with pytest.raises(WiringError, match="does not run"):
        await greeter.greet("A")
    async with InMemoryBus(bus):
        assert await greeter.greet("A") == "hello A"
        (provider,) = await bus.providers(Greeter)
        assert (provider.is_singleton, provider.epoch) == (True, 1)
        assert await bus.caller(Greeter, at=provider).greet("B") == "hello B"
    assert singletons.epoch_of("greeter") == 0
    for caller in (greeter, bus.caller(Greeter, at=provider)):
        with pytest.raises(WiringError, match="does not run"):
            await caller.greet("A")


async def test_connected_bus_is_called() -> None:
    stock, orders = offering("hello", singleton=True), Bus("orders")
    async with InMemoryBus(stock) as there, InMemoryBus(orders) as here:
        chosen, pinned = orders.caller(Greeter), orders.caller(Greeter, at=AT)
        with pytest.raises(NoProvider, match="no bus in memory is connected there"):
            await pinned.greet("A")
        here.connect(AT, there)
        assert await chosen.greet("A") == await pinned.greet("A") == "hello A"
        (provider,) = await orders.providers(Greeter)
        assert (provider.application, provider.address) == ("stock", AT)
        with pytest.raises(IncompatibleService, match="another first number"):
            await orders.caller(Loud).greet("A")
        stock.withdraw(Greeter)
        with pytest.raises(NoProvider):
            await chosen.greet("A")
        stock.offer(Greeter, Polite("again"))
        assert await chosen.greet("A") == "again A"
        here.disconnect(AT)
        with pytest.raises(NoProvider):
            await chosen.greet("A")


async def test_bus_connected_before_its_start_in_memory_is_called() -> None:
    stock, orders = offering("hello"), Bus("orders")
    there, here = InMemoryBus(stock), InMemoryBus(orders)
    here.connect(AT, there)
    async with here, there:
        assert await orders.caller(Greeter).greet("A") == "hello A"
