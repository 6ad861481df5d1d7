"""RabbitMQ at the paces of applications: publishes that wait for their confirms, and a consumer with a small prefetch.

    publish      AT_ONCE callers, each with one message, which waits until the broker has it on disk
    consume      a full queue, PREFETCH messages at once: each has its effect in the database once, and is acked

Plain aio-pika does the same on the same broker, with asyncpg where there is a database: the id of a message is stored
with its effect in one transaction, before the ack. All run in this process, in turn.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack
from itertools import count as counter
from pathlib import Path
from typing import Any, Final

import aio_pika
from aio_pika.abc import AbstractChannel, AbstractIncomingMessage
from sqlalchemy.ext.asyncio import AsyncSession

from durable import Bus
from durable.application.handlers import MaxBatch
from durable.embedded import postgres, rabbitmq
from durable.outcomes import Stored
from durable.settings import load_settings
from durable.telemetry import Event
from durable.transports.rabbitmq.topology import Queue
from durable.transports.rabbitmq.transport import RabbitTransport
from tests.benchmarks import floor, session_floor
from tests.benchmarks.databases import Databases
from tests.benchmarks.floor import Note
from tests.benchmarks.rabbitmq_floor import message_of
from tests.benchmarks.racing import until
from tests.benchmarks.rows import Row, Speed

AT_ONCE: Final = 128
PREFETCH: Final = 10
CONSUMED: Final = 20_000
_TURNS: Final = 40  # of AT_ONCE publishes
_numbers: Final[Iterator[int]] = counter()
_REMEMBER: Final = "INSERT INTO seen (id) VALUES ($1) ON CONFLICT DO NOTHING RETURNING id"

Publish = Callable[[int], Awaitable[object]]
"""Publishes the message of this number, and waits for its confirm."""


def run(rounds: int, rows: int | None) -> tuple[list[Speed], list[Row]]:
    """Return the times of publishes, and the rates of consumers."""
    count = rows or CONSUMED
    published = [Speed(f"{AT_ONCE} confirmed publishes at once: each", "aio-pika")]
    by_hand = f"aio-pika and asyncpg, prefetch {PREFETCH}: id and effect in a transaction"
    options: Sequence[tuple[str, MaxBatch]] = (("as by default", "auto"), ("max_batch=1", 1))
    consumed = [Row(f"consume, prefetch {PREFETCH}, {name}", by_hand) for name, _ in options]
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        databases = Databases(stack.enter_context(postgres(folder)))
        url = stack.enter_context(rabbitmq(folder / "rabbitmq")).url
        for _ in range(rounds):
            asyncio.run(_publish(url, published[0]))
            plain = asyncio.run(_consume_by_hand(url, databases.fresh(), count))
            for row, (_, max_batch) in zip(consumed, options, strict=True):
                row.floor = max(row.floor, plain)
                row.ours = max(row.ours, asyncio.run(_consume(url, databases.fresh(), count, max_batch)))
    return published, consumed


# ---------------------------------------------------------------- publish


async def _publish(url: str, speed: Speed) -> None:
    async with await aio_pika.connect(url) as connection, connection.channel(on_return_raises=True) as channel:
        queue = await _declare(channel)
        items = floor.envelopes(AT_ONCE, f"rabbitmq://default/queue/{queue}")
        bodies = [message_of(envelope) for envelope in items]
        exchange = channel.default_exchange

        async def plain(number: int) -> None:
            await exchange.publish(bodies[number], queue, mandatory=True)

        async with _transport(url).sender(items[0].destination) as sender:

            async def ours(number: int) -> None:
                (outcome,) = await sender.send([items[number]])
                assert isinstance(outcome, Stored), outcome

            for work in (plain, ours):  # to open what is opened at the first use
                await work(0)
            seconds, computed = await _mean(plain)
            speed.floor, speed.floor_computed = min(speed.floor, seconds), min(speed.floor_computed, computed)
            seconds, computed = await _mean(ours)
            speed.ours, speed.ours_computed = min(speed.ours, seconds), min(speed.ours_computed, computed)


async def _mean(publish: Publish) -> tuple[float, float]:
    """The seconds from a call to its return, and those that this process computes for it."""
    took = 0.0
    computed = time.process_time()

    async def timed(number: int) -> None:
        nonlocal took
        began = time.perf_counter()
        await publish(number)
        took += time.perf_counter() - began

    for _ in range(_TURNS):
        await asyncio.gather(*map(timed, range(AT_ONCE)))
    calls = _TURNS * AT_ONCE
    return took / calls, (time.process_time() - computed) / calls


# ---------------------------------------------------------------- consume


async def _consume(url: str, database: str, count: int, max_batch: MaxBatch) -> float:
    """Messages a second from the start of a node to the last effect."""
    address = await _fill(url, count)
    bus = Bus("bench", database, amqp_url=url, pool_size=floor.CONNECTIONS)
    bus.listen(f"{address}?prefetch={PREFETCH}")

    @bus.handles(Note, max_batch=max_batch, concurrency=floor.CONNECTIONS)
    async def take(note: Note, session: AsyncSession) -> None:
        await session.execute(session_floor.BUSINESS, {"number": 1})

    began = time.perf_counter()
    async with bus:
        await until(lambda: bus.runtime.counters[Event.HANDLED] >= count)
        took = time.perf_counter() - began
    return count / took


async def _consume_by_hand(url: str, database: str, count: int) -> float:
    name = (await _fill(url, count)).rpartition("/")[2]
    arrived = 0
    async with (
        floor.open_pool(database) as pool,
        await aio_pika.connect(url) as connection,
        connection.channel() as channel,
    ):
        await pool.execute("CREATE TABLE seen (id uuid PRIMARY KEY)")

        async def take(delivered: AbstractIncomingMessage) -> None:
            nonlocal arrived
            async with pool.acquire() as conn, conn.transaction():
                if await conn.fetchval(_REMEMBER, delivered.message_id):
                    await conn.execute(floor.BUSINESS, 1)
            await delivered.ack()
            arrived += 1

        await channel.set_qos(prefetch_count=PREFETCH)
        queue = await channel.get_queue(name)
        began = time.perf_counter()
        await queue.consume(take)
        await until(lambda: arrived >= count)
        return count / (time.perf_counter() - began)


async def _fill(url: str, count: int) -> str:
    """Put so many messages into a new queue; return its address."""
    async with await aio_pika.connect(url) as connection, connection.channel() as channel:
        address = f"rabbitmq://default/queue/{await _declare(channel)}"
    async with _transport(url).sender(address) as sender:
        for batch in floor.batches(floor.envelopes(count, address)):
            outcomes = await sender.send(batch)
            assert all(isinstance(outcome, Stored) for outcome in outcomes), outcomes
    return address


async def _declare(channel: AbstractChannel) -> str:
    """Declare a queue as a listener of durable does."""
    name = f"bench-{next(_numbers)}"
    arguments: dict[str, Any] = Queue(name).arguments
    await channel.declare_queue(name, durable=True, arguments=arguments)
    return name


def _transport(url: str) -> RabbitTransport:
    return RabbitTransport(load_settings(amqp_url=url), service="floor", messages=dict)
