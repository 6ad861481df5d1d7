"""Connections to the directories of others: how they end."""

from __future__ import annotations

import asyncio
from typing import Any, NoReturn, cast

import pytest

from durable.calls.connections import Connections
from durable.calls.registry import Registry
from durable.settings import load_settings
from durable.tasks import crew
from durable.transports.base import Spoke
from tests.support.hubs import listing


async def test_connection_has_the_time_to_say_goodbye(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crew, "_ROUND", 0.01)
    is_connected, has_left = asyncio.Event(), asyncio.Event()

    class Connector:
        async def run(self, spoke: object) -> NoReturn:
            try:
                is_connected.set()
                await asyncio.Event().wait()
                raise AssertionError
            finally:
                await asyncio.sleep(0.1)
                has_left.set()

    class Transport:
        def spoke(self, address: str) -> Connector:
            return Connector()

    transport = cast(Any, Transport())
    connections = Connections(Registry(list), lambda _: transport, load_settings(), "shop", own=list)
    connections.open("tcp://hub")
    await is_connected.wait()
    await connections.close_all(within=5)
    assert has_left.is_set()


async def test_services_of_an_address_are_forgotten_when_its_disconnection_is_cancelled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(crew, "_ROUND", 0.01)
    is_connected, says_goodbye = asyncio.Event(), asyncio.Event()

    class Connector:
        async def run(self, spoke: Spoke) -> NoReturn:
            spoke.learn([listing("who")])
            is_connected.set()
            try:
                await asyncio.Event().wait()
                raise AssertionError
            finally:
                says_goodbye.set()
                await asyncio.sleep(0.1)

    class Transport:
        def spoke(self, address: str) -> Connector:
            return Connector()

    transport, registry = cast(Any, Transport()), Registry(list)
    connections = Connections(registry, lambda _: transport, load_settings(), "shop", own=list)
    connections.open("tcp://hub")
    await is_connected.wait()
    assert len(registry.learned("tcp://hub")) == 1
    closing = asyncio.create_task(connections.close("tcp://hub", within=5), name="close")
    await says_goodbye.wait()
    closing.cancel()
    await asyncio.wait([closing])
    assert closing.cancelled()
    assert not registry.learned("tcp://hub")
    await asyncio.sleep(0.2)  # for the goodbye
