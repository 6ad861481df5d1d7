"""Declaring on a real broker: what is made, what is refused and how that is explained, and what nothing may change."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager

import pytest
from aio_pika.abc import AbstractIncomingMessage
from aio_pika.exceptions import DeliveryError

from durable.embedded import Broker
from durable.errors import ConnectionFailed, InvalidSetting, PeerTimeout
from durable.settings import load_settings
from durable.transports.rabbitmq.address import source
from durable.transports.rabbitmq.declaring import Found, State, declare, inspect
from durable.transports.rabbitmq.topology import Binding, Exchange, Queue, Topology, listening
from tests.failure.waiting import eventually
from tests.support.broker import Foreign, foreign
from tests.support.servers import AnyBroker, Names

SECONDS = 10.0
NEVER = 2_147_483_647


@pytest.fixture
async def client(broker: AnyBroker) -> AsyncIterator[Foreign]:
    async with foreign(broker.url) as connected:
        yield connected


def of(*queues: Queue) -> Topology:
    return Topology(queues=queues)


async def publish_until_refused(client: Foreign, queue: str) -> int:
    """How many messages were confirmed."""
    for count in range(20):
        try:
            await client.publish(queue, str(count).encode())
        except DeliveryError:
            return count
    raise AssertionError("20 messages were confirmed")


# ---------------------------------------------------------------- declared


async def test_topology_of_a_subscription_is_declared_and_routes_its_messages(
    client: Foreign, queue_name: Names
) -> None:
    service, exchange = queue_name("billing"), queue_name("exchange")
    queue_name.also(f"{service}:orders.placed")
    settings = load_settings(amqp_exchange=exchange)
    address = source("rabbitmq://default/topic/orders")
    topology = listening(address, settings, service=service, handled=["orders.placed"])

    await declare(client.connection, topology, seconds=SECONDS)
    await client.publish("orders:orders.placed", b"1", exchange=exchange)

    message = await client.get(f"{service}:orders.placed")
    assert message is not None
    assert message.body == b"1"


async def test_declaring_again_changes_nothing(client: Foreign, queue_name: Names) -> None:
    name, exchange = queue_name(), queue_name("exchange")
    topology = Topology((Exchange(exchange),), (Queue(name, max_length=5),), (Binding(exchange, "a", name),))

    await declare(client.connection, topology, seconds=SECONDS)
    await client.publish("a", b"1", exchange=exchange)
    await declare(client.connection, topology, seconds=SECONDS)

    assert await client.count(name) == 1


@pytest.mark.parametrize("type", ["quorum", "classic"])
async def test_full_queue_refuses_and_keeps_its_confirmed_messages(
    client: Foreign, queue_name: Names, type: str
) -> None:
    queue = Queue(queue_name(), "quorum" if type == "quorum" else "classic", max_length=5)
    await declare(client.connection, of(queue), seconds=SECONDS)

    confirmed = await publish_until_refused(client, queue.name)

    kept = [message.body for message in await client.drain(queue.name)]
    assert kept == [str(number).encode() for number in range(confirmed)]
    assert confirmed in (5, 6)  # a quorum queue counts a little late


async def test_message_redelivered_many_times_is_never_dropped(client: Foreign, queue_name: Names) -> None:
    name = queue_name()
    await declare(client.connection, of(Queue(name)), seconds=SECONDS)
    await client.publish(name, b"1")

    async with asyncio.timeout(SECONDS), client.connection.channel() as channel:
        queue = await channel.get_queue(name)
        deliveries: asyncio.Queue[AbstractIncomingMessage] = asyncio.Queue()
        await queue.consume(deliveries.put)
        for _ in range(30):
            await (await deliveries.get()).nack(requeue=True)

    assert await eventually(lambda: client.get(name))


# ---------------------------------------------------------------- looked at


async def test_missing_queue_or_exchange_is_reported_and_not_made(client: Foreign, queue_name: Names) -> None:
    name = queue_name()

    for thing in (Queue(name), Queue(name, declared=False), Exchange(name), Exchange(name, declared=False)):
        assert await inspect(client.connection, thing, seconds=SECONDS) == Found(State.MISSING)
        assert await inspect(client.connection, thing, seconds=SECONDS) == Found(State.MISSING)


async def keep(message: AbstractIncomingMessage) -> None:
    """A consumer that does not acknowledge."""


async def test_a_queue_is_found_with_its_messages_and_consumers(client: Foreign, queue_name: Names) -> None:
    queue = Queue(queue_name())
    await declare(client.connection, of(queue), seconds=SECONDS)
    await client.publish(queue.name, b"1")
    assert await inspect(client.connection, queue, seconds=SECONDS) == Found(State.PRESENT, "", 1, 0)

    async with client.connection.channel() as channel:
        await (await channel.get_queue(queue.name)).consume(keep)
        found = await inspect(client.connection, queue, seconds=SECONDS)

    assert (found.state, found.consumer_count) == (State.PRESENT, 1)


async def test_foreign_queue_is_accepted_unchanged(client: Foreign, queue_name: Names) -> None:
    queue = Queue(queue_name(), declared=False)
    with pytest.raises(InvalidSetting, match="there is none, and its address says declare=no; create it"):
        await declare(client.connection, of(queue), seconds=SECONDS)

    await client.declare(queue.name, message_ttl=60_000)

    await declare(client.connection, of(queue), seconds=SECONDS)
    assert await inspect(client.connection, queue, seconds=SECONDS) == Found(State.PRESENT, "", 0, 0)


async def test_foreign_exchange_is_accepted_unchanged(client: Foreign) -> None:
    found = await inspect(client.connection, Exchange("amq.fanout", declared=False), seconds=SECONDS)

    assert found.state is State.PRESENT


# ---------------------------------------------------------------- refused


@pytest.mark.parametrize(
    ("type", "arguments", "asked", "what_to_do"),
    [
        ("classic", {}, Queue(""), "its x-queue-type is classic, and quorum was asked for; write type=classic in"),
        ("quorum", {}, Queue("", "classic"), "its x-queue-type is quorum, and classic was asked for; write"),
        ("quorum", {}, Queue(""), f"its x-delivery-limit is not set, and {NEVER} was asked for; delete it"),
        ("quorum", {"delivery_limit": NEVER, "max_length": 5, "overflow": "reject-publish"}, Queue("", max_length=6),
         "its x-max-length is 5, and 6 was asked for; write max_length=5 in its address, or delete it"),
        ("classic", {"max_length": 5, "overflow": "reject-publish"}, Queue("", "classic"),
         "its x-max-length is 5, and none was asked for; write max_length=5 in its address"),
        ("classic", {}, Queue("", "classic", max_length=5),
         "its x-max-length is not set, and 5 was asked for; leave max_length out of its address"),
        ("classic", {"max_length": 5}, Queue("", "classic", max_length=5), "its x-overflow is not set, and reject-pub"),
    ],
    ids=["type quorum", "type classic", "delivery limit", "other length", "length not asked", "no length", "overflow"],
)  # fmt: skip
async def test_queue_with_other_arguments_is_refused_with_advice_and_left_unchanged(
    client: Foreign, queue_name: Names, type: str, arguments: dict[str, object], asked: Queue, what_to_do: str
) -> None:
    name = queue_name()
    await client.declare(name, type=type, **arguments)
    await client.publish(name, b"1")
    queue = Queue(name, asked.type, asked.max_length)

    with pytest.raises(InvalidSetting) as refused:
        await declare(client.connection, of(queue), seconds=SECONDS)
    found = await inspect(client.connection, queue, seconds=SECONDS)

    assert f"queue {name}: {what_to_do}" in str(refused.value)
    assert found == Found(State.REFUSED, str(refused.value), 1, 0)
    await client.declare(name, type=type, **arguments)


async def test_transient_queue_is_refused(client: Foreign, queue_name: Names) -> None:
    name = queue_name()
    async with client.connection.channel() as channel:
        await channel.declare_queue(name, durable=False)

        with pytest.raises(InvalidSetting, match="its durable is false, and true was asked for; delete it when"):
            await declare(client.connection, of(Queue(name, "classic")), seconds=SECONDS)


async def test_exclusive_queue_of_another_connection_is_refused(
    client: Foreign, broker: AnyBroker, queue_name: Names
) -> None:
    name = queue_name()
    async with foreign(broker.url) as other, other.connection.channel() as channel:
        await channel.declare_queue(name, exclusive=True)

        with pytest.raises(InvalidSetting, match="exclusive to another connection"):
            await declare(client.connection, of(Queue(name, "classic")), seconds=SECONDS)


async def test_an_exchange_of_another_type_is_refused(client: Foreign, queue_name: Names) -> None:
    exchange = Exchange("amq.direct")

    with pytest.raises(
        InvalidSetting, match=r"exchange amq\.direct: its type is direct, and topic was asked for; give"
    ):
        await declare(client.connection, Topology((exchange,)), seconds=SECONDS)

    assert (await inspect(client.connection, exchange, seconds=SECONDS)).state is State.REFUSED


async def test_topology_declared_before_a_refusal_can_be_completed_later(client: Foreign, queue_name: Names) -> None:
    sound, other, exchange = queue_name(), queue_name(), queue_name("exchange")
    await client.declare(other, type="classic")
    topology = Topology((Exchange(exchange),), (Queue(sound), Queue(other)), (Binding(exchange, "a", sound),))

    with pytest.raises(InvalidSetting, match=other):
        await declare(client.connection, topology, seconds=SECONDS)
    await client.delete(other)
    await declare(client.connection, topology, seconds=SECONDS)
    await client.publish("a", b"1", exchange=exchange)

    assert await client.count(sound) == 1


# ---------------------------------------------------------------- the broker itself


@contextmanager
def user(broker: Broker, name: str, *, configure: str) -> Iterator[str]:
    """The URL of a user who may read everything, write nothing, and configure what matches this expression."""
    broker.control("add_user", name, "f9-Kestrel-40")
    try:
        broker.control("set_permissions", name, configure, "^$", ".*")
        yield broker.url.replace("guest:guest", f"{name}:f9-Kestrel-40")
    finally:
        broker.control("delete_user", name)


async def test_user_without_the_right_to_declare_is_named_in_the_error(own_broker: Broker, queue_name: Names) -> None:
    mine, other = queue_name("mine"), queue_name("other")
    with user(own_broker, queue_name("user"), configure="^mine") as url:
        async with foreign(own_broker.url) as owner, foreign(url) as client:
            await owner.declare(other)
            await declare(client.connection, of(Queue(mine)), seconds=SECONDS)

            with pytest.raises(InvalidSetting, match=f"queue {other}: this user may not declare it; let rabbitmqctl"):
                await declare(client.connection, of(Queue(other, "classic")), seconds=SECONDS)
            await declare(client.connection, of(Queue(other, declared=False)), seconds=SECONDS)


async def test_silent_broker_is_given_up_at_the_deadline(own_broker: Broker, queue_name: Names) -> None:
    async with foreign(own_broker.url) as client:
        own_broker.pause()
        try:
            with pytest.raises(PeerTimeout, match="declaring"):
                await declare(client.connection, of(Queue(queue_name())), seconds=0.2)
            with pytest.raises(PeerTimeout, match="looking"):
                await inspect(client.connection, Queue(queue_name()), seconds=0.2)
        finally:
            own_broker.resume()


async def test_lost_connection_is_no_fault_of_the_topology(own_broker: Broker, queue_name: Names) -> None:
    queue = Queue(queue_name())
    async with foreign(own_broker.url) as client:
        await asyncio.to_thread(own_broker.control, "close_all_connections", "for a test")
        with pytest.raises(ConnectionFailed):
            await declare(client.connection, of(queue), seconds=SECONDS)

        await client.connection.close()
        with pytest.raises(ConnectionFailed, match="the connection was closed"):
            await inspect(client.connection, queue, seconds=SECONDS)
