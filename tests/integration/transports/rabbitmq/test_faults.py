"""A broker that dies, hangs, runs out of memory or throws everybody out, under senders and listeners at work."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any

import pytest

from durable.embedded import Broker
from durable.envelope import Envelope
from durable.errors import ConnectionFailed, PeerTimeout, TransportError
from durable.outcomes import STORED
from durable.settings import load_settings
from durable.testing import eventually
from durable.transports.base import Sender
from durable.transports.rabbitmq.transport import RabbitListener, RabbitTransport
from tests.support.receivers import MemoryReceiver, envelopes
from tests.support.servers import Names

HASTY = {"send_timeout": timedelta(seconds=1), "connect_timeout": timedelta(seconds=1)}


def transport(broker: Broker, **settings: Any) -> RabbitTransport:
    return RabbitTransport(load_settings(amqp_url=broker.url, **settings), service="orders", messages=dict)


@pytest.fixture
def queue(queue_name: Names) -> str:
    return f"rabbitmq://default/queue/{queue_name('faults')}"


@pytest.fixture
def receiver() -> MemoryReceiver:
    return MemoryReceiver()


@asynccontextmanager
async def listening(made: RabbitTransport, uri: str, receiver: MemoryReceiver) -> AsyncIterator[RabbitListener]:
    listener = made.listener(uri, "in")
    await listener.serve(receiver)
    try:
        yield listener
    finally:
        receiver.release()
        await listener.close()


async def declare(made: RabbitTransport, uri: str, broker: Broker) -> None:
    """The queue; a broker that is killed now would come back with it."""
    async with listening(made, uri, MemoryReceiver()) as listener:
        assert listener.statistics()["down"] == 0
    await asyncio.to_thread(broker.settle)


async def error_of(doing: Any) -> TransportError | None:
    try:
        await doing
    except TransportError as error:
        return error
    return None


async def answers(sender: Sender) -> bool:
    return await error_of(sender.ping()) is None


async def send_until_it_fails(sender: Sender) -> TransportError:
    while True:
        try:
            await sender.send(envelopes(10))
        except TransportError as error:
            return error


async def stored(sender: Sender, batch: Sequence[Envelope]) -> bool:
    """An agent's next try."""
    try:
        return await sender.send(batch) == [STORED] * len(batch)
    except TransportError:
        return False


class TestKilled:
    @pytest.mark.parametrize("queue_type", ["classic", "quorum"])
    async def test_confirmed_messages_survive_a_broker_killed_within_a_batch(
        self, own_broker: Broker, queue: str, receiver: MemoryReceiver, queue_type: str
    ) -> None:
        made = transport(own_broker, amqp_queue_type=queue_type)
        await declare(made, queue, own_broker)
        confirmed: list[Envelope] = []

        async def keep_sending(sender: Sender) -> TransportError:
            while True:
                batch = envelopes(100)
                try:
                    outcomes = await sender.send(batch)
                except TransportError as error:
                    return error
                confirmed.extend(sent for sent, outcome in zip(batch, outcomes, strict=True) if outcome == STORED)

        async with made.sender(queue) as sender:
            async with asyncio.TaskGroup() as tasks:
                sending = [tasks.create_task(keep_sending(sender)) for _ in range(4)]
                await eventually(lambda: len(confirmed) >= 1_000, within=20)
                await asyncio.to_thread(own_broker.kill)
            assert {type(task.result()) for task in sending} <= {ConnectionFailed, PeerTimeout}
            assert not await answers(sender)
            await asyncio.to_thread(own_broker.start)
            await eventually(lambda: answers(sender), within=20)
            async with listening(made, queue, receiver):
                ids = {sent.id for sent in confirmed}
                await eventually(lambda: ids <= receiver.stored.keys(), within=30, what="everything confirmed")
                await eventually(lambda: stored(sender, envelopes(1)), within=20)

    async def test_a_listener_outlives_its_broker(
        self, own_broker: Broker, queue: str, receiver: MemoryReceiver
    ) -> None:
        made = transport(own_broker)
        await declare(made, queue, own_broker)
        receiver.hold()
        batch = envelopes(5)
        async with made.sender(queue) as sender, listening(made, queue, receiver) as listener:
            assert await sender.send(batch) == [STORED] * 5
            await receiver.arrived(1)
            await asyncio.to_thread(own_broker.kill)
            await eventually(lambda: listener.statistics()["down"] == 1)
            receiver.release()  # what is stored now cannot be acknowledged any more
            await asyncio.to_thread(own_broker.start)
            await eventually(lambda: listener.statistics()["down"] == 0, within=20)
            await eventually(lambda: stored(sender, envelopes(1)), within=20)
            await eventually(lambda: len(receiver.stored) == 6, within=20)
            assert receiver.envelopes[:5] == batch


