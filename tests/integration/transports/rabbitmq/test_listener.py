"""What a listener does with what a real broker delivers. What it does when the broker dies is in test_faults;
what it makes of bad and of foreign messages, in test_rabbitmq_bad_input and test_rabbitmq_foreign."""

from __future__ import annotations

import asyncio
import logging
import struct
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import timedelta
from itertools import pairwise
from typing import Any

import pytest
from aio_pika.exceptions import ChannelPreconditionFailed
from aiormq.abc import ChannelFrame
from aiormq.exceptions import ChannelClosed

from durable.envelope import Envelope
from durable.errors import InvalidSetting, StorageUnavailable, TransportError
from durable.outcomes import STORED, Outcome
from durable.settings import load_settings
from durable.testing import eventually
from durable.transports.rabbitmq.channel import translated
from durable.transports.rabbitmq.transport import RabbitListener, RabbitTransport
from tests.support.broker import Foreign, foreign
from tests.support.proxy import UP, ChaosProxy
from tests.support.receivers import REJECTED_TYPE, MemoryReceiver, envelope, envelopes
from tests.support.servers import AnyBroker, Names


class Placed:
    """A message type; its class is never looked at by a transport."""


def transport(url: str, *types: str, service: str = "billing", **settings: Any) -> RabbitTransport:
    made = load_settings(amqp_url=url, amqp_queue_type="classic", **settings)
    return RabbitTransport(made, service=service, messages=lambda: dict.fromkeys(types, Placed))


