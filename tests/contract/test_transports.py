"""What the agents rely on, whichever transport carries the envelopes.

Every transport runs the first part; what is true only of connections is run by those that have some.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from durable.envelope import Envelope, new_id
from durable.errors import ConnectionFailed, InvalidSetting, PeerTimeout, TransportError
from durable.outcomes import BUSY, DUPLICATE, STORED, Rejected
from durable.settings import Settings, load_settings
from durable.transports import tcp_listener
from durable.transports.base import Listener, Sender, Transport
from durable.transports.conversation import Answered, ClientSide, Ponged
from durable.transports.frames import Received
from durable.transports.memory import MemoryTransport
from durable.transports.tcp import TcpTransport
from durable.transports.tcp_stream import LINGER_SECONDS
from tests.support.proxy import DOWN, UP, ChaosProxy
from tests.support.receivers import REJECTED_TYPE, MemoryReceiver, envelope, envelopes

pytestmark = pytest.mark.timeout(20)

SEND_TIMEOUT = timedelta(seconds=0.3)
PATIENT = load_settings(
    connect_timeout=timedelta(seconds=2),
    send_timeout=timedelta(seconds=5),
    idle_timeout=timedelta(seconds=5),
    frame_timeout=timedelta(seconds=2),
    drain_timeout=timedelta(seconds=5),
)
HASTY = PATIENT.model_copy(update={"send_timeout": SEND_TIMEOUT})


@dataclass
class Link:
    """A listener, its receiver, and the way to them, on which a test can interfere."""

    transport: Transport
    listener: Listener
    uri: str
    cut: Callable[[], None]
    silence: Callable[[], None]
    restore: Callable[[], None]
    proxy: ChaosProxy | None = None
    receiver: MemoryReceiver = field(default_factory=MemoryReceiver)

    def sender(self, settings: Settings = PATIENT) -> Sender:
        """A sender to the listener; by default one that outlasts every delay of these tests."""
        match self.transport:
            case MemoryTransport():
                self.transport.send_timeout = settings.send_timeout
                return self.transport.sender(self.uri)
            case _:
                return TcpTransport(settings, "orders", 1).sender(self.uri)


@pytest.fixture
def folder() -> Iterator[str]:
    """For socket files: their paths are short, and pytest's are not."""
    path = tempfile.mkdtemp(dir="/tmp")
    yield path
    shutil.rmtree(path)


def memory_link() -> Link:
    transport = MemoryTransport(PATIENT)
    uri = "memory://billing"
    return Link(
        transport,
        transport.listener(uri, "billing-in"),
        uri,
        cut=lambda: transport.break_(uri),
        silence=lambda: transport.silence(uri),
        restore=lambda: transport.restore(uri),
    )


def stream_link(listener: Listener, proxy: ChaosProxy) -> Link:
    transport = TcpTransport(PATIENT, "orders", 1)

    def silence() -> None:
        proxy.swallow(DOWN)

    return Link(transport, listener, proxy.uri, cut=proxy.refuse, silence=silence, restore=proxy.restore, proxy=proxy)


async def serving(scheme: str, folder: str, settings: Settings, receiver: MemoryReceiver) -> AsyncIterator[Link]:
    if scheme == "memory":
        link = memory_link()
        link.receiver = receiver
        await link.listener.serve(receiver)
        yield link
        await link.listener.close()
        return
    here, there = ("tcp://127.0.0.1:0",) * 2 if scheme == "tcp" else (f"unix://{folder}/in", f"unix://{folder}/proxy")
    listener = TcpTransport(settings, "billing", 2).listener(here, "billing-in")
    await listener.serve(receiver)
    async with ChaosProxy(listener.address, at=there) as proxy:
        link = stream_link(listener, proxy)
        link.receiver = receiver
        yield link
    await listener.close()


@pytest.fixture(params=["memory", "tcp", "unix"])
async def link(request: pytest.FixtureRequest, folder: str) -> AsyncIterator[Link]:
    async for link in serving(request.param, folder, PATIENT, MemoryReceiver()):
        yield link


