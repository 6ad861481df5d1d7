"""Circuits that failures, handlers and errors open: one row, obeyed by every node, closed by a single message."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

import msgspec
import psycopg
import pytest
from sqlalchemy.orm import Session

from durable import Bus, CircuitBreaker, Context, InvalidSetting, Reject, Retry, RetryAfter, RetryLater, message
from durable.settings import load_settings
from durable.telemetry import Event
from durable.transports.memory import MemoryTransport
from tests.failure.waiting import eventually
from tests.failure.workbench import QUICK
from tests.support.tables import change

PEER = "memory://billing"
BREAKER = CircuitBreaker(failure_rate=0.5, at_least=4, window=60, open_for=0.2, longest=0.4)
ONCE_MORE = Retry(immediate=0, delays=[0] * 50)


@message("circuits.placed")
class Placed(msgspec.Struct):
    number: int


@message("circuits.charged")
class Charged(msgspec.Struct):
    number: int


class RateLimited(Exception):
    retry_after = 3600


class Warehouse:
    """What the handlers of two nodes call, and what they see of it."""

    def __init__(self) -> None:
        self.is_down = False
        self.calls: list[int] = []
        self.inside = self.most_inside = 0

    async def reserve(self, number: int) -> None:
        self.inside += 1
        self.most_inside = max(self.most_inside, self.inside)
        try:
            await asyncio.sleep(0.01)
            self.calls.append(number)
            if self.is_down:
                raise ConnectionError("the warehouse is down")
        finally:
            self.inside -= 1


class Shop:
    def __init__(self, database: str) -> None:
        self.database = database
        self.warehouse = Warehouse()
        self.handled: list[int] = []
        self.nodes = [self._node(), self._node()]

    def _node(self) -> Bus:
        bus = Bus("shop", self.database, **QUICK)

        @bus.handles(Placed, retry=ONCE_MORE, circuit_breaker=BREAKER)
        async def handle(placed: Placed) -> None:
            await self.warehouse.reserve(placed.number)
            self.handled.append(placed.number)

        return bus

    def count(self, event: Event) -> int:
        return sum(node.runtime.counters[event] for node in self.nodes)

    def circuits(self) -> list[tuple[object, ...]]:
        return rows(self.database, "SELECT kind, key, reason, actor, probing FROM durable.circuits")

    def all_open(self) -> bool:
        running = [node.runtime.node for node in self.nodes]
        agents = [None if node is None else node.agents.handlers.get("circuits.placed") for node in running]
        return all(agent is not None and agent.circuit.is_open for agent in agents)


def rows(database: str, sql: str) -> list[tuple[object, ...]]:
    with psycopg.connect(database) as conn:
        return conn.execute(sql.encode()).fetchall()


async def place(bus: Bus, *numbers: int) -> None:
    async with bus.unit_of_work() as uow:
        for number in numbers:
            uow.send(Placed(number))


@pytest.fixture
def shop(database_url: str) -> Shop:
    return Shop(database_url)


async def test_failures_of_all_nodes_open_a_circuit_together(database_url: str) -> None:
    """Each of four nodes sees too few failures to stop the handler by itself."""
    breaker = CircuitBreaker(failure_rate=0.5, at_least=8, window=60, open_for=3600)
    nodes = []
    for _ in range(4):
        bus = Bus("shop", database_url, **QUICK)

        @bus.handles(Placed, retry=Retry.never(), circuit_breaker=breaker)
        async def handle(placed: Placed) -> None:
            raise ConnectionError("the warehouse is down")

        nodes.append(bus)
    async with nodes[0], nodes[1], nodes[2], nodes[3]:
        for node in nodes:
            await place(node, 1, 2)  # a node handles what it has stored, where it has room
        await eventually(lambda: rows(database_url, "SELECT key, probing FROM durable.circuits") != [])
        assert rows(database_url, "SELECT count(*) FROM durable.dead_letters") == [(8,)]
        [(key, reason)] = rows(database_url, "SELECT key, reason FROM durable.circuits")
        assert (key, str(reason).partition(",")[0]) == ("circuits.placed", "8 of 8 messages failed within 60 s")
        most = max(node.runtime.counters[Event.DEAD_LETTERED] for node in nodes)
        assert most < 8
    assert rows(database_url, "SELECT * FROM durable.handler_counts") == []


async def test_failures_stop_the_handler_on_every_node_until_one_trial_succeeds(shop: Shop) -> None:
    first, second = shop.nodes
    shop.warehouse.is_down = True
    async with first, second:
        await place(first, *range(40))
        await eventually(lambda: shop.count(Event.CIRCUIT_OPENED) >= 1)
        [(kind, key, reason, actor, probing)] = shop.circuits()
        assert (kind, key, probing) == ("handler", "circuits.placed", True)
        assert "messages failed within 60 s" in str(reason) or "still failing: ConnectionError" in str(reason)
        assert str(actor).startswith("node ")
        await eventually(shop.all_open)
        shop.warehouse.is_down = False
        await eventually(lambda: sorted(shop.handled) == list(range(40)))
        await eventually(lambda: shop.circuits() == [])
        assert shop.count(Event.CIRCUIT_CLOSED) >= 1
        assert shop.count(Event.DEAD_LETTERED) == 0


async def test_open_handler_circuit_is_tried_with_one_message_over_all_nodes_at_growing_intervals(shop: Shop) -> None:
    shop.warehouse.is_down = True
    async with shop.nodes[0], shop.nodes[1]:
        await place(shop.nodes[0], *range(40))
        await eventually(shop.all_open)
        await eventually(lambda: shop.warehouse.inside == 0)
        shop.warehouse.calls.clear()
        shop.warehouse.most_inside = 0
        await eventually(lambda: len(shop.warehouse.calls) >= 3)
        assert shop.warehouse.most_inside == 1
        [(waits,)] = rows(shop.database, "SELECT until - now() > interval '0.05 s' FROM durable.circuits")
        assert waits or len(shop.warehouse.calls) > 3
        assert len(rows(shop.database, "SELECT 1 FROM durable.incoming_envelopes")) == 40


async def test_success_of_an_attempt_begun_before_the_outage_does_not_close_the_circuit(database_url: str) -> None:
    bus = Bus("shop", database_url, **QUICK)
    slow = asyncio.Event()

    @bus.handles(Placed, retry=Retry(immediate=0, delays=[3600]), circuit_breaker=CircuitBreaker(0.5, 4, open_for=3600))
    async def handle(placed: Placed) -> None:
        if placed.number:
            raise ConnectionError
        await slow.wait()

    async with bus:
        await place(bus, *range(5))
        await eventually(lambda: bus.runtime.counters[Event.CIRCUIT_OPENED] == 1)
        slow.set()
        await eventually(lambda: bus.runtime.counters[Event.HANDLED] == 1)
        assert rows(database_url, "SELECT probing FROM durable.circuits") == [(True,)]
        assert bus.runtime.counters[Event.CIRCUIT_CLOSED] == 0


async def test_reading_from_before_a_local_opening_does_not_close_the_circuit(database_url: str) -> None:
    bus = Bus("shop", database_url, **dict[str, Any](QUICK, poll_interval=timedelta(minutes=5)))

    @bus.handles(Placed, concurrency=1)
    async def handle(placed: Placed, ctx: Context) -> None:
        ctx.circuit.open(3600)

    async with bus:
        node = bus.runtime.node
        assert node is not None
        agent = node.agents.handlers["circuits.placed"]
        generation = agent.circuit.generation.number
        await place(bus, 1)
        await eventually(lambda: agent.circuit.is_open)
        agent.observe_circuits({}, generation)
        assert agent.circuit.is_open
        agent.observe_circuits({}, agent.circuit.generation.number)
        assert not agent.circuit.is_open


async def test_verdict_of_a_handler_on_a_message_is_no_failure_for_the_breaker(database_url: str) -> None:
    bus = Bus("shop", database_url, **QUICK)

    @bus.handles(Placed, circuit_breaker=CircuitBreaker(failure_rate=0.1, at_least=1))
    async def handle(placed: Placed) -> None:
        raise Reject("sold out") if placed.number % 2 else RetryLater(3600)

    async with bus:
        await place(bus, *range(20))
        await eventually(lambda: bus.runtime.counters[Event.DEAD_LETTERED] == 10)
        await eventually(lambda: bus.runtime.counters[Event.RETRIED] == 10)
        assert rows(database_url, "SELECT 1 FROM durable.circuits") == []


async def test_pause_by_an_operator_replaces_an_open_circuit(shop: Shop) -> None:
    shop.warehouse.is_down = True
    async with shop.nodes[0]:
        await place(shop.nodes[0], *range(10))
        await eventually(lambda: shop.count(Event.CIRCUIT_OPENED) >= 1)
        await shop.nodes[0].pause(Placed, reason="stocktaking")
        await eventually(lambda: shop.warehouse.inside == 0)
        shop.warehouse.is_down = False
        calls = len(shop.warehouse.calls)
        await asyncio.sleep(1)  # several times what it would take to be tried
        assert len(shop.warehouse.calls) <= calls + 1  # a trial that was claimed before the pause
        assert [row[2] for row in shop.circuits()] == ["stocktaking"]
        assert await shop.nodes[0].resume(Placed)
        await eventually(lambda: sorted(shop.handled) == list(range(10)))


@pytest.mark.parametrize("asks_by", ["an error", "its circuit"])
async def test_pause_by_an_operator_outlasts_the_attempt_under_way(database_url: str, asks_by: str) -> None:
    bus = Bus("shop", database_url, **QUICK)
    bus.on_error(RateLimited, retry=RetryAfter(longest=0.1, shortest=0.1))
    begun, paused = asyncio.Event(), asyncio.Event()

    @bus.handles(Placed)
    async def handle(placed: Placed, ctx: Context) -> None:
        begun.set()
        await paused.wait()
        if asks_by == "an error":
            raise RateLimited
        ctx.circuit.open(0.1)

    async with bus:
        await place(bus, 1)
        await begun.wait()
        await bus.pause(Placed, reason="stocktaking")
        paused.set()
        await eventually(
            lambda: rows(database_url, "SELECT 1 FROM durable.incoming_envelopes WHERE owner_id <> 0") == []
        )
        assert rows(database_url, "SELECT reason, until FROM durable.circuits") == [("stocktaking", None)]


async def test_trial_of_a_dead_node_is_followed_by_another(shop: Shop) -> None:
    async with shop.nodes[0]:
        with psycopg.connect(shop.database) as conn:  # as a node leaves it that was killed in the middle of a trial
            conn.execute(
                "INSERT INTO durable.circuits (kind, key, reason, until, actor, probing)"
                " VALUES ('handler', 'circuits.placed', 'down', now() + interval '1 s', 'node 99', true)"
            )
        await place(shop.nodes[0], 1, 2, 3)
        await eventually(lambda: sorted(shop.handled) == [1, 2, 3])
        assert shop.circuits() == []


async def test_undecodable_trial_leaves_the_circuit_open_until_the_next_trial(shop: Shop) -> None:
    with psycopg.connect(shop.database) as conn:
        conn.execute(
            "INSERT INTO durable.circuits (kind, key, reason, until, actor, probing)"
            " VALUES ('handler', 'circuits.placed', 'down', now() + interval '1 s', 'node 99', true)"
        )
    async with shop.nodes[0]:
        await place(shop.nodes[0], 1)
        await change(shop.database, "UPDATE durable.incoming_envelopes SET body = 'null'")
        await place(shop.nodes[0], 2)
        await eventually(lambda: shop.handled == [2])
        await eventually(lambda: shop.circuits() == [])


async def test_error_with_a_retry_time_stops_the_handler_until_then(database_url: str) -> None:
    bus = Bus("shop", database_url, **QUICK)
    bus.on_error(RateLimited, retry=RetryAfter())
    calls: list[int] = []

    @bus.handles(Placed, concurrency=1)
    async def handle(placed: Placed) -> None:
        calls.append(placed.number)
        raise RateLimited("quota used up")

    async with bus:
        await place(bus, *range(5))
        await eventually(lambda: rows(database_url, "SELECT 1 FROM durable.circuits") != [])
        [row] = rows(
            database_url,
            "SELECT kind, reason, until - since BETWEEN interval '59 min' AND interval '61 min' FROM durable.circuits",
        )
        assert row == ("handler", "RateLimited: quota used up", True)
        await eventually(lambda: rows(database_url, OWNERS) == [(0, 0)] * 5)
        assert len(calls) == 1


OWNERS = "SELECT owner_id, attempts FROM durable.incoming_envelopes"


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("is_async", [True, False])
async def test_a_handler_opens_its_own_circuit_whether_its_attempt_commits_or_fails(
    database_url: str, fails: bool, is_async: bool
) -> None:
    bus = Bus("shop", database_url, **QUICK)

    def decide(ctx: Context) -> None:
        ctx.circuit.open(3600, reason="quota used up")
        if fails:
            raise RetryLater(0)

    if is_async:

        @bus.handles(Placed, concurrency=1)
        async def handle(placed: Placed, ctx: Context) -> None:
            decide(ctx)
    else:

        @bus.handles(Placed, concurrency=1)
        def handle_in_thread(placed: Placed, session: Session, ctx: Context) -> None:
            decide(ctx)

    async with bus:
        await place(bus, *range(3))
        waiting = 3 if fails else 2
        await eventually(lambda: rows(database_url, "SELECT reason FROM durable.circuits") == [("quota used up",)])
        await eventually(lambda: len(rows(database_url, "SELECT 1 FROM durable.incoming_envelopes")) == waiting)
        await eventually(lambda: {owner for owner, _ in rows(database_url, OWNERS)} == {0})
        assert bus.runtime.counters[Event.HANDLED] == (0 if fails else 1)


async def test_destination_closed_by_a_handler_is_sent_nothing_by_any_node(database_url: str) -> None:
    transport = MemoryTransport(load_settings())
    first, second = (Bus("shop", database_url, transports=[transport], **QUICK) for _ in range(2))
    for bus in (first, second):
        bus.route(Charged, to=PEER)

        @bus.handles(Placed)
        async def handle(placed: Placed, ctx: Context) -> None:
            ctx.circuit.open(destination=PEER, reason="their maintenance")

    async with first, second:
        await place(first, 1)
        await eventually(lambda: paused(first) and paused(second))
        async with second.unit_of_work() as uow:
            uow.send(Charged(1))
        owners = "SELECT owner_id, attempts FROM durable.outgoing_envelopes"
        await eventually(lambda: rows(database_url, owners) == [(0, 0)])
        assert rows(database_url, "SELECT kind, key, probing FROM durable.circuits") == [("destination", PEER, False)]
        await asyncio.sleep(0.3)  # several pings of a destination that were latched instead
        assert rows(database_url, "SELECT reason FROM durable.circuits") == [("their maintenance",)]
        assert await first.resume(destination=PEER)
        await eventually(lambda: not paused(first) and not paused(second))


def paused(bus: Bus) -> bool:
    node = bus.runtime.node
    return node is not None and PEER in node.agents.senders and node.agents.senders[PEER].paused


async def test_opened_circuit_is_obeyed_by_the_other_node_before_its_next_poll(database_url: str) -> None:
    slow = {**QUICK, "poll_interval": timedelta(minutes=5)}
    first, second = (Bus("shop", database_url, **slow) for _ in range(2))
    for bus in (first, second):

        @bus.handles(Placed, retry=Retry.never(), circuit_breaker=CircuitBreaker(0.5, 4))
        async def handle(placed: Placed) -> None:
            raise ConnectionError

    def is_open(bus: Bus) -> bool:
        node = bus.runtime.node
        agent = None if node is None else node.agents.handlers.get("circuits.placed")
        return agent is not None and agent.circuit.is_open

    async with first, second:
        await place(first, *range(20))
        await eventually(lambda: is_open(first) or is_open(second))
        await eventually(lambda: is_open(first) and is_open(second))


@pytest.mark.parametrize("seconds", [0, -1])
async def test_circuit_open_refuses_a_span_not_above_zero(database_url: str, seconds: float) -> None:
    bus = Bus("shop", database_url, **QUICK)
    refused: list[str] = []

    @bus.handles(Placed)
    async def handle(placed: Placed, ctx: Context) -> None:
        try:
            ctx.circuit.open(seconds)
        except InvalidSetting as error:
            refused.append(str(error))

    async with bus:
        await place(bus, 1)
        await eventually(lambda: bool(refused))
    assert "over before it begins" in refused[0]
