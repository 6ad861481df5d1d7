"""Keys over a queue that two nodes of a service listen on."""

from __future__ import annotations

import asyncio
import re
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import timedelta
from itertools import product
from typing import Any

import msgspec
import pytest

from durable import Bus, message
from durable.envelope import Envelope
from durable.errors import TransportError
from durable.outcomes import STORED, Outcome
from durable.settings import load_settings
from durable.transports.base import Sender
from durable.transports.rabbitmq.transport import RabbitListener, RabbitTransport
from tests.failure.waiting import eventually
from tests.failure.workbench import QUICK
from tests.support.broker import foreign
from tests.support.proxy import UP, ChaosProxy
from tests.support.receivers import MemoryReceiver, envelope
from tests.support.servers import AnyBroker, Names

KEYS, EACH = 5, 20


@message("rabbit.order-step")
class Step(msgspec.Struct):
    key: str
    number: int


def listener(database: str, url: str, address: str, done: dict[str, list[int]]) -> Bus:
    bus = Bus("workshop", database, amqp_url=url, **QUICK)
    bus.listen(address)

    @bus.handles(Step)
    async def handle(step: Step) -> None:
        done[step.key].append(step.number)

    return bus


def received(bus: Bus) -> int:
    return bus.runtime.counters.snapshot()["received"]


async def send(bus: Bus, address: str, numbers: range) -> None:
    for number in numbers:
        async with bus.unit_of_work():
            for key in range(KEYS):
                bus.send(Step(f"k{key}", number), key=f"k{key}", to=address)


def in_order(done: dict[str, list[int]], count: int) -> bool:
    """Have all been handled? An attempt may run twice, when a node has lost its lease: the first counts."""
    first = {key: list(dict.fromkeys(numbers)) for key, numbers in done.items()}
    assert all(numbers == sorted(numbers) for numbers in first.values()), done
    return {key: list(range(count)) for key in (f"k{number}" for number in range(KEYS))} == first


@pytest.mark.parametrize("options", ["?ordered=yes&prefetch=10", "?ordered=yes&prefetch=10&type=classic"])
async def test_keys_keep_their_order_with_two_listeners_of_a_queue_even_when_one_closes(
    database_url: str, make_database: Any, broker: AnyBroker, queue_name: Names, options: str
) -> None:
    address = f"rabbitmq://default/queue/{queue_name()}"
    done: dict[str, list[int]] = defaultdict(list)
    active, standing_by = (listener(database_url, broker.url, address + options, done) for _ in range(2))
    sender = Bus("sender", make_database("sender"), amqp_url=broker.url, **QUICK)
    async with sender, AsyncExitStack() as others:
        async with active:
            await others.enter_async_context(standing_by)
            await send(sender, address, range(EACH))
            await eventually(lambda: in_order(done, EACH), within=60)
            assert (received(active), received(standing_by)) == (KEYS * EACH, 0), "one of them has had it all"
            await send(sender, address, range(EACH, 2 * EACH))
        await eventually(lambda: in_order(done, 2 * EACH), within=60)
        await send(sender, address, range(2 * EACH, 2 * EACH + 2))
        await eventually(lambda: in_order(done, 2 * EACH + 2), within=60)
        assert received(standing_by) >= 2 * KEYS


async def test_listeners_sharing_an_unordered_queue_warn_when_keys_arrive(
    database_url: str, make_database: Any, broker: AnyBroker, queue_name: Names, caplog: pytest.LogCaptureFixture
) -> None:
    address = f"rabbitmq://default/queue/{queue_name()}?prefetch=1"
    done: dict[str, list[int]] = defaultdict(list)
    first, second = (listener(database_url, broker.url, address, done) for _ in range(2))
    sender = Bus("sender", make_database("sender"), amqp_url=broker.url, **QUICK)
    async with first, second, sender:
        await send(sender, address, range(EACH))
        await eventually(lambda: sum(map(len, done.values())) == KEYS * EACH, within=60)
        assert received(first)
        assert received(second)
    told = [record.message for record in caplog.records if "messages with a key" in record.message]
    said = (
        f"listener {address}: messages with a key arrive over a queue that is not ordered, and two listeners may store "
        "them in another order; write ordered=yes in its address"
    )
    assert told == [said] * 2


