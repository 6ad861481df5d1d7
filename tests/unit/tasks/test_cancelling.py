"""Work that is done to its end in a task that is cancelled."""

from __future__ import annotations

import asyncio

import pytest

from durable.tasks.cancelling import run_to_completion


async def test_work_ends_before_its_task_despite_repeated_cancellation() -> None:
    said = list[str]()
    go_on = asyncio.Event()

    async def work() -> None:
        await go_on.wait()
        said.append("work")

    async def caller() -> None:
        try:
            await run_to_completion(work())
        finally:
            said.append("caller")

    task = asyncio.create_task(caller())
    for _ in range(3):
        await asyncio.sleep(0)
        task.cancel()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert said == ["work", "caller"]


async def test_error_of_the_work_is_raised() -> None:
    async def work() -> None:
        raise LookupError

    with pytest.raises(LookupError):
        await run_to_completion(work())


async def test_cancellation_is_raised_despite_a_later_failure_of_the_work() -> None:
    go_on = asyncio.Event()

    async def work() -> None:
        await go_on.wait()
        raise OSError("the connection is dead")

    async def caller() -> None:
        async with asyncio.timeout(0.01):
            await run_to_completion(work())

    task = asyncio.create_task(caller())
    asyncio.get_running_loop().call_later(0.05, go_on.set)
    with pytest.raises(TimeoutError) as raised:
        await task
    assert raised.value.__cause__ is not None
    assert isinstance(raised.value.__cause__.__cause__, OSError)
