"""Answers between two services on Postgres: restarts, rollbacks, retention, many at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any
from uuid import UUID

import msgspec
import pytest

from durable import Bus, Context, InvalidMessage, InvalidSetting, Retry, UnknownMessage, message, upcaster
from durable.embedded import Embedded
from durable.embedded.ports import free_port
from durable.envelope import new_id
from durable.recovery.maintenance import maintain
from durable.testing import eventually
from tests.conftest import fresh_databases
from tests.support.tables import Tables

SOON = 30  # seconds; no measure


@message("answering.ask")
class Ask(msgspec.Struct):
    number: int


@message("answering.told")
class Told(msgspec.Struct):
    number: int


@message("answering.told", version=2)
class ToldTwice(msgspec.Struct):
    number: int
    again: int


@upcaster(Told, to=ToldTwice)
def twice(told: Told) -> ToldTwice:
    return ToldTwice(told.number, told.number)


class Two:
    """A service that asks and one that answers, each on its own database."""

    def __init__(self, asking: Tables, answering: str) -> None:
        self.tables = asking
        self._answering = answering
        self._asks_at, self._answers_at = (f"tcp://127.0.0.1:{free_port()}" for _ in range(2))
        self.attempts: Counter[int] = Counter()

    def asking(self, **options: Any) -> Bus:
        bus = Bus("asking", self.tables.url, poll_interval=timedelta(milliseconds=30), **options)
        bus.route(Ask, to=self._answers_at)
        bus.listen(self._asks_at)
        bus.expects(Told, at=self._asks_at)
        return bus

    def answering(self) -> Bus:
        bus = Bus("answering", self._answering, poll_interval=timedelta(milliseconds=30), answer_to=[self._asks_at])
        bus.listen(self._answers_at)

        @bus.handles(Ask, retry=Retry(immediate=1, delays=[]))
        async def answer(ask: Ask, ctx: Context) -> None:
            ctx.reply(Told(ask.number * 2))
            self.attempts[ask.number] += 1
            if ask.number < 0 and self.attempts[ask.number] == 1:
                raise RuntimeError("at first")

        return bus


@pytest.fixture
def two(tables: Tables, servers: Callable[[int], Embedded]) -> Iterator[Two]:
    with fresh_databases(servers(18)) as databases:
        yield Two(tables, databases("answering"))


async def requested(bus: Bus, *numbers: int, **options: Any) -> list[UUID]:
    async with bus.unit_of_work() as uow:
        return [uow.request(Ask(number), Told, **options) for number in numbers]


async def test_answer_comes_to_a_node_started_after_the_request(two: Two) -> None:
    async with two.asking() as first:
        [request] = await requested(first, 21)
    async with two.answering(), two.asking() as second:
        assert await second.wait_for(request, Told, timeout=SOON) == Told(42)
        assert (await second.wait_for(request, timeout=SOON)).outcome == "sent"
    async with two.asking(mode="send-only") as third:
        assert await third.wait_for(request, Told, timeout=SOON) == Told(42)


AWAITED: dict[str, tuple[Sequence[type], object]] = {
    "its class": ([Told], Told(42)),
    "a newer class": ([ToldTwice], ToldTwice(42, 42)),
    "both": ([ToldTwice, Told], Told(42)),
    "its class among others": ([Ask, Told], Told(42)),
}


@pytest.mark.parametrize(("classes", "answer"), AWAITED.values(), ids=AWAITED)
async def test_answer_is_told_to_a_bus_with_only_the_same_settings(
    two: Two, classes: Sequence[type], answer: object
) -> None:
    async with two.answering(), two.asking() as bus:
        [request] = await requested(bus, 21)
        async with Bus("asking", two.tables.url, mode="send-only") as own:
            assert await own.wait_for(request, *classes, timeout=SOON) == answer
            with pytest.raises(InvalidMessage, match=r"of type answering\.told, not answering\.ask; wait for it"):
                await own.wait_for(request, Ask, timeout=SOON)


async def test_answer_of_a_failed_attempt_is_not_sent(two: Two) -> None:
    async with two.answering(), two.asking() as bus:
        [request] = await requested(bus, -4)
        assert await bus.wait_for(request, Told, timeout=SOON) == Told(-8)
        assert two.attempts == {-4: 2}
        assert two.tables.count("answers") == 1


async def test_many_requests_are_answered_each_with_its_own(two: Two) -> None:
    numbers = range(1, 301)
    async with two.answering(), two.asking() as bus:
        requests = await requested(bus, *numbers)
        answers = [await bus.wait_for(request, Told, timeout=SOON) for request in requests]
    assert [answer.number for answer in answers] == [2 * number for number in numbers]


async def test_answer_is_kept_for_its_retention(two: Two) -> None:
    async with two.answering(), two.asking() as bus:
        kept, old = await requested(bus, 1, 2)
        for request in (kept, old):
            await bus.wait_for(request, Told, timeout=SOON)
        aged = "UPDATE durable.answers SET kept_at = kept_at - interval '8 days' WHERE request_id = %s"
        two.tables.execute(aged, old)
        await maintain(bus.runtime.database, bus.settings)
        assert two.tables.rows("SELECT request_id FROM durable.answers") == [kept]


async def test_answers_of_other_endpoints_leave_the_first_in_place(two: Two) -> None:
    async with two.answering(), two.asking() as bus:
        [request] = await requested(bus, 5)
        await bus.wait_for(request, Told, timeout=SOON)
        async with bus.unit_of_work() as uow:
            uow.send(Told(0), to="local", headers={"in-reply-to": str(request)})
        await eventually(lambda: two.tables.count("answers") == 2)
        assert await bus.wait_for(request, Told, timeout=SOON) == Told(10)


async def test_request_in_scope_is_stored_with_its_unit_of_work(two: Two) -> None:
    async with two.answering(), two.asking() as bus:
        async with bus.unit_of_work() as uow:
            dropped = bus.request(Ask(1), Told)
            await uow.session.rollback()
        async with bus.unit_of_work():
            stored = bus.request(Ask(2), Told)
        assert await bus.wait_for(stored, Told, timeout=SOON) == Told(4)
        with pytest.raises(UnknownMessage):
            await bus.wait_for(dropped, Told, timeout=SOON)


async def test_impossible_arguments_are_refused(two: Two) -> None:
    bus = two.asking()
    with pytest.raises(InvalidSetting, match="no transport has this scheme"):
        bus.expects(Ask, at="carrier-pigeon://roof")
    async with bus:
        with pytest.raises(InvalidSetting, match="wait_for: answers="):
            await bus.wait_for(new_id(), "Told")  # type: ignore[call-overload]
        with pytest.raises(InvalidSetting, match="above 0"):
            await bus.wait_for(new_id(), Told, timeout=0)
