"""Connections to called addresses: those that nobody uses are closed when others are opened."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import timedelta
from typing import Any, cast

from durable.calls.links import Links
from durable.testing import eventually
from durable.transports.base import Answer, Transport
from durable.transports.frames import Call, Offers, Result

CALL = Call("counting", "count", b"")


class Calling:
    """A transport whose callers answer when they are told, and say whether they are open."""

    def __init__(self) -> None:
        self.open: set[str] = set()
        self.go = asyncio.Event()

    def caller(self, uri: str) -> Any:
        return Told(self, uri)


class Told:
    def __init__(self, transport: Calling, uri: str) -> None:
        self._transport = transport
        self._uri = uri

    async def __aenter__(self) -> Told:
        self._transport.open.add(self._uri)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._transport.open.discard(self._uri)

    async def offers(self) -> Offers:
        return Offers([])

    async def call(self, call: Call, sent: Callable[[], None]) -> Answer:
        await self._transport.go.wait()
        return Result(b"")


def links_of(transport: Calling, idle: timedelta) -> Links:
    return Links(lambda _: cast(Transport, transport), idle=idle)


async def test_unused_addresses_are_closed_when_another_is_opened() -> None:
    transport = Calling()
    links = links_of(transport, timedelta(seconds=-1))
    for number in range(100):
        await links.to(f"tcp://provider:{number}")
    assert len(links) == 1
    await eventually(lambda: transport.open == {"tcp://provider:99"})


async def test_used_addresses_stay_open() -> None:
    transport = Calling()
    links = links_of(transport, timedelta(minutes=1))
    for number in (1, 2, 1, 3):
        await links.to(f"tcp://provider:{number}")
    assert len(transport.open) == 3
    await links.close()
    assert (len(links), transport.open) == (0, set())


async def test_address_with_a_call_under_way_stays_open() -> None:
    transport = Calling()
    links = links_of(transport, timedelta(seconds=-1))
    calling = asyncio.create_task((await links.to("tcp://provider:1")).call(CALL, lambda: None))
    await asyncio.sleep(0)
    await links.to("tcp://provider:2")
    assert transport.open == {"tcp://provider:1", "tcp://provider:2"}
    transport.go.set()
    assert await calling == Result(b"")
    await links.to("tcp://provider:3")
    await eventually(lambda: transport.open == {"tcp://provider:3"})
