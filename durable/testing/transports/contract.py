"""Contract of every transport: the tests that direct and brokered transports share.

They look at two ends. At the sender's: one outcome for each envelope, or a TransportError. At the receiver's: what it
was given. Between the two may be a broker, so a test waits until the receiver has what was sent, where it matters.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pytest

from durable.agents.latch import Latch
from durable.envelope import Envelope, new_id
from durable.errors import InvalidSetting, PeerTimeout, TransportError
from durable.messages.scope import listener_of
from durable.outcomes import DUPLICATE, STORED, Outcome, Rejected
from durable.testing.transports.link import HASTY, LATE_SECONDS, PATIENT, Link, error_of, needed
from durable.testing.transports.receivers import envelope, envelopes
from durable.testing.waiting import eventually
from durable.transports.base import Sender

SMALL = PATIENT.model_copy(update={"max_message_bytes": 50_000, "max_frame_bytes": 100_000, "batch_bytes": 100_000})

UNHURRIED = PATIENT.model_copy(update={"send_timeout": timedelta(seconds=30)})

ODD = Envelope(
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
"""An envelope with something in every field."""


def without_deadline(envelope: Envelope) -> Envelope:
    return msgspec.structs.replace(envelope, deliver_by=None)


class TransportContract:
    """The base of both contracts; a test module derives its class from one of them, and gives it a link.

    `impossible_uris` are addresses of the transport's own scheme that can never work.
    """

    pytestmark = pytest.mark.asyncio

    impossible_uris: Sequence[str] = ()

    link: Any
    """The fixture of the class that is derived: it yields a Link."""

    # ------------------------------------------------------------------ what arrives

    async def test_envelopes_arrive_unchanged_and_in_order_under_the_name_of_the_endpoint(self, link: Link) -> None:
        batch = [*envelopes(3), ODD, *envelopes(3)]
        async with link.sender() as sender:
            assert await sender.send(batch) == [STORED] * 7
            await link.receiver.stores(7)
        arrived = link.receiver.envelopes
        assert [without_deadline(envelope) for envelope in arrived] == [without_deadline(sent) for sent in batch]
        assert {listener_of(each) for each in link.receiver.endpoints} == {link.listener.endpoint} == {"billing-in"}

    async def test_deadline_is_equally_far_away_on_arrival(self, link: Link) -> None:
        """A transport may count what is left of it by the receiver's clock, which is this one."""
        async with link.sender() as sender:
            await sender.send([ODD])
            await link.receiver.stores(1)
        [arrived] = link.receiver.envelopes
        assert ODD.deliver_by is not None
        assert arrived.deliver_by is not None
        assert abs(arrived.deliver_by - ODD.deliver_by) < timedelta(minutes=1)

    async def test_empty_batch_has_no_outcomes_and_is_not_received(self, link: Link) -> None:
        async with link.sender() as sender:
            assert await sender.send([]) == []
            await sender.send(envelopes(1))
            await link.receiver.stores(1)
        assert [len(batch) for batch in link.receiver.batches] == [1]

    async def test_batch_of_thousands_is_delivered_in_order(self, link: Link) -> None:
        batch = envelopes(2_500)
        async with link.sender(UNHURRIED) as sender:
            assert await sender.send(batch) == [STORED] * 2_500
            await link.receiver.stores(2_500)
        assert link.receiver.envelopes == batch

    async def test_one_sender_serves_many_tasks_at_once(self, link: Link) -> None:
        async with link.sender() as sender:
            async with asyncio.TaskGroup() as tasks:
                sends = [tasks.create_task(sender.send(envelopes(5))) for _ in range(40)]
            assert [task.result() for task in sends] == [[STORED] * 5] * 40
            await link.receiver.stores(200)

    async def test_batch_sent_again_is_stored_once(self, link: Link) -> None:
        batch = envelopes(3)
        async with link.sender() as sender:
            assert await sender.send(batch) == [STORED] * 3
            assert set(await sender.send(batch)) in ({STORED}, {DUPLICATE})
            await link.receiver.until(lambda: link.receiver.arrivals == 6, "everything to arrive twice")
        assert link.receiver.envelopes == batch

    async def test_envelopes_are_counted(self, link: Link) -> None:
        async with link.sender() as sender:
            await sender.send(envelopes(2))
            await sender.send(envelopes(3))
            await eventually(lambda: link.listener.statistics()["envelopes"] == 5, what="the count of envelopes")
        assert link.listener.statistics()["dropped"] == 0
        assert 1 <= link.listener.statistics()["batches"] <= 5

    # ------------------------------------------------------------------ sizes

    async def test_batch_above_every_limit_is_delivered_in_parts_and_in_order(self, link: Link) -> None:
        await link.replace_listener(settings=SMALL)
        batch = envelopes(50, body=b"x" * 10_000)
        async with link.sender(SMALL) as sender:
            assert await sender.send(batch) == [STORED] * 50
            await link.receiver.stores(50)
        assert link.receiver.envelopes == batch

    async def test_too_large_envelope_harms_no_other(self, link: Link) -> None:
        """Assert that the envelope is Rejected, or told to the receiver as a letter, or left to the receiver to judge;
        never lost.
        """
        await link.replace_listener(settings=SMALL)
        await self._goes_alone(link, envelope(body=b"x" * 150_000))

    async def test_unencodable_envelope_harms_no_other(self, link: Link) -> None:
        await self._goes_alone(link, envelope("\ud800"))

    async def _goes_alone(self, link: Link, strange: Envelope) -> None:
        before, after = envelopes(3), envelopes(2)
        async with link.sender(SMALL) as sender:
            outcomes = await sender.send([*before, strange, *after])
            assert outcomes[:3] + outcomes[4:] == [STORED] * 5
            await eventually(lambda: _is_accounted_for(link, strange, outcomes[3]), what="a trace of the envelope")
            await link.receiver.stores(5)
        assert [e for e in link.receiver.envelopes if e != strange] == [*before, *after]

    # ------------------------------------------------------------------ pings and outages

    async def test_ping_succeeds_only_over_an_open_way(self, link: Link) -> None:
        way = needed(link.way)
        async with link.sender() as sender:
            await sender.ping()
            way.cut()
            with pytest.raises(TransportError):
                await sender.ping()
            way.restore()
            await eventually(lambda: _succeeds(sender), what="a ping over the way that was restored")
        assert link.receiver.batches == []

    async def test_sender_reconnects_after_each_outage(self, link: Link) -> None:
        way = needed(link.way)
        async with link.sender() as sender:
            for outage in range(3):
                assert await sender.send(envelopes(1)) == [STORED]
                way.cut()
                assert await error_of(sender.send(envelopes(1))), f"outage {outage} was not noticed"
                way.restore()
                await eventually(lambda: _succeeds(sender), what="a ping over the way that was restored")
            assert await sender.send(envelopes(1)) == [STORED]
            await link.receiver.stores(4)

    async def test_silent_peer_costs_one_timeout(self, link: Link) -> None:
        way = needed(link.way)
        batch = envelopes(3)
        async with link.sender(HASTY) as sender:
            await sender.ping()
            way.silence()
            async with asyncio.timeout(LATE_SECONDS):
                with pytest.raises(PeerTimeout):
                    await sender.send(batch)
            with pytest.raises(TransportError):
                await sender.ping()
            way.restore()
        async with link.sender() as sender:  # whether it had arrived is unknown, so all of it is sent again
            assert set(await sender.send(batch)) <= {STORED, DUPLICATE}
            await link.receiver.stores(3)
        assert link.receiver.envelopes == batch

    async def test_way_broken_within_a_batch_leaves_the_fate_of_the_batch_unknown(self, link: Link) -> None:
        way = needed(link.way)
        batch = envelopes(3)
        async with link.sender() as sender:
            await sender.ping()
            way.silence()
            async with asyncio.TaskGroup() as tasks:
                send = tasks.create_task(error_of(sender.send(batch)))
                await asyncio.wait([send], timeout=0.05)
                way.cut()
                assert isinstance(await send, TransportError)
            way.restore()
            await eventually(lambda: _succeeds(sender), what="a ping over the way that was restored")
            assert set(await sender.send(batch)) <= {STORED, DUPLICATE}
            await link.receiver.stores(3)
        assert link.receiver.envelopes == batch

    async def test_failures_latch_the_destination_until_the_first_answered_ping(self, link: Link) -> None:
        """Drive the circuit of the sending agents as they drive it."""
        way, circuit = needed(link.way), Latch(failures_to_latch=3)
        batch = envelopes(2)
        async with link.sender(HASTY) as sender:
            await sender.ping()
            way.cut()
            while not circuit.latched:
                assert await error_of(sender.send(batch)), "a batch was answered through a way that is cut"
                circuit.batch_failed(circuit.ticket)
            for _ in range(2):
                assert await error_of(sender.ping()), "a ping was answered through a way that is cut"
            way.restore()
            await eventually(lambda: _succeeds(sender), what="a ping over the way that was restored")
            assert circuit.ping_succeeded()
            assert link.receiver.batches == []  # pings carry nothing, and what failed was not kept to be sent later
            assert await sender.send(batch) == [STORED] * 2
            await link.receiver.stores(2)

    # ------------------------------------------------------------------ cancelling, closing

    async def test_sends_cancelled_at_any_moment_harm_no_other(self, link: Link) -> None:
        others = envelopes(30)
        async with link.sender() as sender:
            for turns, other in enumerate(others):
                async with asyncio.TaskGroup() as tasks:
                    cancelled = tasks.create_task(sender.send(envelopes(2)))
                    send = tasks.create_task(sender.send([other]))
                    for _ in range(turns):
                        await asyncio.sleep(0)
                    cancelled.cancel()
                    with contextlib.suppress(asyncio.CancelledError):  # it may have been answered just before
                        assert await cancelled == [STORED] * 2
                    assert await send == [STORED]
            await link.receiver.until(lambda: {e.id for e in others} <= link.receiver.stored.keys(), "the others")

    async def test_closing_twice_is_allowed(self, link: Link) -> None:
        await link.listener.close()
        await link.listener.close()

    async def test_sender_finds_the_next_listener_at_the_same_address(self, link: Link) -> None:
        batch = envelopes(2)
        async with link.sender() as sender:
            assert await sender.send(batch[:1]) == [STORED]
            await link.receiver.stores(1)
            await link.replace_listener()
            assert await sender.send(batch[1:]) == [STORED]
            await link.receiver.stores(2)
        assert link.receiver.envelopes == batch

    async def test_unserved_listener_can_be_closed(self, link: Link) -> None:
        await link.transport(PATIENT).listener(link.listener.address, "another").close()

    # ------------------------------------------------------------------ addresses

    async def test_impossible_uri_is_an_invalid_setting(self, link: Link) -> None:
        transport = link.transport(PATIENT)
        for uri in ("", "nothing", "another-scheme://name", *self.impossible_uris):
            with pytest.raises(InvalidSetting):
                transport.check(uri)
            with pytest.raises(InvalidSetting):
                transport.sender(uri)
            with pytest.raises(InvalidSetting):
                transport.listener(uri, "x")

    async def test_addresses_in_use_are_valid_and_of_a_known_scheme(self, link: Link) -> None:
        transport = link.transport(PATIENT)
        for uri in (link.destination, link.listener.address):
            transport.check(uri)
            assert uri.partition("://")[0] in transport.schemes

    async def test_resolving_twice_changes_nothing(self, link: Link) -> None:
        transport = link.transport(PATIENT)
        resolved = transport.resolve(link.destination, "order placed")
        assert transport.resolve(resolved, "order placed") == resolved
        async with transport.sender(resolved) as sender:
            assert await sender.send(envelopes(1)) == [STORED]
            await link.receiver.stores(1)


async def _succeeds(sender: Sender) -> bool:
    return await error_of(sender.ping()) is None


def _is_accounted_for(link: Link, strange: Envelope, outcome: Outcome) -> bool:
    """Rejected and kept from the receiver, or shown to it in some way."""
    shown = strange in link.receiver.envelopes or bool(link.receiver.letters)
    return isinstance(outcome, Rejected) != shown
