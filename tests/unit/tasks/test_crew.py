"""Tasks that end together, whatever they raise."""

from __future__ import annotations

import asyncio
import gc
import inspect
import time
from collections.abc import Awaitable, Callable, Generator

import pytest

from durable.errors import BrokeOff
from durable.tasks import crew
from durable.tasks.cancelling import is_cancelled, raise_if_cancelled
from durable.tasks.crew import Crew, cancel_once, contained, end, in_turn, wait


class Panic(BaseException):
    pass


class Forever:
    """As a future without an event loop."""

    def __await__(self) -> Generator[None, None, None]:
        while True:
            yield


async def for_ever() -> None:
    await asyncio.Event().wait()


async def raising(error: BaseException) -> None:
    await asyncio.sleep(0)
    raise error


@pytest.mark.parametrize("error", [Panic("x"), SystemExit(1), GeneratorExit(), asyncio.CancelledError("by accident")])
async def test_crew_raises_broke_off_for_a_base_exception(error: BaseException) -> None:
    others: list[asyncio.Task[None]] = []

    async def owner() -> None:
        async with Crew() as tasks:
            others.append(tasks.create_task(for_ever(), name="other"))
            tasks.create_task(raising(error), name="raising")
            await for_ever()

    with pytest.raises(BrokeOff, match=type(error).__name__) as raised:
        await owner()
    assert raised.value.__cause__ is not None
    assert others[0].cancelled()
    assert not is_cancelled()


async def test_crew_raises_several_errors_as_a_group() -> None:
    async def owner() -> None:
        async with Crew() as tasks:
            for number in range(2):
                tasks.create_task(raising(ValueError(str(number))), name="raising")
            await for_ever()

    with pytest.raises(ExceptionGroup) as raised:
        await owner()
    assert len(raised.value.exceptions) == 2


async def test_crew_passes_on_each_cancellation() -> None:
    heard = 0
    ended = asyncio.Event()

    async def stubborn() -> None:
        nonlocal heard
        while heard < 3:
            try:
                await for_ever()
            except asyncio.CancelledError:
                heard += 1
        ended.set()

    async def nested() -> None:
        async with Crew() as inner:
            inner.create_task(stubborn(), name="stubborn")

    async def owner() -> None:
        async with Crew() as tasks:
            tasks.create_task(nested(), name="nested")

    task = asyncio.create_task(owner())
    await asyncio.sleep(0.01)
    assert await end([task], within=20) == []
    assert heard == 3
    assert task.cancelled()


async def test_task_cancelled_by_an_accident_breaks_its_crew_off() -> None:
    others = list[asyncio.Task[None]]()

    async def owner() -> None:
        async with Crew() as crew:
            lonely = crew.create_task(for_ever(), name="lonely")
            others.append(crew.create_task(for_ever(), name="other"))
            await asyncio.sleep(0)
            lonely.cancel()
            await for_ever()

    with pytest.raises(BrokeOff, match="lonely: cancelled by an accident"):
        await owner()
    assert others[0].cancelled()


async def test_task_ended_by_its_crew_is_no_accident() -> None:
    async with Crew() as crew:
        task = crew.create_task(for_ever(), name="ended")
        await asyncio.sleep(0)
        crew.cancel(task)
        await asyncio.wait([task])
    assert task.cancelled()


async def test_error_does_not_replace_the_cancellation_of_a_crew() -> None:
    async def cleaning_up() -> None:
        try:
            await for_ever()
        finally:
            raise ConnectionResetError

    async def owner() -> None:
        async with Crew() as tasks:
            tasks.create_task(cleaning_up(), name="cleaning up")
            await for_ever()

    task = asyncio.create_task(owner())
    await asyncio.sleep(0.01)
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()


async def test_end_returns_the_tasks_still_running() -> None:
    free = asyncio.Event()

    async def stubborn() -> None:
        while not free.is_set():
            try:
                await free.wait()
            except asyncio.CancelledError:
                continue

    task = asyncio.create_task(stubborn())
    await asyncio.sleep(0)
    assert await end([task], within=0.05) == [task]
    free.set()
    await task