class SlowReceiver(MemoryReceiver):
    """A receiver whose commits take a while. `sizes`: of the batches that it has stored."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    async def receive(self, endpoint: str, batch: Sequence[Envelope]) -> list[Outcome]:
        self.sizes.append(len(batch))
        await asyncio.sleep(0.05)
        return await super().receive(endpoint, batch)


@pytest.fixture
async def client(broker: AnyBroker) -> AsyncIterator[Foreign]:
    async with foreign(broker.url) as client:
        yield client


@pytest.fixture
def queue(queue_name: Names) -> str:
    return queue_name("listener")


@pytest.fixture
def receiver() -> MemoryReceiver:
    return MemoryReceiver()


@asynccontextmanager
async def listening(
    made: RabbitTransport, uri: str, receiver: MemoryReceiver, endpoint: str = "in"
) -> AsyncIterator[RabbitListener]:
    listener = made.listener(uri, endpoint)
    await listener.serve(receiver)
    try:
        yield listener
    finally:
        receiver.release()
        await listener.close()


def at(queue: str) -> str:
    return f"rabbitmq://default/queue/{queue}"


async def send(url: str, queue: str, batch: Sequence[Envelope]) -> None:
    async with transport(url, service="orders").sender(at(queue)) as sender:
        assert await sender.send(batch) == [STORED] * len(batch)


_SOON: Mapping[str, Any] = {"reconnect_pause": 0.05, "reconnect_pause_longest": 0.1}


async def left_in(client: Foreign, queue: str) -> int:
    """What is in the queue once nobody consumes it: what was not acknowledged is back then."""

    async def is_left() -> bool:
        return await client.consumers(queue) == 0

    await eventually(is_left)
    return await client.count(queue)


def table(content: bytes) -> bytes:
    """A table of AMQP."""
    return struct.pack("!I", len(content)) + content


def nested(depth: int) -> bytes:
    """Tables in tables."""
    content = table(b"")
    for _ in range(depth):
        content = table(b"\x01a" + b"F" + content)
    return content


class TestTopics:
    async def test_topic_binds_a_queue_for_each_handled_type(
        self, broker: AnyBroker, client: Foreign, queue_name: Names, receiver: MemoryReceiver
    ) -> None:
        service, exchange = queue_name("billing"), queue_name("exchange")
        queue_name.also(f"{service}:placed", f"{service}:paid")
        made = transport(broker.url, "placed", "paid", service=service, amqp_exchange=exchange)
        sending = transport(broker.url, service="orders", amqp_exchange=exchange)
        batches = {name: [envelope(name) for _ in range(20)] for name in ("placed", "paid")}
        async with listening(made, "rabbitmq://default/topic/orders", receiver) as listener:
            for name, batch in batches.items():
                async with sending.sender(sending.resolve("rabbitmq://default/topic", name)) as sender:
                    assert await sender.send(batch) == [STORED] * 20
            await client.publish("orders:paid", b"{}", exchange=exchange, message_id="17")
            await receiver.stores(41)
            assert listener.statistics()["connections"] == 1
        for batch in batches.values():
            assert [stored for stored in receiver.envelopes if stored in batch] == batch
        (plain,) = [stored for stored in receiver.envelopes if stored.source == "unknown"]
        assert plain.message_type == "paid"
        assert plain.destination == f"rabbitmq://default/queue/{service}:paid"

    async def test_topic_without_handled_types_is_refused(self, broker: AnyBroker, receiver: MemoryReceiver) -> None:
        with pytest.raises(InvalidSetting, match="no message type is handled here"):
            await transport(broker.url).listener("rabbitmq://default/topic/orders", "in").serve(receiver)


class TestStoring:
    async def test_deliveries_gather_while_a_batch_is_being_stored(
        self, broker: AnyBroker, queue: str, receiver: MemoryReceiver
    ) -> None:
        receiver.hold()
        async with listening(transport(broker.url, batch_size=5, batches_in_flight=2), at(queue), receiver) as listener:
            await send(broker.url, queue, envelopes(1))
            await receiver.arrived(1)
            batch = envelopes(25)
            await send(broker.url, queue, batch)
            await eventually(lambda: len(listener._held) == 25)
            assert len(receiver.batches) == 1
            receiver.release()
            await receiver.stores(26)
        assert receiver.batches[1:] == [batch[:10], batch[10:20], batch[20:]]

    async def test_a_batch_is_bounded_in_bytes(self, broker: AnyBroker, queue: str, receiver: MemoryReceiver) -> None:
        await declared(broker.url, queue)
        await send(broker.url, queue, [*envelopes(5, body=bytes(4_000)), *envelopes(2, body=bytes(20_000))])
        async with listening(transport(broker.url, batch_bytes=10_000, batches_in_flight=1), at(queue), receiver):
            await receiver.stores(7)
        assert all(len(batch) == 1 or sum(e.weight_bytes for e in batch) <= 10_000 for batch in receiver.batches)

    async def test_delivery_is_acknowledged_only_when_stored_and_the_order_is_kept(
        self, broker: AnyBroker, client: Foreign, queue: str, receiver: MemoryReceiver
    ) -> None:
        batch = envelopes(30)
        receiver.broken = "the database is away"
        async with listening(transport(broker.url), at(queue), receiver) as listener:
            await send(broker.url, queue, batch)
            await receiver.until(lambda: receiver.arrivals > 90, "it to be offered again and again")
            assert listener.statistics()["envelopes"] == 0
        assert await left_in(client, queue) == 30
        async with listening(transport(broker.url), at(queue), receiver):
            await receiver.arrived(len(receiver.batches) + 1)
            receiver.broken = ""
            await receiver.stores(30)
        assert receiver.envelopes == batch
        assert await left_in(client, queue) == 0

    async def test_unstorable_delivery_is_offered_less_and_less_often(
        self, broker: AnyBroker, queue: str, receiver: MemoryReceiver
    ) -> None:
        clock = asyncio.get_running_loop().time
        receiver.broken = "the database is away"
        times = []
        async with listening(transport(broker.url), at(queue), receiver):
            await send(broker.url, queue, envelopes(1))
            for number in range(2, 6):
                await receiver.arrived(number)
                times.append(clock())
        pauses = [later - earlier for earlier, later in pairwise(times)]
        assert all(pause >= 0.03 * 2**number for number, pause in enumerate(pauses)), pauses

    async def test_a_fault_of_the_receiver_loses_nothing(
        self, broker: AnyBroker, client: Foreign, queue: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        class Faulty(MemoryReceiver):
            faults = 2

            async def receive(self, endpoint: str, batch: Sequence[Envelope]) -> list[Outcome]:
                if self.faults:
                    self.faults -= 1
                    raise LookupError("a fault")
                return await super().receive(endpoint, batch)

        receiver, batch = Faulty(), envelopes(5)
        async with listening(transport(broker.url), at(queue), receiver):
            await send(broker.url, queue, batch)
            await receiver.stores(5)
        assert receiver.envelopes == batch
        assert caplog.text.count("LookupError('a fault')") == 2
        assert caplog.text.count("Traceback") == 1
        assert await left_in(client, queue) == 0

    async def test_invalid_delivery_is_kept_as_a_dead_letter_before_its_acknowledgement(
        self, broker: AnyBroker, client: Foreign, queue: str
    ) -> None:
        class Unavailable(MemoryReceiver):
            available = False

            async def reject(
                self, endpoint: str, raw: bytes, reason: str, headers: Mapping[str, str] | None = None
            ) -> None:
                if not self.available:
                    raise StorageUnavailable("the database is away")
                await super().reject(endpoint, raw, reason, headers)

        receiver, stored = Unavailable(), envelopes(3)
        async with listening(transport(broker.url), at(queue), receiver):
            await client.publish(queue, b"no type", app_id="legacy")
            await send(broker.url, queue, [*stored, envelope(REJECTED_TYPE, b"rejected")])
            await receiver.stores(3)
            await eventually(lambda: len(receiver.batches) > 1)
        assert await left_in(client, queue) == 2
        receiver.available = True
        async with listening(transport(broker.url), at(queue), receiver) as listener:
            await receiver.until(lambda: len(receiver.letters) == 2, "both letters")
            await eventually(lambda: listener.statistics()["envelopes"] == 2)
            assert listener.statistics()["refused"] == 2
        (first, reason, about), (second, verdict, facts) = receiver.letters
        assert (first, second) == (b"no type", b"rejected")
        assert "no type" in reason
        assert verdict == "a type that the test rejects"
        assert (about["queue"], about["routing-key"], about["app-id"]) == (queue, queue, "legacy")
        assert (facts["app-id"], facts["type"]) == ("orders", REJECTED_TYPE)
        assert await left_in(client, queue) == 0

    async def test_prefetch_bounds_the_deliveries_held(
        self, broker: AnyBroker, client: Foreign, queue: str, receiver: MemoryReceiver
    ) -> None:
        receiver.hold()
        async with listening(transport(broker.url), f"{at(queue)}?prefetch=7", receiver):
            await send(broker.url, queue, envelopes(50))
            await eventually(lambda: _counts(client, queue, 43))
            receiver.release()
            await receiver.stores(50)

    async def test_a_small_prefetch_fills_again_before_the_next_commit(self, broker: AnyBroker, queue: str) -> None:
        await declared(broker.url, queue)
        await send(broker.url, queue, envelopes(100))
        receiver = SlowReceiver()
        async with listening(transport(broker.url), f"{at(queue)}?prefetch=10", receiver):
            await receiver.stores(100)
        # One delivery, nine that have come meanwhile, and then halves of ten: 20 commits at least.
        assert len(receiver.sizes) < 17


async def _counts(client: Foreign, queue: str, count: int) -> bool:
    return await client.count(queue) == count


async def declared(url: str, queue: str) -> None:
    """The queue, as a listener declares it."""
    async with listening(transport(url), at(queue), MemoryReceiver()):
        pass


class TestUnreadable:
    """What the library itself cannot read: it closes the connection, and the broker delivers the message again."""

    @pytest.mark.parametrize(
        "properties",
        [
            pytest.param(b"\x00\x20" + b"\x02\xff\xfe", id="a type that is not UTF-8"),
            pytest.param(b"\x00\x40" + b"\xff" * 8, id="a time beyond the calendar"),
            pytest.param(b"\x20\x00" + table(b"\x01\xff" + b"V"), id="a header's name that is not UTF-8"),
            pytest.param(b"\x20\x00" + nested(5_000), id="tables in tables"),
        ],
    )
    async def test_unreadable_delivery_becomes_a_dead_letter_and_harms_no_other(
        self, broker: AnyBroker, client: Foreign, queue: str, properties: bytes, receiver: MemoryReceiver
    ) -> None:
        made, neighbour = transport(broker.url), MemoryReceiver()
        before, after, others = envelopes(3), envelopes(3), envelopes(5)
        async with (
            listening(made, at(queue), receiver) as listener,
            listening(made, at(f"{queue}-2"), neighbour),
        ):
            await send(broker.url, queue, before)
            await publish_raw(client, queue.encode(), properties, b"unreadable")
            await send(broker.url, queue, after)
            await send(broker.url, f"{queue}-2", others)
            await receiver.until(lambda: bool(receiver.letters), "a letter")
            await receiver.stores(6)
            await neighbour.stores(5)
            await eventually(lambda: listener.statistics()["down"] == 0)
        ((raw, reason, about),) = receiver.letters
        assert raw == b"unreadable"
        assert reason.startswith("the properties cannot be read: ")
        assert about["queue"] == queue
        assert receiver.envelopes == [*before, *after]
        assert neighbour.envelopes == others
        assert await left_in(client, queue) == 0

    async def test_undecodable_routing_key_is_shown_with_replacement_characters(
        self, broker: AnyBroker, client: Foreign, queue: str, queue_name: Names, receiver: MemoryReceiver
    ) -> None:
        exchange = queue_name("exchange")
        async with listening(transport(broker.url), at(queue), receiver):
            await client.bind(queue, exchange, "#")
            await publish_raw(client, b"k\xff.\xfe" + b"\xff" * 200, b"\x00\x00", b"!", exchange.encode())
            await receiver.until(lambda: bool(receiver.letters), "a letter")
        ((raw, _, about),) = receiver.letters
        assert raw == b"!"
        assert about["routing-key"].startswith("k\N{REPLACEMENT CHARACTER}.\N{REPLACEMENT CHARACTER}")


async def publish_raw(client: Foreign, key: bytes, properties: bytes, body: bytes, exchange: bytes = b"") -> None:
    """Publish what no well-behaved client would: flags and properties as they are given."""
    publish = struct.pack("!HHH", 60, 40, 0) + bytes([len(exchange)]) + exchange + bytes([len(key)]) + key + b"\0"
    header = struct.pack("!HHQ", 60, 0, len(body)) + properties
    assert client.connection.transport is not None
    channel = await client.connection.transport.connection.channel()
    frames = (
        struct.pack("!BHI", kind, channel.number, len(payload)) + payload + b"\xce"
        for kind, payload in ((1, publish), (2, header), (3, body))
    )
    await channel.connection.write_queue.put(ChannelFrame(payload=b"".join(frames), should_close=False))
    await channel.close()


class TestDown:
    async def test_deleted_queue_is_declared_again(
        self, broker: AnyBroker, client: Foreign, queue: str, receiver: MemoryReceiver, caplog: pytest.LogCaptureFixture
    ) -> None:
        async with listening(transport(broker.url), at(queue), receiver) as listener:
            await client.delete(queue)
            await eventually(lambda: listener.statistics()["dropped"] == 1)
            await eventually(lambda: listener.statistics()["down"] == 0)
            assert listener.statistics()["connections"] == 2
            await send(broker.url, queue, envelopes(3))
            await receiver.stores(3)
        assert f"{at(queue)} is down: queue {queue}: the broker cancelled the consumer" in caplog.text
        assert f"{at(queue)} is up again" in caplog.text

    async def test_deleted_queue_of_several_is_declared_and_bound_again(
        self, broker: AnyBroker, client: Foreign, queue_name: Names, receiver: MemoryReceiver
    ) -> None:
        service, exchange = queue_name("billing"), queue_name("exchange")
        queue_name.also(f"{service}:placed", f"{service}:paid")
        made = transport(broker.url, "placed", "paid", service=service, amqp_exchange=exchange)
        async with listening(made, "rabbitmq://default/topic/orders", receiver) as listener:
            await client.delete(f"{service}:placed")
            await eventually(lambda: listener.statistics()["connections"] == 2)
            for key in ("orders:placed", "orders:paid"):
                await client.publish(key, b"{}", exchange=exchange, message_id=key)
            await receiver.stores(2)

    @pytest.mark.parametrize("deleted", ["exchange", "binding"])
    async def test_deleted_exchange_or_binding_is_declared_again_under_the_same_consumers(
        self, broker: AnyBroker, client: Foreign, queue_name: Names, receiver: MemoryReceiver, deleted: str
    ) -> None:
        """The broker cancels no consumer then, and a sender of the topic makes the exchange again without bindings."""
        service, exchange = queue_name("billing"), queue_name("exchange")
        queue_name.also(queue := f"{service}:placed")
        made = transport(broker.url, "placed", service=service, amqp_exchange=exchange, **_SOON)
        async with listening(made, "rabbitmq://default/topic/orders", receiver) as listener:
            async with client.connection.channel() as channel:
                if deleted == "exchange":
                    await channel.exchange_delete(exchange)
                    await channel.declare_exchange(exchange, "topic", durable=True)
                else:
                    await (await channel.get_queue(queue)).unbind(exchange, "orders:placed")
            await eventually(lambda: client.routes(exchange, "orders:placed"))
            await receiver.stores(1)
            assert listener.statistics()["connections"] == 1

    async def test_refused_declaration_takes_a_consuming_listener_down_until_the_cause_is_removed(
        self,
        broker: AnyBroker,
        client: Foreign,
        queue_name: Names,
        receiver: MemoryReceiver,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        service, exchange = queue_name("billing"), queue_name("exchange")
        queue_name.also(f"{service}:placed")
        made = transport(broker.url, "placed", service=service, amqp_exchange=exchange, **_SOON)

        async def is_fanout() -> bool:
            try:
                async with client.connection.channel() as channel:
                    await channel.exchange_delete(exchange)
                    await channel.declare_exchange(exchange, "fanout", durable=True)
            except ChannelPreconditionFailed:  # the listener was quicker
                return False
            return True

        async with listening(made, "rabbitmq://default/topic/orders", receiver) as listener:
            await eventually(is_fanout)
            await eventually(lambda: listener.statistics()["down"] == 1)
            await client.publish(f"{service}:placed", b"{}", message_id="17")
            await receiver.stores(1)
            assert f"exchange {exchange}: its type is fanout, and topic was asked for" in caplog.text
            await client.delete(exchange)
            await eventually(lambda: listener.statistics()["down"] == 0)
            assert listener.statistics()["connections"] == 1

    async def test_unordered_listener_stores_deliveries_held_of_a_deleted_queue(
        self, broker: AnyBroker, client: Foreign, queue: str, receiver: MemoryReceiver, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Nobody delivers them again, and no order is promised that they could break."""
        receiver.hold()
        async with listening(transport(broker.url, batch_size=2, batches_in_flight=1), at(queue), receiver) as listener:
            batch, later = envelopes(10), envelopes(3)
            await send(broker.url, queue, batch)
            await receiver.arrived(1)
            await eventually(lambda: len(receiver.batches[0]) + len(listener._held) == 10)
            await client.delete(queue)
            await eventually(lambda: listener.statistics()["connections"] == 2)
            receiver.release()
            await send(broker.url, queue, later)
            await receiver.stores(13)
        assert receiver.envelopes == [*batch, *later]
        assert "had not stored" not in caplog.text
        assert await left_in(client, queue) == 0

    async def test_stale_delivery_tags_of_a_deleted_queue_are_not_acknowledged(
        self, broker: AnyBroker, client: Foreign, queue: str, receiver: MemoryReceiver
    ) -> None:
        """Its tags are those of a channel that is gone; the next channel has the same number."""
        receiver.hold()
        async with listening(transport(broker.url), at(queue), receiver) as listener:
            await send(broker.url, queue, envelopes(3))
            await receiver.arrived(1)
            await client.delete(queue)
            await eventually(lambda: listener.statistics()["connections"] == 2)
            batch = envelopes(3)
            await send(broker.url, queue, batch)
            await eventually(lambda: len(listener._held) == 3)
            receiver.release()
            await receiver.until(lambda: {sent.id for sent in batch} <= receiver.stored.keys())
            await eventually(lambda: listener.statistics()["envelopes"] >= 3)
            for number in range(5):  # a tag that is not known there would have closed the channel by now
                await send(broker.url, queue, envelopes(1))
                await receiver.stores(len(batch) + 1 + number)
            assert listener.statistics()["connections"] == 2
        assert await left_in(client, queue) == 0

    async def test_a_queue_with_other_arguments_is_an_invalid_setting(
        self, broker: AnyBroker, client: Foreign, queue: str, receiver: MemoryReceiver
    ) -> None:
        await client.declare(queue, max_length=5)
        made = transport(broker.url)
        with pytest.raises(InvalidSetting, match=f"queue {queue}: its x-max-length is 5"):
            await made.listener(at(queue), "in").serve(receiver)
        async with listening(made, f"{at(queue)}?declare=no", receiver):  # nothing is left behind
            await client.publish(queue, b"{}", message_id="17", type="placed")
            await receiver.stores(1)

    async def test_queue_redeclared_with_other_arguments_is_retried_with_one_error_logged(
        self, broker: AnyBroker, client: Foreign, queue: str, receiver: MemoryReceiver, caplog: pytest.LogCaptureFixture
    ) -> None:
        await declared(broker.url, queue)
        async with (
            proxy_of(broker.url) as (proxy, url),
            listening(transport(url), at(queue), receiver) as listener,
        ):
            proxy.refuse()
            await client.delete(queue)
            await client.declare(queue, max_length=5)
            proxy.restore()
            await eventually(lambda: "its x-max-length is 5" in caplog.text)
            assert listener.statistics()["down"] == 1
            await client.delete(queue)
            await eventually(lambda: listener.statistics()["down"] == 0, within=15)
            await send(broker.url, queue, envelopes(1))
            await receiver.stores(1)
        errors = [record for record in caplog.records if record.levelno == logging.ERROR and record.name == "durable"]
        assert len(errors) == 1

    async def test_listener_serves_without_a_broker_and_consumes_when_one_appears(
        self, broker: AnyBroker, queue: str, receiver: MemoryReceiver
    ) -> None:
        async with proxy_of(broker.url) as (proxy, url):
            proxy.refuse()
            async with listening(transport(url), at(queue), receiver) as listener:
                assert listener.statistics()["down"] == 1
                await eventually(lambda: listener.statistics()["dropped"] >= 3)
                proxy.restore()
                await eventually(lambda: listener.statistics()["down"] == 0, within=15)
                await send(broker.url, queue, envelopes(2))
                await receiver.stores(2)
                assert listener.statistics()["connections"] == 1

    async def test_a_listener_without_a_broker_is_closed_at_once(self, queue: str, receiver: MemoryReceiver) -> None:
        listener = transport("amqp://guest:guest@127.0.0.1:1/").listener(at(queue), "in")
        await listener.serve(receiver)
        async with asyncio.timeout(20):
            await listener.close()

    async def test_silent_broker_delays_the_start_by_one_timeout(
        self, broker: AnyBroker, queue: str, receiver: MemoryReceiver
    ) -> None:
        async with proxy_of(broker.url) as (proxy, url):
            proxy.swallow(UP)
            made = transport(url, connect_timeout=timedelta(seconds=0.2))
            async with asyncio.timeout(20), listening(made, at(queue), receiver) as listener:
                assert listener.statistics()["down"] == 1


