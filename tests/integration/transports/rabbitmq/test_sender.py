"""What a sender makes of a real broker's answers. What it does when the broker dies is in test_faults."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trustme
from aio_pika.abc import AbstractIncomingMessage
from aiormq.channel import Channel
from pamqp.commands import Basic
from pamqp.common import FieldValue

from durable.envelope import Envelope
from durable.errors import ConnectionFailed, InvalidSetting, PeerTimeout, TransportError
from durable.outcomes import BUSY, STORED, Failed, Outcome, Rejected, Stored
from durable.settings import Settings, load_settings
from durable.testing import eventually
from durable.transports.base import Sender
from durable.transports.rabbitmq import message as rabbitmq_message
from durable.transports.rabbitmq.channel import translated
from durable.transports.rabbitmq.transport import RabbitTransport
from tests.support.broker import Foreign, foreign
from tests.support.proxy import DOWN, UP, ChaosProxy
from tests.support.receivers import envelope, envelopes
from tests.support.servers import AnyBroker, Names

UNROUTABLE = Failed(
    "no queue is bound there (NO_ROUTE); "
    "start the services that listen there, or run `durable-agent topology APP --apply` for each"
)


def transport(url: str, **settings: Any) -> RabbitTransport:
    return RabbitTransport(settings_of(url, **settings), service="orders", messages=dict)


def settings_of(url: str, **settings: Any) -> Settings:
    return load_settings(amqp_url=url, **settings)


@pytest.fixture
async def client(broker: AnyBroker) -> AsyncIterator[Foreign]:
    async with foreign(broker.url) as client:
        yield client


@pytest.fixture
async def queue(client: Foreign, queue_name: Names) -> str:
    name = queue_name("sender")
    await client.declare(name)
    return name


@pytest.fixture
async def proxied(broker: AnyBroker) -> AsyncIterator[tuple[ChaosProxy, str]]:
    """A proxy before the broker, and the URL that goes through it."""
    user, _, place = broker.url.removeprefix("amqp://").partition("@")
    host, _, vhost = place.partition("/")
    async with ChaosProxy(f"tcp://{host}") as proxy:
        yield proxy, f"amqp://{user}@{proxy.uri.removeprefix('tcp://')}/{vhost}"


def to(queue: str) -> str:
    return f"rabbitmq://default/queue/{queue}"


async def taken(client: Foreign, queue: str) -> list[AbstractIncomingMessage]:
    """All that is in the queue, in order."""
    messages = []
    async with client.connection.channel() as channel:
        found = await channel.get_queue(queue, ensure=False)
        while message := await found.get(no_ack=True, fail=False):
            messages.append(message)
    return messages


class TestAnswers:
    async def test_stored_batch_is_persistent_ordered_and_unchanged_in_the_queue(
        self, broker: AnyBroker, client: Foreign, queue: str
    ) -> None:
        batch = [envelope("orders.placed", str(number).encode()) for number in range(250)]
        async with transport(broker.url).sender(to(queue)) as sender:
            assert await sender.send(batch) == [STORED] * 250
        messages = await taken(client, queue)
        assert [message.message_id for message in messages] == [str(sent.id) for sent in batch]
        assert [message.body for message in messages] == [sent.body for sent in batch]
        assert {message.delivery_mode for message in messages} == {2}
        assert {message.type for message in messages} == {"orders.placed"}

    async def test_deadline_is_told_to_a_broker_with_a_dead_letter_queue_when_configured(
        self, broker: AnyBroker, client: Foreign, queue_name: Names
    ) -> None:
        late, dead = queue_name("late"), queue_name("dead")
        await client.declare(dead)
        await client.declare(late, dead_letter_exchange="", dead_letter_routing_key=dead)
        soon = datetime.now(UTC) + timedelta(seconds=1)
        deadlines = [soon, soon + timedelta(days=365), None]
        batch = [msgspec.structs.replace(envelope(), deliver_by=deadline) for deadline in deadlines]
        async with transport(broker.url, amqp_expiration=True).sender(to(late)) as sender:
            assert await sender.send(batch) == [STORED] * 3

        async def dead_lettered() -> bool:
            return await client.count(dead) == 1

        await eventually(dead_lettered, within=20)
        assert [message.message_id for message in await taken(client, dead)] == [str(batch[0].id)]
        assert [message.expiration is not None for message in await taken(client, late)] == [True, False]

    async def test_unroutable_message_is_a_failure_until_a_queue_exists(
        self, broker: AnyBroker, client: Foreign, queue_name: Names
    ) -> None:
        missing, batch = queue_name("missing"), envelopes(150)
        async with transport(broker.url).sender(to(missing)) as sender:
            assert await sender.send(batch) == [UNROUTABLE] * 150
            with pytest.raises(TransportError, match=f"NOT_FOUND - no queue '{missing}'"):
                await sender.ping()
            await client.declare(missing)
            await sender.ping()
            assert await sender.send(batch) == [STORED] * 150
        assert await client.count(missing) == 150

    async def test_unbound_routing_key_is_a_failure_until_a_queue_is_bound(
        self, broker: AnyBroker, client: Foreign, queue: str, queue_name: Names
    ) -> None:
        exchange = queue_name("exchange")
        topic = transport(broker.url, amqp_exchange=exchange)
        destination = topic.resolve("rabbitmq://default/topic", "placed")
        assert destination == f"rabbitmq://default/exchange/{exchange}/orders:placed"
        async with topic.sender(destination) as sender:
            batch = envelopes(2)
            await sender.ping()
            assert await sender.send(batch) == [UNROUTABLE] * 2
            with pytest.raises(TransportError, match="no queue is bound there"):
                await sender.ping()
            await client.bind(queue, exchange, "orders:placed")
            await sender.ping()
            assert await sender.send(batch) == [STORED] * 2
            await sender.ping()
        ids = [message.message_id for message in await taken(client, queue)]
        assert ids == [str(envelope.id) for envelope in (batch[0], *batch)], "the ping has carried the first"

    async def test_deleted_exchange_is_declared_again(
        self, broker: AnyBroker, client: Foreign, queue: str, queue_name: Names
    ) -> None:
        exchange = queue_name("exchange")
        topic = transport(broker.url, amqp_exchange=exchange)
        async with topic.sender(topic.resolve("rabbitmq://default/topic", "placed")) as sender:
            await sender.send(envelopes(1))
            await client.delete(exchange)
            with pytest.raises(ConnectionFailed, match=f"NOT_FOUND - no exchange '{exchange}'"):
                await sender.send(envelopes(1))
            assert await sender.send(envelopes(1)) == [UNROUTABLE]
            await client.bind(queue, exchange, "orders:placed")
            await sender.ping()

    async def test_full_queue_is_busy_and_keeps_every_stored_message(
        self, broker: AnyBroker, client: Foreign, queue_name: Names
    ) -> None:
        name, batch = queue_name("full"), [envelope(body=str(number).encode()) for number in range(50)]
        await client.declare(name, max_length=5, overflow="reject-publish")
        async with transport(broker.url).sender(to(name)) as sender:
            outcomes = await sender.send(batch)
            assert set(outcomes) == {STORED, BUSY}
            stored = [sent.body for sent, outcome in zip(batch, outcomes, strict=True) if outcome == STORED]
            assert [message.body for message in await taken(client, name)] == stored
            assert (await sender.send(batch))[0] == STORED

    async def test_equal_ids_are_not_under_way_together_and_get_their_own_answers(
        self, broker: AnyBroker, client: Foreign, queue: str, queue_name: Names
    ) -> None:
        twin = envelope()
        async with transport(broker.url).sender(to(queue_name("missing"))) as sender:
            assert await sender.send([twin, envelope(), twin]) == [UNROUTABLE, UNROUTABLE, BUSY]
            assert await sender.send([twin]) == [UNROUTABLE]
        async with transport(broker.url).sender(to(queue)) as sender:
            first, second = await asyncio.gather(sender.send([twin]), sender.send([twin]))
            assert sorted([first, second], key=str) == [[BUSY], [STORED]]
            assert await sender.send([twin]) == [STORED]

    async def test_each_message_gets_its_own_answer(
        self, broker: AnyBroker, client: Foreign, queue_name: Names
    ) -> None:
        """The queue is deleted, and declared again, while hundreds of messages are on their way.

        What was on its way during the deletion does not count: it may be stored in the queue that is gone.
        """
        name, answered = queue_name("fleeting"), dict[str, Outcome]()
        first, deleted, stopping = set[Outcome](), asyncio.Event(), asyncio.Event()

        async def keep_sending(sender: Sender) -> None:
            while not stopping.is_set():
                counts, batch = deleted.is_set(), envelopes(50)
                outcomes = await sender.send(batch)
                first.update(outcomes)
                if counts:
                    answered.update(zip((str(sent.id) for sent in batch), outcomes, strict=True))

        await client.declare(name)
        async with transport(broker.url).sender(to(name)) as sender, asyncio.TaskGroup() as tasks:
            for _ in range(4):
                tasks.create_task(keep_sending(sender))
            await eventually(lambda: STORED in first)
            await client.delete(name)
            deleted.set()
            await eventually(lambda: UNROUTABLE in answered.values())
            await client.declare(name)
            await eventually(lambda: STORED in answered.values())
            stopping.set()
        assert set(answered.values()) <= {STORED, UNROUTABLE}
        arrived = {message.message_id for message in await taken(client, name)}
        unroutable = {id_ for id_, outcome in answered.items() if outcome == UNROUTABLE}
        assert arrived.isdisjoint(unroutable)
        assert answered.keys() - unroutable <= arrived


class TestManyUnderWay:
    async def test_all_of_a_batch_is_published_before_the_first_answer(
        self, client: Foreign, queue: str, proxied: tuple[ChaosProxy, str]
    ) -> None:
        proxy, url = proxied
        async with transport(url).sender(to(queue)) as sender, asyncio.TaskGroup() as tasks:
            await sender.send(envelopes(1))
            before = proxy.bytes_passed(UP)
            proxy.hold(DOWN)
            sends = [tasks.create_task(sender.send(envelopes(500, body=b"x" * 1_000))) for _ in range(4)]
            await proxy.passed(UP, before + 2_000 * 1_000)
            await eventually(lambda: _holds(client, queue, 2_001))
            assert not any(task.done() for task in sends)
            proxy.release(DOWN)
        assert [task.result() for task in sends] == [[STORED] * 500] * 4


async def _holds(client: Foreign, queue: str, count: int) -> bool:
    return await client.count(queue) == count


NAN = msgspec.structs.replace(envelope(), headers={"n": float("nan")})
HUGE = msgspec.structs.replace(envelope(), headers={"h": "x" * 200_000})
SURROGATE = msgspec.structs.replace(envelope(), headers={"h": "\ud800"})
LONG = envelope("x" * 256)


class TestUnsendableEnvelopes:
    @pytest.mark.parametrize("bad", [NAN, HUGE, SURROGATE, LONG], ids=["NaN", "200 kB", "surrogate", "long type"])
    async def test_unsendable_envelope_alone_is_rejected_and_the_connection_stays(
        self, client: Foreign, queue: str, proxied: tuple[ChaosProxy, str], bad: Envelope
    ) -> None:
        proxy, url = proxied
        async with transport(url).sender(to(queue)) as sender:
            outcomes = await sender.send([envelope(), bad, envelope()])
            assert [outcomes[0], outcomes[2]] == [STORED] * 2
            assert isinstance(outcomes[1], Rejected)
            assert await sender.send([bad]) == [outcomes[1]]
            assert proxy.connections == 1
        assert await client.count(queue) == 2

    def test_too_long_routing_key_is_an_invalid_setting(self, broker: AnyBroker) -> None:
        with pytest.raises(InvalidSetting, match="256 bytes"):
            transport(broker.url).resolve("rabbitmq://default/topic", "x" * 249)

    async def test_envelope_killing_its_connection_is_found_and_rejected_alone(
        self, broker: AnyBroker, client: Foreign, queue: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """As if durable had let something through that the broker does not bear: a NaN, as measured."""
        _let_through(monkeypatch)
        killer = envelope("killer")
        batch, innocent = [*envelopes(20), killer, *envelopes(400)], envelopes(30)
        made = transport(broker.url)
        async with made.sender(to(queue)) as sender, made.sender(to(queue)) as neighbour:
            outcomes, others = await asyncio.gather(sender.send(batch), _sent(neighbour, innocent))
            assert outcomes[:20] + outcomes[21:] == [STORED] * 420
            assert isinstance(outcomes[20], Rejected)
            assert "INTERNAL_ERROR" in outcomes[20].reason
            assert others == [STORED] * 30
            assert isinstance((await sender.send([killer]))[0], Rejected)
        arrived = {message.message_id for message in await taken(client, queue)}
        assert arrived == {str(sent.id) for sent in [*batch, *innocent] if sent is not killer}

    async def test_envelopes_killing_connections_in_parallel_batches_are_found_and_no_other_is_rejected(
        self, broker: AnyBroker, client: Foreign, queue: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        _let_through(monkeypatch)
        batches = [[*envelopes(3), envelope("killer"), *envelopes(3)] for _ in range(3)]
        bystanders = [envelopes(1) for _ in range(20)]
        async with transport(broker.url).sender(to(queue)) as sender, asyncio.TaskGroup() as tasks:
            sends = [tasks.create_task(_sent(sender, batch)) for batch in [*batches, *bystanders]]
        for send in sends[:3]:
            assert [type(outcome) for outcome in send.result()] == [Stored] * 3 + [Rejected] + [Stored] * 3
        assert [send.result() for send in sends[3:]] == [[STORED]] * 20


def _let_through(monkeypatch: pytest.MonkeyPatch) -> None:
    """Envelopes of the type `killer` have a header that no check has seen."""
    checked = rabbitmq_message.properties

    def properties(sent: Envelope, now: datetime | None = None) -> Basic.Properties:
        about = checked(sent, now)
        if sent.message_type == "killer":
            about.headers = dict[str, FieldValue](n=float("nan"))
        return about

    monkeypatch.setattr(rabbitmq_message, "properties", properties)


async def _sent(sender: Sender, batch: Sequence[Envelope]) -> list[Outcome]:
    """As an agent does: again, when the fate of the batch is unknown."""
    while True:
        try:
            return await sender.send(batch)
        except TransportError:
            await asyncio.sleep(0.01)


class TestDeadlines:
    async def test_late_answer_is_never_taken_for_another_message(
        self, client: Foreign, queue: str, proxied: tuple[ChaosProxy, str]
    ) -> None:
        proxy, url = proxied
        late = envelopes(3)
        async with transport(url, send_timeout=timedelta(seconds=1)).sender(to(queue)) as sender:
            await sender.ping()
            await sender.send(envelopes(1))
            proxy.hold(DOWN)
            with pytest.raises(PeerTimeout, match="not confirmed within 1 seconds"):
                await sender.send(late)
            await eventually(lambda: _holds(client, queue, 4))
            await client.delete(queue)
            proxy.release(DOWN)
            # The broker's Acks of the first attempt are here by now; of the second it returns every message.
            assert await _sent(sender, late) == [UNROUTABLE] * 3

    async def test_unanswered_batch_costs_its_destination_one_timeout_and_its_neighbours_nothing(
        self, broker: AnyBroker, client: Foreign, queue: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        made = transport(broker.url, send_timeout=timedelta(seconds=1))
        async with made.sender(to(queue)) as sender, made.sender(to(queue)) as neighbour:
            await neighbour.send(envelopes(1))
            with monkeypatch.context() as patch:
                patch.setattr(Channel, "_on_confirm_frame", _swallow)
                with pytest.raises(PeerTimeout):
                    await sender.send(envelopes(1))
            assert await neighbour.send(envelopes(1)) == [STORED]
            assert await sender.send(envelopes(1)) == [STORED]

    async def test_unanswering_connection_is_replaced(
        self, client: Foreign, queue: str, proxied: tuple[ChaosProxy, str]
    ) -> None:
        proxy, url = proxied
        hasty = transport(url, connect_timeout=timedelta(seconds=1))
        async with hasty.sender(to(queue)) as sender:
            await sender.ping()
            proxy.hold(DOWN)  # what is held for the old connection stays so
            with pytest.raises(PeerTimeout, match="broker default: opening a channel"):
                await sender.ping()
            proxy.release(DOWN)
            await eventually(lambda: _answers(sender))
            assert proxy.connections == 2


async def _swallow(*_: object) -> None:
    pass


async def _answers(sender: Sender) -> bool:
    try:
        await sender.ping()
    except TransportError:
        return False
    return True


class TestConnections:
    async def test_senders_share_one_connection_closed_by_the_last(
        self, queue: str, proxied: tuple[ChaosProxy, str]
    ) -> None:
        proxy, url = proxied
        made = transport(url)
        assert proxy.connections == 0
        async with made.sender(to(queue)) as first:
            async with made.sender(to(queue)) as second:
                await asyncio.gather(*(sender.send(envelopes(1)) for sender in [first, second] * 5))
            await first.send(envelopes(1))
            assert proxy.connections == 1
        await proxy.closed(1)
        async with made.sender(to(queue)) as third:
            await third.send(envelopes(1))
        assert proxy.connections == 2

    async def test_sends_to_a_dead_broker_share_one_failure(self, queue: str, proxied: tuple[ChaosProxy, str]) -> None:
        proxy, url = proxied
        proxy.refuse()
        async with transport(url).sender(to(queue)) as sender:
            errors = await asyncio.gather(*(sender.send(envelopes(1)) for _ in range(20)), return_exceptions=True)
            assert {type(error) for error in errors} == {ConnectionFailed}
            assert proxy.connections == 1

    async def test_closed_sender_ends_its_sends_under_way(self, queue: str, proxied: tuple[ChaosProxy, str]) -> None:
        proxy, url = proxied
        made = transport(url)
        async with made.sender(to(queue)) as neighbour:
            await neighbour.ping()
            async with asyncio.TaskGroup() as tasks:
                async with made.sender(to(queue)) as sender:
                    await sender.send(envelopes(1))
                    proxy.hold(DOWN)
                    send = tasks.create_task(_error_of(sender.send(envelopes(1))))
                    await proxy.held(DOWN)
                assert "the sender was closed" in str(await send)
            proxy.release(DOWN)

    async def test_wrong_password_is_a_failure_without_the_password(
        self, broker: AnyBroker, queue: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        place = broker.url.partition("@")[2]
        caplog.set_level(logging.DEBUG)
        async with transport(f"amqp://guest:swordfish@{place}").sender(to(queue)) as sender:
            with pytest.raises(ConnectionFailed, match="ACCESS_REFUSED") as failure:
                await sender.send(envelopes(1))
        shown: BaseException | None = failure.value
        while shown is not None:
            assert "swordfish" not in f"{shown} {shown!r}"
            shown = shown.__cause__
        assert "swordfish" not in caplog.text

    async def test_unreachable_broker_is_a_failure(self) -> None:
        async with transport("amqp://guest:guest@127.0.0.1:1/").sender(to("x")) as sender:
            with pytest.raises(ConnectionFailed, match="Connect call failed"):
                await sender.send(envelopes(1))
            with pytest.raises(ConnectionFailed, match="Connect call failed"):
                await sender.ping()

    async def test_a_sender_is_for_a_queue_or_an_exchange_with_a_key(self, broker: AnyBroker) -> None:
        for uri in ("rabbitmq://default/topic", "rabbitmq://default/topic/orders"):
            with pytest.raises(InvalidSetting, match="needs a queue, or an exchange and a routing key"):
                transport(broker.url).sender(uri)


class TestTls:
    async def test_certificate_of_the_broker_is_checked(
        self, broker: AnyBroker, client: Foreign, queue: str, tmp_path: Path
    ) -> None:
        authority, stranger = trustme.CA(), trustme.CA()
        for name, known in (("ours", authority), ("theirs", stranger)):
            known.cert_pem.write_to_path(tmp_path / f"{name}.pem")
        async with encrypted(broker.url, authority) as url:
            async with transport(url, tls_ca=tmp_path / "ours.pem").sender(to(queue)) as sender:
                assert await sender.send(envelopes(1)) == [STORED]
            async with transport(url, tls_ca=tmp_path / "theirs.pem").sender(to(queue)) as sender:
                with pytest.raises(ConnectionFailed, match="CERTIFICATE_VERIFY_FAILED"):
                    await sender.send(envelopes(1))
        assert await client.count(queue) == 1


@asynccontextmanager
async def encrypted(url: str, authority: trustme.CA) -> AsyncIterator[str]:
    """The broker behind TLS, as the URL to it."""
    user, _, place = url.removeprefix("amqp://").partition("@")
    host, _, port = place.rstrip("/").partition(":")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("127.0.0.1").configure_cert(context)

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
        writer.close()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there = await asyncio.open_connection(host, int(port))
        await asyncio.gather(pump(reader, there[1]), pump(there[0], writer))

    server = await asyncio.start_server(accept, "127.0.0.1", 0, ssl=context)
    async with server:
        yield f"amqps://{user}@127.0.0.1:{server.sockets[0].getsockname()[1]}/"


async def _error_of(sending: Any) -> BaseException | None:
    try:
        await sending
    except TransportError as error:
        return error
    return None


class TestCancellation:
    """aiormq cancels those who wait on a broker that went silent."""

    async def test_cancellation_by_the_library_is_a_failure(self) -> None:
        with pytest.raises(ConnectionFailed, match="asking: the broker went silent"), translated("asking"):
            raise asyncio.CancelledError

    async def test_cancellation_by_the_caller_stays_a_cancellation(self) -> None:
        async def wait() -> None:
            with translated("asking"):
                await asyncio.get_running_loop().create_future()

        async with asyncio.TaskGroup() as tasks:
            waiting = tasks.create_task(wait())
            await asyncio.sleep(0)
            waiting.cancel()
        assert waiting.cancelled()

    async def test_timeout_stays_a_timeout(self) -> None:
        with pytest.raises(PeerTimeout), translated("asking"):
            async with asyncio.timeout(0.01):
                await asyncio.get_running_loop().create_future()
