"""Tasks of a handler, and the event loop itself, that code of the application ends.

asyncio re-raises SystemExit and KeyboardInterrupt of a task out of its loop, and whatever runs there ends: a message
that did so at each start of its node would never be counted, and its neighbours never handled.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import msgspec
import psycopg
import pytest

from durable import Bus, Retry, message
from tests.failure.waiting import eventually
from tests.failure.workbench import QUICK

Exit = Callable[[], Awaitable[None]]


@message("loops.poison")
class Poison(msgspec.Struct):
    number: int


@message("loops.healthy")
class Healthy(msgspec.Struct):
    number: int


async def exits() -> None:
    sys.exit(3)


async def interrupts() -> None:
    raise KeyboardInterrupt


async def in_group(step: Exit) -> None:
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(asyncio.sleep(0))
        tasks.create_task(_coroutine(step))


async def in_gather(step: Exit) -> None:
    await asyncio.gather(asyncio.sleep(0.01), step())


async def in_task(step: Exit) -> None:
    await asyncio.create_task(_coroutine(step))


async def in_task_of_a_task(step: Exit) -> None:
    async def outer() -> None:
        await asyncio.sleep(0)
        await asyncio.create_task(_coroutine(step))

    await asyncio.create_task(outer())


async def in_shield(step: Exit) -> None:
    await asyncio.shield(step())


async def in_wait_for(step: Exit) -> None:
    await asyncio.wait_for(step(), 5)


async def _coroutine(step: Exit) -> None:
    await step()


WAYS = [in_group, in_gather, in_task, in_task_of_a_task, in_shield, in_wait_for]


def letters(database: str) -> list[Any]:
    with psycopg.connect(database) as connection:
        return connection.execute("SELECT message_type, attempts, reason FROM durable.dead_letters").fetchall()


def marks(database: str) -> list[Any]:
    with psycopg.connect(database) as connection:
        return connection.execute("SELECT attempts, interruptions FROM durable.incoming_envelopes").fetchall()


@pytest.mark.parametrize("step", [exits, interrupts], ids=lambda step: step.__name__)
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
async def test_node_lives_when_a_task_of_a_handler_exits(
    way: Callable[[Exit], Awaitable[None]], step: Exit, database_url: str
) -> None:
    bus = Bus("shop", database_url, **QUICK)
    handled: list[int] = []

    @bus.handles(Poison, retry=Retry(immediate=1, delays=()))
    async def handle_poison(poison: Poison) -> None:
        await way(step)

    @bus.handles(Healthy)
    async def handle(healthy: Healthy) -> None:
        handled.append(healthy.number)

    async with bus:
        before = bus.runtime.node_id
        async with bus.unit_of_work() as uow:
            uow.send(Poison(1))
            for number in range(5):
                uow.send(Healthy(number))
        await eventually(lambda: len(letters(database_url)) == 1 and len(handled) == 5)
        assert bus.runtime.node_id == before
    ((message_type, attempts, reason),) = letters(database_url)
    assert (message_type, attempts) == ("loops.poison", 2)
    assert reason == ("3" if step is exits else "KeyboardInterrupt")


async def test_node_lives_when_a_task_left_behind_by_a_handler_exits(database_url: str) -> None:
    bus = Bus("shop", database_url, **QUICK)
    left: list[asyncio.Task[None]] = []

    @bus.handles(Poison)
    async def handle(poison: Poison) -> None:
        async def late() -> None:
            await asyncio.sleep(0.05)
            sys.exit(3)

        left.append(asyncio.create_task(late()))

    async with bus:
        async with bus.unit_of_work() as uow:
            uow.send(Poison(1))
        await eventually(lambda: left and left[0].done())
        await eventually(lambda: not marks(database_url))
    assert str(left[0].exception()) == "task broken off: SystemExit: 3"


def exit_in_a_callback() -> None:
    asyncio.get_running_loop().call_soon(sys.exit, 3)


def interrupt_in_a_callback() -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    asyncio.get_running_loop().call_soon(interrupt)


def stop_the_loop() -> None:
    asyncio.get_running_loop().stop()


def cancel_all_tasks() -> None:
    for task in asyncio.all_tasks():
        task.cancel()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # connections of a loop that has ended
@pytest.mark.parametrize(
    "end",
    [exit_in_a_callback, interrupt_in_a_callback, stop_the_loop, cancel_all_tasks],
    ids=lambda end: end.__name__,
)
def test_message_becomes_a_dead_letter_when_its_handler_ends_the_loop_at_each_start(
    end: Callable[[], None], database_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    handled: list[int] = []

    async def live(*messages: Any) -> None:
        bus = Bus("shop", database_url, concurrency=1, **QUICK)

        @bus.handles(Poison, retry=Retry(immediate=1, delays=()))
        async def handle_poison(poison: Poison) -> None:
            end()
            await asyncio.sleep(5)

        @bus.handles(Healthy)
        async def handle(healthy: Healthy) -> None:
            handled.append(healthy.number)

        async with bus:
            async with bus.unit_of_work() as uow:
                for each in messages:
                    uow.send(each)
            await eventually(lambda: letters(database_url) and set(handled) == {*range(5)})

    runs = 0
    while not letters(database_url):
        runs += 1
        with suppress(SystemExit, KeyboardInterrupt, RuntimeError, asyncio.CancelledError):
            asyncio.run(live(*([Poison(1), *map(Healthy, range(5))] if runs == 1 else [])))
        assert runs < 8, marks(database_url)
    assert runs == 5  # two deaths, and two attempts that count
    ((message_type, _, reason),) = letters(database_url)
    assert message_type == "loops.poison"
    assert "its node died" in reason
    assert set(handled) == {*range(5)}
    assert "handle_poison on message" in caplog.text


@pytest.mark.parametrize("stop", ["leaving", "cancelled"])
def test_ordered_stop_marks_no_message(stop: str, database_url: str) -> None:
    begun = asyncio.Event()

    async def live() -> None:
        bus = Bus("shop", database_url, **dict[str, Any](QUICK, drain_timeout=timedelta(seconds=0.2)))

        @bus.handles(Poison)
        async def handle(poison: Poison) -> None:
            begun.set()
            await asyncio.sleep(30)

        async with bus:
            async with bus.unit_of_work() as uow:
                uow.send(Poison(1))
            await begun.wait()
            if stop == "cancelled":
                task = asyncio.current_task()
                assert task is not None
                task.cancel()
                await asyncio.sleep(1)

    with suppress(asyncio.CancelledError):
        asyncio.run(live())
    assert marks(database_url) == [(0, 0)]