@asynccontextmanager
async def proxy_of(url: str) -> AsyncIterator[tuple[ChaosProxy, str]]:
    """A proxy before the broker, and the URL that goes through it."""
    user, _, place = url.removeprefix("amqp://").partition("@")
    host, _, vhost = place.partition("/")
    async with ChaosProxy(f"tcp://{host}") as proxy:
        yield proxy, f"amqp://{user}@{proxy.uri.removeprefix('tcp://')}/{vhost}"


class TestClosing:
    async def test_hanging_deliveries_are_given_up_at_the_deadline_and_delivered_to_the_next(
        self, broker: AnyBroker, client: Foreign, queue: str, receiver: MemoryReceiver
    ) -> None:
        receiver.hold()
        listener = transport(broker.url, drain_timeout=timedelta(seconds=0.1)).listener(at(queue), "in")
        await listener.serve(receiver)
        batch = envelopes(4)
        await send(broker.url, queue, batch)
        await receiver.arrived(1)
        async with asyncio.timeout(20):
            await listener.close()
        assert listener.statistics()["envelopes"] == 0
        successor = MemoryReceiver()
        async with listening(transport(broker.url), at(queue), successor):
            await successor.stores(4)
        assert successor.envelopes == batch

    async def test_closing_listener_acknowledges_deliveries_under_way_and_leaves_the_others(
        self, broker: AnyBroker, client: Foreign, queue: str, receiver: MemoryReceiver
    ) -> None:
        receiver.hold()
        listener = transport(broker.url, batch_size=2, batches_in_flight=1).listener(at(queue), "in")
        await listener.serve(receiver)
        await send(broker.url, queue, envelopes(10))
        await eventually(lambda: len(receiver.batches) == 1 and len(listener._held) >= 8)
        taken = len(receiver.batches[0])
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(listener.close())
            await eventually(lambda: listener._stop.is_set())
            receiver.release()
        assert len(receiver.stored) == taken
        assert await left_in(client, queue) == 10 - taken

    @pytest.mark.parametrize("moment", range(12))
    async def test_listener_ends_when_closed_at_any_moment_of_its_return(
        self, broker: AnyBroker, client: Foreign, queue: str, receiver: MemoryReceiver, moment: int
    ) -> None:
        """A cancellation in the middle of a conversation with the broker comes back as an error of the channel."""
        listener = transport(broker.url).listener(at(queue), "in")
        await listener.serve(receiver)
        await client.delete(queue)
        await eventually(lambda: listener.statistics()["down"] == 1, within=20)
        await eventually(lambda: client.exists(queue), within=20)  # it is between declaring and consuming now
        for _ in range(moment):
            await asyncio.sleep(0)
        async with asyncio.timeout(30):
            await listener.close()
        assert not [task for task in asyncio.all_tasks() if listener.address in task.get_name()]

        async def is_left() -> bool:
            return await client.consumers(queue) == 0

        await eventually(is_left, within=20)

    async def test_closed_listener_holds_no_delivery_behind_a_broken_network(
        self, broker: AnyBroker, client: Foreign, queue: str, receiver: MemoryReceiver
    ) -> None:
        receiver.hold()
        async with proxy_of(broker.url) as (proxy, url):
            made = transport(url, drain_timeout=timedelta(seconds=1))
            listener = made.listener(at(queue), "in")
            await listener.serve(receiver)
            await send(broker.url, queue, envelopes(5))
            await receiver.arrived(1)
            proxy.swallow(UP)
            async with asyncio.timeout(60):
                await listener.close()
            healthy = MemoryReceiver()
            async with listening(transport(broker.url), at(queue), healthy):
                await healthy.stores(5)


async def test_cancellation_turned_into_a_channel_error_is_a_cancellation() -> None:
    async def converse() -> None:
        with translated("consuming"):
            try:
                await asyncio.sleep(600)
            except asyncio.CancelledError:
                raise ChannelClosed(320, "closed") from None

    task = asyncio.create_task(converse())
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()


async def test_timeout_within_a_conversation_is_no_cancellation() -> None:
    async def converse() -> None:
        with translated("consuming"):
            async with asyncio.timeout(0.01):
                try:
                    await asyncio.sleep(600)
                except asyncio.CancelledError:
                    raise ChannelClosed(320, "closed") from None

    with pytest.raises(TransportError):
        await converse()
