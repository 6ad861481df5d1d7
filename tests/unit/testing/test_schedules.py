"""Schedules, and what waits for its time, on a bus in memory."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta

import msgspec
import pytest

from durable import Bus, Context, Reject, message
from durable.errors import InvalidMessage, InvalidSetting
from durable.testing import InMemoryBus, ManualClock

BEGIN = datetime(2030, 3, 1, 12, 30, tzinfo=UTC)
HOUR = timedelta(hours=1)
BILLING = "tcp://127.0.0.1:1"


@message("memory.chime")
class Chime(msgspec.Struct):
    hour: int = 0


@pytest.fixture
def bus() -> Bus:
    bus = Bus("clock")
    bus.every("0 * * * *", lambda at: Chime(at.hour), name="hours")
    return bus


@pytest.fixture
def heard(bus: Bus) -> list[int]:
    heard: list[int] = []

    @bus.handles(Chime)
    async def hear(chime: Chime, ctx: Context) -> None:
        heard.append(chime.hour)

    return heard


@pytest.fixture
async def memory(bus: Bus, heard: list[int]) -> AsyncIterator[InMemoryBus]:
    async with InMemoryBus(bus, clock=ManualClock(BEGIN)) as memory:
        yield memory


async def pass_time(memory: InMemoryBus, by: timedelta) -> None:
    memory.clock.advance(by)
    await memory.drain()


class TestSchedules:
    async def test_every_passed_occurrence_runs_in_order(self, memory: InMemoryBus, heard: list[int]) -> None:
        await memory.drain()
        assert heard == []
        await pass_time(memory, 3 * HOUR)
        assert heard == [13, 14, 15]
        await pass_time(memory, HOUR / 4)
        assert heard == [13, 14, 15]
        assert {e.headers["schedule"] for e in memory.envelopes(Chime)} == {"hours"}

    async def test_schedule_keeps_its_local_hour_when_clocks_change(self, heard: list[int], bus: Bus) -> None:
        bus.application.schedules.clear()
        bus.every("30 2 * * *", lambda at: Chime(at.hour), name="nights", tz="Europe/Vienna")
        async with InMemoryBus(bus, clock=ManualClock(datetime(2025, 10, 25, tzinfo=UTC))) as memory:
            await pass_time(memory, timedelta(days=3))
        assert heard == [0, 0, 1]

    async def test_schedule_is_run_now_moved_paused_and_resumed(
        self, memory: InMemoryBus, bus: Bus, heard: list[int]
    ) -> None:
        assert await bus.run_schedule("hours")
        await memory.drain()
        assert heard == [12]
        assert await bus.reschedule_next("hours", delay=60)
        await pass_time(memory, timedelta(minutes=2))
        assert heard == [12, 13]
        await bus.pause(schedule="hours")
        await pass_time(memory, 2 * HOUR)
        assert await bus.resume(schedule="hours")
        assert not await bus.resume(schedule="hours")
        await pass_time(memory, HOUR)
        assert heard == [12, 13, 15]
        assert not await bus.run_schedule("minutes")

    async def test_failing_occurrence_prevents_no_other_and_no_run_by_hand(self, bus: Bus, heard: list[int]) -> None:
        def make(at: datetime) -> Chime:
            if at.hour == 14:
                raise LookupError("no rates on a holiday")
            return Chime(at.hour)

        bus.application.schedules.clear()
        bus.every("0 * * * *", make, name="hours")
        async with InMemoryBus(bus, clock=ManualClock(BEGIN)) as memory:
            memory.clock.advance(4 * HOUR)
            assert await bus.run_schedule("hours")
            with pytest.raises(LookupError, match="on a holiday"):
                await memory.drain()
            await memory.drain()
        assert heard == [13, 15, 16, 16]

    async def test_pause_of_an_unknown_schedule_is_refused(self, memory: InMemoryBus, bus: Bus) -> None:
        with pytest.raises(
            InvalidSetting, match="schedule 'huors' is neither declared nor stored; did you mean 'hours'"
        ):
            await bus.pause(schedule="huors")
        assert not await bus.resume(schedule="huors")

    async def test_each_run_by_hand_is_a_message_though_the_clock_stands(
        self, bus: Bus, memory: InMemoryBus, heard: list[int]
    ) -> None:
        for count in (1, 2, 3):
            assert await bus.run_schedule("hours")
            await memory.drain()
            assert heard == [12] * count
        assert not await bus.reschedule_next("minutes", delay=1)

    async def test_too_long_advance_of_the_clock_is_refused(self, memory: InMemoryBus) -> None:
        memory.clock.advance(timedelta(days=1_000))
        with pytest.raises(AssertionError, match="advance less, and drain"):
            await memory.drain()


class TestMessages:
    async def test_scheduled_message_can_be_cancelled_moved_or_run_now(
        self, memory: InMemoryBus, bus: Bus, heard: list[int]
    ) -> None:
        async with bus.unit_of_work():
            gone, now, later = (bus.send(Chime(number), delay=60) for number in (1, 2, 3))
            far = bus.send(Chime(4), to=BILLING, delay=60)
        assert await bus.cancel(gone)
        assert not await bus.cancel(gone)
        assert await bus.run_now(now)
        assert await bus.reschedule(later, delay=120)
        with pytest.raises(InvalidMessage, match="too old for its receiver"):
            await bus.reschedule(far, delay=timedelta(days=8))
        await pass_time(memory, timedelta(seconds=90))
        assert heard == [2]
        await pass_time(memory, timedelta(seconds=40))
        assert heard == [2, 3]

    async def test_expired_dead_letter_is_handled_when_replayed(self) -> None:
        bus, attempts = Bus("late"), []

        @bus.handles(Chime)
        async def hear(chime: Chime, ctx: Context) -> None:
            attempts.append(ctx.deliver_by)
            if len(attempts) == 1:
                raise Reject("not yet")

        async with InMemoryBus(bus, clock=ManualClock(BEGIN)) as memory:
            async with bus.unit_of_work():
                bus.send(Chime(), deliver_by=HOUR)
            await memory.drain()
            memory.clock.advance(2 * HOUR)
            memory.replay()
            await memory.drain()
        assert attempts == [BEGIN + HOUR, None]
        assert memory.expired == []
