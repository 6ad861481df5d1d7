"""The virtual loop: time jumps, processes freeze and die at any await, and a run is the same each time."""

from __future__ import annotations

import asyncio
from contextvars import Context

from tests.simulation.loop import CURRENT, Scheduled, State, VirtualLoop


def process_context() -> tuple[Scheduled, Context]:
    process, context = Scheduled(), Context()
    context.run(CURRENT.set, process)
    return process, context


async def note(times: list[float], count: int, pause: float = 1.0) -> None:
    for _ in range(count):
        await asyncio.sleep(pause)
        times.append(asyncio.get_running_loop().time())


def test_clock_jumps_to_the_next_timer() -> None:
    times: list[float] = []
    with VirtualLoop() as loop:
        loop.start(note(times, 3, 1_000.0), Context(), "note")
        loop.run(lambda: False, limit=10_000)
    assert times == [1_000, 2_000, 3_000]
    assert loop.time() == 10_000


def test_timeout_is_in_virtual_time() -> None:
    async def wait() -> str:
        try:
            async with asyncio.timeout(60):
                await asyncio.Event().wait()
        except TimeoutError:
            return f"given up at {asyncio.get_running_loop().time():g}"
        return "never"

    with VirtualLoop() as loop:
        task = loop.start(wait(), Context(), "wait")
        loop.run(task.done, limit=1_000)
        assert task.result() == "given up at 60"


def test_frozen_process_continues_after_its_resume() -> None:
    process, context = process_context()
    times: list[float] = []
    with VirtualLoop() as loop:
        loop.start(note(times, 3), context, "note")
        loop.run(lambda: False, limit=1.5)
        process.state = State.FROZEN
        loop.run(lambda: False, limit=10)
        loop.resume(process)
        loop.run(lambda: False, limit=20)
    assert times == [1, 10, 11]


def test_dead_process_runs_nothing_more_not_even_its_cleanup() -> None:
    process, context = process_context()
    times: list[float] = []

    async def careful() -> None:
        try:
            await note(times, 100)
        finally:
            if not loop.is_closed():
                times.append(-1)

    with VirtualLoop() as loop:
        loop.start(careful(), context, "careful")
        loop.run(lambda: False, limit=2.5)
        process.state = State.DEAD
        loop.run(lambda: False, limit=50)
        assert times == [1, 2]


def test_process_is_struck_at_a_step() -> None:
    process, context = process_context()
    times: list[float] = []

    def strike() -> None:
        process.state = State.DEAD

    with VirtualLoop() as loop:
        loop.start(note(times, 100), context, "note")
        process.steps_left, process.struck = 7, strike
        loop.run(lambda: False, limit=200)
    assert 0 < len(times) < 7
