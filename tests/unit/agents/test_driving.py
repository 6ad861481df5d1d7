"""Waits of a coroutine, and what passes through to it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextvars import copy_context
from typing import Any

import pytest

from durable.agents.driving import driven


async def running(work: Coroutine[Any, Any, Any]) -> tuple[Any, int]:
    """Return its result, and how often it has waited."""
    waits: list[None] = []
    return await driven(copy_context(), work, lambda: waits.append(None)), len(waits)


async def test_each_wait_is_told_and_the_result_returned() -> None:
    async def work() -> int:
        await asyncio.sleep(0)
        await asyncio.sleep(0.001)
        return 7

    assert await running(work()) == (7, 2)


async def test_coroutine_without_a_wait_tells_of_none() -> None:
    async def work() -> int:
        return 7

    assert await running(work()) == (7, 0)


@pytest.mark.parametrize("error", [LookupError("gone"), KeyboardInterrupt(), asyncio.CancelledError()])
async def test_error_of_the_coroutine_is_raised(error: BaseException) -> None:
    async def work() -> None:
        await asyncio.sleep(0)
        raise error

    with pytest.raises(type(error)):
        await running(work())


async def test_cancellation_reaches_a_coroutine_and_may_be_refused() -> None:
    seen: list[str] = []

    async def work() -> int:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            seen.append("cancelled")
            await asyncio.sleep(0)
        return 7

    task = asyncio.ensure_future(running(work()))
    await asyncio.sleep(0)
    task.cancel()
    assert await task == (7, 2)
    assert seen == ["cancelled"]


async def test_timeout_within_the_coroutine_ends_its_wait() -> None:
    async def work() -> str:
        try:
            async with asyncio.timeout(0.01):
                await asyncio.Event().wait()
        except TimeoutError:
            return "late"
        return "never"

    assert await running(work()) == ("late", 1)


def test_closed_coroutine_runs_its_last_blocks() -> None:
    seen: list[str] = []

    async def work() -> None:
        try:
            await asyncio.sleep(0)
        finally:
            seen.append("closed")

    outer = running(work())
    outer.send(None)
    outer.close()
    assert seen == ["closed"]


async def test_variables_of_a_context_are_the_coroutines_own() -> None:
    async def work() -> asyncio.Task[Any] | None:
        await asyncio.sleep(0)
        return asyncio.current_task()

    found, _ = await running(work())
    assert found is asyncio.current_task()
