"""Bytes under way are granted in turn, and never more than may be."""

from __future__ import annotations

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from durable.transports.tcp.budget import Budget


async def test_large_frame_is_not_overtaken_by_small_ones() -> None:
    budget, granted = Budget(100), list[str]()

    async def take(name: str, size_bytes: int) -> None:
        await budget.take(size_bytes)
        granted.append(name)

    async with asyncio.TaskGroup() as tasks:
        await take("first", 60)
        for name, size_bytes in (("large", 80), ("small", 10)):
            tasks.create_task(take(name, size_bytes))
        await asyncio.sleep(0)
        assert granted == ["first"]
        budget.give_back(60)
    assert granted == ["first", "large", "small"]


async def test_frame_above_the_budget_goes_alone() -> None:
    budget = Budget(100)
    await budget.take(500)
    waiting = asyncio.ensure_future(budget.take(1))
    await asyncio.sleep(0)
    assert not waiting.done()
    budget.give_back(500)
    await waiting


@given(st.lists(st.tuples(st.sampled_from(["take", "give", "cancel"]), st.integers(1, 120), st.integers(0, 9))))
def test_budget_grants_every_request_in_the_end(steps: list[tuple[str, int, int]]) -> None:
    async def run() -> None:
        budget = Budget(100)
        held: list[int] = []
        waiting: list[tuple[int, asyncio.Task[None]]] = []
        for step, size_bytes, which in steps:
            match step:
                case "take":
                    waiting.append((size_bytes, asyncio.create_task(budget.take(size_bytes))))
                case "give" if held:
                    budget.give_back(held.pop(which % len(held)))
                case "cancel" if waiting:
                    waiting.pop(which % len(waiting))[1].cancel()
                case _:
                    pass
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            held += [size for size, task in waiting if task.done()]
            waiting = [(size, task) for size, task in waiting if not task.done()]
            assert sum(held) <= 100 or len(held) == 1
            assert held or not waiting
        while waiting:
            for size_bytes in held:
                budget.give_back(size_bytes)
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            held = [size for size, task in waiting if task.done()]
            assert held
            waiting = [(size, task) for size, task in waiting if not task.done()]

    asyncio.run(run())
