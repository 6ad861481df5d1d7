"""Providers that are listed and cannot be called: the next one is, within the time of the call."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Any

import pytest

from durable.calls.caller import RemoteService
from durable.calls.choice import Origin
from durable.calls.contract import contract_of
from durable.calls.links import Links
from durable.calls.places import this_machine
from durable.calls.provider import CallProvider
from durable.calls.providers import Anywhere, Providers
from durable.calls.registry import Registry
from durable.errors import NoProvider
from durable.settings import load_settings
from durable.transports.frames import Listing
from durable.transports.tcp.transport import TcpTransport
from tests.support.calling import Inventory, Reservation
from tests.support.hubs import process

CONTRACT = contract_of(Inventory)


@pytest.fixture
async def silent() -> AsyncIterator[list[str]]:
    """Addresses at which somebody listens and says nothing, as a process that stands still does."""

    ended: list[asyncio.Task[Any] | None] = []

    async def say_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ended.append(asyncio.current_task())
        with contextlib.suppress(OSError):
            await reader.read()
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()

    servers = [await asyncio.start_server(say_nothing, "127.0.0.1", 0) for _ in range(2)]
    yield [f"tcp://127.0.0.1:{each.sockets[0].getsockname()[1]}" for each in servers]
    for each in servers:
        each.close()
    await asyncio.gather(*filter(None, ended))


@contextlib.asynccontextmanager
async def caller(*addresses: str, seconds: float = 10) -> AsyncIterator[Any]:
    """Call the inventory at these addresses, of which the first seems to be the least busy."""
    registry = Registry()
    registry.learn("hub", [listed(node, address) for node, address in enumerate(addresses, 1)])
    links = Links(lambda _: TcpTransport(load_settings(), "orders", 3))
    providers = Providers(
        registry, lambda: Origin("orders", 3, this_machine()), links=lambda: links, provider=CallProvider
    )
    place = Anywhere(CONTRACT, lambda: providers)
    yield RemoteService(CONTRACT, place, timeout=seconds, options={}, on_error=None).stub()
    await links.close()


def listed(node: int, address: str) -> Listing:
    return Listing(
        CONTRACT.offer, "stock", node, [address], datetime.now(UTC), load=1000 * node, machine=this_machine()
    )


@pytest.mark.parametrize(
    "bad",
    [
        "tcp://127.0.0.1:1?bogus=1",
        "tcp://127.0.0.1:1",
        "tcp://127.0.0.1:1?tls=1",
        "tcp://[::ffff:127.0.0.1]:1",
        "unix:///tmp/" + "p" * 150,
        "tcp://" + "x" * 70 + ":1",
    ],
)
async def test_uncallable_address_is_passed_over_and_tried_last(bad: str) -> None:
    async with process("stock", offers=True) as stock, caller(bad, stock.address) as inventory:
        assert [await inventory.reserve("A-1") for _ in range(5)] == [Reservation("A-1", 1)] * 5
    async with caller(bad) as inventory:
        with pytest.raises(NoProvider, match="service inventory: no answer at"):
            await inventory.reserve("A-1")


async def test_silent_provider_takes_a_share_of_the_time_and_is_tried_last(silent: list[str]) -> None:
    async with process("stock", offers=True) as stock, caller(*silent, stock.address, seconds=1.5) as inventory:
        async with asyncio.timeout(1.5):
            found = Counter([each.sku for each in await asyncio.gather(*(inventory.reserve("A") for _ in range(20)))])
        assert found == {"A": 20}
        async with asyncio.timeout(0.25):  # nobody is asked again that has just failed
            assert await inventory.reserve("A-1") == Reservation("A-1", 1)


async def test_error_says_how_many_were_asked(silent: list[str]) -> None:
    async with caller(*silent, seconds=0.4) as inventory:
        with pytest.raises(NoProvider, match=r"\(2 addresses were asked\)$"):
            await inventory.reserve("A-1")


async def test_error_of_any_kind_is_one_of_a_call() -> None:
    def fail(at: str) -> Any:
        raise ValueError("of a fault inside")

    links = Links(fail)
    registry = Registry()
    registry.learn("hub", [listed(1, "tcp://127.0.0.1:1")])
    providers = Providers(registry, lambda: Origin("orders", 3, ""), links=lambda: links, provider=CallProvider)
    place = Anywhere(CONTRACT, lambda: providers)
    inventory = RemoteService(CONTRACT, place, timeout=1, options={}, on_error=None).stub()
    registry.learn("hub", [listed(1, "tcp://orders:1")])
    with pytest.raises(NoProvider, match="of a fault inside"):
        await inventory.reserve("A-1")


def test_address_rests_for_longer_when_failing_again(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    providers = Providers(Registry(), lambda: Origin("orders", 3, ""), links=lambda: None, provider=CallProvider)

    def rest() -> float:
        """Fail, twice at once, and return the seconds until the address is called as the others are."""
        began = now[0]
        providers.has_failed("a")
        providers.has_failed("a")
        while "a" in providers.failed:
            now[0] += 0.5
        return now[0] - began

    assert [rest() for _ in range(7)] == [1, 2, 4, 8, 16, 16, 16]
    now[0] += 17
    assert rest() == 1