class TestEveryTransport:
    async def test_returns_one_outcome_for_each_envelope_in_order(self, link: Link) -> None:
        stored, rejected, also_stored = envelope(), envelope(REJECTED_TYPE), envelope()
        async with link.sender() as sender:
            assert await sender.send([stored]) == [STORED]
            assert await sender.send([stored, rejected, also_stored]) == [
                DUPLICATE,
                Rejected("a type that the test rejects"),
                STORED,
            ]

    async def test_brings_envelopes_unchanged_and_in_order_under_the_name_of_the_endpoint(self, link: Link) -> None:
        full = Envelope(
            id=new_id(),
            message_type="order placed ✓",
            destination="billing",
            source="orders",
            correlation_id=new_id(),
            body=bytes(range(256)),
            sent_at=datetime(2024, 2, 29, 12, 30, 15, 123456, tzinfo=UTC),
            content_type="application/octet-stream",
            causation_id=new_id(),
            partition_key="customer 7",
            headers={"trace": "ä\r\n", "": ""},
            deliver_by=datetime(2999, 1, 1, tzinfo=UTC),
            execution_time=datetime(2998, 1, 1, tzinfo=UTC),
        )
        batch = [*envelopes(3), full, *envelopes(3)]
        async with link.sender() as sender:
            await sender.send(batch)
        assert link.receiver.batches == [batch]
        assert link.receiver.endpoints == {link.listener.endpoint} == {"billing-in"}

    async def test_an_empty_batch_has_no_outcomes_and_reaches_nobody(self, link: Link) -> None:
        async with link.sender() as sender:
            assert await sender.send([]) == []
        assert link.receiver.batches == []

    async def test_a_batch_of_thousands_is_delivered_in_order(self, link: Link) -> None:
        batch = envelopes(2_500)
        async with link.sender() as sender:
            assert await sender.send(batch) == [STORED] * 2_500
        assert [e for part in link.receiver.batches for e in part] == batch

    async def test_a_receiver_without_room_makes_the_sender_see_busy(self, link: Link) -> None:
        link.receiver.room = 0
        async with link.sender(HASTY) as sender:
            assert await sender.send(envelopes(3)) == [BUSY] * 3
        assert link.receiver.stored == {}

    async def test_what_exceeds_the_room_is_busy_and_the_rest_is_stored(self, link: Link) -> None:
        link.receiver.room = 2
        batch = envelopes(5)
        async with link.sender(HASTY) as sender:
            assert await sender.send(batch) == [STORED] * 2 + [BUSY] * 3
            link.receiver.room = 100
            assert await sender.send(batch) == [DUPLICATE] * 2 + [STORED] * 3

    async def test_batches_under_way_are_answered_as_they_are_stored(self, link: Link) -> None:
        link.receiver.hold()
        async with link.sender() as sender, asyncio.TaskGroup() as tasks:
            first = tasks.create_task(sender.send(envelopes(1)))
            await link.receiver.arrived(1)
            second = tasks.create_task(sender.send(envelopes(2)))
            await link.receiver.arrived(2)
            link.receiver.release_batch(1)
            assert await second == [STORED] * 2
            assert not first.done()
            link.receiver.release_batch(0)
            assert await first == [STORED]

    async def test_one_sender_serves_many_tasks_at_once(self, link: Link) -> None:
        async with link.sender() as sender, asyncio.TaskGroup() as tasks:
            sends = [tasks.create_task(sender.send(envelopes(5))) for _ in range(40)]
        assert [task.result() for task in sends] == [[STORED] * 5] * 40
        assert len(link.receiver.stored) == 200

    async def test_a_ping_succeeds_only_while_a_batch_could_be_stored(self, link: Link) -> None:
        async with link.sender() as sender:
            await sender.ping()
            link.receiver.is_ready = False
            with pytest.raises(TransportError, match="cannot store"):
                await sender.ping()
            link.receiver.is_ready = True
            await sender.ping()

    async def test_without_a_listener_nothing_is_delivered(self, link: Link) -> None:
        await link.listener.close()
        async with link.sender() as sender:
            with pytest.raises(ConnectionFailed):
                await sender.send(envelopes(1))
            with pytest.raises(ConnectionFailed):
                await sender.ping()

    async def test_a_peer_that_dies_in_mid_batch_leaves_its_fate_unknown_and_it_can_be_sent_again(
        self, link: Link
    ) -> None:
        batch = envelopes(3)
        link.receiver.hold()
        async with link.sender() as sender, asyncio.TaskGroup() as tasks:
            send = tasks.create_task(_error_of(sender.send(batch)))
            await link.receiver.arrived(1)
            link.cut()
            assert isinstance(await send, ConnectionFailed)
            link.receiver.release()
            link.restore()
            assert set(await sender.send(batch)) <= {STORED, DUPLICATE}
        assert list(link.receiver.stored.values()) == batch

    async def test_a_peer_that_does_not_answer_costs_one_timeout(self, link: Link) -> None:
        async with link.sender(HASTY) as sender:
            await sender.ping()
            link.silence()
            with pytest.raises(PeerTimeout, match=r"no answer within 0\.3 seconds"):
                await sender.send(envelopes(1))
            link.restore()
            assert await sender.send(envelopes(1)) == [STORED]

    async def test_a_receiver_that_hangs_costs_one_timeout(self, link: Link) -> None:
        link.receiver.hold()
        async with link.sender(HASTY) as sender:
            with pytest.raises(PeerTimeout):
                await sender.send(envelopes(1))
            link.receiver.release()
            assert await sender.send(envelopes(1)) == [STORED]

    async def test_a_cancelled_send_harms_no_other(self, link: Link) -> None:
        link.receiver.hold()
        async with link.sender() as sender, asyncio.TaskGroup() as tasks:
            cancelled = tasks.create_task(sender.send(envelopes(1)))
            await link.receiver.arrived(1)
            other = tasks.create_task(sender.send(envelopes(2)))
            await link.receiver.arrived(2)
            cancelled.cancel()
            with pytest.raises(asyncio.CancelledError):
                await cancelled
            link.receiver.release()
            assert await other == [STORED] * 2
            assert await sender.send(envelopes(3)) == [STORED] * 3

    async def test_a_listener_that_closes_answers_the_batches_under_way(self, link: Link) -> None:
        link.receiver.hold()
        async with link.sender() as sender, asyncio.TaskGroup() as tasks:
            sends = [tasks.create_task(sender.send(envelopes(2))) for _ in range(3)]
            await link.receiver.arrived(3)
            closing = tasks.create_task(link.listener.close())
            await asyncio.sleep(0)
            assert not closing.done()
            link.receiver.release()
            assert [await send for send in sends] == [[STORED] * 2] * 3
            await closing
            with pytest.raises(ConnectionFailed):
                await sender.send(envelopes(1))

    async def test_a_listener_that_hangs_is_closed_at_the_deadline(self, link: Link, folder: str) -> None:
        settings = PATIENT.model_copy(update={"drain_timeout": timedelta(seconds=0.1)})
        transport = MemoryTransport(settings) if link.proxy is None else TcpTransport(settings, "shipping", 3)
        uri = {"memory": "memory://shipping", "tcp": "tcp://127.0.0.1:0", "unix": f"unix://{folder}/shipping"}
        listener = transport.listener(uri[link.uri.partition(":")[0]], "shipping-in")
        receiver = MemoryReceiver()
        receiver.hold()
        await listener.serve(receiver)
        async with transport.sender(listener.address) as sender, asyncio.TaskGroup() as tasks:
            send = tasks.create_task(_error_of(sender.send(envelopes(1))))
            await receiver.arrived(1)
            async with asyncio.timeout(2):
                await listener.close()
            receiver.release()
            match await send:
                case ConnectionFailed():
                    assert link.proxy is not None
                case None:
                    assert link.proxy is None  # in memory nothing breaks off what is under way
                case other:
                    pytest.fail(f"unexpected: {other}")

    async def test_closing_twice_is_closing(self, link: Link) -> None:
        await link.listener.close()
        await link.listener.close()

    async def test_a_sender_finds_the_next_listener_at_the_same_address(self, link: Link) -> None:
        transport = link.transport if link.proxy is None else TcpTransport(PATIENT, "billing", 3)
        async with link.sender() as sender:
            assert await sender.send(envelopes(1)) == [STORED]
            await link.listener.close()
            successor = transport.listener(link.listener.address, "billing-in")
            await successor.serve(link.receiver)
            assert await sender.send(envelopes(1)) == [STORED]
        await successor.close()

    async def test_an_address_that_is_taken_is_an_invalid_setting(self, link: Link) -> None:
        listener = link.transport.listener(link.listener.address, "another")
        with pytest.raises(InvalidSetting, match=link.listener.address):
            await listener.serve(MemoryReceiver())

    async def test_batches_and_envelopes_are_counted(self, link: Link) -> None:
        async with link.sender() as sender:
            await sender.send(envelopes(2))
            await sender.send(envelopes(3))
        statistics = link.listener.statistics()
        assert (statistics["batches"], statistics["envelopes"], statistics["dropped"]) == (2, 5, 0)

    @pytest.mark.parametrize(
        "uri", ["", "http://127.0.0.1:1", "tcp://127.0.0.1", "unix://x", "memory://", "memory://a/b"]
    )
    async def test_a_uri_that_could_never_work_is_an_invalid_setting(self, link: Link, uri: str) -> None:
        with pytest.raises(InvalidSetting, match="write"):
            link.transport.check(uri)
        with pytest.raises(InvalidSetting):
            link.transport.sender(uri)
        with pytest.raises(InvalidSetting):
            link.transport.listener(uri, "x")
        link.transport.check(link.uri)


