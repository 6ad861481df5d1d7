"""The stop of a runtime: each step is taken, and has its time."""

from __future__ import annotations

import asyncio

import pytest

from durable import Bus
from durable.runtime import Runtime
from durable.tasks import crew


@pytest.fixture
async def runtime() -> Runtime:
    return Bus("shop", "postgresql://nowhere/shop").runtime


async def test_announcements_are_removed_to_the_last_one(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crew, "_ROUND", 0.01)
    removed = list[int]()

    async def announce() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            for number in range(10):
                await asyncio.sleep(0.01)
                removed.append(number)

    runtime.calls.tasks.append(asyncio.create_task(announce(), name="announcements"))
    await asyncio.sleep(0)
    await runtime.stop()
    assert len(removed) == 10


@pytest.mark.parametrize("step", ["close_all", "life", "metrics"])
async def test_cancelled_stop_closes_everything(runtime: Runtime, step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In any of its steps, whose waiting is cut off then."""
    stands, closed = asyncio.Event(), list[str]()

    async def stand(*_: object) -> None:
        stands.set()
        await asyncio.Event().wait()

    async def close() -> None:
        closed.append("sessions")

    standing = {
        "close_all": (runtime.calls.connections, "close_all"),
        "life": (runtime.life, "stop"),
        "metrics": (runtime, "_close_metrics"),
    }
    part, method = standing[step]
    monkeypatch.setattr(part, method, stand)
    monkeypatch.setattr(runtime.sessions, "close", close)
    stopping = asyncio.create_task(runtime.stop(), name="stop")
    await stands.wait()
    stopping.cancel()
    await asyncio.wait([stopping])
    assert stopping.cancelled()
    assert closed == ["sessions"]
