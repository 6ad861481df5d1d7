"""Messages that have passed leave nothing in memory, whichever way they went."""

from __future__ import annotations

import asyncio
import gc
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import msgspec
import pytest
from sqlalchemy import Engine, text
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from durable import Bus, Context, Reject, Retry, message, telemetry
from durable.testing import eventually
from durable.transports.memory import MemoryTransport
from tests.support.tables import Tables

ROUND = 40
OFTEN = ROUND // 2
"""What is there so many times more after another round is left behind by each message."""
OWNERS = ("durable.", "sqlalchemy.", __name__)
"""Modules whose objects are counted: not drivers, whose connections keep prepared statements."""
SOON = Retry(immediate=0, delays=[0.01])


@message("memory.passed")
class Passed(msgspec.Struct):
    number: int


@message("memory.answered")
class Answered(msgspec.Struct):
    number: int


@message("memory.asked")
class Asked(msgspec.Struct):
    number: int


class Counting:
    """Handlers of each kind, which count what they have been given."""

    def __init__(self, url: str) -> None:
        self.bus = Bus("memory", url)
        self.bus.application.transports.append(MemoryTransport(self.bus.settings))
        self.done = 0
        self._failed: set[int] = set()

    def fails_at_first(self, number: int) -> None:
        if number not in self._failed:
            self._failed.add(number)
            raise ValueError("not yet")
        self._failed.discard(number)

    async def send(self, **options: Any) -> None:
        async with self.bus.unit_of_work():
            for number in range(ROUND):
                self.bus.send(Passed(number), **options)

    async def send_with_keys(self) -> None:
        async with self.bus.unit_of_work():
            for number in range(ROUND):
                self.bus.send(Passed(number), key=f"{self.done} {number}")


Kind = Callable[[Counting], Callable[[], Awaitable[Any]]]


def alone(it: Counting) -> Callable[[], Awaitable[Any]]:
    @it.bus.handles(Passed)
    async def handle(passed: Passed, session: AsyncSession) -> None:
        await session.execute(text("SELECT 1"))
        it.done += 1

    return it.send


def in_groups(it: Counting) -> Callable[[], Awaitable[Any]]:
    @it.bus.handles(Passed, max_batch=10)
    async def handle(passed: Passed, session: AsyncSession) -> None:
        async with session.begin_nested():
            await session.execute(text("SELECT 1"))
        it.done += 1

    return it.send


def as_lists(it: Counting) -> Callable[[], Awaitable[Any]]:
    @it.bus.handles(Passed, max_batch=100)
    async def handle(passed: list[Passed], session: AsyncSession) -> None:
        it.done += len(passed)

    return it.send


def in_threads(it: Counting) -> Callable[[], Awaitable[Any]]:
    @it.bus.handles(Passed)
    def handle(passed: Passed, session: Session) -> None:
        session.execute(text("SELECT 1"))
        it.done += 1

    return it.send


def with_keys(it: Counting) -> Callable[[], Awaitable[Any]]:
    alone(it)
    return it.send_with_keys


def ordered(it: Counting) -> Callable[[], Awaitable[Any]]:
    @it.bus.handles(Passed, ordered=True)
    async def handle(passed: Passed) -> None:
        it.done += 1

    return it.send


def failing_at_first(it: Counting) -> Callable[[], Awaitable[Any]]:
    @it.bus.handles(Passed, retry=SOON)
    async def handle(passed: Passed) -> None:
        it.fails_at_first(passed.number)
        it.done += 1

    return it.send


def dead_lettered(it: Counting) -> Callable[[], Awaitable[Any]]:
    @it.bus.handles(Passed)
    async def handle(passed: Passed) -> None:
        it.done += 1
        raise Reject("refused")

    return it.send


def delayed(it: Counting) -> Callable[[], Awaitable[Any]]:
    alone(it)
    return lambda: it.send(delay=0.05)


def sending_on(it: Counting) -> Callable[[], Awaitable[Any]]:
    @it.bus.handles(Asked)
    async def pass_on(asked: Asked, ctx: Context) -> None:
        ctx.send(Passed(asked.number))

    alone(it)

    async def send() -> None:
        async with it.bus.unit_of_work():
            for number in range(ROUND):
                it.bus.send(Asked(number))

    return send


def requested(it: Counting) -> Callable[[], Awaitable[Any]]:
    @it.bus.handles(Asked)
    async def answer(asked: Asked, ctx: Context) -> None:
        ctx.reply(Answered(asked.number))

    it.bus.expects(Answered)

    async def ask() -> None:
        async with it.bus.unit_of_work() as uow:
            ids = [uow.request(Asked(number), Answered) for number in range(ROUND)]
        await asyncio.gather(*(it.bus.wait_for(each, Answered) for each in ids))
        it.done += ROUND

    return ask


def transactions_rolled_back(it: Counting) -> Callable[[], Awaitable[Any]]:
    alone(it)

    async def give_up(number: int) -> None:
        async with it.bus.unit_of_work():
            it.bus.send(Passed(number))
            raise KeyError

    async def give_all_up() -> None:
        for number in range(ROUND):
            with pytest.raises(KeyError):
                await give_up(number)
        it.done += ROUND

    return give_all_up


def sessions_of_the_application(it: Counting) -> Callable[[], Awaitable[Any]]:
    alone(it)

    async def send() -> None:
        for number in range(ROUND):
            async with AsyncSession(it.bus.runtime.sessions.engine) as session:
                with it.bus.enlist(session):
                    it.bus.send(Passed(number))
                    await session.commit()

    return send


def sync_sessions_of_the_application(it: Counting) -> Callable[[], Awaitable[Any]]:
    alone(it)

    def send_all(engine: Engine) -> None:
        for number in range(ROUND):
            with Session(engine) as session, it.bus.enlist(session):
                it.bus.send(Passed(number))
                session.commit()

    return lambda: asyncio.to_thread(send_all, it.bus.runtime.sessions.sync_engine)


def to_another_service(it: Counting) -> Callable[[], Awaitable[Any]]:
    it.bus.listen("memory://here")
    alone(it)
    return lambda: it.send(to="memory://here")


KINDS: list[Kind] = [
    alone, in_groups, as_lists, in_threads, with_keys, ordered, failing_at_first, dead_lettered, delayed, sending_on,
    requested, transactions_rolled_back, sessions_of_the_application, sync_sessions_of_the_application,
    to_another_service,
]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
async def test_messages_leave_nothing_in_memory(tables: Tables, kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telemetry.log, "disabled", True)  # pytest keeps each record
    it = Counting(tables.url)
    send = kind(it)
    async with it.bus:
        for rounds in (1, 2):  # of these, caches are filled
            await send()
            await eventually(partial(_have_passed, it, tables, rounds * ROUND))
        before = _objects()
        await send()
        await eventually(partial(_have_passed, it, tables, 3 * ROUND))
        await eventually(lambda: not _left(before))


def _have_passed(it: Counting, tables: Tables, count: int) -> bool:
    return it.done >= count and not tables.count("incoming_envelopes") + tables.count("outgoing_envelopes")


def _left(before: Counter[str]) -> dict[str, int]:
    """Return what is there more often now, when the agents have let go of what they had last."""
    grown = {name: count - before[name] for name, count in _objects().items()}
    return {name: count for name, count in grown.items() if count >= OFTEN}


def _objects() -> Counter[str]:
    """Count the objects by the names of their types; those of asyncio are let go by and by."""
    gc.collect()
    names = (f"{type(each).__module__}.{type(each).__qualname__}" for each in gc.get_objects())
    return Counter(name for name in names if name.startswith(OWNERS))
