"""A destination for each customer: what a node does for many of them, it does for all of them together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import msgspec
import psycopg
import pytest

from durable import Bus, message
from durable.recovery import agent, idle_addresses, ordered_claims, outgoing_claims
from durable.settings import load_settings
from durable.storage import circuits, leases, ordering, outbox
from durable.storage.database import Database
from durable.transports.memory import MemoryTransport
from tests.failure.waiting import eventually
from tests.failure.workbench import QUICK

SLOW_TO_LOOK: dict[str, Any] = {**QUICK, "poll_interval": timedelta(minutes=5)}
KEYS = pytest.mark.parametrize("key", ["k", None], ids=["keyed", "plain"])


@message("address.note")
class Note(msgspec.Struct):
    number: int


def rows(database_url: str, query: str) -> list[tuple[Any, ...]]:
    with psycopg.connect(database_url) as conn:
        return conn.execute(query.encode()).fetchall()


class Customers:
    """A node that sends to many addresses, and listens at all of them."""

    def __init__(self, database_url: str, count: int, **settings: Any) -> None:
        self.addresses = [f"memory://customer{number}" for number in range(count)]
        self.handled: list[int] = []
        transports = [MemoryTransport(load_settings())]
        self.bus = Bus("workshop", database_url, transports=transports, **{**SLOW_TO_LOOK, **settings})
        for address in self.addresses:
            self.bus.listen(address, name=address)
        self.bus.handles(Note)(self._handle)

    async def _handle(self, note: Note) -> None:
        self.handled.append(note.number)

    async def send(self, key: str | None) -> None:
        async with self.bus.unit_of_work():
            for number, address in enumerate(self.addresses):
                self.bus.send(Note(number), to=address, key=key and f"{key}{number}")

    async def all_handled(self) -> bool:
        return bool(await eventually(lambda: sorted(self.handled) == list(range(len(self.addresses))), within=30))

    @property
    def agents(self) -> int:
        node = self.bus.runtime.node
        return 0 if node is None else len(node.agents.senders)


def counted(monkeypatch: pytest.MonkeyPatch, module: Any, *names: str) -> Counter[str]:
    """Count the calls of functions of storage."""
    calls = Counter[str]()

    def watch(name: str) -> Callable[..., Any]:
        work: Callable[..., Any] = getattr(module, name)

        def watched(*args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            return work(*args, **kwargs)

        return watched

    for name in names:
        monkeypatch.setattr(module, name, watch(name))
    return calls


async def test_keyed_messages_at_many_addresses_are_looked_for_and_claimed_together(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    customers = Customers(database_url, 200)
    await customers.send("k")
    calls = counted(monkeypatch, ordering, "scan", "claim")
    hint = ordered_claims.OrderedClaims.hint

    def of_inbox(self: ordered_claims.OrderedClaims, destination: str | None, key: str) -> None:
        if destination is None:
            hint(self, destination, key)

    monkeypatch.setattr(ordered_claims.OrderedClaims, "hint", of_inbox)
    async with customers.bus:
        assert await customers.all_handled()
    assert calls["scan"] <= 20
    assert calls["claim"] <= 20


async def test_messages_without_keys_at_many_addresses_are_claimed_together(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    customers = Customers(database_url, 200)
    await customers.send(None)
    calls = counted(monkeypatch, outbox, "claim")
    async with customers.bus:
        assert await customers.all_handled()
    assert calls["claim"] <= 20


@KEYS
async def test_addresses_beyond_those_of_a_look_have_their_turn_at_once(
    database_url: str, monkeypatch: pytest.MonkeyPatch, key: str | None
) -> None:
    """Nothing but the first look is due for minutes."""
    for module in (ordered_claims, outgoing_claims, agent):
        monkeypatch.setattr(module, "DESTINATIONS", 8)
    customers = Customers(database_url, 50)
    await customers.send(key)
    async with customers.bus:
        assert await customers.all_handled()


async def test_paused_addresses_keep_no_others_waiting_however_short_a_look_is(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A look that sees only the first of its addresses goes on behind them, though they wait for ever."""
    monkeypatch.setattr(ordered_claims, "LONGEST_STEP", 0.0)
    monkeypatch.setattr(ordered_claims, "DESTINATIONS", 8)
    customers = Customers(database_url, 20, batch_size=3)
    for address in sorted(customers.addresses)[:3]:
        await customers.bus.pause(destination=address)
    await customers.send("k")
    async with customers.bus:
        await eventually(lambda: len(customers.handled) == 17, within=20)