class TestSilent:
    async def test_silent_broker_costs_a_send_one_timeout_and_loses_nothing(
        self, own_broker: Broker, queue: str, receiver: MemoryReceiver
    ) -> None:
        made = transport(own_broker, **HASTY)
        before, meanwhile, after = (envelopes(3) for _ in range(3))
        async with listening(made, queue, receiver), made.sender(queue) as sender:
            await eventually(lambda: stored(sender, before), within=20)
            own_broker.pause()
            error = await send_until_it_fails(sender)  # a process is not stopped at once on a busy machine
            assert isinstance(error, PeerTimeout)
            assert "not confirmed within 1 seconds" in str(error)
            with pytest.raises(PeerTimeout):
                await sender.send(meanwhile)
            with pytest.raises(PeerTimeout):
                await sender.ping()
            own_broker.resume()
            await eventually(lambda: answers(sender), within=20)
            await eventually(lambda: stored(sender, meanwhile), within=20)
            await eventually(lambda: stored(sender, after), within=20)
            ids = {sent.id for sent in [*before, *meanwhile, *after]}
            await eventually(lambda: ids <= receiver.stored.keys(), within=20)

    async def test_missing_heartbeats_are_a_failure_and_no_cancellation(
        self, own_broker: Broker, queue: str, receiver: MemoryReceiver
    ) -> None:
        """As the library notices it: by cancelling everybody who waits."""
        patient = transport(own_broker, send_timeout=timedelta(seconds=60), idle_timeout=timedelta(seconds=1))
        async with listening(patient, queue, receiver) as listener, patient.sender(queue) as sender:
            assert await sender.send(envelopes(1)) == [STORED]
            own_broker.pause()
            error = await send_until_it_fails(sender)
            assert isinstance(error, ConnectionFailed)
            assert "the broker went silent" in str(error)
            await eventually(lambda: listener.statistics()["down"] == 1, within=20)
            own_broker.resume()
            await eventually(lambda: listener.statistics()["down"] == 0, within=20)
            await eventually(lambda: answers(sender), within=20)


class TestBlocked:
    async def test_publishing_and_pinging_fail_and_say_why_while_acknowledging_goes_on(
        self, own_broker: Broker, queue: str, receiver: MemoryReceiver
    ) -> None:
        made = transport(own_broker, send_timeout=timedelta(seconds=1.5))
        batch = envelopes(3)
        receiver.hold()
        async with listening(made, queue, receiver) as listener, made.sender(queue) as sender:
            assert await sender.send(envelopes(2)) == [STORED] * 2
            await receiver.arrived(1)
            await asyncio.to_thread(own_broker.memory_alarm, True)
            for _ in range(3):
                with pytest.raises(TransportError, match="broker blocked: it is short of memory or disk"):
                    await sender.send(batch)
            with pytest.raises(TransportError, match="broker blocked"):
                await sender.ping()
            receiver.release()
            await eventually(lambda: listener.statistics()["envelopes"] == 2)
            await asyncio.to_thread(own_broker.memory_alarm, False)
            await eventually(lambda: answers(sender), within=20)
            assert await sender.send(batch) == [STORED] * 3
            await receiver.stores(5)


class TestThrownOut:
    async def test_connections_closed_by_the_broker_are_opened_again(
        self, own_broker: Broker, queue: str, receiver: MemoryReceiver
    ) -> None:
        made = transport(own_broker)
        batch = envelopes(5)
        receiver.hold()
        async with listening(made, queue, receiver) as listener, made.sender(queue) as sender:
            assert await sender.send(batch) == [STORED] * 5
            await receiver.arrived(1)
            await asyncio.to_thread(own_broker.control, "close_all_connections", "maintenance")
            await eventually(lambda: listener.statistics()["connections"] == 2, within=20)
            receiver.release()
            await eventually(lambda: stored(sender, envelopes(1)), within=20)
            await receiver.stores(6)
            assert receiver.envelopes[:5] == batch
            await eventually(lambda: listener.statistics()["envelopes"] >= 6)

    async def test_broker_stopping_fails_the_send_under_way_with_its_reason(
        self, own_broker: Broker, queue: str, receiver: MemoryReceiver
    ) -> None:
        made = transport(own_broker)
        async with listening(made, queue, receiver) as listener, made.sender(queue) as sender:
            assert await sender.send(envelopes(1)) == [STORED]
            sending = asyncio.create_task(send_until_it_fails(sender))
            await asyncio.to_thread(own_broker.stop)
            assert isinstance(await sending, ConnectionFailed)
            await eventually(lambda: listener.statistics()["down"] == 1)

    async def test_connections_are_named_after_service_and_purpose(
        self, own_broker: Broker, queue: str, receiver: MemoryReceiver
    ) -> None:
        made = transport(own_broker)
        async with (
            listening(made, queue, receiver),
            listening(made, queue, receiver),
            made.sender(queue) as sender,
            made.sender(queue) as another,
        ):
            await sender.ping()
            await another.send(envelopes(1))
            shown = await asyncio.to_thread(own_broker.control, "list_connections", "client_properties")
        assert shown.count("orders publish (") == 1
        assert shown.count("orders consume (") == 1
        assert f":{os.getpid()})" in shown


class TestTooLargeMessages:
    async def test_message_too_large_for_the_broker_is_found_and_rejected(
        self, own_broker: Broker, queue: str, receiver: MemoryReceiver
    ) -> None:
        made = transport(own_broker)
        small, large = envelopes(6), envelopes(2, body=bytes(20_000))
        batch = [*small[:3], large[0], *small[3:], large[1]]
        async with listening(made, queue, receiver):
            await asyncio.to_thread(own_broker.control, "eval", "application:set_env(rabbit, max_message_size, 9000).")
            try:
                async with made.sender(queue) as sender:
                    outcomes = await sender.send(batch)
                    assert await sender.send(envelopes(1)) == [STORED]
            finally:
                await asyncio.to_thread(
                    own_broker.control, "eval", "application:set_env(rabbit, max_message_size, 134217728)."
                )
            await receiver.stores(7)
        for sent, outcome in zip(batch, outcomes, strict=True):
            assert (outcome == STORED) == (sent in small)
            assert outcome == STORED or "PRECONDITION_FAILED - message size 20000" in outcome.reason  # type: ignore[union-attr]
