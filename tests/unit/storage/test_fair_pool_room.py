"""Pools in which openings fail, end amid, and pools are replaced: nobody waits while there is room."""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Final

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from sqlalchemy.exc import TimeoutError as PoolTimeoutError
from sqlalchemy.util import await_only, greenlet_spawn

from durable.storage.fair_pool import FairAsyncPool, FairPool
from durable.testing import eventually

LONG: Final = 60.0
STEPS: Final = st.lists(
    st.tuples(
        st.sampled_from(["come", "come", "open", "open", "fail", "give back", "close", "leave", "dispose"]),
        st.integers(0, 9),
    ),
    max_size=40,
)
SURPLUS: Final = ("come", "open", "come", "open", "give back", "give back", "come", "come", "close")
"""Somebody comes while a connection beyond the size of the pool is being closed."""


class Refused(Exception):
    """An opening failed."""


class Connection:
    def __init__(self, opened: list[Connection], closing: Callable[[], None] = lambda: None) -> None:
        self._opened, self._closing = opened, closing
        opened.append(self)

    def rollback(self) -> None: ...

    def close(self) -> None:
        try:
            self._closing()
        finally:
            self._opened.remove(self)


class Permissions:
    """Those who wait for the answer of the database, in the order of their coming."""

    def __init__(self) -> None:
        self._awaited: list[asyncio.Future[None]] = []

    def __bool__(self) -> bool:
        return bool(self._awaited)

    def __len__(self) -> int:
        return len(self._awaited)

    def await_one(self) -> None:
        awaited = asyncio.get_running_loop().create_future()
        self._awaited.append(awaited)
        try:
            await_only(awaited)
        finally:
            self._awaited.remove(awaited)

    def give(self, number: int, error: Exception | None = None) -> None:
        awaited = self._awaited[number % len(self)]
        if error is None:
            awaited.set_result(None)
        else:
            awaited.set_exception(error)


class Story:
    """Tasks that take connections of one engine, whose pool is replaced at times."""

    def __init__(self, size: int, overflow: int) -> None:
        self.size = size + overflow
        self.opened: list[Connection] = []
        self.opening, self.closing = Permissions(), Permissions()
        self.tasks: list[asyncio.Task[Any]] = []
        self.ending: list[asyncio.Task[None]] = []
        self.in_use: list[Any] = []
        self.pools = [FairAsyncPool(self.create, pool_size=size, max_overflow=overflow, timeout=LONG)]

    def create(self) -> Any:
        self.opening.await_one()
        return Connection(self.opened, self.closing.await_one)

    def taken(self, task: asyncio.Task[Any]) -> None:
        if not task.cancelled() and task.exception() is None:
            self.in_use.append(task.result())

    async def dispose(self) -> None:
        pool = self.pools[-1]
        await greenlet_spawn(pool.dispose)
        self.pools.append(pool.recreate())  # type: ignore[arg-type]

    async def do(self, step: str, number: int) -> None:
        waiting = [task for task in self.tasks if not task.done()]
        match step:
            case "come":
                task = asyncio.create_task(greenlet_spawn(self.pools[-1].connect), name="come")
                task.add_done_callback(self.taken)
                self.tasks.append(task)
            case "open" if self.opening:
                self.opening.give(number)
            case "fail" if self.opening:
                self.opening.give(number, Refused())
            case "close" if self.closing:
                self.closing.give(number)
            case "give back" if self.in_use:
                given = self.in_use.pop(number % len(self.in_use))
                self.ending.append(asyncio.create_task(greenlet_spawn(given.close), name="give back"))
            case "leave" if waiting:
                waiting[number % len(waiting)].cancel()
            case "dispose":
                self.ending.append(asyncio.create_task(self.dispose(), name="dispose"))
            case _:
                pass
        await turn()
        self.check()

    def check(self) -> None:
        for each in self.pools:
            pool: Any = each
            line = pool._pool
            assert not (line._waiting and (line._at_rest or pool._overflow < pool._max_overflow)), "room, and a waiter"
            assert 0 <= pool.checkedout() <= self.size
        assert len(self.opened) + len(self.opening) <= self.size * len(self.pools)

    async def end(self) -> None:
        while self.opening or self.in_use or self.closing:
            for step in ("open", "give back", "close"):
                await self.do(step, 0)
        await asyncio.gather(*self.ending)


