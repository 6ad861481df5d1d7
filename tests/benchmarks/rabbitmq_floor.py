"""Plain aio-pika: persistent messages, published mandatory and with confirms to a quorum queue, and acked one by one.

ALONE     the same bodies, OUTSTANDING unconfirmed at once, and nobody looks into them
STORED    with the database at both ends: claimed and deleted here; there whatever has gathered is stored by one
          statement and then acked
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from uuid import UUID

import aio_pika
from aio_pika import DeliveryMode
from aio_pika.abc import AbstractChannel, AbstractExchange, AbstractIncomingMessage

from durable.envelope import Envelope
from durable.settings import Settings
from tests.benchmarks import floor
from tests.benchmarks.racing import Arrived, Contender, Race, Ship, Start
from tests.benchmarks.rows import Counts

OUTSTANDING = 100
PREFETCH = Settings().prefetch


@asynccontextmanager
async def _send_alone(race: Race) -> AsyncIterator[Ship]:
    async with _channel(race) as channel:

        async def ship(count: int, start: Start) -> Counts:
            messages = iter([message_of(envelope) for envelope in floor.envelopes(count)])
            start()
            await _publish(channel.default_exchange, _queue(race), messages)
            return Counts()

        yield ship


@asynccontextmanager
async def _send_stored(race: Race) -> AsyncIterator[Ship]:
    async with _channel(race) as channel, floor.open_pool(race.sender_url) as pool:

        async def send(envelopes: Sequence[Envelope]) -> None:
            await _publish(channel.default_exchange, _queue(race), map(message_of, envelopes))

        async def ship(count: int, start: Start) -> Counts:
            await floor.fill_outbox(pool, floor.envelopes(count, race.destination))
            start()
            await floor.ship_by(send, pool, race.destination)
            return Counts()

        yield ship


async def _publish(exchange: AbstractExchange, queue: str, messages: Iterable[aio_pika.Message]) -> None:
    remaining = iter(messages)

    async def publish_each() -> None:
        for message in remaining:
            await exchange.publish(message, queue, mandatory=True)

    await asyncio.gather(*(publish_each() for _ in range(OUTSTANDING)))


@asynccontextmanager
async def _take_alone(race: Race) -> AsyncIterator[Arrived]:
    arrived = 0

    async def take(delivered: AbstractIncomingMessage) -> None:
        nonlocal arrived
        arrived += 1
        await delivered.ack()

    async with _channel(race) as channel:
        await _consume(channel, race, take)
        yield lambda: arrived


@asynccontextmanager
async def _store(race: Race) -> AsyncIterator[Arrived]:
    arrived = 0
    waiting: list[AbstractIncomingMessage] = []
    came = asyncio.Event()

    async def take(delivered: AbstractIncomingMessage) -> None:
        waiting.append(delivered)
        came.set()

    async def store(pool: floor.Pool) -> None:
        nonlocal arrived
        while await came.wait():
            came.clear()
            taken = waiting[:]
            waiting.clear()
            await floor.receive(pool, [_envelope(delivered) for delivered in taken])
            arrived += len(taken)
            for delivered in taken:
                await delivered.ack()

    async with _channel(race) as channel, floor.open_pool(race.receiver_url) as pool, asyncio.TaskGroup() as tasks:
        storing = tasks.create_task(store(pool), name="store")
        await _consume(channel, race, take)
        yield lambda: arrived
        storing.cancel()


async def _consume(
    channel: AbstractChannel, race: Race, take: Callable[[AbstractIncomingMessage], Awaitable[None]]
) -> None:
    await channel.set_qos(prefetch_count=PREFETCH)
    queue = await channel.declare_queue(_queue(race), durable=True, arguments={"x-queue-type": "quorum"})
    await queue.consume(take)


@asynccontextmanager
async def _channel(race: Race) -> AsyncIterator[AbstractChannel]:
    connection = await aio_pika.connect(race.settings["amqp_url"])
    async with connection, connection.channel(on_return_raises=True) as channel:
        yield channel


def _queue(race: Race) -> str:
    return race.destination.rpartition("/")[2]


def message_of(envelope: Envelope) -> aio_pika.Message:
    return aio_pika.Message(
        envelope.body,
        message_id=str(envelope.id),
        type=envelope.message_type,
        app_id=envelope.source,
        correlation_id=str(envelope.correlation_id),
        content_type=envelope.content_type,
        timestamp=envelope.sent_at,
        delivery_mode=DeliveryMode.PERSISTENT,
    )


def _envelope(delivered: AbstractIncomingMessage) -> Envelope:
    assert delivered.timestamp is not None
    return Envelope(
        id=UUID(delivered.message_id),
        message_type=str(delivered.type),
        destination="",
        source=str(delivered.app_id),
        correlation_id=UUID(delivered.correlation_id),
        content_type=str(delivered.content_type),
        body=delivered.body,
        sent_at=delivered.timestamp,
    )


ALONE = Contender(_send_alone, _take_alone)
STORED = Contender(_send_stored, _store)
