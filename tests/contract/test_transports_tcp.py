"""TCP and Unix sockets: what every direct transport does, and what is true of connections with frames and credit."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path

import pytest

from durable.errors import ConnectionFailed, PeerTimeout
from durable.outcomes import BUSY, DUPLICATE, STORED, Rejected
from durable.settings import Settings
from durable.testing.transports import (
    DOWN,
    HASTY,
    PATIENT,
    UP,
    DirectContract,
    Link,
    MemoryReceiver,
    envelope,
    envelopes,
    error_of,
)
from durable.transports.frames import Received
from durable.transports.tcp import listener as tcp_listener
from durable.transports.tcp.client_side import Answered, ClientSide, Ponged, Stray
from durable.transports.tcp.conversation import Reply
from durable.transports.tcp.stream import LINGER_SECONDS
from durable.transports.tcp.transport import TcpTransport
from tests.contract.links import Wire, secret_link, tcp_link, tls_link, unix_link
from tests.support.tls import issue


class TestTcp(DirectContract):
    impossible_uris = ("tcp://127.0.0.1", "tcp://127.0.0.1:99999", "tcp://:0/path")

    @pytest.fixture
    async def link(self) -> AsyncIterator[Link]:
        async with tcp_link() as link:
            yield link


class TestTcpOverTls(DirectContract):
    impossible_uris = ("tcp://10.0.0.7:2301?tls=0", "tcp://10.0.0.7:2301?tls=2", "tcp://127.1:2301")

    @pytest.fixture
    async def link(self, tmp_path: Path) -> AsyncIterator[Link]:
        async with tls_link(**issue(tmp_path).settings) as link:
            yield link


class TestTcpWithSecret(DirectContract):
    impossible_uris = ("tcp://127.0.0.1:2301?tls=",)

    @pytest.fixture
    async def link(self, tmp_path: Path) -> AsyncIterator[Link]:
        async with secret_link(issue(tmp_path)) as link:
            yield link


class TestUnixSockets(DirectContract):
    impossible_uris = ("unix://x", "unix://")

    @pytest.fixture
    async def link(self) -> AsyncIterator[Link]:
        async with unix_link() as link:
            yield link


# What is true of connections --------------------------------------------------------------------------------------


@pytest.fixture(params=["tcp", "unix"])
def scheme(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def serving_settings() -> Settings:
    """Those of the listener; a class of tests may need others."""
    return PATIENT


@pytest.fixture
async def link(scheme: str, serving_settings: Settings) -> AsyncIterator[Wire]:
    async with (tcp_link if scheme == "tcp" else unix_link)(serving_settings) as link:
        yield link


class TestConnections:
    async def test_all_batches_and_pings_share_one_connection(self, link: Wire) -> None:
        async with link.sender() as sender, asyncio.TaskGroup() as tasks:
            for _ in range(10):
                tasks.create_task(sender.send(envelopes(1)))
                tasks.create_task(sender.ping())
        assert link.proxy.connections == 1

    async def test_cut_connection_fails_every_waiting_send_and_the_next_send_opens_another(self, link: Wire) -> None:
        link.receiver.hold()
        async with link.sender() as sender:
            async with asyncio.TaskGroup() as tasks:
                sends = [tasks.create_task(error_of(sender.send(envelopes(1)))) for _ in range(5)]
                await link.receiver.arrived(5)
                link.proxy.cut()
            assert {type(send.result()) for send in sends} == {ConnectionFailed}
            link.receiver.release()
            assert await sender.send(envelopes(1)) == [STORED]
        assert link.proxy.connections == 2

    async def test_sends_to_a_dead_peer_share_one_attempt_to_connect(self, link: Wire) -> None:
        link.proxy.refuse()
        async with link.sender() as sender, asyncio.TaskGroup() as tasks:
            sends = [tasks.create_task(error_of(sender.send(envelopes(1)))) for _ in range(5)]
        assert {type(send.result()) for send in sends} == {ConnectionFailed}
        assert link.proxy.connections == 1

    async def test_silent_peer_costs_one_connect_timeout(self, link: Wire) -> None:
        link.proxy.swallow(DOWN)
        settings = PATIENT.model_copy(update={"connect_timeout": timedelta(seconds=0.2)})
        async with link.sender(settings) as sender:
            with pytest.raises(PeerTimeout, match="connecting"):
                await sender.send(envelopes(1))
            link.proxy.restore()
            assert await sender.send(envelopes(1)) == [STORED]

    async def test_batch_lost_on_its_way_costs_one_timeout(self, link: Wire) -> None:
        async with link.sender(HASTY) as sender:
            await sender.ping()
            link.proxy.swallow(UP)
            with pytest.raises(PeerTimeout):
                await sender.send(envelopes(1))
            link.proxy.restore()
            assert await sender.send(envelopes(1)) == [STORED]
        assert len(link.receiver.stored) == 1
        assert link.proxy.connections == 2  # the one that lost something is not used again

    async def test_batch_sent_again_after_a_lost_answer_is_a_duplicate(self, link: Wire) -> None:
        batch = envelopes(2)
        async with link.sender(HASTY) as sender:
            await sender.ping()
            link.proxy.swallow(DOWN)
            with pytest.raises(PeerTimeout):
                await sender.send(batch)
            link.proxy.restore()
            assert await sender.send(batch) == [DUPLICATE] * 2

    async def test_a_slow_network_is_no_failure(self, link: Wire) -> None:
        link.proxy.delay(UP, 0.05)
        link.proxy.delay(DOWN, 0.05)
        async with link.sender() as sender:
            assert await sender.send(envelopes(100, body=b"x" * 2_000)) == [STORED] * 100

    async def test_closed_sender_fails_its_waiting_sends(self, link: Wire) -> None:
        link.receiver.hold()
        async with asyncio.TaskGroup() as tasks:
            async with link.sender() as sender:
                send = tasks.create_task(error_of(sender.send(envelopes(1))))
                await link.receiver.arrived(1)
            assert isinstance(await send, ConnectionFailed)
            link.receiver.release()

    async def test_sender_closed_during_connecting_fails_its_waiting_sends(self, link: Wire) -> None:
        link.proxy.hold(DOWN)
        async with asyncio.TaskGroup() as tasks:
            async with link.sender() as sender:
                send = tasks.create_task(error_of(sender.send(envelopes(1))))
                await link.proxy.held(DOWN)
            assert isinstance(await send, ConnectionFailed)

    async def test_a_sender_cannot_be_used_outside_its_context(self, link: Wire) -> None:
        with pytest.raises(ConnectionFailed, match="the sender was closed"):
            await link.sender().send(envelopes(1))

    async def test_new_batches_take_a_new_connection_after_goodbye_and_old_ones_are_answered(self, link: Wire) -> None:
        link.receiver.hold()
        successor = TcpTransport(PATIENT, "billing", 3).listener(link.listener.address, "billing-in")
        fresh = MemoryReceiver()
        async with link.sender() as sender, asyncio.TaskGroup() as tasks:
            old = tasks.create_task(sender.send(envelopes(1)))
            await link.receiver.arrived(1)
            said = link.proxy.bytes_passed(DOWN)
            closing = tasks.create_task(link.listener.close())
            await link.proxy.passed(DOWN, said + 1)
            await successor.serve(fresh)
            while link.proxy.connections == 1:  # GOODBYE may still be in the sender's socket: then it is Busy
                assert await sender.send(envelopes(1)) in ([STORED], [BUSY])
            assert len(fresh.stored) == 1
            assert not old.done()
            link.receiver.release()
            assert await old == [STORED]
            async with asyncio.timeout(LINGER_SECONDS / 2):  # the sender closes, the listener need not linger
                await closing
        await successor.close()

    async def test_closing_listener_waits_longer_for_batches_than_for_farewells(
        self, link: Wire, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(tcp_listener, "LINGER_SECONDS", 0.01)
        link.receiver.hold()
        async with link.sender() as sender, asyncio.TaskGroup() as tasks:
            send = tasks.create_task(sender.send(envelopes(1)))
            await link.receiver.arrived(1)
            closing = tasks.create_task(link.listener.close())
            await asyncio.wait([closing], timeout=0.1)
            assert not closing.done()
            link.receiver.release()
            assert await send == [STORED]

    async def test_send_cancelled_at_the_arrival_of_its_answer_harms_no_other(
        self, link: Wire, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def hear_and_cancel(side: ClientSide, item: Received) -> Answered | Ponged | Reply | Stray | None:
            cancelled.cancel()
            return hear(side, item)

        hear = ClientSide.hear
        async with link.sender() as sender, asyncio.TaskGroup() as tasks:
            await sender.ping()
            link.receiver.hold()
            cancelled = tasks.create_task(sender.send(envelopes(1)))
            await link.receiver.arrived(1)
            other = tasks.create_task(sender.send(envelopes(2)))
            await link.receiver.arrived(2)
            monkeypatch.setattr(ClientSide, "hear", hear_and_cancel)
            link.receiver.release()
            assert await other == [STORED] * 2
            assert cancelled.cancelled()
        assert link.proxy.connections == 1

    async def test_a_fault_of_the_receiver_costs_its_connection_and_not_the_listener(
        self, link: Wire, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async def broken(endpoint: str, batch: object) -> object:
            raise LookupError("a bug")

        async with link.sender() as sender:
            with monkeypatch.context() as patch:
                patch.setattr(link.receiver, "receive", broken)
                with pytest.raises(ConnectionFailed):
                    await sender.send(envelopes(1))
            assert await sender.send(envelopes(1)) == [STORED]
        assert link.listener.statistics()["dropped"] == 1

    async def test_more_connections_than_allowed_are_dropped(self, link: Wire) -> None:
        transport = TcpTransport(PATIENT.model_copy(update={"tcp_connections": 1}), "billing", 2)
        await link.listener.close()
        listener = transport.listener(link.listener.address, "billing-in")
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

    async def test_an_idle_connection_is_kept_alive_by_heartbeats(self, link: Wire, serving_settings: Settings) -> None:
        async with link.sender(serving_settings) as sender:
            await sender.ping()
            beats = 6  # of idle_timeout / 3: twice as long as silence would be borne
            await link.proxy.passed(DOWN, link.proxy.bytes_passed(DOWN) + beats * PONG_BYTES)
            await sender.ping()
        assert link.proxy.connections == 1
        assert link.listener.statistics()["dropped"] == 0

    async def test_connection_to_a_silent_peer_is_replaced(self, link: Wire, serving_settings: Settings) -> None:
        async with link.sender(serving_settings) as sender:
            await sender.ping()
            link.proxy.swallow(DOWN)
            await link.proxy.closed(1)
            link.proxy.restore()
            assert await sender.send(envelopes(1)) == [STORED]
        assert link.proxy.connections == 2

    async def test_listener_drops_a_silent_client(self, link: Wire, serving_settings: Settings) -> None:
        async with link.sender(PATIENT) as sender:  # its heartbeats come too late for this listener
            await sender.ping()
            await link.proxy.closed(1)
            assert link.listener.statistics()["dropped"] == 1
            assert await sender.send(envelopes(1)) == [STORED]


class TestCredit:
    async def test_the_sender_never_has_more_envelopes_unanswered_than_the_receiver_has_room_for(
        self, link: Wire
    ) -> None:
        link.receiver.room = 50
        link.receiver.hold()
        async with link.sender(HASTY) as sender, asyncio.TaskGroup() as tasks:
            sends = [tasks.create_task(error_of(sender.send(envelopes(10)))) for _ in range(12)]
            await asyncio.wait(sends)
        assert link.receiver.most_under_way == 50
        link.receiver.release()

    async def test_waiting_senders_go_on_in_turn_as_answers_bring_credit(self, link: Wire) -> None:
        link.receiver.room = 20
        link.receiver.handles_at_once = True
        async with link.sender() as sender, asyncio.TaskGroup() as tasks:
            sends = [tasks.create_task(sender.send(envelopes(10))) for _ in range(30)]
        assert [send.result() for send in sends] == [[STORED] * 10] * 30
        assert link.receiver.most_under_way <= 20

    async def test_credit_is_granted_when_room_appears_without_an_answer(self, link: Wire) -> None:
        link.receiver.room = 0
        async with link.sender() as sender, asyncio.TaskGroup() as tasks:
            await sender.ping()
            send = tasks.create_task(sender.send(envelopes(3)))
            await asyncio.sleep(0)
            link.receiver.room = 10
            assert await send == [STORED] * 3

    async def test_a_batch_larger_than_all_the_room_there_ever_is_gets_through(self, link: Wire) -> None:
        link.receiver.room = 3
        link.receiver.handles_at_once = True
        async with link.sender() as sender:
            assert await sender.send(envelopes(10)) == [STORED] * 10
        assert link.receiver.most_under_way <= 3

    async def test_connections_share_the_room(self, link: Wire) -> None:
        link.receiver.room = 10
        link.receiver.hold()
        async with link.sender(HASTY) as one, link.sender(HASTY) as two, asyncio.TaskGroup() as tasks:
            await one.ping()
            await two.ping()
            tasks.create_task(error_of(two.send(envelopes(10))))
            await link.receiver.arrived(1)
            assert len(link.receiver.batches[0]) == 5
            link.receiver.release()


class TestLargeBatches:
    @pytest.fixture
    def serving_settings(self) -> Settings:
        return PATIENT.model_copy(
            update={"max_frame_bytes": 100_000, "max_message_bytes": 100_000, "buffer_bytes": 250_000}
        )

    async def test_a_batch_above_the_frame_limit_is_delivered_in_parts_and_in_order(self, link: Wire) -> None:
        batch = envelopes(50, body=b"x" * 10_000)
        async with link.sender() as sender:
            assert await sender.send(batch) == [STORED] * 50
        assert list(link.receiver.stored.values()) == batch

    async def test_an_envelope_above_the_frame_limit_is_rejected_alone(self, link: Wire) -> None:
        batch = [*envelopes(3), envelope(body=b"x" * 100_000), *envelopes(2)]
        async with link.sender() as sender:
            outcomes = await sender.send(batch)
        assert outcomes[:3] + outcomes[4:] == [STORED] * 5
        match outcomes[3]:
            case Rejected(reason):
                assert str(batch[3].id) in reason
            case other:
                pytest.fail(f"unexpected: {other}")

    async def test_unencodable_envelope_is_rejected_alone(self, link: Wire) -> None:
        batch = [*envelopes(3), envelope("\ud800"), *envelopes(2)]
        async with link.sender() as sender:
            outcomes = await sender.send(batch)
        assert outcomes[:3] + outcomes[4:] == [STORED] * 5
        assert isinstance(outcomes[3], Rejected)

    async def test_bytes_under_way_in_the_listener_are_bounded_however_much_is_sent(self, link: Wire) -> None:
        link.receiver.hold()
        async with link.sender() as sender, asyncio.TaskGroup() as tasks:
            sends = [tasks.create_task(sender.send(envelopes(1, body=b"x" * 90_000))) for _ in range(20)]
            await link.proxy.passed(UP, 4 * 90_000)
            async with TcpTransport(PATIENT, "shipping", 3).sender(link.listener.address) as other:
                for _ in range(20):  # more turns than the listener would need to take in what has arrived
                    await other.ping()
            assert len(link.receiver.batches) == 2  # a third would be above 250,000 bytes
            link.receiver.release()
        assert [send.result() for send in sends] == [[STORED]] * 20


PONG_BYTES = 4 + 9 + 2
