"""The works whose costs are counted, each with nodes that poll so seldom that nothing else is in the counts.

    store      units of work, each with a send
    handle     rows that wait in an inbox: groups by one runner of a handler, so that each is full
    ship       rows that wait in an outbox, until they are in the inbox of a peer and deleted; both sides are counted

Some messages go ahead to warm up, so that connections and prepared statements are there.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import psycopg
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession

from durable import Bus
from durable.embedded import Embedded, postgres, rabbitmq
from durable.settings import load_settings
from durable.telemetry import Event
from tests.benchmarks import contests, filling, floor
from tests.benchmarks.contests import Contest
from tests.benchmarks.costs.comparing import MessageCost
from tests.benchmarks.costs.metering import metering
from tests.benchmarks.databases import Databases
from tests.benchmarks.floor import Note
from tests.benchmarks.racing import until

COUNT: Final = 2_000
WARM_UP: Final = 200
SINGLY: Final = 2
"""Works with a transaction for each message have so many times fewer of them: they take longer, and vary less."""
NETWORKS: Final = ("tcp", "http")

_SELDOM: Final = timedelta(hours=1)
_QUIET: Final[dict[str, Any]] = {
    **dict.fromkeys(("poll_interval", "sweep_interval", "heartbeat_interval", "maintenance_interval"), _SELDOM),
    "forgotten_after": _SELDOM,
    "heartbeat_stale": 3 * _SELDOM,
    "drain_timeout": timedelta(seconds=0.1),
    "buffer_size": 10 * COUNT,
}
_SERVER: Final = {
    "full_page_writes": "off",
    "autovacuum": "off",
    "checkpoint_timeout": "1d",
    "fsync": "off",
    "synchronous_commit": "off",
}
"""So that WAL depends neither on the time of a checkpoint nor on that of a vacuum, and nothing waits for a disk."""

Handler = Callable[..., Awaitable[None]]


def measure(count: int = COUNT, *, with_rabbitmq: bool = False) -> list[MessageCost]:
    """Count the costs of each work, over so many messages."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        databases = Databases(stack.enter_context(_quiet_server(folder)))
        broker = stack.enter_context(rabbitmq(folder / "rabbitmq")) if with_rabbitmq else None
        networks = [contests.of(name, None) for name in NETWORKS]
        if broker is not None:
            networks.append(contests.of("rabbitmq", broker))
        return asyncio.run(_measure(databases, networks, count))


async def _measure(databases: Databases, networks: Sequence[Contest], count: int) -> list[MessageCost]:
    return [
        await _store(databases, count // SINGLY),
        *await _handle(databases, count // SINGLY, "handle, a transaction each", _take, max_batch=1),
        *await _handle(databases, count, "handle, max_batch=100", _take, max_batch=100),
        *await _handle(databases, count, "handle, max_batch=100 as a list", _take_list, max_batch=100),
        *[await _ship(databases, count, network) for network in networks],
    ]


async def _store(databases: Databases, count: int) -> MessageCost:
    url = databases.fresh()
    bus = Bus("bench", url, pool_size=floor.CONNECTIONS)
    bus.route(Note, to=floor.DESTINATION)
    await _send(bus, WARM_UP)
    with metering(url, [bus.runtime.sessions.engine]) as meter:
        await _send(bus, count)
    await bus.runtime.stop()
    return meter.cost("store a send in a unit of work", count)


async def _send(bus: Bus, count: int) -> None:
    numbers = iter(range(count))

    async def work() -> None:
        for number in numbers:
            async with bus.unit_of_work():
                bus.send(Note(number, "x" * 256))

    await asyncio.gather(*(work() for _ in range(floor.CONNECTIONS)))
    await asyncio.sleep(0)  # the driver tells of its last commands in the next turn of the loop


async def _handle(
    databases: Databases, count: int, name: str, handler: Handler, *, max_batch: int
) -> Sequence[MessageCost]:
    """Count all of it for a message, and the handlers' transactions for a batch: another statement in these would be
    lost in the variation of what the agents do for a message.
    """
    url = databases.fresh()
    bus = Bus("bench", settings=load_settings(database_url=url, **_QUIET))
    bus.handles(Note, max_batch=max_batch, concurrency=floor.CONNECTIONS if max_batch == 1 else 1)(handler)
    counters = bus.runtime.counters

    async def handle(messages: int) -> None:
        done = counters[Event.HANDLED] + messages
        filling.wake(url)
        await until(lambda: counters[Event.HANDLED] >= done)

    async with bus:
        filling.fill_inbox(url, WARM_UP)
        await handle(WARM_UP)
        filling.fill_inbox(url, count)
        handlers = bus.runtime.sessions.engine
        with metering(url, _engines(bus)) as meter, metering(url, [handlers]) as of_handlers:
            await handle(count)
    batch = of_handlers.cost(f"{name}: the handlers' part of a batch", count // max_batch)
    return [meter.cost(name, count), batch]


async def _ship(databases: Databases, count: int, network: Contest) -> MessageCost:
    url, peers_url = databases.fresh(), databases.fresh()
    address = network.make_destination()
    sender = Bus("sender", settings=load_settings(database_url=url, **_QUIET, **network.settings))
    receiver = Bus("receiver", settings=load_settings(database_url=peers_url, **_QUIET, **network.settings))
    sender.route(Note, to=address)
    destination = sender.runtime.transports.resolve(address, floor.MESSAGE_TYPE)
    receiver.listen(address)
    receiver.handles(Note, concurrency=1)(_wait)
    arrived, sent = receiver.runtime.counters, sender.runtime.counters

    async def ship(messages: int) -> None:
        done = sent[Event.SENT] + messages
        filling.wake(url)
        await until(lambda: min(sent[Event.SENT], arrived[Event.RECEIVED]) >= done)

    async with receiver, sender:
        filling.fill_outbox(url, WARM_UP, destination)
        await ship(WARM_UP)
        filling.fill_outbox(url, count, destination)
        with metering(url, [*_engines(sender), *_engines(receiver)]) as meter:
            await ship(count)
    return meter.cost(f"outbox to peer's inbox over {network.name}", count)


def _engines(bus: Bus) -> list[AsyncEngine]:
    return [bus.runtime.sessions.engine, bus.runtime.database.engine]


async def _take(note: Note, session: AsyncSession) -> None:
    """Do nothing: the costs are durable's own."""


async def _take_list(notes: list[Note], session: AsyncSession) -> None:
    """Do nothing, for many at once."""


async def _wait(note: Note) -> None:
    """Stay with the first message: arrival is what is measured."""
    await asyncio.Event().wait()


@contextmanager
def _quiet_server(folder: Path) -> Iterator[Embedded]:
    with postgres(folder / "postgres") as server:
        with psycopg.connect(server.uri(), autocommit=True) as conn:
            for name, value in _SERVER.items():
                conn.execute(f"ALTER SYSTEM SET {name} = '{value}'".encode())
            conn.execute("SELECT pg_reload_conf()")
        yield server
