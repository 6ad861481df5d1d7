"""RabbitMQ as a transport: a real broker, with a proxy before it and another behind it."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from durable.testing.transports import BrokeredContract, Link
from tests.contract.links import PREFETCH, rabbitmq_link
from tests.support.servers import AnyBroker, Names


class TestRabbitMQ(BrokeredContract):
    prefetch = PREFETCH
    impossible_uris = (
        "rabbitmq://",
        "rabbitmq://default",
        "rabbitmq://default/queue",
        "rabbitmq://default/queue/",
        "rabbitmq://default/queue/a?unknown=1",
        "rabbitmq://nowhere/queue/a",
    )

    @pytest.fixture
    async def link(self, broker: AnyBroker, queue_name: Names) -> AsyncIterator[Link]:
        async with rabbitmq_link(broker.url, queue_name("contract")) as link:
            yield link
