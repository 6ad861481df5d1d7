"""Large messages that wait because a listener is paused wait at the broker, not in the memory of a node."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from uuid import uuid4

import msgspec
import pytest

from durable.embedded import Embedded
from durable.outcomes import STORED
from durable.settings import load_settings
from durable.testing import eventually
from durable.transports.rabbitmq.transport import RabbitTransport
from tests.support.broker import foreign
from tests.support.rabbit_shop import RabbitShop, rabbit_shop
from tests.support.receivers import MemoryReceiver, envelopes
from tests.support.servers import AnyBroker, Names
from tests.support.tables import Tables, shared_tables

COUNT = 200
NOTE = "x" * 100_000
SMALL: dict[str, Any] = {"buffer_bytes": 2_000_000, "max_message_bytes": 200_000, "batch_size": 5}
HELD = 10  # of the largest messages


@pytest.fixture(scope="module")
def database(servers: Callable[[int], Embedded]) -> Iterator[Tables]:
    with shared_tables(servers(18)) as tables:
        yield tables


async def sell_large(shop: RabbitShop, number: int) -> None:
    body = msgspec.json.encode({"number": number, "note": NOTE})
    await shop.publish(body, message_id=str(uuid4()), message_type="rabbit.sold")


@pytest.mark.parametrize("options", ["", "?ordered=yes"])
async def test_paused_listener_holds_no_more_bytes_than_the_buffer(
    database: Tables, broker: AnyBroker, queue_name: Names, options: str
) -> None:
    queue = queue_name()
    async with rabbit_shop(database, queue, broker.url, options=options, **SMALL) as shop:
        await shop.bus.pause(listener="shop")
        for number in range(COUNT):
            await sell_large(shop, number)

        async def is_held_back() -> bool:
            """A node obeys within a moment; what it has stored until then comes again unless it was acknowledged."""
            return COUNT - HELD - len(shop.seen) <= await shop.client.count(queue) <= COUNT - HELD

        await eventually(is_held_back)
        await shop.bus.resume(listener="shop")
        await shop.has_seen(*range(COUNT))
        assert len({context.id for context in shop.contexts}) == COUNT


@pytest.mark.parametrize("options", ["", "?ordered=yes"])
async def test_backlog_of_large_messages_is_taken_bit_by_bit(
    broker: AnyBroker, queue_name: Names, options: str
) -> None:
    queue = queue_name("large")
    settings = load_settings(amqp_url=broker.url, **SMALL)
    made = RabbitTransport(settings, service="billing", messages=dict)
    uri = f"rabbitmq://default/queue/{queue}{options}"
    listener, receiver = made.listener(uri, "in"), MemoryReceiver()
    await listener.serve(receiver)  # declares the queue
    await listener.close()
    batch = envelopes(COUNT, NOTE.encode())
    async with made.sender(uri) as sender:
        assert await sender.send(batch) == [STORED] * COUNT
    receiver.room = 0
    async with foreign(broker.url) as client:
        listener = made.listener(uri, "in")
        await listener.serve(receiver)
        try:

            async def is_held_back() -> bool:
                return await client.count(queue) == COUNT - HELD

            await eventually(is_held_back)
            receiver.room = 1_000_000
            await eventually(lambda: len(receiver.stored) == COUNT)
        finally:
            await listener.close()
