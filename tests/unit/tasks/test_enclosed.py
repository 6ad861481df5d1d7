"""Code that cannot end the event loop: steps, tasks and what others see of them."""

from __future__ import annotations

import asyncio
import inspect
import sys
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import pytest

from durable.errors import BrokeOff
from durable.tasks.enclosed import Enclosed

ERRORS = [SystemExit(3), KeyboardInterrupt()]


def task_of(work: Callable[[], Coroutine[Any, Any, Any]]) -> Callable[[], Coroutine[Any, Any, Any]]:
    async def outer() -> None:
        await asyncio.sleep(0)
        await asyncio.create_task(work())

    return outer


@pytest.mark.parametrize("depth", range(4))
@pytest.mark.parametrize("error", ERRORS, ids=repr)
async def test_exit_of_a_task_at_any_depth_breaks_off_its_awaiter(error: BaseException, depth: int) -> None:
    async def work() -> None:
        await asyncio.sleep(0)
        raise error

    nested: Callable[[], Coroutine[Any, Any, Any]] = work
    for _ in range(depth):
        nested = task_of(nested)
    with pytest.raises(BrokeOff, match=f"broken off: {type(error).__name__}") as raised:
        await Enclosed(nested())
    assert raised.value.__cause__ is error


@pytest.mark.parametrize("error", [LookupError("gone"), asyncio.CancelledError(), GeneratorExit()], ids=repr)
async def test_other_errors_are_raised_unchanged(error: BaseException) -> None:
    async def work() -> None:
        await asyncio.sleep(0)
        raise error

    with pytest.raises(type(error)) as raised:
        await asyncio.gather(_raised(Enclosed(work())))
    assert raised.value is error


async def _raised(work: Awaitable[Any]) -> None:
    try:
        await work
    except GeneratorExit as error:
        raise error from None


async def test_loop_has_its_own_factory_between_the_steps() -> None:
    made: list[str] = []

    def make(loop: asyncio.AbstractEventLoop, work: Any, **options: Any) -> asyncio.Task[Any]:
        made.append(work.__name__)
        return asyncio.Task(work, loop=loop, **options)

    async def inner() -> int:
        await asyncio.sleep(0)
        return 7

    async def work() -> int:
        await asyncio.sleep(0)
        return await asyncio.create_task(inner(), name="inner")

    loop = asyncio.get_running_loop()
    loop.set_task_factory(make)
    try:
        steps = Enclosed(work())
        steps.send(None)
        assert loop.get_task_factory() is make
        assert await asyncio.ensure_future(_resumed(steps)) == 7
        assert loop.get_task_factory() is make
    finally:
        loop.set_task_factory(None)
    assert made == ["_resumed", "inner"]


async def _resumed(steps: Enclosed[int]) -> int:
    return await steps


async def test_factory_set_by_the_code_stays() -> None:
    def make(loop: asyncio.AbstractEventLoop, work: Any, **options: Any) -> asyncio.Task[Any]:
        return asyncio.Task(work, loop=loop, **options)

    async def work() -> None:
        asyncio.get_running_loop().set_task_factory(make)

    await Enclosed(work())
    try:
        assert asyncio.get_running_loop().get_task_factory() is make
    finally:
        asyncio.get_running_loop().set_task_factory(None)


async def test_task_shows_its_coroutine() -> None:
    async def inner() -> None:
        await asyncio.sleep(0.01)

    async def work() -> None:
        task = asyncio.create_task(inner(), name="the inner one")
        assert task.get_name() == "the inner one"
        assert "inner() running" in repr(task)
        assert inspect.getcoroutinestate(task.get_coro()) == inspect.CORO_CREATED  # type: ignore[arg-type]
        await asyncio.sleep(0)
        assert inspect.getcoroutinestate(task.get_coro()) == inspect.CORO_SUSPENDED  # type: ignore[arg-type]
        await task

    await Enclosed(work())


async def test_task_is_closed_without_a_warning_when_cancelled_before_its_begin() -> None:
    async def inner() -> None: ...

    async def work() -> None:
        task = asyncio.create_task(inner())
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()

    await Enclosed(work())


async def test_future_makes_no_task() -> None:
    async def work() -> None:
        with pytest.raises(TypeError):
            asyncio.get_running_loop().create_task(asyncio.get_running_loop().create_future())  # type: ignore[arg-type]

    await Enclosed(work())


def test_code_without_a_loop_breaks_off() -> None:
    async def work() -> None:
        sys.exit(3)

    with pytest.raises(BrokeOff, match="SystemExit: 3"):
        Enclosed(work()).send(None)
