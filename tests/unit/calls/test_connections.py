"""Connections to the directories of others: how they end."""

from __future__ import annotations

import asyncio
from typing import Any, NoReturn, cast

import pytest

from durable.calls.connections import Connections
from durable.calls.registry import Registry
from durable.settings import load_settings
from durable.tasks import crew


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
