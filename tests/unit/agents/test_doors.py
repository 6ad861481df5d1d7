"""Listeners that no node has taken over."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import pytest

from durable.agents.doors import Doors, Relay
from durable.transports.base import Receiver


class Door:
    """A listener with batches under way."""

    def __init__(self, address: str, *, drain_seconds: float, error: Exception | None = None) -> None:
        self.endpoint = self.address = address
        self._drain_seconds = drain_seconds
        self._error = error
        self.is_closed = False

    async def serve(self, receiver: Receiver) -> None:
        pass

    def statistics(self) -> Mapping[str, int]:
        return {}

    async def close(self) -> None:
        try:
            await asyncio.sleep(self._drain_seconds)
            if self._error is not None:
                raise self._error
        finally:
            self.is_closed = True


def kept(*listeners: Door) -> Doors:
    doors = Doors()
    for listener in listeners:
        assert doors.keep(listener.address, listener, Relay())
    return doors


async def test_doors_close_at_the_same_time() -> None:
    listeners = [Door(f"tcp://127.0.0.1:{port}", drain_seconds=0.5) for port in range(50)]
    async with asyncio.timeout(5):
        await kept(*listeners).close(patience=1, ending_seconds=1)
    assert all(listener.is_closed for listener in listeners)


async def test_doors_are_ended_together_after_their_time() -> None:
    listeners = [Door(f"tcp://127.0.0.1:{port}", drain_seconds=60) for port in range(50)]
    async with asyncio.timeout(5):
        await kept(*listeners).close(patience=0.1, ending_seconds=0.1)
    assert all(listener.is_closed for listener in listeners)


async def test_failing_door_leaves_no_other_open(caplog: pytest.LogCaptureFixture) -> None:
    failing = Door("tcp://127.0.0.1:1", drain_seconds=0, error=OSError("no such file"))
    listener = Door("tcp://127.0.0.1:2", drain_seconds=0.01)
    await kept(failing, listener).close(patience=1, ending_seconds=1)
    assert listener.is_closed
    assert "internal error while closing listener tcp://127.0.0.1:1" in caplog.text


async def test_node_without_doors_closes_none() -> None:
    await Doors().close(patience=60, ending_seconds=60)
