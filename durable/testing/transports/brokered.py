"""The contract of transports with a broker in the middle: RabbitMQ.

Stored means that the broker has it, for good; what becomes of it at the receiver, the sender is never told:

    the receiver has no room        the broker keeps it; it arrives when there is room, and waits unacknowledged
    ... is broken                   nothing is acknowledged, so it is delivered again
    ... rejects it                  it is kept there as a letter, and acknowledged
    ... has it already              acknowledged
    ... or its listener, dies       what was not acknowledged is delivered to the next listener
    nobody listens                  the broker keeps it for who will

So an acknowledgement is to the broker what an outcome is to a sender: it follows the commit.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from datetime import timedelta
from uuid import UUID

from durable.envelope import Envelope
from durable.outcomes import STORED
from durable.testing.transports.contract import TransportContract
from durable.testing.transports.link import PATIENT, Link, needed
from durable.testing.transports.receivers import REJECTED_TYPE, MemoryReceiver, envelope, envelopes
from durable.testing.waiting import eventually

ABRUPT = PATIENT.model_copy(update={"drain_timeout": timedelta(seconds=0.1)})


class BrokeredContract(TransportContract):
    """Derive a class from it and give it a fixture `link`.

    `prefetch` is how many deliveries a listener of that link may have unacknowledged; some tests send four times as
    many, so the link should make it small.
    """

    prefetch: int = 50

    # ------------------------------------------------------------------ what Stored means

    async def test_broker_keeps_stored_envelopes_without_a_listener(self, link: Link) -> None:
        batch = envelopes(3)
        await link.listener.close()
        async with link.sender() as sender:
            await sender.ping()
            assert await sender.send(batch) == [STORED] * 3
        await link.replace_listener()
        await link.receiver.stores(3)
        assert link.receiver.envelopes == batch

    async def test_hanging_receiver_does_not_delay_the_sender(self, link: Link) -> None:
        link.receiver.hold()
        async with link.sender() as sender:
            assert await sender.send(envelopes(2)) == [STORED] * 2
            await link.receiver.arrived(1)
            await sender.ping()
            assert await sender.send(envelopes(3)) == [STORED] * 3
        link.receiver.release()
        await link.receiver.stores(5)

    # ------------------------------------------------------------------ acknowledgements

    async def test_acknowledgement_follows_the_storing_of_the_batch(self, link: Link) -> None:
        """The listener ends while the receiver holds the batch: a successor gets all of it."""
        await link.replace_listener(settings=ABRUPT)
        batch, successor = envelopes(5), MemoryReceiver()
        link.receiver.hold()
        async with link.sender() as sender:
            assert await sender.send(batch) == [STORED] * 5
        await link.receiver.arrived(1)
        async with asyncio.timeout(20):
            await link.replace_listener(successor)
        await successor.stores(5)
        assert successor.envelopes == batch

    async def test_envelopes_unstored_at_a_lost_connection_are_delivered_again(self, link: Link) -> None:
        way, batch = needed(link.listener_way), envelopes(5)
        link.receiver.hold()
        async with link.sender() as sender:
            assert await sender.send(batch) == [STORED] * 5
        await link.receiver.arrived(1)
        held = link.receiver.batches[0]
        way.cut()
        link.receiver.release()
        way.restore()
        await link.receiver.until(lambda: _comes_again(link.receiver, held), "what was held to come again")
        await link.receiver.stores(5)
        assert set(link.receiver.stored) == {each.id for each in batch}

    async def test_envelope_failed_at_the_receiver_is_delivered_again(self, link: Link) -> None:
        batch = envelopes(3)
        link.receiver.broken = "the disk is full"
        async with link.sender() as sender:
            assert await sender.send(batch) == [STORED] * 3
        await link.receiver.until(lambda: link.receiver.arrivals > 3, "something to arrive again")
        link.receiver.broken = ""
        await link.receiver.stores(3)
        assert set(link.receiver.stored) == {each.id for each in batch}

    async def test_envelope_rejected_by_the_receiver_is_kept_there_as_a_letter(self, link: Link) -> None:
        rejected = envelope(REJECTED_TYPE, body=b"the rejected body")
        async with link.sender() as sender:
            assert await sender.send([envelope(), rejected, envelope()]) == [STORED] * 3
        await link.receiver.stores(2)
        await link.receiver.until(lambda: bool(link.receiver.letters), "a letter")
        ((raw, reason, _),) = link.receiver.letters
        assert rejected.body in raw
        assert "a type that the test rejects" in reason
        await self._is_left(link, [])

    async def test_stored_envelope_is_acknowledged_and_never_delivered_again(self, link: Link) -> None:
        async with link.sender() as sender:
            assert await sender.send(envelopes(20)) == [STORED] * 20
            await link.receiver.stores(20)
            assert await sender.send(link.receiver.envelopes) == [STORED] * 20  # duplicates are acknowledged as well
        await link.receiver.until(lambda: link.receiver.arrivals == 40, "all of it to arrive again")
        await self._is_left(link, [])

    async def test_closing_listener_acknowledges_the_envelopes_under_way(self, link: Link) -> None:
        batch = envelopes(5)
        link.receiver.hold()
        async with link.sender() as sender, asyncio.TaskGroup() as tasks:
            assert await sender.send(batch) == [STORED] * 5
            await link.receiver.arrived(1)
            closing = tasks.create_task(link.listener.close())
            await asyncio.wait([closing], timeout=0.05)
            assert not closing.done()
            link.receiver.release()
        stored = len(link.receiver.stored)
        assert stored >= len(link.receiver.batches[0])
        await self._is_left(link, batch[stored:])

    async def _is_left(self, link: Link, rest: list[Envelope]) -> None:
        """Assert that a successor gets the deliveries that were not stored, and those sent from now on; no others."""
        successor, new = MemoryReceiver(), envelope()
        await link.replace_listener(successor)
        async with link.sender() as sender:
            assert await sender.send([new]) == [STORED]
        await successor.stores(len(rest) + 1)
        assert [each for batch in successor.batches for each in batch] == [*rest, new]
        assert successor.letters == []

    # ------------------------------------------------------------------ bounds

    async def test_hanging_receiver_holds_at_most_the_prefetch(self, link: Link) -> None:
        """The rest lies at the broker: a neighbour gets it."""
        neighbour, batch = MemoryReceiver(), envelopes(4 * self.prefetch)
        link.receiver.hold()
        async with link.sender() as sender:
            assert await sender.send(batch) == [STORED] * len(batch)
        await link.receiver.arrived(1)
        await link.listen(neighbour)
        await neighbour.stores(3 * self.prefetch)
        assert link.receiver.most_under_way <= self.prefetch
        link.receiver.release()
        await eventually(lambda: _have_all(batch, link.receiver, neighbour), what="all of it at one or the other")

    async def test_receiver_is_never_given_more_than_its_room(self, link: Link) -> None:
        link.receiver.room = 7
        link.receiver.handles_at_once = True
        link.receiver.hold()
        async with link.sender() as sender:
            assert await sender.send(envelopes(100)) == [STORED] * 100
        await link.receiver.arrived(1)
        await asyncio.sleep(0.1)  # much more gathers at the listener
        link.receiver.release()
        await link.receiver.stores(100)
        assert link.receiver.most_under_way <= 7

    async def test_envelopes_without_room_arrive_when_room_is_free(self, link: Link) -> None:
        batch = envelopes(10)
        link.receiver.room = 0
        async with link.sender() as sender:
            assert await sender.send(batch) == [STORED] * 10
            await asyncio.sleep(0.1)
            assert link.receiver.stored == {}
            link.receiver.room = 4
            await link.receiver.stores(4)
            await asyncio.sleep(0.1)
            assert len(link.receiver.stored) == 4
            link.receiver.room = 1_000
            await link.receiver.stores(10)
        assert set(link.receiver.stored) == {each.id for each in batch}

    async def test_listeners_at_one_address_share_the_envelopes(self, link: Link) -> None:
        neighbour, batch = MemoryReceiver(), envelopes(4 * self.prefetch)
        await link.listen(neighbour)
        for receiver in (link.receiver, neighbour):
            receiver.hold()
        async with link.sender() as sender:
            assert await sender.send(batch) == [STORED] * len(batch)
        for receiver in (link.receiver, neighbour):
            await receiver.arrived(1)
            receiver.release()
        await eventually(lambda: _have_all(batch, link.receiver, neighbour), what="all of it at one or the other")
        assert not link.receiver.stored.keys() & neighbour.stored.keys()

    # ------------------------------------------------------------------ outages of the listener

    async def test_listener_reconnects_after_each_outage(self, link: Link) -> None:
        way = needed(link.listener_way)
        async with link.sender() as sender:
            for outage in range(1, 4):
                way.cut()
                assert await sender.send(envelopes(2)) == [STORED] * 2
                way.restore()
                await link.receiver.stores(2 * outage)


def _comes_again(receiver: MemoryReceiver, held: list[Envelope]) -> bool:
    arrived = Counter(each.id for batch in receiver.batches for each in batch)
    return all(arrived[each.id] > 1 for each in held)


def _have_all(batch: list[Envelope], *receivers: MemoryReceiver) -> bool:
    stored = set[UUID]().union(*(receiver.stored for receiver in receivers))
    return stored == {each.id for each in batch}