# ---------------------------------------------------------------- what a listener holds when its consumer is lost


class Service:
    """Two nodes of a service with one inbox: the first commit of a message counts, as in a database."""

    def __init__(self) -> None:
        self.commits: list[bytes] = []

    def node(self) -> Node:
        return Node(self)


class Node(MemoryReceiver):
    def __init__(self, service: Service) -> None:
        super().__init__()
        self._commits = service.commits

    def _store(self, envelope: Envelope) -> Outcome:
        outcome = super()._store(envelope)
        if outcome == STORED and envelope.body not in self._commits:
            self._commits.append(envelope.body)
        return outcome


def numbered(numbers: range) -> list[Envelope]:
    return [envelope(body=b"%03d" % number) for number in numbers]


LOSSES = ("deleted", "closed", "given back")
MOMENTS = ("none is stored", "some are stored", "the receiver is busy", "the receiver is broken")


@asynccontextmanager
async def proxied(url: str) -> AsyncIterator[tuple[ChaosProxy, str]]:
    """A proxy before the broker, and the URL that goes through it."""
    user, _, place = url.removeprefix("amqp://").partition("@")
    host, _, vhost = place.partition("/")
    async with ChaosProxy(f"tcp://{host}") as proxy:
        yield proxy, f"amqp://{user}@{proxy.uri.removeprefix('tcp://')}/{vhost}"


@asynccontextmanager
async def serving(url: str, address: str, receiver: MemoryReceiver, **settings: Any) -> AsyncIterator[RabbitListener]:
    pauses = {"reconnect_pause": timedelta(milliseconds=50), "reconnect_pause_longest": timedelta(milliseconds=200)}
    made = load_settings(amqp_url=url, batch_size=2, batches_in_flight=1, **pauses | settings)
    listener = RabbitTransport(made, service="billing", messages=dict).listener(address, "in")
    await listener.serve(receiver)
    try:
        yield listener
    finally:
        receiver.release()
        await listener.close()


@pytest.mark.parametrize(("loss", "moment"), list(product(LOSSES, MOMENTS)))
async def test_ordered_listener_stores_nothing_of_a_lost_consumer_after_newer_messages(
    broker: AnyBroker, queue_name: Names, caplog: pytest.LogCaptureFixture, loss: str, moment: str
) -> None:
    """Of the active listener nothing reaches the broker any more, so that it takes its time to leave."""
    queue, service = queue_name("ordered"), Service()
    address = f"rabbitmq://default/queue/{queue}"
    ordered, old, new = f"{address}?ordered=yes&type=classic", numbered(range(10)), numbered(range(10, 20))
    slow, quick = service.node(), service.node()
    publishing = RabbitTransport(load_settings(amqp_url=broker.url), service="orders", messages=dict)
    async with (
        foreign(broker.url) as client,
        publishing.sender(address) as sender,
        proxied(broker.url) as (proxy, url),
        serving(url, ordered, slow) as active,
        serving(broker.url, ordered, quick),
    ):
        if moment == "the receiver is busy":
            slow.room = 0
        elif moment == "the receiver is broken":
            slow.broken = "the database is away"
        slow.hold()
        assert await sender.send(old) == [STORED] * 10
        if moment == "the receiver is busy":
            await eventually(lambda: len(active._held) == 10)
        else:
            await slow.arrived(1)
            await eventually(lambda: len(active._held) + len(slow.batches[-1]) == 10)
        if moment == "some are stored":
            slow.release_batch(0)
            await slow.arrived(2)
        before = list(service.commits)

        proxy.hold(UP)
        lost = active._consumers
        assert lost is not None
        if loss == "deleted":
            await client.delete(queue)
            await eventually(lambda: lost.lost.done())
        elif loss == "closed":
            proxy.refuse()
            await eventually(lambda: lost.lost.done())
            proxy.restore()
        else:
            lost.give_up("more than buffer_bytes are held")
        slow.room, slow.broken = 1_000, ""
        slow.release()
        if loss == "deleted":
            await eventually(lambda: _stored(sender, new))
        else:
            proxy.release(UP)
            assert await sender.send(new) == [STORED] * 10
        await eventually(lambda: new[-1].body in service.commits)
        proxy.release(UP)
        await eventually(lambda: active.statistics()["connections"] == 2)
    come_again = [] if loss == "deleted" else [each for each in old if each.body not in before]
    assert service.commits == [*before, *(each.body for each in [*come_again, *new])]
    told = [record.message for record in caplog.records if "deliveries that it had not stored" in record.message]
    numbers = [int(number) for each in told for number in re.findall(r"dropped (\d+) deliveries", each)]
    assert numbers == ([10 - len(before)] if loss == "deleted" else [])