async def test_cancelled_task_does_its_last_work_undisturbed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crew, "_ROUND", 0.01)
    done = list[int]()

    async def leaving() -> None:
        try:
            await for_ever()
        finally:
            for number in range(10):
                await asyncio.sleep(0.01)
                done.append(number)

    task = asyncio.create_task(leaving())
    await asyncio.sleep(0)
    assert await cancel_once([task], within=20) == []
    assert len(done) == 10


async def test_last_work_without_an_end_is_cut_off() -> None:
    async def hanging() -> None:
        try:
            await for_ever()
        finally:
            await for_ever()

    task = asyncio.create_task(hanging())
    await asyncio.sleep(0)
    assert await cancel_once([task], within=0.01) == []
    assert task.cancelled()


async def test_each_step_is_taken_after_a_failure() -> None:
    taken = list[int]()

    async def step(number: int) -> None:
        taken.append(number)
        if number:
            raise ValueError(str(number))

    with pytest.raises(ValueError, match="1"):
        await in_turn(step(0), step(1), step(2), step(0))
    assert taken == [0, 1, 2, 0]


async def test_each_step_is_taken_when_their_owner_is_cancelled() -> None:
    taken = list[str]()

    async def failing() -> None:
        taken.append("failing")
        raise OSError

    async def last() -> None:
        taken.append("last")

    task = asyncio.create_task(in_turn(failing(), for_ever(), last()))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()
    assert taken == ["failing", "last"]


def test_steps_are_closed_with_their_owner() -> None:
    """As when its event loop has gone: nothing can wait for them."""
    closed = list[str]()

    async def waiting() -> None:
        try:
            await Forever()
        finally:
            closed.append("waiting")

    async def last() -> None:
        closed.append("taken")

    left = last()
    owner = in_turn(waiting(), left)
    owner.send(None)
    owner.close()
    assert closed == ["waiting"]
    assert inspect.getcoroutinestate(left) == inspect.CORO_CLOSED


@pytest.mark.parametrize("ending", [end, wait])
async def test_standstill_of_the_process_is_no_time_to_end_in(ending: Callable[..., Awaitable[object]]) -> None:
    """As if the process was stopped just when its tasks were about to end: they need a moment more of it."""
    stood_still = asyncio.Event()

    async def about_to_end() -> None:
        try:
            await stood_still.wait()
        finally:
            for _ in range(5):
                await asyncio.sleep(0)

    def stand_still() -> None:
        time.sleep(1.3)
        stood_still.set()

    task = asyncio.create_task(about_to_end(), name="about to end")
    asyncio.get_running_loop().call_soon(stand_still)
    assert await ending([task], within=1.2) == []


async def test_timeout_is_no_cancellation() -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0):
            await contained(for_ever())
    assert not is_cancelled()


async def test_keyboard_interrupt_is_not_caught() -> None:
    with pytest.raises(KeyboardInterrupt):
        raise_if_cancelled(KeyboardInterrupt())


@pytest.mark.parametrize("swallow", [True, False])
async def test_cancelled_task_ends_despite_another_error(swallow: bool) -> None:
    rounds = 0

    async def loop(step: Callable[[], Awaitable[None]]) -> None:
        nonlocal rounds
        while True:
            rounds += 1
            try:
                await step()
            except BaseException as error:
                raise_if_cancelled(error)

    async def step() -> None:
        try:
            await for_ever()
        except asyncio.CancelledError:
            if swallow:
                raise OSError("the rollback failed") from None
            raise

    task = asyncio.create_task(loop(step))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()
    assert rounds == 1


async def test_task_cancelled_before_its_beginning_leaves_no_warning(recwarn: pytest.WarningsRecorder) -> None:
    async def break_off() -> None:
        async with Crew() as tasks:
            tasks.create_task(for_ever(), name="never begun")
            raise LookupError

    with pytest.raises(LookupError):
        await break_off()
    gc.collect()
    assert not recwarn.list
