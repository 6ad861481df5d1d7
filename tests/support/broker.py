"""A foreign AMQP client: what a program that does not know durable does on a broker.

async with foreign(broker.url) as client:
    await client.declare(name, type="quorum")
    await client.publish(name, b'{"id": 1}', content_type="application/json", headers={"n": 1})
    message = await client.get(name)
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aio_pika
from aio_pika.abc import AbstractChannel, AbstractConnection, AbstractIncomingMessage
from aio_pika.exceptions import ChannelNotFoundEntity, DeliveryError

PATIENCE = 10.0


class Foreign:
    """One connection; each call has a channel of its own, so that a refusal spoils nothing else."""

    def __init__(self, connection: AbstractConnection) -> None:
        self.connection = connection

    async def declare(self, queue: str, *, type: str = "classic", **arguments: object) -> None:
        """Declare a durable queue; further arguments as in `max_length=5`, written `x-max-length`."""
        table = {"x-queue-type": type} | {f"x-{name.replace('_', '-')}": value for name, value in arguments.items()}
        async with self._channel() as channel:
            await channel.declare_queue(queue, durable=True, arguments=table)  # type: ignore[arg-type]

    async def bind(self, queue: str, exchange: str, routing_key: str, *, type: str = "topic") -> None:
        """Bind the queue to an exchange, which is declared when it is missing."""
        async with self._channel() as channel:
            await channel.declare_exchange(exchange, type, durable=True)
            await (await channel.get_queue(queue)).bind(exchange, routing_key)

    async def publish(self, routing_key: str, body: bytes, *, exchange: str = "", **properties: object) -> None:
        """Publish one message, persistent unless said otherwise; return once the broker has confirmed it.

        Properties are those of aio_pika.Message. Raises aio_pika's DeliveryError when no queue takes it.
        """
        message = aio_pika.Message(body, **({"delivery_mode": 2} | properties))  # type: ignore[arg-type]
        async with self._channel() as channel:
            target = await channel.get_exchange(exchange, ensure=False) if exchange else channel.default_exchange
            await target.publish(message, routing_key, timeout=PATIENCE)

    async def routes(self, exchange: str, routing_key: str) -> bool:
        """Publish a message there that is always the same; False when no queue takes it, or there is no exchange."""
        try:
            await self.publish(routing_key, b"{}", exchange=exchange, message_id="17")
        except (ChannelNotFoundEntity, DeliveryError):
            return False
        return True

    async def get(self, queue: str) -> AbstractIncomingMessage | None:
        """Take the first message off the queue; None when there is none."""
        async with self._channel() as channel:
            found = await channel.get_queue(queue, ensure=False)
            return await found.get(no_ack=True, fail=False, timeout=PATIENCE)

    async def drain(self, queue: str) -> list[AbstractIncomingMessage]:
        """Take all messages off the queue, in their order."""
        messages = []
        while message := await self.get(queue):
            messages.append(message)
        return messages

    async def count(self, queue: str) -> int:
        """How many messages wait in the queue; those that a consumer holds unacknowledged are not among them."""
        async with self._channel() as channel:
            found = await channel.declare_queue(queue, passive=True)
            return found.declaration_result.message_count or 0

    async def consumers(self, queue: str) -> int:
        async with self._channel() as channel:
            found = await channel.declare_queue(queue, passive=True)
            return found.declaration_result.consumer_count or 0

    async def exists(self, queue: str) -> bool:
        try:
            await self.count(queue)
        except ChannelNotFoundEntity:
            return False
        return True

    async def purge(self, queue: str) -> None:
        async with self._channel() as channel:
            await (await channel.get_queue(queue, ensure=False)).purge()

    async def delete(self, *names: str) -> None:
        """Delete the queues and exchanges of these names, as far as there are any."""
        for name in names:
            async with self._channel() as channel:
                await channel.queue_delete(name)
                await channel.exchange_delete(name)

    @asynccontextmanager
    async def _channel(self) -> AsyncIterator[AbstractChannel]:
        async with asyncio.timeout(PATIENCE), await self.connection.channel(on_return_raises=True) as channel:
            yield channel


@asynccontextmanager
async def foreign(url: str) -> AsyncIterator[Foreign]:
    """A client that is connected to this broker."""
    async with await aio_pika.connect(url, timeout=PATIENCE) as connection:
        yield Foreign(connection)