class LosesAsItStores(MemoryReceiver):
    """A receiver that stores a batch in the instant in which its consumer is lost."""

    listener: RabbitListener

    async def receive(self, endpoint: str, batch: Sequence[Envelope]) -> list[Outcome]:
        if not self.stored:
            assert self.listener._consumers is not None
            self.listener._consumers.give_up("lost in this instant")
        return [self._store(each) for each in batch]


async def test_batch_stored_in_the_instant_of_the_loss_is_done_with(
    broker: AnyBroker, queue_name: Names, caplog: pytest.LogCaptureFixture
) -> None:
    address = f"rabbitmq://default/queue/{queue_name('instant')}"
    publishing = RabbitTransport(load_settings(amqp_url=broker.url), service="orders", messages=dict)
    receiver, batch = LosesAsItStores(), numbered(range(10))
    async with (
        publishing.sender(address) as sender,
        serving(broker.url, f"{address}?ordered=yes&type=classic", receiver) as listener,
    ):
        receiver.listener = listener
        assert await sender.send(batch) == [STORED] * 10
        await eventually(lambda: len(receiver.stored) == 10)
        await eventually(lambda: listener.statistics()["connections"] == 2)
    assert receiver.envelopes == batch
    assert [record.message for record in caplog.records if record.name == "asyncio"] == []


@pytest.mark.parametrize(("options", "shortest"), [("?ordered=yes&type=classic", 1.0), ("?type=classic", 0.0)])
async def test_deleted_ordered_queue_is_left_alone_for_longer(
    broker: AnyBroker, queue_name: Names, options: str, shortest: float
) -> None:
    """Its active consumer may hear of the deletion last, and stores what it holds until then."""
    queue = queue_name("left-alone")
    address = f"rabbitmq://default/queue/{queue}{options}"
    longest = timedelta(seconds=2 * shortest + 0.1)
    clock = asyncio.get_running_loop().time
    async with (
        foreign(broker.url) as client,
        serving(broker.url, address, MemoryReceiver(), reconnect_pause_longest=longest) as listener,
    ):
        began = clock()
        await client.delete(queue)
        await eventually(lambda: listener.statistics()["connections"] == 2)
        took = clock() - began
        assert took >= shortest
        assert await client.exists(queue)


async def test_deleted_ordered_queue_is_declared_and_bound_at_once(broker: AnyBroker, queue_name: Names) -> None:
    """The broker confirms messages that other queues take: without this one they would be lost for its listeners."""
    service, exchange = queue_name("at-once"), queue_name("exchange")
    queue_name.also(queue := f"{service}:{Step.__name__}")
    settings = load_settings(amqp_url=broker.url, amqp_exchange=exchange, reconnect_pause_longest=timedelta(hours=1))
    made = RabbitTransport(settings, service=service, messages=lambda: {Step.__name__: Step})
    listener = made.listener("rabbitmq://default/topic/orders?ordered=yes&type=classic", "in")
    async with foreign(broker.url) as client:
        await listener.serve(MemoryReceiver())
        try:
            await client.delete(queue)
            await eventually(lambda: listener.statistics()["dropped"] == 1)
            await eventually(lambda: client.routes(exchange, f"orders:{Step.__name__}"))
            assert (await client.count(queue), await client.consumers(queue)) == (1, 0)
        finally:
            await listener.close()


async def _stored(sender: Sender, batch: list[Envelope]) -> bool:
    """Send until there is a queue again; the receiver knows what comes twice."""
    try:
        return await sender.send(batch) == [STORED] * len(batch)
    except TransportError:
        return False
