"""Each transport answers after the commit. It is made to answer before, and then the suite notices, and envelopes are
lost: so the guard is needed, and the tests that all transports run can fail.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import pytest

from durable.envelope import ANY_NODE, Envelope
from durable.errors import StorageUnavailable
from durable.outcomes import STORED, Outcome
from durable.storage import inbox
from durable.testing.transports import BrokeredContract, DirectContract, Link, receivers
from durable.transports.frames import PartlyReadable
from durable.transports.http import batches as http_batches
from durable.transports.http.exchange import Door
from durable.transports.memory import MemoryListener
from durable.transports.rabbitmq.consumers import Delivery
from durable.transports.rabbitmq.listener import RabbitListener
from durable.transports.tcp import listener as tcp_listener
from tests.contract.links import LinkOver
from tests.failure import leftovers
from tests.failure.books import open_books, read_books
from tests.failure.test_guards import A, B, both_ways, check, fail_first, idle
from tests.failure.waiting import eventually
from tests.failure.workbench import Clerk, Workbench

DIRECT = ("memory", "tcp", "unix", "http")


class Early:
    """Answers that do not wait for what they answer for."""

    def __init__(self) -> None:
        self._storing: set[asyncio.Future[Any]] = set()

    def answer(self, storing: Awaitable[Sequence[Outcome]], count: int) -> list[Outcome]:
        self._storing.add(asyncio.ensure_future(storing))
        return [STORED] * count

    async def end(self) -> None:
        for storing in self._storing:
            storing.cancel()
        await asyncio.gather(*self._storing, return_exceptions=True)


@pytest.fixture
async def early() -> AsyncIterator[Early]:
    early = Early()
    yield early
    await early.end()


def answer_before_the_commit(transport: str, early: Early, monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the guard out of this transport's listener."""
    if transport == "memory":
        receive = MemoryListener._receive

        async def in_memory(self: MemoryListener, batch: list[Envelope]) -> list[Outcome]:
            return early.answer(receive(self, batch), len(batch))

        monkeypatch.setattr(MemoryListener, "_receive", in_memory)
    elif transport in ("tcp", "unix"):
        on_connection = tcp_listener._Connection._receive

        async def by_tcp(self: Any, envelopes: list[Envelope]) -> list[Outcome]:
            return early.answer(on_connection(self, envelopes), len(envelopes))

        monkeypatch.setattr(tcp_listener._Connection, "_receive", by_tcp)
    elif transport == "http":
        at_door = http_batches._receive

        async def by_http(door: Door, batch: PartlyReadable, peer: str | None) -> list[Outcome]:
            return early.answer(at_door(door, batch, peer), len(batch.envelopes))

        monkeypatch.setattr(http_batches, "_receive", by_http)
    else:

        async def by_rabbitmq(self: RabbitListener, receiver: Any, batch: Sequence[Delivery]) -> None:
            await self._acknowledge(batch)
            await receiver.receive(self.endpoint, [delivery.content for delivery in batch])

        monkeypatch.setattr(RabbitListener, "_store", by_rabbitmq)


Test = Callable[[Any, Link], Awaitable[None]]

OF_DIRECT: Sequence[Test] = (
    DirectContract.test_answer_follows_the_storing_of_the_batch,
    DirectContract.test_envelope_failed_at_the_receiver_is_answered_failed_and_can_be_sent_again,
)
OF_BROKERED: Sequence[Test] = (
    BrokeredContract.test_acknowledgement_follows_the_storing_of_the_batch,
    BrokeredContract.test_envelopes_unstored_at_a_lost_connection_are_delivered_again,
    BrokeredContract.test_envelope_failed_at_the_receiver_is_delivered_again,
)
NOTICING = {**dict.fromkeys(DIRECT, OF_DIRECT), "rabbitmq": OF_BROKERED}


@both_ways
@pytest.mark.parametrize(
    ("transport", "test"), [(transport, test) for transport, tests in NOTICING.items() for test in tests]
)
async def test_the_suite_notices_an_answer_before_the_commit(
    transport: str,
    test: Test,
    link_over: LinkOver,
    early: Early,
    monkeypatch: pytest.MonkeyPatch,
    guarded: bool,
) -> None:
    if not guarded:
        answer_before_the_commit(transport, early, monkeypatch)
        monkeypatch.setattr(receivers, "_PATIENCE", 1.0)  # for what must never come
    async with link_over(transport) as link:
        failure = await failure_of(test(None, link))

    assert (failure is None) == guarded, f"{failure!r}"


async def failure_of(test: Awaitable[None]) -> BaseException | None:
    """The assertion that did not hold, if any; other errors are raised."""
    try:
        await test
    except AssertionError as error:
        return error
    except BaseExceptionGroup as group:
        asserted, others = group.split(AssertionError)
        if others is not None:
            raise
        return asserted
    return None


@both_ways
@pytest.mark.parametrize("transport", [*DIRECT, "rabbitmq"])
async def test_answer_follows_the_commit(
    transport: str,
    link_over: LinkOver,
    make_database: Callable[[str], str],
    early: Early,
    monkeypatch: pytest.MonkeyPatch,
    guarded: bool,
) -> None:
    orders, billing = make_database("orders"), make_database("billing")
    open_books(orders, billing)
    refusals = fail_first(monkeypatch, inbox, "store", StorageUnavailable("the disk is full"))
    if not guarded:
        answer_before_the_commit(transport, early, monkeypatch)
    async with Workbench(orders) as sender, Workbench(billing) as receiver, link_over(transport) as link:
        await link.listener.close()
        await link.listen(receiver.receiving(B))
        leftovers.unsent_orders(orders, [1], link.destination, ANY_NODE)
        agent = sender.sending(A, link.destination, link.sender())
        handler = receiver.handling(B, Clerk(B).handle)

        await sender.claim_outgoing(agent, A)
        await eventually(lambda: refusals and not agent.held())
        if guarded:
            await eventually(lambda: receiver.claim_incoming(handler, B))
        await idle(handler)

        check(read_books(orders, billing).violations(), "I1 lost", guarded=guarded)
