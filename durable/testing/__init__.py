"""Tests of applications, without a database: a bus in memory that behaves as the real one does.

    async with InMemoryBus(bus) as memory:
        async with bus.unit_of_work():
            bus.send(OrderPlaced(17))
        await memory.drain()
        assert memory.sent(ReservationMade) == [ReservationMade(17)]

The bus keeps its declarations; handlers, units of work, retries and dead letters work as they do on Postgres, which
one suite of contract tests holds both to. Nothing waits: time is a clock that the test advances.

`bus.use(Chaos(fail=0.2, crash=0.01))` lets things go wrong by chance, in memory and on a database.

Tests of transports are in `durable.testing.transports`, which needs pytest.
"""

from durable.testing.bus import InMemoryBus
from durable.testing.chaos import Chaos, ChaosError
from durable.testing.clock import ManualClock
from durable.testing.rows import DeadLetter, Expired, Handled, Scheduled
from durable.testing.waiting import eventually

__all__ = [
    "Chaos",
    "ChaosError",
    "DeadLetter",
    "Expired",
    "Handled",
    "InMemoryBus",
    "ManualClock",
    "Scheduled",
    "eventually",
]
