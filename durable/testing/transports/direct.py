"""The contract of transports whose outcome comes from the receiver itself: TCP, Unix sockets, HTTP, memory.

Stored and Duplicate are what the receiver said of an envelope after its commit; no answer, no outcome. So whatever
befalls the receiver is seen by the sender: no room as Busy, a fault of its database as Failed, silence as a timeout.
"""

from __future__ import annotations

import asyncio
from datetime import timedelta

import pytest

from durable.errors import ConnectionFailed, InvalidSetting, PeerTimeout, TransportError
from durable.outcomes import BUSY, DUPLICATE, STORED, Busy, Failed, Rejected
from durable.testing.transports.contract import SMALL, TransportContract
from durable.testing.transports.link import HASTY, LATE_SECONDS, PATIENT, Link, error_of, needed
from durable.testing.transports.receivers import REJECTED_TYPE, MemoryReceiver, envelope, envelopes
from durable.transports.base import keeps_order


class DirectContract(TransportContract):
    """Derive a class from it and give it a fixture `link`."""

    # ------------------------------------------------------------------ outcomes

    async def test_returns_one_outcome_for_each_envelope_in_order(self, link: Link) -> None:
        stored, rejected, also_stored = envelope(), envelope(REJECTED_TYPE), envelope()
        async with link.sender() as sender:
            assert await sender.send([stored]) == [STORED]
            assert await sender.send([stored, rejected, also_stored]) == [
                DUPLICATE,
                Rejected("a type that the test rejects"),
                STORED,
            ]

    async def test_answer_follows_the_storing_of_the_batch(self, link: Link) -> None:
        link.receiver.hold()
        async with link.sender() as sender, asyncio.TaskGroup() as tasks:
            send = tasks.create_task(sender.send(envelopes(2)))
            await link.receiver.arrived(1)
            for _ in range(5):  # an answer that was too early would come before these
                await sender.ping()
            assert not send.done()
            assert link.receiver.stored == {}
            link.receiver.release()
            assert await send == [STORED] * 2

    async def test_envelope_failed_at_the_receiver_is_answered_failed_and_can_be_sent_again(self, link: Link) -> None:
        batch = envelopes(2)
        link.receiver.broken = "the disk is full"
        async with link.sender() as sender:
            assert await sender.send(batch) == [Failed("the disk is full")] * 2
            link.receiver.broken = ""
            assert await sender.send(batch) == [STORED] * 2

    async def test_sender_keeping_order_sends_nothing_behind_an_unstored_part(self, link: Link) -> None:
        await link.replace_listener(settings=SMALL)
        link.receiver.broken = "the disk is full"
        async with link.sender(SMALL) as sender:
            outcomes = await sender.send(envelopes(50, body=b"x" * 10_000))
            assert all(isinstance(outcome, Failed | Busy) for outcome in outcomes)
            assert len(link.receiver.batches) == 1 or not keeps_order(sender)

    async def test_batches_under_way_are_each_answered_once_stored(self, link: Link) -> None:
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

    async def test_each_batch_is_counted_once(self, link: Link) -> None:
        async with link.sender() as sender:
            await sender.send(envelopes(2))
            await sender.send(envelopes(3))
        assert link.listener.statistics()["batches"] == 2

    # ------------------------------------------------------------------ busy peers

    async def test_receiver_without_room_answers_busy(self, link: Link) -> None:
        link.receiver.room = 0
        async with link.sender(HASTY) as sender:
            assert await sender.send(envelopes(3)) == [BUSY] * 3
        assert link.receiver.stored == {}

    async def test_envelopes_beyond_the_room_are_busy_and_the_others_stored(self, link: Link) -> None:
        link.receiver.room = 2
        batch = envelopes(5)
        async with link.sender(HASTY) as sender:
            assert await sender.send(batch) == [STORED] * 2 + [BUSY] * 3
            link.receiver.room = 100
            assert await sender.send(batch) == [DUPLICATE] * 2 + [STORED] * 3

    async def test_receiver_is_never_given_more_than_its_room(self, link: Link) -> None:
        link.receiver.room = 50
        link.receiver.hold()
        async with link.sender(HASTY) as sender, asyncio.TaskGroup() as tasks:
            sends = [tasks.create_task(error_of(sender.send(envelopes(10)))) for _ in range(12)]
            await asyncio.wait(sends)
        assert link.receiver.most_under_way == 50
        link.receiver.release()

    # ------------------------------------------------------------------ pings

    async def test_ping_succeeds_only_with_a_receiver_able_to_store(self, link: Link) -> None:
        async with link.sender() as sender:
            await sender.ping()
            link.receiver.is_ready = False
            with pytest.raises(TransportError):
                await sender.ping()
            link.receiver.is_ready = True
            await sender.ping()

    async def test_batch_is_not_delivered_without_a_listener(self, link: Link) -> None:
        await link.listener.close()
        async with link.sender() as sender:
            with pytest.raises(ConnectionFailed):
                await sender.send(envelopes(1))
            with pytest.raises(ConnectionFailed):
                await sender.ping()

    # ------------------------------------------------------------------ outages

    async def test_batch_to_a_dying_peer_has_an_unknown_fate_and_can_be_sent_again(self, link: Link) -> None:
        way = needed(link.way)
        batch = envelopes(3)
        link.receiver.hold()
        async with link.sender() as sender, asyncio.TaskGroup() as tasks:
            send = tasks.create_task(error_of(sender.send(batch)))
            await link.receiver.arrived(1)
            way.cut()
            assert isinstance(await send, ConnectionFailed)
            link.receiver.release()
            way.restore()
            assert set(await sender.send(batch)) <= {STORED, DUPLICATE}
        assert link.receiver.envelopes == batch

    async def test_hanging_receiver_costs_one_timeout(self, link: Link) -> None:
        link.receiver.hold()
        async with link.sender(HASTY) as sender:
            async with asyncio.timeout(LATE_SECONDS):
                with pytest.raises(PeerTimeout):
                    await sender.send(envelopes(1))
            link.receiver.release()
            assert await sender.send(envelopes(1)) == [STORED]

    async def test_send_cancelled_during_its_wait_harms_no_other(self, link: Link) -> None:
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

    # ------------------------------------------------------------------ stopping

    async def test_closing_listener_answers_the_batches_under_way(self, link: Link) -> None:
        link.receiver.hold()
        async with link.sender() as sender, asyncio.TaskGroup() as tasks:
            sends = [tasks.create_task(sender.send(envelopes(2))) for _ in range(3)]
            await link.receiver.arrived(3)
            closing = tasks.create_task(link.listener.close())
            await asyncio.wait([closing], timeout=0.05)
            assert not closing.done()
            link.receiver.release()
            assert [await send for send in sends] == [[STORED] * 2] * 3
            await closing
            with pytest.raises(ConnectionFailed):
                await sender.send(envelopes(1))

    async def test_hanging_listener_is_closed_at_the_deadline(self, link: Link) -> None:
        """Close while a batch hangs: it breaks off or is answered later; the sender is never told an untrue outcome."""
        await link.replace_listener(settings=PATIENT.model_copy(update={"drain_timeout": timedelta(seconds=0.1)}))
        link.receiver.hold()
        batch = envelopes(1)
        async with link.sender() as sender, asyncio.TaskGroup() as tasks:
            send = tasks.create_task(error_of(sender.send(batch)))
            await link.receiver.arrived(1)
            async with asyncio.timeout(20):
                await link.listener.close()
            link.receiver.release()
            assert isinstance(await send, ConnectionFailed) or link.receiver.envelopes == batch

    async def test_occupied_address_is_an_invalid_setting(self, link: Link) -> None:
        with pytest.raises(InvalidSetting, match=link.listener.address):
            await link.listen(MemoryReceiver())
