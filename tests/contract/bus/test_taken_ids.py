"""An id that somebody took first, with the same body: nothing is lost in silence. On Postgres and in memory alike."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from msgspec.structs import replace

from durable.envelope import Envelope
from tests.contract.bus.orders import OrderPlaced, arriving, collect
from tests.contract.bus.worlds import World

LIFE = timedelta(seconds=600)
HOUR = timedelta(hours=1)
Squat = Callable[[datetime], dict[str, Any]]
"""Times of a message that came first, claimed so that the span of its life is that of the real one."""

TAKEN: dict[str, Squat] = {
    "expired on arrival": lambda now: {"sent_at": now - HOUR, "deliver_by": now - HOUR + LIFE},
    "expired a moment ago": lambda now: {
        "sent_at": now - LIFE - timedelta(seconds=2), "deliver_by": now - timedelta(seconds=2),
    },
    "put off and sent in the future": lambda now: {
        "sent_at": now + 23 * HOUR, "deliver_by": now + 23 * HOUR + LIFE, "execution_time": now + 23 * HOUR,
    },
    "put off for ever, with a long life": lambda now: {
        "sent_at": now + 23 * HOUR, "deliver_by": now + 24 * HOUR, "execution_time": now + 47 * HOUR,
    },
    "put off beyond its life": lambda now: {
        "sent_at": now - timedelta(seconds=540), "deliver_by": now + timedelta(seconds=60),
        "execution_time": now + timedelta(seconds=90),
    },
}  # fmt: skip


def of(real: Envelope, **times: Any) -> Envelope:
    return replace(real, **{"deliver_by": None, "execution_time": None, **times})


@pytest.mark.parametrize("squat", TAKEN.values(), ids=TAKEN.keys())
@pytest.mark.parametrize("on_expiry", ["forget", "dead-letter"])
async def test_message_raises_an_alarm_when_its_id_was_taken(world: World, squat: Squat, on_expiry: str) -> None:
    numbers = collect(world.bus, OrderPlaced, on_expiry=on_expiry)
    now = datetime.now(UTC)
    real = of(arriving(), sent_at=now, deliver_by=now + LIFE)
    async with world:
        await world.arrive(of(real, **squat(now)))
        await world.arrive(real)
        await world.arrive(real)
        letters = {each.reason for each in world.dead_letters() if each.exception_type != "expired"}
    assert numbers == []
    assert letters == {"another message was received under the same id before"}


@pytest.mark.parametrize("jitter", [-0.5, 0.0, 0.5])
@pytest.mark.parametrize("life", [None, LIFE], ids=["no deadline", "ten minutes"])
async def test_repeat_of_a_handled_message_stays_a_duplicate(
    world: World, life: timedelta | None, jitter: float
) -> None:
    numbers = collect(world.bus, OrderPlaced)
    now = datetime.now(UTC)
    real = of(arriving(), sent_at=now, deliver_by=None if life is None else now + life)
    counted_anew = None if life is None else now + life + timedelta(seconds=jitter)
    async with world:
        await world.arrive(real)
        await world.arrive(replace(real, deliver_by=counted_anew))
        await world.arrive(of(real, sent_at=now + timedelta(minutes=5), deliver_by=life and now + life + HOUR / 12))
        assert world.dead_letters() == []
    assert numbers == [OrderPlaced(1)]


async def test_waiting_message_lives_as_long_as_its_duplicate(world: World) -> None:
    numbers = collect(world.bus, OrderPlaced)
    now = datetime.now(UTC)
    real = of(arriving(), sent_at=now, deliver_by=now + LIFE)
    async with world:
        await world.pause(OrderPlaced)
        soon = now + timedelta(seconds=60)
        await world.arrive(of(real, sent_at=soon - LIFE, deliver_by=soon))
        await world.arrive(real)
        await world.advance(timedelta(seconds=120))
        assert world.expired() == []
        await world.bus.resume(OrderPlaced)
        await world.settle()
        assert world.dead_letters() == []
    assert numbers == [OrderPlaced(1)]
