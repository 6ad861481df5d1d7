"""Whose unit of work it is: shapes in which a block is entered, and places from which a message is sent.

The one that is found is the one that is meant, or NoUnitOfWork is raised: never another.
"""

from __future__ import annotations

import asyncio
import contextvars
import gc
import threading
import types
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Iterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from typing import Any, cast

import pytest
from sqlalchemy.util import greenlet_spawn

from durable.errors import NoUnitOfWork, WiringError
from durable.outbox.outbox import Outbox
from durable.outbox.scope import Block, Scope

NOBODY = "NoUnitOfWork"


class Desk:
    """Blocks by name, and which of them is found."""

    def __init__(self) -> None:
        self.scope = Scope()

    def block(self, name: str) -> Block:
        return self.scope.entered(lambda: cast(Outbox, name))

    def found(self) -> str:
        try:
            return cast(str, self.scope.outbox)
        except NoUnitOfWork:
            return NOBODY


@pytest.fixture
def desk() -> Desk:
    return Desk()


# ---------------------------------------------------------------- ways to enter a block of one's own

Entering = Callable[[Desk], Any]
"""Returns a sync context manager whose block is that of `own`."""


def directly(desk: Desk) -> Any:
    return desk.block("own")


@contextmanager
def _manager(desk: Desk) -> Iterator[None]:
    with desk.block("own"):
        yield


def by_a_manager(desk: Desk) -> Any:
    return _manager(desk)


@contextmanager
def by_a_manager_of_a_manager(desk: Desk) -> Iterator[None]:
    with _manager(desk):
        yield


def _part(desk: Desk) -> Iterator[None]:
    with desk.block("own"):
        yield


@contextmanager
def by_a_delegating_manager(desk: Desk) -> Iterator[None]:
    yield from _part(desk)


@contextmanager
def by_a_looping_manager(desk: Desk) -> Iterator[None]:
    for _ in _part(desk):
        yield


@contextmanager
def by_a_stack(desk: Desk) -> Iterator[None]:
    with ExitStack() as stack:
        stack.enter_context(_manager(desk))
        yield


class _Held:
    def __init__(self, desk: Desk) -> None:
        self._block = desk.block("own")

    def __enter__(self) -> None:
        self._block.__enter__()

    def __exit__(self, *_: object) -> None:
        self._block.__exit__(None, None, None)


def by_an_object(desk: Desk) -> Any:
    return _Held(desk)


class _HeldByAMethod(_Held):
    def __enter__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self._block.__enter__()


def by_a_method_of_an_object(desk: Desk) -> Any:
    return _HeldByAMethod(desk)


CLEAR = [
    directly,
    by_a_manager,
    by_a_manager_of_a_manager,
    by_a_delegating_manager,
    by_a_stack,
    by_an_object,
    by_a_method_of_an_object,
]
UNCLEAR = [by_a_looping_manager]
"""The block is that of a generator within: a manager that reads the first row of another unit of work is alike."""
MANAGERS = [*CLEAR, *UNCLEAR]


class _Stepped:
    """A context manager of an application that runs a generator by itself."""

    def __init__(self, desk: Desk) -> None:
        self._steps = _part(desk)

    def __enter__(self) -> None:
        next(self._steps)

    def __exit__(self, *_: object) -> None:
        next(self._steps, None)


# ---------------------------------------------------------------- places from which a message is sent


async def here(desk: Desk) -> str:
    return desk.found()


async def in_a_task(desk: Desk) -> str:
    return await asyncio.create_task(here(desk))


async def in_a_thread(desk: Desk) -> str:
    return await asyncio.to_thread(desk.found)


async def in_a_listener(desk: Desk) -> str:
    """As sessions call their listeners: in a greenlet."""
    return await greenlet_spawn(desk.found)


async def in_a_block_within(desk: Desk) -> str:
    with desk.block("inner"):
        assert desk.found() == "inner"
    return desk.found()


