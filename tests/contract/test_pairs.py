"""Features in pairs: each pair comes to the same on Postgres and in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import combinations
from typing import Any, NamedTuple

import pytest

from durable import Bus, CircuitBreaker, Context, Keys, Outgoing, Retry, RetryLater, SendNext
from durable.embedded import Embedded
from durable.recovery import membership
from tests.contract.bus.orders import OrderPlaced, OrderShipped, Sending
from tests.contract.bus.worlds import InMemory, OnPostgres, World
from tests.support.tables import Tables, shared_tables

COUNT = 3


@dataclass
class Plan:
    """How messages are sent, and what their handler does."""

    sends: dict[str, Any] = field(default_factory=dict)
    handles: dict[str, Any] = field(default_factory=lambda: {"retry": Retry(immediate=0, delays=[])})
    fails: dict[int, Exception] = field(default_factory=dict)
    """By number, at the first attempt."""
    cascades: bool = False
    drops: bool = False
    pauses: bool = False
    doubles: bool = False
    encrypts: bool = False


def _retries(plan: Plan) -> None:
    plan.handles["retry"] = Retry(immediate=0, delays=[5], jitter=0)
    plan.fails[0] = ZeroDivisionError("once")


FEATURES: dict[str, Callable[[Plan], None]] = {
    "key": lambda plan: plan.sends.update(key="order-1"),
    "delay": lambda plan: plan.sends.update(delay=20),
    "deadline": lambda plan: plan.sends.update(deliver_by=timedelta(seconds=30)),
    "business key": lambda plan: setattr(plan, "doubles", True),
    "group": lambda plan: plan.handles.update(max_batch=10),
    "retry": _retries,
    "retry later": lambda plan: plan.fails.update({1: RetryLater(50)}),
    "dead letter": lambda plan: plan.fails.update({2: ZeroDivisionError("always")}),
    "park": lambda plan: plan.handles.update(on_dead_letter="park"),
    "breaker": lambda plan: plan.handles.update(circuit_breaker=CircuitBreaker(1, 3, open_for=1_000)),
    "pause": lambda plan: setattr(plan, "pauses", True),
    "cascade": lambda plan: setattr(plan, "cascades", True),
    "drop": lambda plan: setattr(plan, "drops", True),
    "expiry": lambda plan: plan.handles.update(on_expiry="dead-letter"),
    "encryption": lambda plan: setattr(plan, "encrypts", True),
}


class End(NamedTuple):
    """What became of the messages."""

    handled: list[int]
    shipped: list[int]
    dead: list[tuple[str | None, str]]
    expired: list[str]
    scheduled: int


class Shop:
    """A bus with the handlers of a plan."""

    def __init__(self, bus: Bus, plan: Plan) -> None:
        self.handled: list[int] = []
        self.shipped: list[int] = []
        if plan.encrypts:
            bus.keys_from(lambda: Keys({"a": bytes(32)}))
            bus.application.ring.everything = True
        if plan.drops:
            bus.use(Sending(drop_the_second))

        @bus.handles(OrderPlaced, concurrency=1, **plan.handles)
        async def place(order: OrderPlaced, ctx: Context) -> OrderShipped | None:
            error = plan.fails.get(order.number)
            if error is not None and (ctx.attempt == 1 or str(error) == "always"):
                raise error
            self.handled.append(order.number)
            return OrderShipped(order.number) if plan.cascades else None

        @bus.handles(OrderShipped, concurrency=1)
        async def ship(shipped: OrderShipped) -> None:
            self.shipped.append(shipped.number)


def drop_the_second(outgoing: Outgoing, call_next: SendNext) -> Any:
    dropped = isinstance(outgoing.message, OrderPlaced) and outgoing.message.number == 1
    return None if dropped else call_next(outgoing)


async def play(world: World, plan: Plan) -> End:
    shop = Shop(world.bus, plan)
    async with world:
        if plan.pauses:
            await world.pause(OrderPlaced)
        for _ in range(2 if plan.doubles else 1):
            for number in range(COUNT):
                options: dict[str, Any] = plan.sends | ({"id_from": f"order-{number}"} if plan.doubles else {})
                async with world.bus.unit_of_work():
                    world.bus.send(OrderPlaced(number), **options)
                await world.settle()
        for _ in range(2):
            await world.advance(timedelta(seconds=21))
        if plan.pauses:
            await world.bus.resume(OrderPlaced)
            await world.settle()
        await world.advance(timedelta(seconds=60))
        dead = sorted((letter.message_type, letter.exception_type) for letter in world.dead_letters())
        return End(sorted(shop.handled), sorted(shop.shipped), dead, sorted(world.expired()), world.scheduled())


@pytest.fixture(scope="module")
def database(servers: Callable[[int], Embedded]) -> Iterator[Tables]:
    with shared_tables(servers(18)) as tables:
        yield tables


@pytest.fixture(autouse=True)
def leaving_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership, "_LISTEN_SECONDS", 0.02)


@pytest.mark.parametrize(("first", "second"), list(combinations(FEATURES, 2)))
async def test_pair_of_features_behaves_the_same_on_postgres_and_in_memory(
    database: Tables, first: str, second: str
) -> None:
    ends: list[End] = []
    database.clear()
    for world in (InMemory(), OnPostgres(database)):
        plan = Plan()
        FEATURES[first](plan)
        FEATURES[second](plan)
        ends.append(await play(world, plan))
    assert ends[0] == ends[1]