# What is true of connections --------------------------------------------------------------------------------------


@pytest.fixture(params=["tcp", "unix"])
def scheme(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def serving_settings() -> Settings:
    """Those of the listener; a class of tests may need others."""
    return PATIENT


@dataclass
class Connected:
    """A link that surely has a proxy."""

    link: Link
    proxy: ChaosProxy
    receiver: MemoryReceiver
    listener: Listener

    def sender(self, settings: Settings = PATIENT) -> Sender:
        return self.link.sender(settings)


@pytest.fixture
async def connected(scheme: str, folder: str, serving_settings: Settings) -> AsyncIterator[Connected]:
    async for link in serving(scheme, folder, serving_settings, MemoryReceiver()):
        assert link.proxy is not None
        yield Connected(link, link.proxy, link.receiver, link.listener)


class TestConnections:
    async def test_all_batches_and_pings_share_one_connection(self, connected: Connected) -> None:
        async with connected.sender() as sender, asyncio.TaskGroup() as tasks:
            for _ in range(10):
                tasks.create_task(sender.send(envelopes(1)))
                tasks.create_task(sender.ping())
        assert connected.proxy.connections == 1

    async def test_a_cut_connection_fails_all_who_wait_and_the_next_send_opens_another(
        self, connected: Connected
    ) -> None:
        connected.receiver.hold()
        async with connected.sender() as sender:
            async with asyncio.TaskGroup() as tasks:
                sends = [tasks.create_task(_error_of(sender.send(envelopes(1)))) for _ in range(5)]
                await connected.receiver.arrived(5)
                connected.proxy.cut()
            assert {type(send.result()) for send in sends} == {ConnectionFailed}
            connected.receiver.release()
            assert await sender.send(envelopes(1)) == [STORED]
        assert connected.proxy.connections == 2

    async def test_all_who_wait_for_a_dead_peer_share_one_attempt_to_connect(self, connected: Connected) -> None:
        connected.proxy.refuse()
        async with connected.sender() as sender, asyncio.TaskGroup() as tasks:
            sends = [tasks.create_task(_error_of(sender.send(envelopes(1)))) for _ in range(5)]
        assert {type(send.result()) for send in sends} == {ConnectionFailed}
        assert connected.proxy.connections == 1

    async def test_a_peer_that_accepts_and_says_nothing_costs_one_connect_timeout(self, connected: Connected) -> None:
        connected.proxy.swallow(DOWN)
        settings = PATIENT.model_copy(update={"connect_timeout": timedelta(seconds=0.2)})
        async with connected.sender(settings) as sender:
            with pytest.raises(PeerTimeout, match="connecting"):
                await sender.send(envelopes(1))
            connected.proxy.restore()
            assert await sender.send(envelopes(1)) == [STORED]

    async def test_what_is_swallowed_on_its_way_to_the_peer_costs_one_timeout(self, connected: Connected) -> None:
        async with connected.sender(HASTY) as sender:
            await sender.ping()
            connected.proxy.swallow(UP)
            with pytest.raises(PeerTimeout):
                await sender.send(envelopes(1))
            connected.proxy.restore()
            assert await sender.send(envelopes(1)) == [STORED]
        assert len(connected.receiver.stored) == 1
        assert connected.proxy.connections == 2  # the one that lost something is not used again

    async def test_an_answer_that_is_lost_makes_duplicates_of_what_is_sent_again(self, connected: Connected) -> None:
        batch = envelopes(2)
        async with connected.sender(HASTY) as sender:
            await sender.ping()
            connected.proxy.swallow(DOWN)
            with pytest.raises(PeerTimeout):
                await sender.send(batch)
            connected.proxy.restore()
            assert await sender.send(batch) == [DUPLICATE] * 2

    async def test_a_slow_network_is_no_failure(self, connected: Connected) -> None:
        connected.proxy.delay(UP, 0.05)
        connected.proxy.delay(DOWN, 0.05)
        async with connected.sender() as sender:
            assert await sender.send(envelopes(100, body=b"x" * 2_000)) == [STORED] * 100

    async def test_a_sender_that_is_closed_tells_those_who_still_wait(self, connected: Connected) -> None:
        connected.receiver.hold()
        async with asyncio.TaskGroup() as tasks:
            async with connected.sender() as sender:
                send = tasks.create_task(_error_of(sender.send(envelopes(1))))
                await connected.receiver.arrived(1)
            assert isinstance(await send, ConnectionFailed)
            connected.receiver.release()

    async def test_a_sender_that_is_closed_while_it_connects_tells_those_who_wait(self, connected: Connected) -> None:
        connected.proxy.hold(DOWN)
        async with asyncio.TaskGroup() as tasks:
            async with connected.sender() as sender:
                send = tasks.create_task(_error_of(sender.send(envelopes(1))))
                await connected.proxy.held(DOWN)
            assert isinstance(await send, ConnectionFailed)

    async def test_a_sender_cannot_be_used_outside_its_context(self, connected: Connected) -> None:
        with pytest.raises(RuntimeError, match="async with"):
            await connected.sender().send(envelopes(1))

    async def test_after_goodbye_new_batches_take_a_new_connection_while_old_ones_are_answered(
        self, connected: Connected
    ) -> None:
        connected.receiver.hold()
        successor = TcpTransport(PATIENT, "billing", 3).listener(connected.listener.address, "billing-in")
        fresh = MemoryReceiver()
        async with connected.sender() as sender, asyncio.TaskGroup() as tasks:
            old = tasks.create_task(sender.send(envelopes(1)))
            await connected.receiver.arrived(1)
            said = connected.proxy.bytes_passed(DOWN)
            closing = tasks.create_task(connected.listener.close())
            await connected.proxy.passed(DOWN, said + 1)
            await successor.serve(fresh)
            while connected.proxy.connections == 1:  # GOODBYE may still be in the sender's socket: then it is Busy
                assert await sender.send(envelopes(1)) in ([STORED], [BUSY])
            assert len(fresh.stored) == 1
            assert not old.done()
            connected.receiver.release()
            assert await old == [STORED]
            async with asyncio.timeout(LINGER_SECONDS / 2):  # the sender closes, the listener need not linger
                await closing
        await successor.close()

    async def test_a_listener_that_closes_waits_longer_for_batches_than_for_farewells(
        self, connected: Connected, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(tcp_listener, "LINGER_SECONDS", 0.01)
        connected.receiver.hold()
        async with connected.sender() as sender, asyncio.TaskGroup() as tasks:
            send = tasks.create_task(sender.send(envelopes(1)))
            await connected.receiver.arrived(1)
            closing = tasks.create_task(connected.listener.close())
            await asyncio.wait([closing], timeout=0.1)
            assert not closing.done()
            connected.receiver.release()
            assert await send == [STORED]

    async def test_a_send_that_is_cancelled_just_when_its_answer_arrives_harms_no_other(
        self, connected: Connected, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def hear_and_cancel(side: ClientSide, item: Received) -> Answered | Ponged | None:
            cancelled.cancel()
            return hear(side, item)

        hear = ClientSide.hear
        async with connected.sender() as sender, asyncio.TaskGroup() as tasks:
            await sender.ping()
            connected.receiver.hold()
            cancelled = tasks.create_task(sender.send(envelopes(1)))
            await connected.receiver.arrived(1)
            other = tasks.create_task(sender.send(envelopes(2)))
            await connected.receiver.arrived(2)
            monkeypatch.setattr(ClientSide, "hear", hear_and_cancel)
            connected.receiver.release()
            assert await other == [STORED] * 2
            assert cancelled.cancelled()
        assert connected.proxy.connections == 1

    async def test_a_fault_of_the_receiver_costs_its_connection_and_not_the_listener(
        self, connected: Connected, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async def broken(endpoint: str, batch: object) -> object:
            raise LookupError("a bug")

        async with connected.sender() as sender:
            with monkeypatch.context() as patch:
                patch.setattr(connected.receiver, "receive", broken)
                with pytest.raises(ConnectionFailed):
                    await sender.send(envelopes(1))
            assert await sender.send(envelopes(1)) == [STORED]
        assert connected.listener.statistics()["dropped"] == 1

    async def test_more_connections_than_allowed_are_dropped(self, folder: str, scheme: str) -> None:
        here = "tcp://127.0.0.1:0" if scheme == "tcp" else f"unix://{folder}/few"
        transport = TcpTransport(PATIENT, "billing", 2, max_connections=1)
        listener = transport.listener(here, "billing-in")
        await listener.serve(MemoryReceiver())
        async with transport.sender(listener.address) as first, transport.sender(listener.address) as second:
            await first.ping()
            with pytest.raises(ConnectionFailed):
                await second.ping()
            await first.ping()
        await listener.close()
        assert listener.statistics()["dropped"] == 1


class TestLiveness:
    @pytest.fixture
    def serving_settings(self) -> Settings:
        return PATIENT.model_copy(update={"idle_timeout": timedelta(seconds=0.3)})

    async def test_an_idle_connection_is_kept_alive_by_heartbeats(
        self, connected: Connected, serving_settings: Settings
    ) -> None:
        async with connected.sender(serving_settings) as sender:
            await sender.ping()
            beats = 6  # of idle_timeout / 3: twice as long as silence would be borne
            await connected.proxy.passed(DOWN, connected.proxy.bytes_passed(DOWN) + beats * PONG_BYTES)
            await sender.ping()
        assert connected.proxy.connections == 1
        assert connected.listener.statistics()["dropped"] == 0

    async def test_a_connection_on_which_the_peer_fell_silent_is_replaced(
        self, connected: Connected, serving_settings: Settings
    ) -> None:
        async with connected.sender(serving_settings) as sender:
            await sender.ping()
            connected.proxy.swallow(DOWN)
            await connected.proxy.closed(1)
            connected.proxy.restore()
            assert await sender.send(envelopes(1)) == [STORED]
        assert connected.proxy.connections == 2

    async def test_the_listener_drops_a_client_that_fell_silent(
        self, connected: Connected, serving_settings: Settings
    ) -> None:
        async with connected.sender(PATIENT) as sender:  # its heartbeats come too late for this listener
            await sender.ping()
            await connected.proxy.closed(1)
            assert connected.listener.statistics()["dropped"] == 1
            assert await sender.send(envelopes(1)) == [STORED]


class TestCredit:
    async def test_the_sender_never_has_more_envelopes_unanswered_than_the_receiver_has_room_for(
        self, connected: Connected
    ) -> None:
        connected.receiver.room = 50
        connected.receiver.hold()
        async with connected.sender(HASTY) as sender, asyncio.TaskGroup() as tasks:
            sends = [tasks.create_task(_error_of(sender.send(envelopes(10)))) for _ in range(12)]
            await asyncio.wait(sends)
        assert connected.receiver.most_under_way == 50
        connected.receiver.release()

    async def test_waiting_senders_go_on_in_turn_as_answers_bring_credit(self, connected: Connected) -> None:
        connected.receiver.room = 20
        connected.receiver.handles_at_once = True
        async with connected.sender() as sender, asyncio.TaskGroup() as tasks:
            sends = [tasks.create_task(sender.send(envelopes(10))) for _ in range(30)]
        assert [send.result() for send in sends] == [[STORED] * 10] * 30
        assert connected.receiver.most_under_way <= 20

    async def test_room_that_appears_without_an_answer_is_granted(self, connected: Connected) -> None:
        connected.receiver.room = 0
        async with connected.sender() as sender, asyncio.TaskGroup() as tasks:
            await sender.ping()
            send = tasks.create_task(sender.send(envelopes(3)))
            await asyncio.sleep(0)
            connected.receiver.room = 10
            assert await send == [STORED] * 3

    async def test_a_batch_larger_than_all_the_room_there_ever_is_gets_through(self, connected: Connected) -> None:
        connected.receiver.room = 3
        connected.receiver.handles_at_once = True
        async with connected.sender() as sender:
            assert await sender.send(envelopes(10)) == [STORED] * 10
        assert connected.receiver.most_under_way <= 3

    async def test_connections_share_the_room(self, connected: Connected) -> None:
        connected.receiver.room = 10
        connected.receiver.hold()
        async with connected.sender(HASTY) as one, connected.sender(HASTY) as two, asyncio.TaskGroup() as tasks:
            await one.ping()
            await two.ping()
            tasks.create_task(_error_of(two.send(envelopes(10))))
            await connected.receiver.arrived(1)
            assert len(connected.receiver.batches[0]) == 5
            connected.receiver.release()


class TestLargeBatches:
    @pytest.fixture
    def serving_settings(self) -> Settings:
        return PATIENT.model_copy(
            update={"max_frame_bytes": 100_000, "max_message_bytes": 100_000, "buffer_bytes": 250_000}
        )

    async def test_a_batch_above_the_frame_limit_is_delivered_in_parts_and_in_order(self, connected: Connected) -> None:
        batch = envelopes(50, body=b"x" * 10_000)
        async with connected.sender() as sender:
            assert await sender.send(batch) == [STORED] * 50
        assert list(connected.receiver.stored.values()) == batch

    async def test_an_envelope_above_the_frame_limit_is_rejected_alone(self, connected: Connected) -> None:
        batch = [*envelopes(3), envelope(body=b"x" * 100_000), *envelopes(2)]
        async with connected.sender() as sender:
            outcomes = await sender.send(batch)
        assert outcomes[:3] + outcomes[4:] == [STORED] * 5
        match outcomes[3]:
            case Rejected(reason):
                assert str(batch[3].id) in reason
            case other:
                pytest.fail(f"unexpected: {other}")

    async def test_an_envelope_that_cannot_be_encoded_is_rejected_alone(self, connected: Connected) -> None:
        batch = [*envelopes(3), envelope("\ud800"), *envelopes(2)]
        async with connected.sender() as sender:
            outcomes = await sender.send(batch)
        assert outcomes[:3] + outcomes[4:] == [STORED] * 5
        assert isinstance(outcomes[3], Rejected)

    async def test_bytes_under_way_in_the_listener_are_bounded_however_much_is_sent(self, connected: Connected) -> None:
        connected.receiver.hold()
        async with connected.sender() as sender, asyncio.TaskGroup() as tasks:
            sends = [tasks.create_task(sender.send(envelopes(1, body=b"x" * 90_000))) for _ in range(20)]
            await connected.proxy.passed(UP, 4 * 90_000)
            async with TcpTransport(PATIENT, "shipping", 3).sender(connected.listener.address) as other:
                for _ in range(20):  # more turns than the listener would need to take in what has arrived
                    await other.ping()
            assert len(connected.receiver.batches) == 2  # a third would be above 250,000 bytes
            connected.receiver.release()
        assert [send.result() for send in sends] == [[STORED]] * 20


PONG_BYTES = 4 + 9 + 2


async def _error_of(sending: Coroutine[Any, Any, object]) -> TransportError | None:
    try:
        await sending
    except TransportError as error:
        return error
    return None