PLACES = [here, in_a_task, in_a_thread, in_a_listener]
Place = Callable[[Desk], Awaitable[str]]
of_places = pytest.mark.parametrize("place", PLACES, ids=lambda place: place.__name__)
of_outer = pytest.mark.parametrize("outer", ["", "outer"], ids=["alone", "within another"])


def around(desk: Desk, outer: str) -> Any:
    return desk.block(outer) if outer else ExitStack()


@of_outer
@pytest.mark.parametrize("place", [*PLACES, in_a_block_within], ids=lambda place: place.__name__)
@pytest.mark.parametrize("enter", CLEAR, ids=lambda enter: enter.__name__)
async def test_block_of_a_context_manager_holds_for_its_user(
    desk: Desk, enter: Entering, place: Place, outer: str
) -> None:
    with around(desk, outer):
        with enter(desk):
            assert await place(desk) == "own"
        assert await place(desk) == (outer or NOBODY)


@of_outer
@of_places
@pytest.mark.parametrize("enter", UNCLEAR, ids=lambda enter: enter.__name__)
async def test_block_of_a_generator_in_a_context_manager_is_its_users_or_nobodys(
    desk: Desk, enter: Entering, place: Place, outer: str
) -> None:
    with around(desk, outer):
        with enter(desk):
            assert await place(desk) == (NOBODY if outer else "own")
        assert await place(desk) == (outer or NOBODY)


@of_outer
@of_places
async def test_block_of_a_manager_run_by_hand_is_its_own_or_nobodys(desk: Desk, place: Place, outer: str) -> None:
    with around(desk, outer):
        with _Stepped(desk):
            assert await place(desk) == (NOBODY if outer else "own")
        assert await place(desk) == (outer or NOBODY)


# ---------------------------------------------------------------- iterated generators


async def rows(desk: Desk, place: Place, found: list[str]) -> AsyncIterator[int]:
    with desk.block("own"):
        for number in range(3):
            found.append(await place(desk))
            yield number
        with desk.block("inner"):
            found.append(await place(desk))


async def a_loop(steps: AsyncIterator[int], consume: Callable[[], Awaitable[None]]) -> None:
    async for _ in steps:
        await consume()


async def a_task_a_step(steps: AsyncIterator[int], consume: Callable[[], Awaitable[None]]) -> None:
    while await asyncio.wait_for(asyncio.ensure_future(anext(steps, None)), 5) is not None:
        await consume()


async def a_first_step_in_a_task(steps: AsyncIterator[int], consume: Callable[[], Awaitable[None]]) -> None:
    await asyncio.wait_for(asyncio.ensure_future(anext(steps)), 5)
    async for _ in steps:
        await consume()


async def a_thread_a_step(steps: AsyncIterator[int], consume: Callable[[], Awaitable[None]]) -> None:
    async def step() -> int | None:
        return await anext(steps, None)

    while await asyncio.to_thread(asyncio.run, step()) is not None:
        await consume()


RUNS = [a_loop, a_task_a_step, a_first_step_in_a_task, a_thread_a_step]


@of_outer
@of_places
@pytest.mark.parametrize("enter", MANAGERS, ids=lambda enter: enter.__name__)
@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.__name__)
async def test_generator_and_its_consumer_find_their_own_block_or_none(
    desk: Desk, run: Any, enter: Entering, place: Place, outer: str
) -> None:
    found, consumed = list[str](), list[str]()

    async def lines() -> AsyncIterator[int]:
        with enter(desk):
            for number in range(3):
                found.append(await place(desk))
                yield number

    async def consume() -> None:
        consumed.append(await place(desk))
        async with AsyncExitStack() as stack:
            stack.enter_context(desk.block("its own"))
            assert await place(desk) in ("its own", NOBODY)

    with around(desk, outer):
        await run(lines(), consume)
        assert await place(desk) == (outer or NOBODY)
    assert set(found) <= {"own", NOBODY}
    assert set(consumed) <= {outer or "own", NOBODY}
    if place in (here, in_a_listener) and enter in CLEAR:
        assert set(found) == {"own"}
    assert not desk.scope._of_generators


