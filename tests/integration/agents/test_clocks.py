"""Nodes whose clock is hours off: the database's clock decides what is due, late, or too old for another attempt."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import pytest

from durable import Bus, Retry, message
from durable.clock import SystemClock
from tests.failure.waiting import eventually
from tests.support.tables import Tables


@message("clocks.placed")
@dataclass
class Placed:
    name: str


def clock_is_off(monkeypatch: pytest.MonkeyPatch, by: timedelta) -> None:
    monkeypatch.setattr(SystemClock, "now", lambda _: datetime.now(UTC) + by)


@pytest.mark.parametrize("hours", [-6, 6])
async def test_node_handles_messages_of_others_by_the_clock_of_the_database(
    tables: Tables, monkeypatch: pytest.MonkeyPatch, hours: int
) -> None:
    bus, attempts = Bus("shop", tables.url, poll_interval="50ms"), Counter[str]()

    @bus.handles(Placed, retry=Retry(immediate=0, delays=["50ms"], max_age="1h"))
    async def handle(placed: Placed) -> None:
        attempts[placed.name] += 1
        if attempts[placed.name] == 1:
            raise ValueError

    async with bus.unit_of_work():
        bus.send(Placed("young"))
        bus.send(Placed("due soon"), delay="200ms")
        bus.send(Placed("with a deadline"), deliver_by=timedelta(hours=1))
        bus.send(Placed("late"), deliver_by=timedelta(milliseconds=1))
        bus.send(Placed("due tomorrow"), delay="24h")
    await bus.runtime.stop()
    clock_is_off(monkeypatch, timedelta(hours=hours))
    async with bus:
        await eventually(lambda: tables.count("envelope_history") == 4)
    outcomes = dict(tables.rows("SELECT outcome, count(*) FROM durable.envelope_history GROUP BY outcome"))
    assert outcomes == {"handled": 3, "expired": 1}
    assert attempts == {"young": 2, "due soon": 2, "with a deadline": 2}
    assert tables.count("dead_letters") == 0
    assert tables.count("incoming_envelopes") == 1
