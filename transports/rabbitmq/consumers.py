"""Consumers of some queues, a channel for each, until one of them is lost; and acknowledging what they brought.

A queue that is deleted raises nothing: the broker only sends Basic.Cancel. A channel that is closed tells those who
wait on it, of whom there may be none. Both end up in `lost`.

aiormq's basic_ack() passes through the queue of its writer message by message; here a batch does so at once, which
takes half the time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime

from aiormq.abc import DeliveredMessage
from aiormq.channel import Channel
from pamqp.commands import Basic
from pamqp.frame import marshal

from durable.envelope import Envelope
from durable.errors import ConnectionFailed, InvalidMessage, PeerTimeout, TransportError
from durable.transports.rabbitmq.arrivals import Origin, Unmappable, mapped, metadata
from durable.transports.rabbitmq.broker import CLOSING_SECONDS, Connection
from durable.transports.rabbitmq.channel import error_of, is_open, is_writable, reason_of, translated, write
from durable.transports.rabbitmq.signatures import Verifier


@dataclass(slots=True, eq=False)
class Consumer:
    """Consumer of one queue, and its channel."""

    origin: Origin
    channel: Channel
    lost: asyncio.Future[TransportError]
    """Done once another consumer may be given what this one has not acknowledged."""
    is_cancelled: bool = False
    """True once the broker has cancelled it: most often its queue was deleted, with all that was not acknowledged."""

    @property
    def is_lost(self) -> bool:
        return self.lost.done()


@dataclass(slots=True, eq=False)
class Delivery:
    """Delivery, and the consumer that it came to. `settled` once it was acknowledged."""

    content: Envelope | Unmappable
    about: Basic.Properties
    method: Basic.Deliver
    consumer: Consumer
    peer: str | None = None
    """The name that its sender has proven, if it has."""
    settled: bool = False

    @property
    def weight_bytes(self) -> int:
        return self.content.weight_bytes if isinstance(self.content, Envelope) else len(self.content.raw)

    @property
    def raw(self) -> bytes:
        """Body for a dead letter."""
        return self.content.body if isinstance(self.content, Envelope) else self.content.raw

    @property
    def metadata(self) -> dict[str, str]:
        """Properties for a dead letter."""
        if isinstance(self.content, Unmappable):
            return self.content.metadata
        return metadata(self.method, self.about, self.consumer.origin)


class Consumers:
    """Consumers of some queues. Deliveries go to `arrived`, those of each queue in order."""

    def __init__(
        self, arrived: Callable[[Delivery], None], verifier: Verifier, *, limit_bytes: int, seconds: float
    ) -> None:
        self.lost: asyncio.Future[TransportError] = asyncio.get_running_loop().create_future()
        self._arrived = arrived
        self._verifier = verifier
        self._limit_bytes = limit_bytes
        self._seconds = seconds
        self._tags: dict[Channel, str] = {}
        self.is_cancelled = False
        """True once the broker has cancelled one of them."""

    async def add(self, connection: Connection, origin: Origin, prefetch: int) -> None:
        """Consume one more queue; raises TransportError."""
        channel = await connection.channel(confirms=False)
        self._tags[channel] = f"durable-{channel.number}"
        consumer = Consumer(origin, channel, self.lost)
        channel.closing.add_done_callback(lambda closing: self._lose(origin, reason_of(error_of(closing))))
        channel.on_consumer_cancel_callbacks.add(lambda _: self._cancelled(consumer))

        async def deliver(message: DeliveredMessage) -> None:
            assert isinstance(message.delivery, Basic.Deliver)
            about = message.header.properties
            content = mapped(
                message.delivery,
                about,
                message.body,
                origin=origin,
                limit_bytes=self._limit_bytes,
                now=datetime.now(UTC),
            )
            peer = None
            if isinstance(content, Envelope):
                try:
                    peer = self._verifier.peer(about, message.body)
                    self._verifier.check_way(content, about, message.delivery, origin.queue)
                except InvalidMessage as error:
                    content = Unmappable(message.body, str(error), metadata(message.delivery, about, origin))
            self._arrived(Delivery(content, about, message.delivery, consumer, peer))

        with translated(f"consuming {origin.queue}"):
            async with asyncio.timeout(self._seconds):
                await channel.basic_qos(prefetch_count=prefetch)
                await channel.basic_consume(origin.queue, deliver, consumer_tag=self._tags[channel])

    def give_up(self, reason: str) -> None:
        """End as if the broker had closed the channels: from now on every consumer is lost."""
        if not self.lost.done():
            self.lost.set_result(ConnectionFailed(reason))

    async def cancel(self) -> None:
        """Stop deliveries. While the broker reads nothing, this waits without an end."""
        for channel, tag in self._tags.items():
            if await is_writable(channel):
                write(channel, marshal(Basic.Cancel(tag, nowait=True), channel.number))
                channel.consumers.pop(tag, None)

    async def close(self) -> bool:
        """Close the channels; the broker has what was acknowledged, and delivers the rest again, when this returns.

        False when that is not certain: the broker has not answered in time, and may take them for consumers still.
        """
        self.give_up("closed here")
        try:
            with translated("closing the channels"):
                async with asyncio.timeout(CLOSING_SECONDS):
                    for channel in self._tags:
                        if is_open(channel):
                            await channel.close()
        except PeerTimeout:
            return False
        except TransportError:
            return not any(is_open(channel) for channel in self._tags)
        return True

    def _cancelled(self, consumer: Consumer) -> None:
        consumer.is_cancelled = self.is_cancelled = True
        self._lose(consumer.origin, "the broker cancelled the consumer")

    def _lose(self, origin: Origin, reason: str) -> None:
        self.give_up(f"queue {origin.queue}: {reason}")


async def acknowledge(deliveries: Iterable[Delivery]) -> None:
    """Send a Basic.Ack for each delivery. Those whose channel is lost are going to be delivered again."""
    acks: dict[Channel, list[bytes]] = {}
    for delivery in deliveries:
        assert delivery.method.delivery_tag is not None
        frame = marshal(Basic.Ack(delivery.method.delivery_tag), delivery.consumer.channel.number)
        acks.setdefault(delivery.consumer.channel, []).append(frame)
        delivery.settled = True
    for channel, frames in acks.items():
        if await is_writable(channel):
            write(channel, b"".join(frames))