@of_outer
@of_places
async def test_block_held_by_an_iterator_is_its_consumers_or_nobodys(desk: Desk, place: Place, outer: str) -> None:
    class Lines:
        def __init__(self) -> None:
            self._block = desk.block("own")
            self._left = 2

        def __aiter__(self) -> Lines:
            return self

        async def __anext__(self) -> int:
            if self._left == 2:
                self._block.__enter__()
                assert await place(desk) in ("own", NOBODY)
            if not self._left:
                self._block.__exit__(None, None, None)
                raise StopAsyncIteration
            self._left -= 1
            return self._left

    with around(desk, outer):
        async for _ in Lines():
            assert await place(desk) == (NOBODY if outer else "own")
        assert await place(desk) == (outer or NOBODY)


@of_outer
@of_places
async def test_function_called_by_a_generator_finds_its_own_block(desk: Desk, place: Place, outer: str) -> None:
    async def save() -> str:
        with desk.block("saved"):
            return await place(desk)

    async def lines() -> AsyncIterator[str]:
        with desk.block("own"):
            yield await save()
            yield desk.found()

    with around(desk, outer):
        assert [each async for each in lines()] == ["saved", "own"]


@of_outer
@of_places
async def test_block_entered_by_a_helper_of_a_stack_is_its_generators_or_nobodys(
    desk: Desk, place: Place, outer: str
) -> None:
    def begin(stack: AsyncExitStack) -> None:
        stack.enter_context(desk.block("own"))

    async def lines() -> AsyncIterator[str]:
        async with AsyncExitStack() as stack:
            begin(stack)
            yield await place(desk)
            yield desk.found()

    with around(desk, outer):
        async for line in lines():
            assert line in ("own", NOBODY)
            assert await place(desk) == (NOBODY if outer else "own")
        assert await place(desk) == (outer or NOBODY)


@of_places
async def test_manager_reading_a_generator_diverts_nothing_of_its_user(desk: Desk, place: Place) -> None:
    found = list[str]()

    @asynccontextmanager
    async def export() -> AsyncIterator[AsyncIterator[int]]:
        steps = rows(desk, here, found)
        await anext(steps)
        yield steps

    with desk.block("outer"):
        async with export() as steps:
            assert await place(desk) == NOBODY
            async for _ in steps:
                pass
        assert await place(desk) == "outer"


@of_places
@pytest.mark.parametrize("among", ["nothing", "its own generator", "the generator of another task"])
def test_open_generators_change_nothing_for_others(desk: Desk, place: Place, among: str) -> None:
    found = list[str]()

    async def work() -> None:
        with desk.block("own"):
            found.extend(await asyncio.gather(place(desk), place(desk)))

    async def job() -> None:
        steps = rows(desk, here, [])
        if among == "nothing":
            await work()
            return
        step = asyncio.ensure_future(anext(steps))
        await (step if among == "its own generator" else asyncio.create_task(asyncio.wait_for(step, 5)))
        await work()
        await steps.aclose()  # type: ignore[attr-defined]

    def command() -> None:
        with desk.block("outer"):
            asyncio.run(job())
            assert desk.found() == "outer"

    command()
    assert found == ["own", "own"]