async def test_keys_hinted_at_many_addresses_are_all_claimed_however_short_a_step_is(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ordered_claims, "LONGEST_STEP", 0.0)
    steps: list[int] = []
    claim = ordered_claims.OrderedClaims._claim_hinted

    async def claimed(self: ordered_claims.OrderedClaims, *args: Any) -> Any:
        steps[-1] += 1
        return await claim(self, *args)

    claim_hinted = ordered_claims.OrderedClaims.claim_hinted

    async def stepped(self: ordered_claims.OrderedClaims) -> float:
        steps.append(0)
        return await claim_hinted(self)

    monkeypatch.setattr(ordered_claims.OrderedClaims, "_claim_hinted", claimed)
    monkeypatch.setattr(ordered_claims.OrderedClaims, "claim_hinted", stepped)
    customers = Customers(database_url, 60, batch_size=5)
    async with customers.bus:
        monkeypatch.setattr(ordered_claims.OrderedClaims, "poll", _nothing)
        await customers.send("k")
        assert await customers.all_handled()
    assert max(steps) == 1
    assert len(steps) >= 12


async def _nothing(self: ordered_claims.OrderedClaims) -> float:
    self.asked.clear()
    return 0.0


@KEYS
async def test_agent_ended_during_a_claim_is_replaced(
    database_url: str, monkeypatch: pytest.MonkeyPatch, key: str | None
) -> None:
    """Nobody would look for the rows of an agent that has ended before minutes have passed."""
    customers = Customers(database_url, 20, forgotten_after=timedelta(minutes=5))
    await customers.send(key)
    module, name = (ordering, "claim") if key else (outbox, "claim_alone")
    claim: Callable[..., Any] = getattr(module, name)
    ended = Counter[str]()

    def claimed(*args: Any, **kwargs: Any) -> Any:
        found = claim(*args, **kwargs)
        node = customers.bus.runtime.node
        assert node is not None
        for address in customers.addresses:
            if not ended[address] and address in node.agents.senders:
                ended[address] += node.agents.retire(address)
        return found

    monkeypatch.setattr(module, name, claimed)
    async with customers.bus:
        assert await customers.all_handled()
    assert ended.total() == 20


async def test_destinations_failing_together_take_one_connection(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each needs some transactions until it is latched: the others would wait behind all of them."""
    at_once, most = Counter[str](), Counter[str]()
    transaction = Database.transaction

    async def watched(self: Database, work: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        name = "failures" if work in (outbox.count_failed_attempt, circuits.open_circuit, leases.release) else "other"
        at_once[name] += 1
        most[name] = max(most[name], at_once[name])
        try:
            return await transaction(self, work, *args, **kwargs)
        finally:
            at_once[name] -= 1

    monkeypatch.setattr(Database, "transaction", watched)
    unhurried = {**QUICK, "forgotten_after": timedelta(minutes=5)}  # the release of forgotten rows is no failure
    bus = Bus("workshop", database_url, transports=[MemoryTransport(load_settings())], **unhurried)
    latched = "SELECT count(*) FROM durable.circuits WHERE kind = 'destination'"
    async with bus:
        async with bus.unit_of_work():
            for number in range(60):
                bus.send(Note(number), to=f"memory://nobody{number}")
        await eventually(lambda: rows(database_url, latched) == [(60,)], within=30)
    assert most["failures"] == 1


async def test_agents_of_addresses_used_once_are_few_however_many_addresses_there_are(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of them would be kept for ten minutes."""
    monkeypatch.setattr(idle_addresses, "_MOST_IDLE", 5)
    monkeypatch.setattr(agent, "_BETWEEN_ADDRESSES", timedelta(milliseconds=100))
    customers = Customers(database_url, 50)
    async with customers.bus:
        await customers.send(None)
        assert await customers.all_handled()
        assert await eventually(lambda: 0 < customers.agents <= 5, within=20)
        customers.handled.clear()
        await customers.send(None)
        assert await customers.all_handled(), "a forgotten address can be used again"
