"""The lines of those who wait for a connection: here numbers are the connections."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from types import SimpleNamespace
from typing import Any, Final

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy.pool import QueuePool
from sqlalchemy.util import greenlet_spawn
from sqlalchemy.util.queue import Empty, Full

from durable.storage.fair_pool import FairAsyncPool, FairPool, LoopLine, ThreadLine
from durable.testing import eventually

CONNECTIONS: Final = 2
STEPS: Final = st.lists(st.sampled_from(["come", "give back", "give back and come", "leave", "turn"]), max_size=40)


def line(*connections: int) -> Any:
    made: Any = LoopLine(CONNECTIONS)
    for connection in connections:
        made.put_nowait(connection)
    return made


def get(of: Any, seconds: float | None = None) -> int:
    """Take a connection, or wait for one in turn."""
    with suppress(Empty):
        return int(of.get_nowait())
    return int(of.wait(of.stand(), seconds))


def come(to: Any, seconds: float | None = None) -> asyncio.Task[int]:
    return asyncio.create_task(greenlet_spawn(get, to, seconds), name="come")


async def turn() -> None:
    """Let everybody go as far as it can."""
    for _ in range(5):
        await asyncio.sleep(0)


class Story:
    """People who come to a line, and connections that are used by one of them at a time."""

    def __init__(self) -> None:
        self.line = line(*range(CONNECTIONS))
        self.come: list[asyncio.Task[int]] = []
        self.served: list[int] = []
        """Their numbers in the order in which they got a connection."""
        self.in_use: list[int] = []
        self.left: set[int] = set()

    def arrive(self) -> None:
        number = len(self.come)

        def served(task: asyncio.Task[int]) -> None:
            if not task.cancelled():
                self.served.append(number)
                self.in_use.append(task.result())

        self.come.append(come(self.line))
        self.come[-1].add_done_callback(served)

    def give_back(self) -> None:
        if self.in_use:
            self.line.put_nowait(self.in_use.pop())

    async def do(self, step: str) -> None:
        match step:
            case "come":
                self.arrive()
                await turn()
            case "give back":
                self.give_back()
            case "give back and come":
                self.give_back()
                self.arrive()
            case "leave":
                waiting = [number for number, task in enumerate(self.come) if not task.done()]
                if waiting:
                    self.left.add(waiting[0])
                    self.come[waiting[0]].cancel()
            case _:
                await turn()


@given(STEPS)
def test_line_serves_in_the_order_of_coming(steps: Sequence[str]) -> None:
    """Tasks go on one after another: who came later may go on first where both got a connection in one moment."""

    async def tell() -> None:
        story = Story()
        for step in steps:
            await story.do(step)
        await turn()
        while len(story.in_use) and any(not task.done() for task in story.come):
            story.give_back()
            await turn()
        cancelled = {number for number in story.left if story.come[number].cancelled()}
        assert sorted(story.served) == [number for number in range(len(story.come)) if number not in cancelled]
        for turn_of, number in enumerate(story.served):
            assert sum(before > number for before in story.served[:turn_of]) <= CONNECTIONS, story.served
        assert len(story.in_use) + story.line.qsize() == CONNECTIONS, "a connection is lost"

    asyncio.run(tell())


async def test_connection_handed_to_a_waiter_is_not_for_a_passer_by() -> None:
    busy = line()
    waiting = come(busy)
    await turn()
    busy.put_nowait(7)
    with pytest.raises(Empty):
        busy.get_nowait()
    assert await waiting == 7


async def test_connection_goes_to_the_next_task_when_the_first_one_is_cancelled() -> None:
    busy = line()
    first, second = come(busy), come(busy)
    await turn()
    busy.put_nowait(7)
    first.cancel()
    assert await asyncio.wait_for(second, 5) == 7
    assert first.cancelled()


async def test_wait_ends_after_its_seconds() -> None:
    busy = line()
    with pytest.raises(Empty):
        await come(busy, 0.01)
    busy.put_nowait(7)
    assert (busy.get_nowait(), busy.empty()) == (7, True)


async def test_connection_given_back_in_a_thread_reaches_its_waiter() -> None:
    busy = line()
    waiting = come(busy)
    await turn()
    thread = threading.Thread(target=busy.put_nowait, args=(7,))
    thread.start()
    assert await asyncio.wait_for(waiting, 5) == 7
    thread.join()


def test_waiter_of_a_closed_loop_is_passed_over() -> None:
    busy = line()
    loop = asyncio.new_event_loop()
    left = loop.create_task(greenlet_spawn(get, busy))
    loop.run_until_complete(turn())
    left.cancel = lambda *_: False  # type: ignore[method-assign]  # nobody ends it
    loop.close()
    busy.put_nowait(7)
    assert busy.get_nowait() == 7
    left._log_destroy_pending = False  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", [LoopLine, ThreadLine])
@pytest.mark.parametrize(("is_stack", "expected"), [(False, [1, 2]), (True, [2, 1])])
def test_line_gives_the_oldest_or_the_newest_connection_at_rest(
    kind: Callable[..., Any], is_stack: bool, expected: list[int]
) -> None:
    at_rest = kind(CONNECTIONS, use_lifo=is_stack)
    for connection in (1, 2):
        at_rest.put(connection, block=False)
    assert at_rest.full()
    with pytest.raises(Full):
        at_rest.put_nowait(3)
    assert [at_rest.get_nowait(), at_rest.get_nowait()] == expected
    assert at_rest.empty()


async def test_threads_are_served_in_the_order_of_coming() -> None:
    busy: Any = ThreadLine(CONNECTIONS)
    with ThreadPoolExecutor(5) as threads:
        waiting = []
        for number in range(5):
            waiting.append(threads.submit(get, busy))
            await eventually(lambda: len(busy._waiting) == number + 1)  # noqa: B023  waited for at once
        for connection in range(5):
            busy.put_nowait(connection)
            with pytest.raises(Empty):
                busy.get_nowait()
        assert [each.result(5) for each in waiting] == [0, 1, 2, 3, 4]


def test_thread_waits_for_its_seconds() -> None:
    busy: Any = ThreadLine(CONNECTIONS)
    with pytest.raises(Empty):
        get(busy, 0.01)
    busy.put_nowait(7)
    assert (get(busy, 0.01), busy.empty()) == (7, True)


def test_connection_of_a_leaving_thread_is_for_the_next_one() -> None:
    busy: Any = ThreadLine(CONNECTIONS)
    leaving = busy.stand()
    assert busy._first() is leaving, "another thread has a connection for it"
    with pytest.raises(Empty):
        busy.wait(leaving, 0)
    assert not busy._is_handed_over(7, leaving)


def test_connection_handed_to_a_leaving_thread_is_for_the_next_one() -> None:
    busy: Any = ThreadLine(CONNECTIONS)
    leaving, next_one = busy.stand(), busy.stand()

    def hand_over_and_end(timeout: float) -> None:
        busy.put_nowait(7)
        raise KeyboardInterrupt

    leaving.served = SimpleNamespace(acquire=hand_over_and_end, release=leaving.served.release)
    with pytest.raises(KeyboardInterrupt):
        busy.wait(leaving, None)
    assert busy.wait(next_one, 0) == 7


def test_many_threads_lose_no_connection() -> None:
    """Some wait too briefly: what is handed over when they leave is for the next one."""
    busy: Any = ThreadLine(CONNECTIONS)
    for connection in range(CONNECTIONS):
        busy.put_nowait(connection)

    def use(number: int) -> bool:
        try:
            connection = get(busy, 5 if number % 2 else 0.0001)
        except Empty:
            return False
        busy.put_nowait(connection)
        return True

    with ThreadPoolExecutor(8) as threads:
        served = list(threads.map(use, range(2_000)))
    assert all(served[1::2])
    assert sorted(busy.get_nowait() for _ in range(CONNECTIONS)) == [0, 1]


@pytest.mark.parametrize("kind", [FairAsyncPool, FairPool])
def test_pool_logs_as_the_one_of_sqlalchemy(kind: type[QueuePool]) -> None:
    """Those who hear durable are told nothing of it."""
    logger: Any = kind(lambda: None).logger  # type: ignore[arg-type]
    assert logger.name.startswith("sqlalchemy.pool.impl.")
