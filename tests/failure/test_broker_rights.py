"""The sending agent, with its database, at a broker that answers and refuses what is published."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta

import psycopg
import pytest

from durable.embedded import Broker
from durable.envelope import ANY_NODE
from durable.observability import health
from durable.settings import load_settings
from durable.storage import gauges
from durable.telemetry import Event
from durable.transports.rabbitmq.sender import RabbitSender
from durable.transports.rabbitmq.transport import RabbitTransport
from tests.failure import leftovers
from tests.failure.books import open_books
from tests.failure.test_guards import A
from tests.failure.waiting import eventually
from tests.failure.workbench import Workbench
from tests.support.broker import Foreign, foreign
from tests.support.servers import Names

PASSWORD = "f9-Kestrel-40"
MANY = 20


@dataclass
class Place:
    """Queue at a broker, with an exchange before it, and a user who sends there."""

    broker: Broker
    user: str
    queue: str
    exchange: str

    @property
    def url(self) -> str:
        return self.broker.url.replace("guest:guest", f"{self.user}:{PASSWORD}")

    def addresses(self) -> dict[str, str]:
        return {
            "queue": f"rabbitmq://default/queue/{self.queue}",
            "exchange": f"rabbitmq://default/exchange/{self.exchange}/orders.placed",
        }

    async def control(self, *arguments: str) -> None:
        await asyncio.to_thread(self.broker.control, *arguments)

    async def set_fault(self, fault: str, is_there: bool, client: Foreign) -> None:
        match fault:
            case "no right to write":
                await self.control("set_permissions", self.user, ".*", "^$" if is_there else ".*", ".*")
            case "no right for the topic":
                await self.control(
                    "set_topic_permissions", self.user, self.exchange, "^bills" if is_there else ".*", ".*"
                )
            case "no exchange" if is_there:
                await client.delete(self.exchange)
            case _:
                await client.bind(self.queue, self.exchange, "orders.*")


@pytest.fixture
def place(own_broker: Broker, queue_name: Names) -> Iterator[Place]:
    user = queue_name("clerk")
    own_broker.control("add_user", user, PASSWORD)
    own_broker.control("set_permissions", user, ".*", ".*", ".*")
    yield Place(own_broker, user, queue_name("rights"), queue_name("rights-exchange"))
    own_broker.control("delete_user", user)


@pytest.fixture
async def client(place: Place) -> AsyncIterator[Foreign]:
    async with foreign(place.broker.url) as client:
        await client.declare(place.queue)
        await client.bind(place.queue, place.exchange, "orders.*")
        yield client


class CountedPings(RabbitSender):
    pings = 0

    async def ping(self) -> None:
        try:
            await super().ping()
        finally:
            self.pings += 1


def sender_to(address: str, url: str) -> CountedPings:
    sender = RabbitTransport(load_settings(amqp_url=url), service="orders", messages=dict).sender(address)
    assert isinstance(sender, RabbitSender)
    sender.__class__ = CountedPings
    assert isinstance(sender, CountedPings)
    return sender


def latched(database: str) -> list[tuple[datetime, str]]:
    """The latches: since when, and why."""
    with psycopg.connect(database) as conn:
        return conn.execute("SELECT since, reason FROM durable.circuits").fetchall()


@pytest.mark.parametrize(
    ("kind", "fault", "told"),
    [
        ("queue", "no right to write", "refused for user .*; let rabbitmqctl set_permissions allow it"),
        ("exchange", "no right to write", "refused for user .*; let rabbitmqctl set_permissions allow it"),
        ("exchange", "no right for the topic", "refused for user .*; let rabbitmqctl set_topic_permissions allow it"),
        ("exchange", "no exchange", "NOT_FOUND - no exchange"),
    ],
)
async def test_destination_stays_latched_when_the_broker_refuses_messages(
    place: Place, client: Foreign, database_url: str, kind: str, fault: str, told: str
) -> None:
    open_books(database_url)
    address = place.addresses()[kind]
    async with Workbench(database_url, health_latched=timedelta(seconds=0.1)) as bench:
        sender = sender_to(address, place.url)
        agent = bench.sending(A, address, sender)
        await place.set_fault(fault, True, client)
        leftovers.unsent_orders(database_url, range(MANY), address, ANY_NODE)
        await bench.claim_outgoing(agent, A)
        await eventually(lambda: latched(database_url))
        ((since, reason),) = latched(database_url)
        pings = sender.pings
        await eventually(lambda: sender.pings >= pings + 5)

        assert [began for began, _ in latched(database_url)] == [since]
        assert bench.counters[Event.LATCHED] == 1
        assert re.search(told, reason)
        problems = await unhealthy(bench)
        assert len(problems) == 1
        assert f"{address} is latched for" in problems[0]

        await place.set_fault(fault, False, client)
        await eventually(lambda: not latched(database_url))
        await bench.claim_outgoing(agent, A)
        await eventually(lambda: not agent.held())
        ids = [message.message_id for message in await client.drain(place.queue)]
    assert len(ids) == len(set(ids)) == MANY


async def unhealthy(bench: Workbench) -> list[str]:
    """What the health of the service has against latched destinations."""
    found = await bench.database.transaction(gauges.read)
    return [each for each in health.problems(found, [], {}, bench.settings) if " is latched " in each]
