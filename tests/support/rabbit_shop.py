"""A service that listens on RabbitMQ, and a client of the broker that knows nothing of durable."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any
from uuid import uuid4

import msgspec
from aiormq.abc import ChannelFrame
from aiormq.channel import Channel
from pamqp.base import Frame
from pamqp.body import ContentBody
from pamqp.commands import Basic
from pamqp.frame import marshal
from pamqp.header import ContentHeader

from durable import Bus, Context, message
from durable.testing import eventually
from tests.support.broker import Foreign, foreign
from tests.support.tables import Tables

WITHIN = 20.0
_QUICK: dict[str, Any] = {"poll_interval": timedelta(milliseconds=30), "ping_interval": timedelta(milliseconds=50)}


@message("rabbit.sold")
class Sold(msgspec.Struct):
    number: int
    note: Any = None


class RabbitShop:
    """A bus that runs on a real Postgres and a real broker, and everything that its handler has seen."""

    def __init__(self, tables: Tables, client: Foreign, queue: str, url: str, **settings: Any) -> None:
        self.tables = tables
        self.client = client
        self.queue = queue
        self.seen: list[Sold] = []
        self.contexts: list[Context] = []
        self.bus = Bus("shop", tables.url, amqp_url=url, **(_QUICK | settings))

        @self.bus.handles(Sold)
        async def sell(sold: Sold, context: Context) -> None:
            self.seen.append(sold)
            self.contexts.append(context)

    async def publish(self, body: bytes, **properties: Any) -> None:
        """To the shop's queue, as a program of somebody else does: with these properties and no others.

        Frame by frame, because aiormq gives every message that it publishes an id.
        """
        header = ContentHeader(body_size=len(body), properties=Basic.Properties(**properties))
        async with self.client.connection.channel(publisher_confirms=False) as channel:
            underlay = await channel.get_underlay_channel()
            assert isinstance(underlay, Channel)
            frames: list[Frame | ContentHeader | ContentBody] = [Basic.Publish(routing_key=self.queue), header]
            if body:
                frames.append(ContentBody(body))
            payload = b"".join(marshal(frame, underlay.number) for frame in frames)
            await underlay.write_queue.put(ChannelFrame(payload=payload, should_close=False))
            await channel.declare_queue(self.queue, passive=True)  # answered once the message has been taken

    async def sell(self, *numbers: int) -> None:
        """Publish messages that nothing is wrong with."""
        for number in numbers:
            await self.publish(b'{"number":%d}' % number, message_id=str(uuid4()), message_type="rabbit.sold")

    async def has_seen(self, *numbers: int) -> None:
        """Wait until these are handled; nothing else may have been."""
        await eventually(lambda: len(self.seen) >= len(numbers), within=WITHIN, what=f"handling of {numbers}")
        assert sorted(sold.number for sold in self.seen) == sorted(numbers)

    async def letters(self, count: int = 1) -> list[Any]:
        """id, reason, body and headers of the dead letters, once there are so many."""
        await eventually(lambda: self.tables.count("dead_letters") >= count, within=WITHIN, what="a dead letter")
        rows = self.tables.rows("SELECT id, reason, body, headers FROM durable.dead_letters ORDER BY letter_id")
        assert len(rows) == count
        return rows


@asynccontextmanager
async def rabbit_shop(
    tables: Tables, queue: str, url: str, *, options: str = "", listen: str | None = None, **settings: Any
) -> AsyncIterator[RabbitShop]:
    """It runs, and listens on this queue, or at an address that leads to it. In the end all that has arrived there is
    acknowledged."""
    tables.clear()
    async with foreign(url) as client:
        shop = RabbitShop(tables, client, queue, url, **settings)
        shop.bus.listen(listen or f"rabbitmq://default/queue/{queue}{options}")
        async with shop.bus:
            yield shop
        assert await client.count(queue) == 0
