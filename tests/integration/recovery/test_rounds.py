"""Claims of a handler over several rounds: each tenant has its turn, and a paused version has none."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator
from datetime import timedelta

import pytest

from durable.agents.context import AgentContext
from durable.clock import SystemClock
from durable.embedded import Embedded
from durable.envelope import ANY_NODE
from durable.messages.ordering import QueueKeys
from durable.recovery.fair_claims import Shares
from durable.recovery.floors import Looks
from durable.recovery.incoming_claims import claim_incoming, claim_trials
from durable.storage import circuits, inbox
from durable.storage.circuits import CircuitKind
from durable.storage.inbox import Arrival
from durable.telemetry import Event
from tests.support.one_handler import NODE, Placed, Shop, envelope, shop_tables
from tests.support.tables import Tables

TENANTS = 6


@pytest.fixture
def tables(server: Embedded) -> Iterator[Tables]:
    with shop_tables(server) as made:
        yield made


@pytest.fixture
async def shop(tables: Tables) -> AsyncIterator[Shop]:
    made = Shop(tables, SystemClock(), batch_size=2, buffer_size=2)
    yield made
    await made.close()


async def test_round_of_claims_ends_when_a_paused_version_alone_waits(shop: Shop) -> None:
    async def handle(order: Placed) -> None: ...

    shop.handles(handle)
    await shop.database.transaction(inbox.store, [Arrival("shop", envelope(1), ANY_NODE)])
    context = AgentContext(shop.database, NODE, shop.settings, SystemClock(), shop.counters)
    shop.agent.observe_circuits({"handling.older": False}, shop.agent.circuit.generation.number)
    await shop.tables.change("UPDATE durable.incoming_envelopes SET message_type = 'handling.older'")
    assert not await claim_incoming(
        context, {"handling.older": shop.agent}, ["handling.older"], Looks(time.monotonic).types
    )
    assert shop.counters[Event.CLAIMED] == 0


async def test_turn_of_a_tenant_is_remembered_while_destinations_are_claimed(shop: Shop) -> None:
    """Each round claims one message of two tenants, who all have more of them."""
    handled: list[int] = []

    async def handle(order: Placed) -> None:
        handled.append(order.number)

    shop.handles(handle)
    rows = [
        Arrival("shop", envelope(tenant), ANY_NODE, QueueKeys(None, f"tenant {tenant}"))
        for tenant in range(TENANTS)
        for _ in range(TENANTS)
    ]
    await shop.database.transaction(inbox.store, rows)
    context = AgentContext(shop.database, NODE, shop.settings, SystemClock(), shop.counters)
    shares = Shares(context, lambda _: None)
    async with shop.open():
        for _ in range(TENANTS // 2):
            await shares.claim({"handling.placed": shop.agent}, ["handling.placed"])
            await shares.claim_outgoing([])
            await shop.settled()
    assert sorted(handled) == list(range(TENANTS))


async def test_trial_is_the_only_one_for_as_long_as_its_handler_may_take(shop: Shop) -> None:
    async def handle(order: Placed) -> None: ...

    shop.handles(handle, timeout=timedelta(hours=1))
    await shop.database.transaction(inbox.store, [Arrival("shop", envelope(1), ANY_NODE)])
    await shop.database.transaction(
        circuits.open_circuit, CircuitKind.HANDLER, "handling.placed", reason="down", actor="it", duration=timedelta(0)
    )
    shop.agent.observe_circuits({"handling.placed": True}, shop.agent.circuit.generation.number)
    context = AgentContext(shop.database, NODE, shop.settings, SystemClock(), shop.counters)
    await claim_trials(context, {"handling.placed": shop.agent}, {})
    assert shop.agent.statistics().waiting == 1
    assert shop.tables.one("SELECT until > now() + interval '1 hour' FROM durable.circuits")
