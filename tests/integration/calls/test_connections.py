"""Services that know each other by one address: directories, announcements and leases, over sockets and processes."""

from __future__ import annotations

import asyncio
import contextlib
import platform
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from durable.calls.contract import contract_of
from durable.calls.places import this_machine
from durable.calls.provider import CallProvider
from durable.errors import TransportError
from durable.settings import load_settings
from durable.testing import eventually
from durable.testing.transports import MemoryReceiver
from durable.transports.frames import (
    MAX_OFFERS,
    Announce,
    Call,
    Cancel,
    Content,
    Directory,
    Fault,
    Frame,
    FrameKind,
    Lookup,
    Outcomes,
    Ping,
    Pong,
    Reset,
    Result,
)
from durable.transports.tcp.client_side import Sendable
from durable.transports.tcp.pace import MOST_FRAMES
from durable.transports.tcp.server_side import ServerSide
from durable.transports.tcp.transport import TcpTransport
from durable.transports.wire import encode
from tests.support.calling import Inventory, Stock
from tests.support.frames import raw_frame
from tests.support.hubs import Process, Raw, listing, process
from tests.support.receivers import envelopes

SOON = 20.0  # seconds; no measure


@pytest.fixture(params=["tcp", "unix"])
def at(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return "tcp://127.0.0.1:0" if request.param == "tcp" else f"unix://{tmp_path}/hub"


@pytest.fixture(autouse=True)
async def close_clients() -> AsyncIterator[None]:
    yield
    await Raw.close_all()


@pytest.fixture
async def hub() -> AsyncIterator[Process]:
    async with process("hub") as found:
        yield found


# ---------------------------------------------------------------- learning and announcing


async def test_directory_is_learned_at_once_and_after_each_change(at: str) -> None:
    async with process("hub", at=at) as hub, process("orders", at=None) as orders:
        orders.connections.open(hub.address)
        hub.provider.offer(contract_of(Inventory), Stock())
        await eventually(lambda: orders.known() == [("hub", "inventory")])
        [learned] = orders.registry.listings()
        assert learned.addresses == [hub.address]
        hub.provider.withdraw(contract_of(Inventory))
        await eventually(lambda: orders.known() == [])


async def test_announced_services_are_known_at_the_hub_and_all_its_connected_peers(at: str) -> None:
    async with process("hub", at=at) as hub, process("orders", at=None) as orders, process("stock", 7) as stock:
        orders.connections.open(hub.address)
        stock.connections.open(hub.address)
        stock.provider.offer(contract_of(Inventory), Stock())
        await eventually(lambda: hub.known() == orders.known() == [("stock", "inventory")])
        assert orders.registry.listings()[0].addresses == [stock.address]
        stock.provider.withdraw(contract_of(Inventory))
        await eventually(lambda: hub.known() == orders.known() == [])


async def test_peer_without_a_directory_is_asked_for_its_own_offers() -> None:
    settings, provider = load_settings(), CallProvider()
    listener = TcpTransport(settings, "old", 3, provider).listener("tcp://127.0.0.1:0", "old")
    await listener.serve(MemoryReceiver())
    async with process("orders", at=None, offers=True) as orders:
        orders.connections.open(listener.address)
        provider.offer(contract_of(Inventory), Stock())
        await eventually(lambda: orders.known() == [("old", "inventory"), ("orders", "inventory")])
        assert [each.addresses for each in orders.registry.listings() if each.application == "old"] == [
            [listener.address]
        ]
        provider.withdraw(contract_of(Inventory))
        await eventually(lambda: orders.known() == [("orders", "inventory")])
    await listener.close()


async def test_disconnected_provider_is_forgotten_at_once(hub: Process) -> None:
    async with process("stock", 7, offers=True) as stock:
        stock.connections.open(hub.address)
        await eventually(lambda: hub.known() == [("stock", "inventory")])
        stock.connections.cancel(hub.address)
        await eventually(lambda: hub.known() == [])


async def test_learned_services_are_never_told_on() -> None:
    async with process("far", offers=True) as far, process("middle") as middle, process("near", at=None) as near:
        middle.connections.open(far.address)
        far.connections.open(middle.address)
        near.connections.open(middle.address)
        middle.provider.offer(contract_of(Inventory), Stock())
        await eventually(lambda: middle.known() == [("far", "inventory"), ("middle", "inventory")])
        await eventually(lambda: near.known() == [("far", "inventory"), ("middle", "inventory")])
        far.connections.cancel(middle.address)  # so that far is not announced at middle, which knows it all the same
        await eventually(lambda: near.known() == [("middle", "inventory")])
        assert middle.known() == [("far", "inventory"), ("middle", "inventory")]


async def test_lost_directory_is_forgotten_after_the_lease_and_learned_again(tmp_path: Path) -> None:
    at = f"unix://{tmp_path}/hub"
    async with process("orders", at=None, call_lease=1.0) as orders:
        orders.connections.open(at)
        for _ in range(2):
            async with process("hub", at=at, offers=True):
                await eventually(lambda: orders.known() == [("hub", "inventory")])
            assert orders.known() == [("hub", "inventory")]  # it may come back within the lease
            await eventually(lambda: orders.known() == [])


async def test_directory_is_kept_when_the_connection_is_back_within_the_lease(tmp_path: Path) -> None:
    at = f"unix://{tmp_path}/hub"
    changes: list[list[tuple[str, str]]] = []
    async with process("orders", at=None, call_lease=30) as orders:
        orders.connections.open(at)
        for _ in range(3):
            async with process("hub", at=at, offers=True) as hub:
                await eventually(lambda: orders.known() == [("hub", "inventory")])
                assert hub.address == at
                orders.registry.watch(lambda: changes.append(orders.known()))
        assert [] not in changes


async def test_peers_of_a_restarted_hub_stay_known_until_they_had_time_to_announce_again(tmp_path: Path) -> None:
    at = f"unix://{tmp_path}/hub"
    async with process("orders", at=None, call_lease=2.0) as orders:
        orders.connections.open(at)
        async with process("hub", at=at):
            raw = await Raw.connect(at)
            await raw.join(listing("prices"), listing("inventory"), lease=10)
            await eventually(lambda: orders.known() == [("stock", "inventory"), ("stock", "prices")])
        async with process("hub", at=at, offers=True):
            await eventually(lambda: ("hub", "inventory") in orders.known())
            assert ("stock", "prices") in orders.known()
            again = await Raw.connect(at)
            await again.join(listing("inventory"), lease=10)
            await eventually(lambda: ("stock", "prices") not in orders.known())
            assert orders.known() == [("hub", "inventory"), ("stock", "inventory")]


# ---------------------------------------------------------------- leases


async def test_client_is_ended_and_forgotten_when_never_resetting(hub: Process) -> None:
    async with process("orders", at=None) as orders:
        orders.connections.open(hub.address)
        raw = await Raw.connect(hub.address)
        await raw.join(listing("inventory"), lease=0.5)
        await eventually(lambda: hub.known() == orders.known() == [("stock", "inventory")])
        assert await raw.refusal() == "the lease of 0.5 s is over: no reset came"
        await raw.is_ended()
        assert hub.known() == []
        await eventually(lambda: orders.known() == [])
        await eventually(lambda: hub.counts["dropped"] == 1)


@pytest.mark.parametrize("lease", [0.1, 61.0])
async def test_lease_out_of_bounds_is_refused_and_changes_nothing(hub: Process, lease: float) -> None:
    raw = await Raw.connect(hub.address)
    assert raw.side.bounds is not None
    assert (raw.side.bounds.shortest, raw.side.bounds.longest) == (0.3, 60)
    await raw.join(listing("inventory"), lease=1.0)
    await raw.say(Reset(lease))
    assert await raw.refusal() == f"a lease of {lease:g} s is out of bounds; choose 0.3 to 60 s"
    assert await raw.refusal() == "the lease of 1 s is over: no reset came"
    await raw.close()


async def test_reset_in_time_keeps_the_connection(hub: Process) -> None:
    raw = await Raw.connect(hub.address)
    await raw.join(listing("inventory"), lease=0.6)
    for _ in range(6):
        await asyncio.sleep(0.2)
        await raw.say(Reset(0.6))
    assert hub.known() == [("stock", "inventory")]
    await raw.close()
    await eventually(lambda: hub.known() == [])


async def test_bus_resets_by_itself(hub: Process) -> None:
    async with process("stock", 7, offers=True, call_lease=0.3) as stock:
        stock.connections.open(hub.address)
        await eventually(lambda: hub.known() == [("stock", "inventory")])
        lost: list[str] = []
        hub.registry.watch(lambda: lost.append("") if not hub.known() else None)
        await asyncio.sleep(1.5)
        assert hub.known() == [("stock", "inventory")]
        assert not lost


async def test_early_frames_of_a_stranger_to_the_directory_end_the_connection(hub: Process) -> None:
    raw = await Raw.connect(hub.address)
    await raw.say(Announce([listing("inventory")]))
    await raw.is_ended()
    assert hub.known() == []


@contextmanager
def provider(hub: str, lease: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "tests.support.hubs", "tcp://127.0.0.1:0", hub, lease]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as started:
        try:
            yield started
        finally:
            started.send_signal(signal.SIGCONT)
            started.kill()


async def test_stopped_provider_is_taken_away_by_its_lease_and_comes_back(hub: Process) -> None:
    with provider(hub.address, "1s") as started:
        await eventually(lambda: hub.known() == [("stock", "inventory")])
        started.send_signal(signal.SIGSTOP)
        await eventually(lambda: hub.known() == [])
        started.send_signal(signal.SIGCONT)
        await eventually(lambda: hub.known() == [("stock", "inventory")])


async def test_killed_provider_is_taken_away_at_once(hub: Process) -> None:
    with provider(hub.address, "60s") as started:
        await eventually(lambda: hub.known() == [("stock", "inventory")])
        started.kill()
        async with asyncio.timeout(2):
            await eventually(lambda: hub.known() == [])


# ---------------------------------------------------------------- bad announcements


@pytest.mark.parametrize(
    ("announced", "reason"),
    [
        (listing("inventory", application="billing"), "inventory is announced for billing node 7, another process; "),
        (listing("inventory", node=8), "inventory is announced for stock node 8, another process; "),
        (listing("inventory", at="tcp://10.0.0.7:22"), "tcp://10.0.0.7:22 is not on this machine"),
        (listing("inventory", at="http://user@127.0.0.1:1"), "is no address that can be called"),
        (listing("inventory", at="file:///etc/passwd"), "is no address that can be called"),
        (listing("inventory", at="tcp://127.0.0.1:1?bogus=1"), "the only options are reuse_port=1 and tls=1"),
        (listing("inventory", at="http://127.0.0.1:1/a//b"), "the path is not one of plain"),
        (listing("inventory", at="unix:///tmp/" + "p" * 150), "the path of a Unix socket has at most"),
    ],
)
async def test_announcement_of_something_else_is_refused_and_changes_nothing(
    hub: Process, announced: Any, reason: str
) -> None:
    raw = await Raw.connect(hub.address)
    await raw.join(listing("prices"))
    await raw.say(Announce([listing("prices"), announced]))
    assert reason in await raw.refusal()
    assert hub.known() == [("stock", "prices")]
    await raw.close()


async def test_own_name_and_address_of_the_service_cannot_be_announced(hub: Process) -> None:
    raw = await Raw.connect(hub.address, service="hub")
    await raw.join(listing("inventory", application="hub"))
    assert await raw.refusal() == (
        "hub is the name of this service, whose nodes are known from its database; give the peer another name"
    )
    other = await Raw.connect(hub.address)
    await other.join(listing("inventory", at=hub.address))
    assert await other.refusal() == f"{hub.address} is an address of this service; announce another"
    assert hub.known() == []
    await raw.close()
    await other.close()


async def test_name_and_address_of_another_peer_cannot_be_taken_away(hub: Process) -> None:
    first = await Raw.connect(hub.address)
    await first.join(listing("inventory"))
    await eventually(lambda: hub.known() == [("stock", "inventory")])
    second = await Raw.connect(hub.address)
    await second.join(listing("inventory", at="tcp://127.0.0.1:2"))
    assert await second.refusal() == (
        "stock node 7 is announced at other addresses already; "
        "end that process, or give the two services different names"
    )
    third = await Raw.connect(hub.address, service="billing")
    await third.join(listing("inventory", application="billing"))
    assert await third.refusal() == "tcp://127.0.0.1:1 is announced by stock already; announce another address"
    assert [each.addresses for each in hub.registry.listings()] == [["tcp://127.0.0.1:1"]]
    again = await Raw.connect(hub.address)  # its former connection is not known to be lost yet
    await again.join(listing("inventory"))
    await again.hear()
    await first.close()
    await eventually(lambda: len(hub.hub._announced) == 1)
    assert hub.known() == [("stock", "inventory")]
    for raw in (second, third, again):
        await raw.close()


@pytest.mark.parametrize("at", ["tcp://0.0.0.0:1", "tcp://localhost:1", "tcp://[::1]:1", f"tcp://{platform.node()}:1"])
async def test_address_is_taken_in_any_spelling(hub: Process, at: str) -> None:
    first, second = await Raw.connect(hub.address), await Raw.connect(hub.address, service="billing")
    await first.join(listing("inventory"))
    await eventually(lambda: hub.known() == [("stock", "inventory")])
    await second.join(listing("inventory", application="billing", at=at))
    assert await second.refusal() == "tcp://127.0.0.1:1 is announced by stock already; announce another address"


async def test_name_and_address_at_another_node_of_the_hub_cannot_be_taken_away(hub: Process) -> None:
    row = listing("inventory", machine=this_machine())
    hub.registry.store([("stock another", row)])
    second = await Raw.connect(hub.address)
    await second.join(listing("inventory", at="tcp://127.0.0.1:2"))
    assert "stock node 7 is announced at other addresses already" in await second.refusal()
    third = await Raw.connect(hub.address, service="billing")
    await third.join(listing("inventory", application="billing"))
    assert await third.refusal() == "tcp://127.0.0.1:1 is announced by stock already; announce another address"
    hub.registry.store([("stock another", replace(row, machine="another"))])  # whose 127.0.0.1 is another one
    await third.say(Announce([listing("inventory", application="billing")]))
    await eventually(lambda: ("billing", "inventory") in hub.known())


async def test_own_rows_at_the_hub_do_not_stand_in_the_way(hub: Process) -> None:
    first = await Raw.connect(hub.address)
    await first.join(listing("inventory"))
    await eventually(lambda: hub.known() == [("stock", "inventory")])
    ((_, announced),) = hub.hub._announced.items()
    hub.registry.store([(announced.source, each) for each in announced.listings])
    await first.say(Announce([listing("inventory", at="tcp://127.0.0.1:2")]))
    await eventually(lambda: [each.addresses for each in hub.registry.listings()] == [["tcp://127.0.0.1:2"]])


async def test_singleton_of_a_service_cannot_be_announced_by_another(hub: Process) -> None:
    first = await Raw.connect(hub.address)
    await first.join(listing("inventory", is_singleton=True, epoch=1))
    await eventually(lambda: hub.known() == [("stock", "inventory")])
    second = await Raw.connect(hub.address, service="billing")
    await second.join(
        listing("inventory", application="billing", at="tcp://127.0.0.1:2", is_singleton=True, epoch=2**40)
    )
    assert await second.refusal() == "inventory is offered by stock: a singleton has one owner"
    await first.close()
    await second.close()


async def test_ten_thousand_offers_end_the_connection_of_their_peer_alone(hub: Process) -> None:
    async with process("orders", at=None) as orders:
        orders.connections.open(hub.address)
        raw = await Raw.connect(hub.address)
        await raw.join()
        await raw.say(Announce([listing(f"s{number}") for number in range(10 * MAX_OFFERS)]))
        await raw.is_ended()
        hub.provider.offer(contract_of(Inventory), Stock())
        await eventually(lambda: orders.known() == [("hub", "inventory")])


async def test_announcements_of_all_peers_have_a_limit(hub: Process) -> None:
    raws = []
    for number in range(11):
        raw = await Raw.connect(hub.address, node=number)
        at = f"tcp://127.0.0.1:{number + 1}"
        await raw.join(*[listing(f"s{each}", node=number, at=at) for each in range(MAX_OFFERS)])
        raws.append(raw)
    assert await raws[-1].refusal() == "more than 10,000 services are announced here; withdraw some"
    assert len(hub.registry.listings()) == 10_000
    for raw in raws:
        await raw.close()


@pytest.mark.parametrize("kind", [FrameKind.CONNECT, FrameKind.ANNOUNCE, FrameKind.RESET, FrameKind.DIRECTORY])
async def test_garbage_ends_the_connection_of_its_peer_alone(hub: Process, kind: FrameKind) -> None:
    raw = await Raw.connect(hub.address)
    await raw.join(listing("inventory"))
    await raw.stream.write(raw_frame(kind, b"\x91\xc1"))
    await raw.is_ended()
    await eventually(lambda: hub.known() == [])


# ---------------------------------------------------------------- load


async def test_flapping_registry_costs_a_few_pushes_a_second(hub: Process) -> None:
    raw = await Raw.connect(hub.address)
    await raw.join()
    pushes: list[Directory] = []

    async def hear() -> None:
        while True:
            pushes.append(await raw.hear())

    hearing = asyncio.create_task(hear())
    for number in range(200):
        hub.registry.learn("nobody", [listing(f"x{number}", application="x")])  # which concerns nobody
        hub.registry.announce("flapping", [listing("inventory")] if number % 2 else [])
        await asyncio.sleep(0.01)
    hub.registry.announce("flapping", [listing("last")])
    await eventually(lambda: pushes and [each.offer.service for each in pushes[-1].listings] == ["last"])
    hearing.cancel()
    assert 4 <= len(pushes) <= 20
    await raw.close()


async def test_changes_of_learned_services_are_not_pushed(hub: Process) -> None:
    raw = await Raw.connect(hub.address)
    await raw.join()
    assert (await raw.hear()).listings == []
    hub.registry.learn("far", [listing("inventory", application="far")])
    await asyncio.sleep(0.5)
    hub.registry.announce("near", [listing("prices")])
    assert [each.offer.service for each in (await raw.hear()).listings] == ["prices"]
    await raw.close()


async def test_large_directory_is_told_in_parts_small_enough_for_the_peer(hub: Process) -> None:
    services = [f"s{number}" for number in range(2_000)]
    hub.registry.announce("many", [listing(each) for each in services])
    raw = await Raw.connect(hub.address, max_frame_bytes=80_000, max_message_bytes=1_000)
    await raw.join()
    parts = [await raw.hear()]
    while parts[-1].more:
        parts.append(await raw.hear())
    assert len(parts) > 1
    assert sorted(each.offer.service for part in parts for each in part.listings) == sorted(services)
    await raw.close()


async def test_directories_calls_and_batches_on_one_connection_do_not_wait_for_each_other(hub: Process) -> None:
    hub.provider.offer(contract_of(Inventory), Stock())
    raw = await Raw.connect(hub.address)
    await raw.join()
    done: dict[type[Any], int] = dict.fromkeys((Directory, Result, Pong, Outcomes), 0)

    async def hear() -> None:
        while True:
            heard = await raw.hear(*done)
            done[type(heard)] += 1

    hearing = asyncio.create_task(hear())
    body = (
        contract_of(Inventory)
        .methods["reserve"]
        .arguments.write(contract_of(Inventory).methods["reserve"].bind("A-1", 1))
    )
    for number in range(300):
        hub.registry.announce("many", [listing(f"s{each}-{number}") for each in range(500)])
        await raw.say(Call("inventory", "reserve", body), 100 + number)
        if number % 30 == 0:
            await raw.say(Ping(), 10_000 + number)
            batch = raw.side.offer(envelopes(10))
            assert isinstance(batch, Sendable)
            await raw.stream.write(batch.data)
        await asyncio.sleep(0.005)
    await eventually(lambda: done[Result] == 300 and done[Pong] == done[Outcomes] == 10 and done[Directory] > 2)
    hearing.cancel()
    await raw.close()


async def test_slow_reader_of_pushes_is_dropped_and_costs_one_push() -> None:
    async with process("hub", frame_timeout=0.5) as hub:
        raw = await Raw.connect(hub.address)
        await raw.join(listing("inventory"))
        raw.stream.pause()
        await eventually(lambda: hub.known() == [("stock", "inventory")])
        unsent = 0
        for number in range(40):
            hub.registry.announce("many", [listing(f"s{each}-{number}" + "x" * 150) for each in range(9_000)])
            await asyncio.sleep(0.05)
            unsent = max(unsent, hub.unsent_bytes())
        assert 0 < unsent < 2 << 20
        await eventually(lambda: ("stock", "inventory") not in hub.known())
        raw.stream.abort()


class Verbose(Stock):
    async def slow(self, name: str) -> str:
        return await super().slow(name) * 500_000


async def test_no_call_is_run_when_the_buffer_is_full_of_unread_results() -> None:
    async with process("hub", buffer_bytes=4 << 20, frame_timeout=60, call_concurrency=10, call_backlog=100) as hub:
        stock = Verbose()
        hub.provider.offer(contract_of(Inventory), stock)
        raw = await Raw.connect(hub.address)
        raw.stream.pause()
        method = contract_of(Inventory).methods["slow"]
        body = method.arguments.write(method.bind("x"))
        for number in range(40):
            await raw.say(Call("inventory", "slow", body), 100 + number)
        await eventually(lambda: hub.provider.load == 40)
        stock.go.set()
        await eventually(lambda: hub.provider.load == 0)
        assert 4 << 20 < hub.unsent_bytes() < (4 << 20) + 10 * 600_000
        assert 10 < len(stock.began) < 30
        raw.stream.resume()
        told = Counter([type(await raw.hear(Result, Fault)) for _ in range(40)])
        assert told == {Result: len(stock.began), Fault: 40 - len(stock.began)}, "no result is lost"
        raw.stream.abort()


# ---------------------------------------------------------------- floods


FLOODS: dict[str, Content] = {
    "lookup": Lookup(),
    "reset": Reset(1.0),
    "announce": Announce([listing("x")]),
    "call": Call("no", "no", b""),
}


@pytest.mark.parametrize("kind", FLOODS)
async def test_flood_ends_the_connection_of_its_peer_alone(
    hub: Process, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    other = await Raw.connect(hub.address, service="orders")
    raw = await Raw.connect(hub.address)
    await raw.join()

    async def flood() -> None:
        with contextlib.suppress(TransportError):
            for number in range(200):
                frames = (Frame(FLOODS[kind], number * 100 + own + 10) for own in range(100))
                await raw.stream.write(b"".join(map(encode, frames)))

    flooding = asyncio.create_task(flood())
    await raw.is_ended()
    await flooding
    await eventually(lambda: hub.counts["dropped"] == 1)
    assert "too many" in caplog.text
    await other.say(Ping())
    await other.hear(Pong)


async def test_frames_of_one_read_leave_turns_to_others(hub: Process, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = await Raw.connect(hub.address)
    turn, heard = 0, Counter[int]()
    hear = ServerSide.hear

    def counted(self: ServerSide, *args: Any) -> Any:
        heard[turn] += 1
        return hear(self, *args)

    async def turns() -> None:
        nonlocal turn
        while True:
            turn += 1
            await asyncio.sleep(0)

    monkeypatch.setattr(ServerSide, "hear", counted)
    counting = asyncio.create_task(turns())
    await raw.stream.write(b"".join(encode(Frame(Cancel(), 5)) for _ in range(1_000)))
    await eventually(lambda: heard.total() == 1_000)
    counting.cancel()
    assert max(heard.values()) <= MOST_FRAMES
