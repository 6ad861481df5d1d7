"""A deadline ends what is awaited, and nothing else; moved on, it needs no new timer."""

from __future__ import annotations

import asyncio

import pytest

from durable.transports.tcp.deadline import Deadline


@pytest.fixture
async def deadline() -> Deadline:
    return Deadline(asyncio.get_running_loop())


def after(seconds: float) -> float:
    return asyncio.get_running_loop().time() + seconds


async def test_work_within_its_deadline_returns(deadline: Deadline) -> None:
    assert await deadline.keep(after(30), asyncio.sleep(0, "done")) == "done"
    deadline.close()


@pytest.mark.parametrize("earlier", [[], [30.0], [30.0, 0.0]])
async def test_work_is_cancelled_when_too_long(deadline: Deadline, earlier: list[float]) -> None:
    """Also when the deadline before was a later one, or has rung already."""
    for seconds in earlier:
        await deadline.keep(after(seconds), asyncio.sleep(0))
        await asyncio.sleep(0)
    with pytest.raises(TimeoutError):
        await deadline.keep(after(0.01), asyncio.Event().wait())
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0


async def test_moved_deadline_does_not_ring_early(deadline: Deadline) -> None:
    await deadline.keep(after(0.02), asyncio.sleep(0))
    began = after(0)
    with pytest.raises(TimeoutError):
        await deadline.keep(after(0.1), asyncio.Event().wait())
    assert after(0) - began >= 0.1


async def test_deadline_of_finished_work_cancels_nothing(deadline: Deadline) -> None:
    await deadline.keep(after(0.01), asyncio.sleep(0))
    await asyncio.sleep(0.05)  # it rings meanwhile


async def test_cancellation_by_others_is_no_timeout(deadline: Deadline) -> None:
    async def work() -> None:
        await deadline.keep(after(30), asyncio.Event().wait())

    task = asyncio.create_task(work())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    deadline.close()