@pytest.mark.parametrize("is_asyncios", [True, False], ids=["asyncio", "another event loop"])
def test_task_run_within_a_generator_is_not_in_its_unit_of_work(
    desk: Desk, is_asyncios: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_by_another(handle: Any) -> None:
        handle._context.run(handle._callback, *handle._args)

    if not is_asyncios:  # as of uvloop, no call of asyncio stands between a task and what runs the loop
        monkeypatch.setattr(asyncio.Handle, "_run", run_by_another)
    loop = asyncio.new_event_loop()
    stranger = loop.create_task(here(desk))

    def steps() -> Iterator[str]:
        with desk.block("own"):
            yield loop.run_until_complete(stranger)

    assert list(steps()) == [NOBODY]
    loop.close()


async def test_tasks_beside_a_generator_find_the_block_around_both(desk: Desk) -> None:
    found = list[str]()

    async def read() -> None:
        async for _ in rows(desk, here, found):
            await asyncio.sleep(0)

    async def write() -> str:
        await asyncio.sleep(0)
        return desk.found()

    with desk.block("outer"):
        _, *others = await asyncio.gather(read(), write(), write())
    assert others == ["outer", "outer"]


async def test_tasks_started_one_by_another_keep_no_blocks(desk: Desk) -> None:
    async def step(left: int) -> None:
        with desk.block(f"step {left}"):
            following = asyncio.create_task(step(left - 1)) if left else None
        if following is not None:
            await asyncio.sleep(0)
            if left % 100 == 0:
                blocks = [each for each in gc.get_objects() if isinstance(each, Block) and each._scope is desk.scope]
                assert len(blocks) < 10
            waiting.append(following)

    waiting = list[asyncio.Task[None]]()
    await asyncio.create_task(step(300))
    while waiting:
        await waiting.pop()


@pytest.mark.parametrize("run", [a_loop, a_task_a_step, a_first_step_in_a_task], ids=lambda run: run.__name__)
async def test_generator_finds_its_own_block_within_a_handlers(desk: Desk, run: Any) -> None:
    """As in a handler, whose block is entered by a function that has ended."""
    found, consumed = list[str](), list[str]()

    async def consume() -> None:
        consumed.append(desk.found())

    outer = desk.block("outer")
    _enter(outer)
    await run(rows(desk, here, found), consume)
    assert desk.found() == "outer"
    outer.__exit__(None, None, None)
    assert found == ["own", "own", "own", "inner"]
    assert set(consumed) == {NOBODY if run is a_loop else "outer"}


def _enter(block: Block) -> None:
    block.__enter__()


@of_outer
@pytest.mark.parametrize("place", [here, in_a_listener], ids=lambda place: place.__name__)
@pytest.mark.parametrize("run", [a_loop, a_task_a_step], ids=lambda run: run.__name__)
async def test_generator_finds_its_own_block(desk: Desk, place: Place, run: Any, outer: str) -> None:
    found, consumed = list[str](), list[str]()

    async def consume() -> None:
        consumed.append(await place(desk))

    with around(desk, outer):
        await run(rows(desk, place, found), consume)
        assert await place(desk) == (outer or NOBODY)
    assert found == ["own", "own", "own", "inner"]
    alone = "own" if run is a_loop else NOBODY  # what is entered in another task holds there
    # Where nobody can tell, the consumer names the one it means; in tasks it knows but of the other one.
    assert set(consumed) == {alone if not outer else NOBODY if run is a_loop else outer}


@of_outer
@pytest.mark.parametrize("place", [in_a_task, in_a_thread], ids=lambda place: place.__name__)
async def test_task_of_a_generator_finds_its_block_or_none(desk: Desk, place: Place, outer: str) -> None:
    found = list[str]()
    with around(desk, outer):
        async for _ in rows(desk, place, found):
            assert await place(desk) == (NOBODY if outer else "own")
    assert set(found) <= ({NOBODY} if outer else {"own", "inner"}) | {"inner"}


async def test_block_of_a_consumer_is_its_own_when_entered_after_the_generators(desk: Desk) -> None:
    found = list[str]()
    steps = rows(desk, here, found)
    await anext(steps)
    with desk.block("consumer"):
        assert desk.found() == "consumer"
        async for _ in steps:
            assert desk.found() == "consumer"
        assert desk.found() == "consumer"
    assert desk.found() == NOBODY
    assert found == ["own", "own", "own", "inner"]


async def test_generator_in_a_generator_finds_its_own_block(desk: Desk) -> None:
    def pages() -> Iterator[str]:
        with desk.block("pages"):
            for _ in range(2):
                yield desk.found()

    def lines() -> Iterator[str]:
        with desk.block("lines"):
            for page in pages():
                yield page
                yield desk.found()  # the block of `pages` may be meant
            yield desk.found()

    with desk.block("outer"):
        assert list(lines()) == ["pages", NOBODY, "pages", NOBODY, "lines"]
        assert desk.found() == "outer"


async def test_two_blocks_of_one_generator_are_one_for_its_consumer(desk: Desk) -> None:
    """As a fixture of a test with two units of work."""

    def fixture() -> Generator[None]:
        with desk.block("first"), desk.block("second"):
            yield

    steps = fixture()
    next(steps)
    assert desk.found() == await in_a_task(desk) == "second"
    steps.close()
    assert desk.found() == NOBODY


async def test_blocks_of_many_generators_are_found_at_once(desk: Desk) -> None:
    """As in a walk of a tree with a block at each level: each level may double the ways to the outermost."""

    def levels(left: int) -> Iterator[str]:
        with desk.block(f"level {left}"):
            yield desk.found() if not left else ""
            yield from levels(left - 1) if left else ()

    with desk.block("outer"):
        assert [each for each in levels(40) if each] == ["level 0"]


async def test_coroutine_of_a_decorated_generator_is_no_iterated_one(desk: Desk) -> None:
    @types.coroutine
    def work() -> Generator[Any, Any, str]:
        with desk.block("own"):
            return (yield from in_a_task(desk).__await__())

    with desk.block("outer"):
        assert await work() == "own"


async def test_steps_in_threads_find_their_block(desk: Desk) -> None:
    """As a web framework sends the body of a response."""

    def body() -> Iterator[str]:
        with desk.block("own"):
            for _ in range(3):
                yield desk.found()

    steps = body()
    assert [await asyncio.to_thread(next, steps, None) for _ in range(4)] == ["own", "own", "own", None]
    assert not desk.scope._of_generators


# ---------------------------------------------------------------- ends


async def test_later_block_stays_in_scope_when_an_earlier_one_is_left(desk: Desk) -> None:
    with desk.block("outer"):
        first, second = desk.block("first"), desk.block("second")
        first.__enter__()
        second.__enter__()
        first.__exit__(None, None, None)
        assert desk.found() == "second"
        second.__exit__(None, None, None)
        assert desk.found() == "outer"
    assert desk.found() == NOBODY


@pytest.mark.parametrize("starts", ["a task", "a thread", "a copied context"])
async def test_block_is_over_for_everything_started_within(desk: Desk, starts: str) -> None:
    let_go, go_on = threading.Event(), asyncio.Event()

    def in_thread() -> str:
        let_go.wait(20)
        return desk.found()

    async def in_task() -> str:
        await go_on.wait()
        return desk.found()

    def begin() -> asyncio.Future[str]:
        if starts == "a copied context":
            return asyncio.get_running_loop().run_in_executor(None, contextvars.copy_context().run, in_thread)
        return asyncio.ensure_future(asyncio.to_thread(in_thread) if starts == "a thread" else in_task())

    with desk.block("outer"):
        with desk.block("own"):
            running = begin()
            await asyncio.sleep(0)
        let_go.set()
        go_on.set()
        assert await running == NOBODY
        assert desk.found() == "outer"


async def test_generators_left_early_leave_nothing(desk: Desk) -> None:
    async def endless() -> AsyncIterator[int]:
        with desk.block("own"):
            while True:
                yield 1

    with desk.block("outer"):
        for _ in range(20):
            async for _ in endless():
                break
            gc.collect(1)  # what is so young
            await asyncio.sleep(0)
        gc.collect()
        await asyncio.sleep(0.01)
        assert desk.found() == "outer"
        blocks = [each for each in gc.get_objects() if isinstance(each, Block) and each._scope is desk.scope]
        assert len(blocks) <= 4
    assert not desk.scope._of_generators


async def test_block_is_entered_once(desk: Desk) -> None:
    block = desk.block("own")
    with block:
        pass
    with pytest.raises(WiringError, match="entered before, and it is for one block; make another"):
        block.__enter__()


async def test_async_context_managers_and_stacks_hold_for_their_user(desk: Desk) -> None:
    async def part() -> AsyncIterator[None]:
        with desk.block("own"):
            yield

    manager = asynccontextmanager(part)

    with desk.block("outer"):
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(manager())
            assert [desk.found(), await in_a_task(desk), await in_a_listener(desk)] == ["own"] * 3
        assert desk.found() == "outer"
