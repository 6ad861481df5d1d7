"""The sending end of RabbitMQ: one queue, or one exchange and routing key, on a channel with publisher confirms.

    batch --> all of it published, mandatory and persistent --> one answer for each message, in any order

    Basic.Ack                Stored: the broker has written it to its queues, on disk
    Basic.Return, then Ack   Failed: no queue is bound; the row stays until there is one
    Basic.Nack               Busy: the queue is full (x-overflow=reject-publish), or the broker could not take it
    AMQP cannot carry it     Rejected, and not published
    nothing in time          the channel is dropped, so that no late answer can be taken for another's: PeerTimeout

Stored means here: by the broker. Only the consumer that stores it in its own database takes it out of the queue.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Self

from aiormq.channel import Channel

from durable.envelope import Envelope
from durable.errors import ConnectionFailed, InvalidSetting, PeerTimeout, TransportError
from durable.outcomes import Failed, Outcome, Rejected, printable
from durable.settings import Settings
from durable.transports.peers import credentials_for
from durable.transports.rabbitmq.address import Destination, ExchangeAddress, QueueAddress
from durable.transports.rabbitmq.broker import Broker, Connection, Shared
from durable.transports.rabbitmq.channel import abandon, translated
from durable.transports.rabbitmq.declaring import declare
from durable.transports.rabbitmq.publisher import Publisher, Unacceptable
from durable.transports.rabbitmq.signatures import Signer
from durable.transports.rabbitmq.topology import sending


class RabbitSender:
    """A `durable.transports.base.Sender` for one `rabbitmq://` destination."""

    def __init__(self, address: Destination, broker: Broker, settings: Settings, service: str) -> None:
        self._address = address
        self._broker = broker
        self._topology = sending(address, settings)
        self._expires = settings.amqp_expiration
        credentials = credentials_for(settings, str(address), service)
        self._sign = Signer(service, credentials).sign if credentials is not None else None
        self._connect_seconds = settings.connect_timeout.total_seconds()
        self._send_seconds = settings.send_timeout.total_seconds()
        self._shared = Shared(lambda: self._open(broker.publishing), lambda publisher: publisher.is_usable)
        self._held = AsyncExitStack()
        self._returned: Envelope | None = None
        """The first message of the last batch that no queue has taken."""

    async def __aenter__(self) -> Self:
        await self._held.enter_async_context(self._broker.publishing)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if (publisher := self._shared.usable) is not None:
            await publisher.drop(ConnectionFailed(f"{self._address}: the sender was closed"))
        await self._held.aclose()

    async def send(self, batch: Sequence[Envelope]) -> list[Outcome]:
        """Publish the batch and return the outcomes in order; Stored means that the broker has it on disk.

        Busy too is an envelope whose id is under way already. Raises ConnectionFailed or PeerTimeout, or TransportError
        while the broker blocks its publishers, when the fate of the batch is unknown: send all of it again.
        """
        if not batch:
            return []
        await self._refuse_if_blocked()
        try:
            outcomes = await self._publish(await self._shared.get(), batch)
        except Unacceptable:
            outcomes = await self._isolate(batch)
        returned = (envelope for envelope, outcome in zip(batch, outcomes, strict=True) if isinstance(outcome, Failed))
        self._returned = next(returned, None)
        return outcomes

    async def ping(self) -> None:
        """Ask the broker for what a publish needs; raise TransportError where something is missing.

        That is the queue, or the exchange, and the right to write there: an empty message is published in a
        transaction that is rolled back, so that nobody gets it. The ping reaches the broker and no further: the state
        of the consumer's database is unknown here. AMQP has no question for the bindings of an exchange: after a
        message was returned because of a missing binding, the ping carries that message, so its consumer may see it
        twice.
        """
        await self._refuse_if_blocked()
        await self._shared.get()
        channel = await self._broker.publishing.channel(confirms=False)  # a refusal closes it
        try:
            with translated(str(self._address)):
                async with asyncio.timeout(self._send_seconds):
                    await self._rehearse(channel)
        finally:
            await abandon(channel)
        if isinstance(self._address, ExchangeAddress) and self._returned is not None:
            (outcome,) = await self._publish(await self._shared.get(), [self._returned])
            if isinstance(outcome, Failed):
                raise TransportError(f"{self._address}: {outcome.reason}")
            self._returned = None

    async def _rehearse(self, channel: Channel) -> None:
        """Do all of a publish but the publish: a queue is told to be there, and rights are checked before routing."""
        exchange, routing_key = self._address.way
        if isinstance(self._address, QueueAddress):
            await channel.queue_declare(self._address.queue, passive=True)
        await channel.tx_select()
        await channel.basic_publish(b"", exchange=exchange, routing_key=routing_key)
        await channel.tx_rollback()

    async def _publish(self, publisher: Publisher, batch: Sequence[Envelope]) -> list[Outcome]:
        try:
            async with asyncio.timeout(self._send_seconds):
                return await publisher.publish(batch)
        except TimeoutError:
            await publisher.drop(ConnectionFailed(f"{self._address}: dropped, something was not confirmed in time"))
            await self._refuse_if_blocked()
            raise PeerTimeout(f"{self._address}: not confirmed within {self._send_seconds:g} seconds") from None

    async def _isolate(self, batch: Sequence[Envelope]) -> list[Outcome]:
        """Publish it again in ever smaller parts, until what the broker does not bear is alone, and is Rejected.

        Each part has a connection of its own: on a shared one the innocent would be closed with the guilty.
        """
        try:
            async with self._broker.connection("publish alone") as connection:
                return await self._publish(await self._open(connection), batch)
        except Unacceptable as error:
            if len(batch) == 1:
                return [Rejected(printable(f"the broker does not accept it: {error}"))]
        middle = len(batch) // 2
        return [*await self._isolate(batch[:middle]), *await self._isolate(batch[middle:])]

    async def _refuse_if_blocked(self) -> None:
        if await self._broker.publishing.is_blocked():
            raise TransportError(f"{self._address}: broker blocked: it is short of memory or disk")

    async def _open(self, connection: Connection) -> Publisher:
        if self._topology.exchanges:
            try:
                await declare(await connection.get(), self._topology, seconds=self._connect_seconds)
            except InvalidSetting as error:  # it may be put right at the broker, without this process
                raise TransportError(str(error)) from error
        return Publisher(await connection.channel(confirms=True), self._address, expires=self._expires, sign=self._sign)