async def turn() -> None:
    """Let each task go as far as it can."""
    for _ in range(10):
        await asyncio.sleep(0)


@given(st.integers(1, 2), st.integers(0, 1), STEPS)
@example(1, 1, [(step, 0) for step in SURPLUS])
def test_tasks_wait_for_no_connection_while_there_is_room(
    size: int, overflow: int, steps: Sequence[tuple[str, int]]
) -> None:
    async def tell() -> None:
        story = Story(size, overflow)
        for step in steps:
            await story.do(*step)
        await story.end()
        ends = await asyncio.gather(*story.tasks, return_exceptions=True)
        assert not [each for each in ends if isinstance(each, Exception) and not isinstance(each, Refused)]
        assert [pool.checkedout() for pool in story.pools] == [0] * len(story.pools)
        assert len(story.opened) == sum(entry.dbapi_connection is not None for entry in at_rest(story.pools[-1]))

    asyncio.run(tell())


def at_rest(pool: Any) -> Sequence[Any]:
    """The entries of a pool; those that were replaced keep no open connection."""
    return list(pool._pool._at_rest)


@given(st.lists(st.booleans(), max_size=4), st.integers(1, 2))
@settings(max_examples=30)
def test_threads_wait_for_no_connection_while_openings_fail(refusals: Sequence[bool], size: int) -> None:
    """They come while the first ones open; so many openings fail as are told."""
    outcomes = list(refusals)
    opened: list[Connection] = []
    ready = threading.Event()

    def create() -> Any:
        assert ready.wait(LONG)
        if outcomes and outcomes.pop():
            raise Refused
        return Connection(opened)

    def use() -> bool:
        try:
            pool.connect().close()
        except Refused:
            return False
        return True

    pool: Any = FairPool(create, pool_size=size, max_overflow=0, timeout=LONG / 10)
    with ThreadPoolExecutor(5) as threads:
        using = [threads.submit(use) for _ in range(5)]
        asyncio.run(eventually(lambda: len(pool._pool._waiting) == len(using) - size))
        ready.set()
        served = [each.result(LONG) for each in using]
    assert served.count(False) == sum(refusals) - sum(outcomes)
    assert pool.checkedout() == 0


class Collection:
    """An act at one line of what a thread runs: there the interpreter may collect garbage."""

    def __init__(self, line: int, act: Callable[[], None]) -> None:
        self.line, self._act = line, act

    def trace(self, frame: Any, event: str, _: object) -> Any:
        self.line -= event == "line"
        if event == "line" and self.line == 0:
            sys.settrace(None)
            self._act()
        return self.trace if self.line > 0 else None


def is_collected_amid(use: str, line: int) -> bool:
    """Let a thread wait for a connection, or give one back, while another thread gives one back, and one is garbage.

    Both come back at this line of the use, or of a wait in vain; False when there are not so many.
    """
    create: Any = lambda: Connection([])  # noqa: E731
    pool: Any = FairPool(create, pool_size=3, max_overflow=0, timeout=0.005)
    given, garbage, used = pool.connect(), [pool.connect()], pool.connect()
    giving = threading.Thread(target=given.close, name="give", daemon=True)

    def collect() -> None:
        giving.start()
        giving.join(1)  # at once, unless something is locked here
        garbage.clear()

    collection = Collection(line, collect)

    def run() -> None:
        sys.settrace(collection.trace)
        if use == "wait":
            with suppress(PoolTimeoutError):
                pool.connect().close()
        else:
            used.close()
        sys.settrace(None)

    using = threading.Thread(target=run, name=use, daemon=True)
    using.start()
    using.join(5)
    assert not using.is_alive(), f"a collection at line {line}: the thread never ends"
    if collection.line <= 0:
        giving.join(5)
        assert not giving.is_alive(), f"a collection at line {line}: the other thread never ends"
        assert pool.checkedout() == (use == "wait")
    return collection.line <= 0


@pytest.mark.parametrize("use", ["wait", "give back"])
def test_thread_ends_when_garbage_is_collected_amid_its_use_of_a_pool(use: str) -> None:
    gc.disable()
    try:
        line = 1
        while is_collected_amid(use, line):
            line += 1
    finally:
        gc.enable()
    assert line > 20, "the use was not met"
