"""Durable ships messages: from committed outbox rows of one process to stored inbox rows of another."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from durable import Bus
from durable.envelope import ANY_NODE
from durable.settings import load_settings
from durable.storage import outbox
from durable.telemetry import Event
from tests.benchmarks import floor
from tests.benchmarks.floor import Note
from tests.benchmarks.racing import Arrived, Contender, Race, Ship, Start, until
from tests.benchmarks.rows import Counts, counting


@asynccontextmanager
async def sender(race: Race) -> AsyncIterator[Ship]:
    """A node that runs when the rows are committed: it is woken, and claims them."""
    bus = Bus("sender", settings=load_settings(database_url=race.sender_url, **race.settings))
    bus.route(Note, to=race.destination)
    destination = bus.runtime.transports.resolve(race.destination, floor.MESSAGE_TYPE)
    counters = bus.runtime.counters

    async def ship(count: int, start: Start) -> Counts:
        sent = [outbox.Sent(envelope, None, ANY_NODE) for envelope in floor.envelopes(count, destination)]
        before = counters[Event.SENT]
        with counting(bus.runtime.database.engine) as counts:
            async with bus.runtime.sessions.engine.begin() as conn:
                await conn.run_sync(outbox.store, bus.settings.db_schema, sent)
                start()
            await bus.runtime.database.transaction(outbox.wake_nodes)  # as each unit of work does after its commit
            await until(lambda: counters[Event.SENT] - before >= count)
        return counts

    async with bus:
        yield ship


@asynccontextmanager
async def receiver(race: Race) -> AsyncIterator[Arrived]:
    """A node whose handler is at its first message for ever: arrival is what is measured."""
    bus = Bus("receiver", settings=load_settings(database_url=race.receiver_url, drain_timeout=0.1, **race.settings))

    @bus.handles(Note, concurrency=1)
    async def wait(note: Note) -> None:
        await asyncio.Event().wait()

    bus.listen(race.destination)
    async with bus:
        yield lambda: bus.runtime.counters[Event.RECEIVED]


DURABLE = Contender(sender, receiver)
