"""Buses that connect to each other, each on a database of its own: callers without an address find providers."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import psycopg
import pytest

from durable import Bus, Retry, message
from durable.calls.caller import RemoteService
from durable.calls.contract import contract_of
from durable.calls.links import Links
from durable.calls.places import Elsewhere
from durable.calls.provider import CallProvider
from durable.errors import ConnectionFailed, InvalidSetting, NoProvider
from durable.settings import load_settings
from durable.testing import eventually
from durable.testing.transports import MemoryReceiver
from durable.transports.base import Spoke
from durable.transports.tcp import credentials
from durable.transports.tcp.spoke import TcpSpoke
from durable.transports.tcp.transport import TcpTransport
from tests.failure.workbench import QUICK
from tests.support.calling import Inventory, Reservation, Stock
from tests.support.hubs import Raw, listing, process
from tests.support.providing import Named, Who

SETTINGS: dict[str, Any] = {**QUICK, "call_timeout": 5, "call_lease": "15s", "reconnect_pause": 0.05}
TCP = "tcp://127.0.0.1:0"


@pytest.fixture(autouse=True)
async def close_clients() -> AsyncIterator[None]:
    yield
    await Raw.close_all()


@pytest.fixture
async def stack() -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as stack:
        yield stack


def known(bus: Bus) -> list[tuple[str, str]]:
    return sorted((each.application, each.offer.service) for each in bus.runtime.calls.registry.listings())


def address(bus: Bus) -> str:
    assert bus.runtime.node is not None
    return bus.runtime.node.listeners[0].address


def make(name: str, url: str, *listen: str, **own: Any) -> Bus:
    bus = Bus(name, url, **{**SETTINGS, **own})
    for uri in listen:
        bus.listen(uri)
    return bus


async def test_callers_find_providers_of_connected_services(
    make_database: Callable[[str], str], stack: AsyncExitStack, tmp_path: Path
) -> None:
    at = f"unix://{tmp_path}/stock"
    stock = make("stock", make_database("stock"), at)
    stock.offer(Inventory, Stock())
    orders = make("orders", make_database("orders"))
    orders.connect(at)
    with pytest.raises(InvalidSetting, match="connected to already"):
        orders.connect(at)
    inventory = orders.caller(Inventory)
    await stack.enter_async_context(orders)  # before the other one runs
    await stack.enter_async_context(stock)
    await eventually(lambda: known(orders) == [("stock", "inventory")])
    assert await inventory.reserve("A-1", 3) == Reservation("A-1", 3)
    [provider] = await orders.providers(Inventory)
    assert (provider.application, provider.address) == ("stock", at)
    orders.disconnect(at)
    assert known(orders) == []
    with pytest.raises(NoProvider):
        await inventory.reserve("A-1", 3)
    with pytest.raises(InvalidSetting, match="not connected to"):
        orders.disconnect(at)
    orders.connect(at)  # while it runs
    await eventually(lambda: known(orders) == [("stock", "inventory")])


@message("connected.job")
class Job(msgspec.Struct):
    number: int


async def is_closed(path: Path) -> bool:
    try:
        _, writer = await asyncio.open_unix_connection(path)
    except OSError:
        return True
    writer.close()
    return False


@pytest.mark.parametrize("source", ["learned", "announced", "another node"])
async def test_handler_finds_providers_while_its_bus_drains(
    make_database: Callable[[str], str], stack: AsyncExitStack, tmp_path: Path, source: str
) -> None:
    """Its connections and listeners are closed by then; of the nodes of its own database it hears as before."""
    path, url = tmp_path / "orders", make_database("orders")
    orders = make("orders", url, f"unix://{path}", drain_timeout=10)
    stock = make("orders", url, TCP) if source == "another node" else make("stock", make_database("stock"), TCP)
    stock.offer(Inventory, Stock())
    inventory = orders.caller(Inventory)
    missing = orders.caller(Who, name={"timeout": 60})
    begun, told = asyncio.Event(), list[object]()

    @orders.handles(Job, retry=Retry.never())
    async def handle(job: Job) -> None:
        begun.set()
        await eventually(lambda: is_closed(path))
        if source == "another node":
            await stack.enter_async_context(stock)
        told.append(await inventory.reserve("A-1", 3))
        with pytest.raises(NoProvider):
            await missing.name()
        told.append("none")

    async with orders:
        if source != "another node":
            await stack.enter_async_context(stock)
            caller, hub = (stock, orders) if source == "announced" else (orders, stock)
            caller.connect(address(hub))
            await eventually(lambda: known(orders) == [("stock", "inventory")])
        async with orders.unit_of_work() as uow:
            uow.send(Job(1))
        await begun.wait()
    assert told == [Reservation("A-1", 3), "none"]


async def test_handlers_at_the_start_wait_until_directories_are_learned(
    make_database: Callable[[str], str], stack: AsyncExitStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at, url = f"unix://{tmp_path}/stock", make_database("orders")
    stock = make("stock", make_database("stock"), at)
    stock.offer(Inventory, Stock())
    await stack.enter_async_context(stock)

    def orders(**own: Any) -> tuple[Bus, list[object]]:
        bus, told = make("orders", url, **own), list[object]()
        bus.connect(at)
        inventory = bus.caller(Inventory)

        @bus.handles(Job, retry=Retry.never())
        async def handle(job: Job) -> None:
            try:
                told.append(await inventory.reserve("A-1", job.number))
            except NoProvider as error:
                told.append(error)

        return bus, told

    sender, _ = orders(mode="send-only")
    async with sender, sender.unit_of_work() as uow:
        for number in range(20):
            uow.send(Job(number))
    bus, told = orders()
    connect = TcpSpoke.run

    async def connect_late(self: TcpSpoke, spoke: Spoke) -> NoReturn:
        await eventually(lambda: bus.runtime.calls.registry.looks > 3)
        await connect(self, spoke)

    monkeypatch.setattr(TcpSpoke, "run", connect_late)
    async with bus:
        await eventually(lambda: len(told) == 20)
    assert sorted(told, key=repr) == sorted((Reservation("A-1", number) for number in range(20)), key=repr)


async def test_draining_call_fails_for_an_unknown_service_at_once_when_its_node_has_left(
    make_database: Callable[[str], str],
) -> None:
    orders = make("orders", make_database("orders"), drain_timeout=20)
    missing = orders.caller(Inventory, reserve={"timeout": 60})
    begun = asyncio.Event()

    class Asks(Named):
        async def wait(self) -> str:
            begun.set()
            await eventually(lambda: orders.runtime.node is None)
            with pytest.raises(NoProvider):
                await missing.reserve("A-1")
            return "none"

    orders.offer(Who, Asks("orders"))
    async with orders:
        call = asyncio.create_task(orders.caller(Who, wait={"timeout": 60}).wait())
        await begun.wait()
    assert await call == "none"


async def test_unknown_service_is_waited_for_until_the_first_attempt_to_connect_has_failed(
    make_database: Callable[[str], str], stack: AsyncExitStack, tmp_path: Path
) -> None:
    orders = make("orders", make_database("orders"))
    orders.connect(f"unix://{tmp_path}/nobody")
    await stack.enter_async_context(orders)
    async with asyncio.timeout(20):
        with pytest.raises(NoProvider):
            await orders.caller(Who, name={"timeout": 60}).name()


async def test_announced_services_are_known_to_all_nodes_of_the_hub_and_called_there(
    make_database: Callable[[str], str], stack: AsyncExitStack
) -> None:
    url = make_database("hub")
    hub, other = make("hub", url, TCP), make("hub", url)
    stock = make("stock", make_database("stock"), TCP)
    stock.offer(Inventory, Stock())
    inventory = other.caller(Inventory)
    for bus in (hub, other, stock):
        await stack.enter_async_context(bus)
    await other.providers(Inventory)
    stock.connect(address(hub))
    await eventually(lambda: known(other) == [("stock", "inventory")])
    assert await inventory.reserve("A-1", 3) == Reservation("A-1", 3)
    stock.disconnect(address(hub))
    await eventually(lambda: known(other) == [])
    with psycopg.connect(url) as conn:
        assert conn.execute("SELECT * FROM durable.offers").fetchall() == []


async def test_elapsed_lease_takes_the_offers_away_at_every_node(
    make_database: Callable[[str], str], stack: AsyncExitStack
) -> None:
    url = make_database("hub")
    hub, other = make("hub", url, TCP, call_lease_shortest=1), make("hub", url)
    for bus in (hub, other):
        await stack.enter_async_context(bus)
    await other.providers(Inventory)
    raw = await Raw.connect(address(hub))
    await raw.join(listing("inventory"), lease=3)
    await eventually(lambda: known(other) == known(hub) == [("stock", "inventory")])
    assert "no reset came" in await raw.refusal()
    await eventually(lambda: known(other) == known(hub) == [])


async def test_announcements_of_a_killed_hub_end_with_their_lease(
    make_database: Callable[[str], str], stack: AsyncExitStack
) -> None:
    url = make_database("hub")
    hub, other = make("hub", url, TCP), make("hub", url)
    for bus in (hub, other):
        await stack.enter_async_context(bus)
    await other.providers(Inventory)
    raw = await Raw.connect(address(hub))
    await raw.join(listing("inventory"))
    await eventually(lambda: known(other) == [("stock", "inventory")])
    hub.runtime.calls.announcing._wanted.clear()  # as if nobody lengthened their leases any more
    await eventually(lambda: known(other) == [])


async def test_connection_of_a_service_to_itself_announces_nothing_twice(
    make_database: Callable[[str], str], stack: AsyncExitStack, tmp_path: Path
) -> None:
    at = f"unix://{tmp_path}/stock"
    stock = make("stock", make_database("stock"), at)
    stock.offer(Inventory, Stock())
    stock.connect(at)
    await stack.enter_async_context(stock)
    await asyncio.sleep(0.5)
    assert known(stock) == [("stock", "inventory")]


# ---------------------------------------------------------------- identity

SECRETS = {name: f"the-secret-of-{name}-alone" for name in ("stock", "orders", "viewer")}


def _peers(**more: dict[str, Any]) -> dict[str, Any]:
    return {name: {"secrets": {"1": secret}, **more.get(name, {})} for name, secret in SECRETS.items()}


async def test_peers_announce_and_see_only_allowed_services() -> None:
    may = _peers(viewer={"types": ["inventory.reserve"]}, orders={"types": ["*"], "offers": ["orders.*"]})
    async with process("hub", peers=may) as hub:
        stock = await Raw.connect(hub.address, "stock", peers={"stock": {"secrets": {"1": SECRETS["stock"]}}})
        await stock.join(listing("inventory"), listing("prices"))
        viewer = await Raw.connect(hub.address, "viewer", peers={"viewer": {"secrets": {"1": SECRETS["viewer"]}}})
        await eventually(lambda: len(hub.known()) == 2)
        await viewer.join(listing("inventory", "viewer", at="tcp://127.0.0.1:2"))
        assert await viewer.refusal() == "viewer may not offer inventory: see offers and types in peers"
        again = await Raw.connect(hub.address, "viewer", peers={"viewer": {"secrets": {"1": SECRETS["viewer"]}}})
        await again.join()
        assert [each.offer.service for each in (await again.hear()).listings] == ["inventory"]
        orders = await Raw.connect(hub.address, "orders", peers={"orders": {"secrets": {"1": SECRETS["orders"]}}})
        await orders.join(listing("orders.status", "orders", at="tcp://127.0.0.1:3"))
        await eventually(lambda: ("orders", "orders.status") in hub.known())


async def test_peer_is_told_only_callable_methods() -> None:
    may = _peers(viewer={"types": ["inventory.reserve"]})
    own = {"viewer": {"secrets": {"1": SECRETS["viewer"]}}}
    async with process("hub", offers=True, peers=may) as hub:
        caller = TcpTransport(load_settings(peers=own), "viewer", 2).caller(hub.address)
        async with caller:
            (offer,) = (await caller.offers()).offers
            assert ([each.method for each in offer.signatures], offer.is_partial) == (["reserve"], True)
        links = Links(lambda _: TcpTransport(load_settings(peers=own), "viewer", 2))
        place = Elsewhere(hub.address, lambda: links)
        inventory = RemoteService(contract_of(Inventory), place, timeout=5, options={}, on_error=None).stub()
        assert await inventory.reserve("A-1") == Reservation("A-1", 1)
        with pytest.raises(NoProvider, match=r"viewer may not call inventory\.slow"):
            await inventory.slow("A")
        await links.close()
        viewer = await Raw.connect(hub.address, "viewer", peers=own)
        await viewer.join()
        (told,) = (await viewer.hear()).listings
        assert [each.method for each in told.offer.signatures] == ["reserve"]


async def test_proven_peer_cannot_announce_under_another_name() -> None:
    shared = "the secret that all the others share"
    async with process("hub", peers=_peers(), shared_secret=shared) as hub:
        stock = await Raw.connect(hub.address, "stock", peers={"stock": {"secrets": {"1": SECRETS["stock"]}}})
        await stock.join(listing("inventory", application="orders"))
        assert "is announced for orders node 7, another process; " in await stock.refusal()
        nobody = await Raw.connect(hub.address, "stock", shared_secret=shared)
        await nobody.join(listing("inventory"))
        assert await nobody.refusal() == (
            "stock is the name of a peer, and not proved; use its secret or its certificate"
        )
        assert hub.known() == []


async def test_stranger_learns_nothing() -> None:
    async with process("hub", offers=True, shared_secret="the secret that all share") as hub:
        with pytest.raises(ConnectionFailed):
            await Raw.connect(hub.address, "stock")


# ---------------------------------------------------------------- Unix sockets


async def test_socket_is_for_its_own_user_alone(tmp_path: Path) -> None:
    at = f"unix://{tmp_path}/hub"
    async with process("hub", at=at, offers=True):
        assert (tmp_path / "hub").stat().st_mode & 0o777 == 0o600
    async with process("hub", at=at, offers=True, unix_users=["0", "54321"]):
        assert (tmp_path / "hub").stat().st_mode & 0o777 == 0o666


class _Elsewhere:
    """Stands for the module os in a process of another user."""

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def geteuid(self) -> int:
        return 54_321


async def test_another_user_neither_calls_nor_connects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    at = f"unix://{tmp_path}/hub"
    with monkeypatch.context() as patched:
        patched.setattr(credentials, "os", _Elsewhere())
        transport = TcpTransport(load_settings(), "hub", 1, CallProvider())
        listener = transport.listener(at, "hub")
    await listener.serve(MemoryReceiver())
    async with TcpTransport(load_settings(), "orders", 2).caller(at) as caller:
        with pytest.raises(ConnectionFailed):
            await caller.offers()
    with pytest.raises(ConnectionFailed):
        await Raw.connect(at)
    await eventually(lambda: listener.statistics()["dropped"] == 2)
    assert listener.statistics()["calls"] == 0
    await listener.close()


async def test_named_users_and_groups_may_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for setting in ({"unix_users": [str(os.geteuid())]}, {"unix_groups": [str(os.getegid())]}):
        at = f"unix://{tmp_path}/{next(iter(setting))}"
        provider = CallProvider()
        with monkeypatch.context() as patched:
            patched.setattr(credentials, "os", _Elsewhere())
            listener = TcpTransport(load_settings(**setting), "hub", 1, provider).listener(at, "hub")
        await listener.serve(MemoryReceiver())
        async with TcpTransport(load_settings(), "orders", 2).caller(at) as caller:
            assert (await caller.offers()).offers == []
        await listener.close()
