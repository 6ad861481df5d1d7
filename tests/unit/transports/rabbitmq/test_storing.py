"""Deliveries of several peers over one queue: what is stored together, and in which order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pamqp.commands import Basic

from durable.envelope import Envelope
from durable.outcomes import BUSY, Failed, Outcome
from durable.settings import load_settings
from durable.transports.rabbitmq import listener as listening
from durable.transports.rabbitmq.address import source
from durable.transports.rabbitmq.arrivals import Unmappable
from durable.transports.rabbitmq.consumers import Delivery
from durable.transports.rabbitmq.listener import RabbitListener
from tests.support.receivers import REJECTED_TYPE, MemoryReceiver, envelope

FORBIDDEN = "payments.secret"
PEERS = {
    "orders": "o" * 20,
    "payments": {"secrets": {"1": "p" * 20}, "types": ["order placed", REJECTED_TYPE]},
}
SETTINGS = load_settings(amqp_url="amqps://one/", peers=PEERS)
MAIL = "rabbitmq://default/queue/mail"


class Receiver(MemoryReceiver):
    """Refuses whole batches, as the receiving agent does: those with these numbers."""

    def __init__(self, refused: dict[int, Outcome]) -> None:
        super().__init__()
        self.refused = refused
        self.letters_at: list[str] = []

    async def receive(self, endpoint: str, batch: Sequence[Envelope]) -> list[Outcome]:
        refusal = self.refused.get(len(self.batches))
        if refusal is None:
            return await super().receive(endpoint, batch)
        self.batches.append(list(batch))
        return [refusal] * len(batch)

    async def reject(self, endpoint: str, raw: bytes, reason: str, headers: Mapping[str, str] | None = None) -> None:
        self.letters_at.append(endpoint)
        await super().reject(endpoint, raw, reason, headers)


class Queue:
    """A listener, with the deliveries that it holds. `acknowledged` are those that are done with, in order."""

    def __init__(self, *, is_ordered: bool) -> None:
        self.listener = RabbitListener(source(MAIL), "shop", cast(Any, None), SETTINGS, "shop", lambda: ())
        self.listener._held.is_ordered = is_ordered
        self.acknowledged: list[Delivery] = []

    def add(self, peer: str | None, message_type: str | None) -> Delivery:
        content = envelope(message_type) if message_type else Unmappable(b"{", "no JSON", {})
        about = cast(Any, SimpleNamespace(origin=SimpleNamespace(queue="mail"), is_lost=False, lost=Never()))
        delivery = Delivery(content, Basic.Properties(), Basic.Deliver(delivery_tag=1), about, peer)
        self.listener._held.add(delivery)
        return delivery

    async def store(self, receiver: Receiver) -> None:
        """Store what is held, as far as the receiver takes it."""

        async def acknowledge(deliveries: Sequence[Delivery]) -> None:
            for each in deliveries:
                each.settled = True
                self.acknowledged.append(each)

        with patch.object(listening, "acknowledge", acknowledge):
            await self.listener._store_or_keep(receiver, self.listener._take(receiver.credit()))


class Never:
    """Stands for the future of a consumer that is not lost."""

    def add_done_callback(self, _: object) -> None: ...

    def remove_done_callback(self, _: object) -> None: ...


senders = st.sampled_from([None, "orders", "payments"])
types = st.sampled_from(["order placed", "order placed", REJECTED_TYPE, FORBIDDEN, None])
queues = st.lists(st.tuples(senders, types), max_size=9)
refusals = st.dictionaries(st.integers(0, 9), st.sampled_from([BUSY, Failed("the database is away")]), max_size=5)
ORDER = "order placed"


@given(queue=queues, refused=refusals)
@example(queue=[("orders", ORDER), ("payments", ORDER), ("orders", ORDER)], refused={})
@example(queue=[("orders", ORDER), ("payments", ORDER), ("orders", ORDER)], refused={1: BUSY})
async def test_ordered_queue_of_several_peers_is_stored_in_its_order(
    queue: list[tuple[str | None, str | None]], refused: dict[int, Outcome]
) -> None:
    held, receiver = Queue(is_ordered=True), Receiver(refused)
    deliveries = [held.add(*each) for each in queue]
    fit = [
        each.content.id
        for each in deliveries
        if isinstance(each.content, Envelope)
        and (each.content.message_type == ORDER or (each.content.message_type == FORBIDDEN and each.peer != "payments"))
    ]

    for _ in range(10 + len(refused)):
        await held.store(receiver)
        stored = [each.id for each in receiver.envelopes]
        assert stored == fit[: len(stored)]
        acknowledged = [each.content.id for each in held.acknowledged if isinstance(each.content, Envelope)]
        assert [each for each in acknowledged if each in fit] == stored
    assert [each.id for each in receiver.envelopes] == fit
    assert {id(each) for each in held.acknowledged} == {id(each) for each in deliveries}


@given(peers=st.lists(senders, max_size=9), is_ordered=st.booleans())
async def test_deliveries_of_a_peer_share_a_commit_as_far_as_the_order_allows(
    peers: list[str | None], is_ordered: bool
) -> None:
    held, receiver = Queue(is_ordered=is_ordered), Receiver({})
    for peer in peers:
        held.add(peer, ORDER)

    await held.store(receiver)
    assert len(receiver.batches) == len([*groupby(peers)] if is_ordered else {*peers})
    assert len(receiver.stored) == len(peers)


@pytest.mark.parametrize(
    ("peer", "message_type", "at"),
    [
        ("payments", FORBIDDEN, "shop<-payments"),
        ("orders", REJECTED_TYPE, "shop<-orders"),
        (None, REJECTED_TYPE, "shop"),
        ("orders", None, "shop<-orders"),
        (None, None, "shop"),
    ],
)
async def test_letter_of_a_delivery_lies_at_the_address_of_its_peer(
    peer: str | None, message_type: str | None, at: str
) -> None:
    held, receiver = Queue(is_ordered=False), Receiver({})
    delivery = held.add(peer, message_type)

    await held.store(receiver)
    assert receiver.letters_at == [at]
    assert held.acknowledged == [delivery]
