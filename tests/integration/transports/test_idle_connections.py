"""Connections of senders to many peers: those that nothing is sent on are few."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import pytest

from durable.errors import TransportError
from durable.outcomes import STORED
from durable.settings import load_settings
from durable.transports.http.sender import HttpSender
from durable.transports.http.transport import HttpTransport
from durable.transports.tcp.sender import TcpSender
from durable.transports.tcp.transport import TcpTransport
from tests.failure.waiting import eventually
from tests.support.receivers import MemoryReceiver, envelope

MOST, COUNT = 3, 10


class Peers:
    """Peers that listen, and a sender to each."""

    def __init__(self) -> None:
        self.receivers = [MemoryReceiver() for _ in range(COUNT)]
        self.listeners: list[Any] = []
        self.senders: list[TcpSender | HttpSender] = []

    async def send(self, number: int) -> None:
        assert await self.senders[number].send([envelope()]) == [STORED]

    @property
    def connected(self) -> set[int]:
        """The numbers of the senders with an open connection."""
        return {number for number, sender in enumerate(self.senders) if is_connected(sender)}

    async def reach(self, *numbers: int) -> None:
        """Wait until these are connected, and no others."""
        await eventually(lambda: self.connected == set(numbers), within=10)


def is_connected(sender: TcpSender | HttpSender) -> bool:
    if isinstance(sender, TcpSender):
        return sender._dialer.open is not None
    pool = sender._client._pool
    return pool is not None and len(pool) > 0


@pytest.fixture(params=["tcp", "http"])
async def peers(request: pytest.FixtureRequest) -> AsyncIterator[Peers]:
    made, settings = Peers(), load_settings(idle_connections=MOST)
    transport: TcpTransport | HttpTransport = (
        TcpTransport(settings, "shop", 1)
        if request.param == "tcp"
        else HttpTransport(settings, service="shop", messages=dict)
    )
    uri = "tcp://127.0.0.1:0" if request.param == "tcp" else "http://127.0.0.1:0/in"
    async with AsyncExitStack() as stack:
        for receiver in made.receivers:
            listener = transport.listener(uri, "billing")
            await listener.serve(receiver)
            stack.push_async_callback(listener.close)
            made.listeners.append(listener)
            made.senders.append(await stack.enter_async_context(transport.sender(listener.address)))
        yield made


async def test_connections_used_last_stay_open(peers: Peers) -> None:
    for number in range(COUNT):
        await peers.send(number)
    await peers.reach(7, 8, 9)
    await peers.send(7)
    await peers.send(0)
    await peers.reach(9, 7, 0)


async def test_connection_closed_for_others_is_opened_anew(peers: Peers) -> None:
    for _ in range(3):
        for number in range(COUNT):
            await peers.send(number)
    assert [len(receiver.stored) for receiver in peers.receivers] == [3] * COUNT
    await peers.reach(7, 8, 9)


async def test_all_peers_are_sent_to_at_once(peers: Peers) -> None:
    """Connections that are being opened, or in use, are none of the idle ones."""
    for _ in range(3):
        await asyncio.gather(*map(peers.send, range(COUNT)))
    assert [len(receiver.stored) for receiver in peers.receivers] == [3] * COUNT


async def test_connection_with_a_batch_under_way_stays_open(peers: Peers) -> None:
    await peers.send(0)
    peers.receivers[0].hold()
    slow = asyncio.create_task(peers.send(0))
    await eventually(lambda: len(peers.receivers[0].batches) == 2, within=10)
    for number in range(1, COUNT):
        await peers.send(number)
    await peers.senders[1].ping()
    assert 0 in peers.connected
    peers.receivers[0].release()
    await slow
    await peers.send(5)
    await peers.reach(1, 0, 5)


async def test_ended_sender_takes_no_place(peers: Peers) -> None:
    for number in (0, 1, 2):
        await peers.send(number)
    await peers.senders[2].__aexit__(None, None, None)
    await peers.senders[1].__aexit__(None, None, None)
    await peers.send(3)
    await peers.send(4)
    await peers.reach(0, 3, 4)
    for number in (1, 2):
        await peers.senders[number].__aenter__()  # the fixture ends them


async def test_ping_is_a_use(peers: Peers) -> None:
    for number in (0, 1, 2):
        await peers.send(number)
    await peers.senders[0].ping()
    await peers.send(3)
    await peers.reach(0, 2, 3)


async def test_pings_of_peers_out_of_reach_close_no_connection(peers: Peers) -> None:
    """A thousand peers that are down are pinged all the time."""
    for listener in peers.listeners[MOST:]:
        await listener.close()
    for number in range(MOST):
        await peers.send(number)
    for sender in peers.senders[MOST:]:
        with pytest.raises(TransportError):
            await sender.ping()
    assert peers.connected == set(range(MOST))


async def test_connection_of_http_is_closed_at_the_peer() -> None:
    transport = HttpTransport(load_settings(), service="shop", messages=dict)
    listener = transport.listener("http://127.0.0.1:0/in", "billing")
    await listener.serve(MemoryReceiver())
    async with transport.sender(listener.address) as sender:
        await sender.send([envelope()])
        pool = sender._client._pool
        assert pool is not None
        (open_one,) = pool._idle[0].connection._pool.connections
        assert sender.close_if_idle()
        await eventually(lambda: open_one.is_closed(), within=10)
    await listener.close()
