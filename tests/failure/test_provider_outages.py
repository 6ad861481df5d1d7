"""A database that is away, and a pooler before it: services that are offered are called all the same."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import AsyncExitStack
from typing import Any

import pytest

from durable import Bus
from durable.calls.choice import HERE
from durable.embedded import Embedded
from durable.envelope import ANY_NODE
from durable.errors import NoProvider, ProviderSuperseded
from durable.testing import eventually
from tests.failure.test_outage_logs import migrated, stop_at_once
from tests.failure.workbench import QUICK
from tests.support.pooler import pooler
from tests.support.providing import Named, Who
from tests.support.servers import EMBEDDED, own_postgres

ROOMY: dict[str, Any] = {**QUICK, "call_timeout": 10, "heartbeat_stale": 30, "dormant_grace": 30}


@pytest.fixture
def own_server() -> Iterator[Embedded]:
    with own_postgres(EMBEDDED) as server:
        yield server
        server.server.run()


def provider(url: str, name: str, *addresses: str, singleton: bool = False, **settings: Any) -> Bus:
    bus = Bus("shop", url, **{**ROOMY, **settings})
    for address in addresses:
        bus.listen(address)
    bus.offer(Who, Named(name), singleton=singleton)
    return bus


async def test_known_providers_are_called_while_the_database_is_away(own_server: Embedded) -> None:
    url = migrated(own_server)
    async with AsyncExitStack() as stack:
        tcp = await stack.enter_async_context(provider(url, "tcp", "tcp://127.0.0.1:0"))
        caller = await stack.enter_async_context(Bus("shop", url, **ROOMY))
        who = caller.caller(Who)
        assert await who.name() == "tcp"
        before = tcp.runtime.node_id
        await asyncio.to_thread(stop_at_once, own_server)
        await eventually(lambda: tcp.runtime.node_id == caller.runtime.node_id == ANY_NODE)
        assert {await who.name() for _ in range(20)} == {"tcp"}
        assert [each.node for each in await caller.providers(Who)] == [before]
        with pytest.raises(NoProvider):
            await caller.caller(Who, at="tcp://127.0.0.1:1").name()
        tcp.withdraw(Who)
        with pytest.raises(NoProvider, match="offered"):
            await who.name()
        tcp.offer(Who, Named("again"))
        assert await who.name() == "again"
        await asyncio.to_thread(own_server.server.run)
        await eventually(lambda: tcp.runtime.node_id not in (ANY_NODE, before), within=30)
        await eventually(lambda: caller.runtime.node_id != ANY_NODE, within=30)
        assert {await who.name() for _ in range(20)} == {"again"}

        async def is_listed_anew() -> bool:
            return [each.node for each in await caller.providers(Who)] == [tcp.runtime.node_id]

        await eventually(is_listed_anew)


async def test_listener_of_a_lost_node_is_closed_with_the_bus(own_server: Embedded) -> None:
    url = migrated(own_server)
    bus = provider(url, "one", "tcp://127.0.0.1:0", drain_timeout=1)
    async with bus, Bus("shop", url, **ROOMY) as caller:
        assert bus.runtime.node is not None
        at = bus.runtime.node.listeners[0].address
        pinned = caller.caller(Who, at=at)
        assert await pinned.name() == "one"
        await asyncio.to_thread(stop_at_once, own_server)
        await eventually(lambda: bus.runtime.node_id == ANY_NODE)
        assert await pinned.name() == "one"
    host, port = at.removeprefix("tcp://").split(":")
    with pytest.raises(OSError, match=r"refused|Connect call failed"):
        await asyncio.open_connection(host, int(port))


async def test_holder_of_a_singleton_refuses_while_the_database_is_away(own_server: Embedded) -> None:
    url = migrated(own_server)
    async with provider(url, "one", "tcp://127.0.0.1:0", singleton=True) as bus, Bus("shop", url, **ROOMY) as caller:
        who = caller.caller(Who)
        assert await who.name() == "one"
        (held,) = await caller.providers(Who)
        running = asyncio.create_task(who.wait())
        await asyncio.to_thread(stop_at_once, own_server)
        await eventually(lambda: bus.runtime.node_id == ANY_NODE)
        with pytest.raises(ProviderSuperseded):
            await caller.caller(Who, at=held).name()
        with pytest.raises(Exception, match=r"has ended|may have been run"):
            await running
        await asyncio.to_thread(own_server.server.run)
        await eventually(lambda: bus.runtime.node_id != ANY_NODE, within=30)
        await eventually(
            lambda: [each.node for each in caller.runtime.calls.registry.listings()] == [bus.runtime.node_id]
        )
        assert await caller.caller(Who, name={"timeout": 20}).name() == "one"


async def test_singleton_is_held_through_a_pooler_without_session_locks(database_url: str) -> None:
    with pooler(database_url) as pooled:
        settings: dict[str, Any] = {"lock_database_url": database_url, "pooler": "transaction"}
        first = provider(pooled, "first", "tcp://127.0.0.1:0", singleton=True, **settings)
        second = provider(pooled, "second", "tcp://127.0.0.1:0", singleton=True, **settings)
        async with Bus("shop", pooled, **ROOMY, **settings) as caller:
            who = caller.caller(Who)
            async with first:
                assert await who.name() == "first"
                await second.__aenter__()
                assert {await who.name() for _ in range(10)} == {"first"}
            try:
                assert await who.name() == "second"
                assert [each.epoch for each in await caller.providers(Who)] == [2]
            finally:
                await second.__aexit__(None, None, None)


async def test_provider_in_the_own_process_needs_no_database(own_server: Embedded) -> None:
    async with provider(migrated(own_server), "here") as bus:
        who = bus.caller(Who)
        await asyncio.to_thread(stop_at_once, own_server)
        await eventually(lambda: bus.runtime.node_id == ANY_NODE)
        assert {await who.name() for _ in range(10)} == {"here"}
        assert [each.address for each in bus.runtime.calls.providers.of("who")] == [HERE, ""]
