"""The messages of a run, how they are sent, and what their handlers do.

Service a sends to b in several lanes; b answers, and sends to itself. Each unit of work writes a row of `sent` for a
message that it sends, and each handler a row of `effects`: what was committed is in the tables, whatever anybody was
told. A message of a key, or of an ordered lane, has a position; the next one is sent after the fate of its transaction
is known.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING, Any, Final
from uuid import UUID

from sqlalchemy.ext.asyncio import AsyncSession

from durable import Bus, CircuitBreaker, Retry, message
from durable.outbox.outbox import Outbox
from tests.simulation.driver import EFFECT, SENT
from tests.simulation.loop import State
from tests.simulation.network import SimulatedTransport
from tests.simulation.process import Process, bounded

if TYPE_CHECKING:
    from tests.simulation.world import World

A, B = "a", "b"
KEYED, WHOLE = "keyed", "whole"
_KEYS: Final = 3
_TENANTS: Final = 3
_LANES: Final = ("plain", "plain", KEYED, KEYED, KEYED, "grouped", "fair", WHOLE, "guarded")
_MISHAPS: Final = ("raise", "raise", "slow", "hang", "rollback", "pause")
_WAIT: Final = 40.0  # seconds until the fate of every transaction is known


@message("sim.plain")
@dataclass
class Plain:
    number: int


@message("sim.keyed")
@dataclass
class Keyed:
    number: int


@message("sim.grouped")
@dataclass
class Grouped:
    number: int


@message("sim.fair")
@dataclass
class Fair:
    number: int


@message("sim.whole")
@dataclass
class Whole:
    number: int


@message("sim.guarded")
@dataclass
class Guarded:
    number: int


@message("sim.local")
@dataclass
class Local:
    number: int


@message("sim.answer")
@dataclass
class Answer:
    number: int


CLASSES: Final = {
    "plain": Plain, KEYED: Keyed, "grouped": Grouped, "fair": Fair, WHOLE: Whole, "guarded": Guarded, "local": Local,
    "answer": Answer,
}  # fmt: skip


TICK: Final = "tick"


@message("sim.tick")
@dataclass
class Tick:
    """An occurrence of a schedule; its number is the time."""

    number: int


class Mishap(Exception):
    """What a handler or a unit of work raises."""


@dataclass
class Item:
    """A message of the run."""

    number: int
    lane: str
    at: float = 0.0
    key: str | None = None
    position: int = 0
    delay: float | None = None
    deliver_by: float | None = None
    mishaps: list[str] = field(default_factory=list)
    """What its first attempts come to; the later ones succeed, unless it is poisoned."""
    is_poisoned: bool = False
    follow_ups: list[Item] = field(default_factory=list)
    is_rolled_back: bool = False
    """True if its unit of work rolls back, or the savepoint that it is sent in."""

    @property
    def order(self) -> tuple[str, str | None] | None:
        """What it is ordered by."""
        if self.lane == KEYED:
            return KEYED, self.key
        return (WHOLE, None) if self.lane == WHOLE else None


class Workload:
    """The items of one run, by number."""

    def __init__(self, world: World, rng: Random, count: int, seconds: float) -> None:
        self._world = world
        self.items: dict[int, Item] = {}
        self.ids: dict[int, UUID] = {}
        self.attempts: Counter[int] = Counter()
        self.units: list[list[Item]] = []
        while len(self.items) < count:
            unit = [self._item(rng) for _ in range(rng.choice((1, 1, 1, 2, 3)))]
            self.units.append(unit)
            at = rng.uniform(0, seconds)
            for item in unit:
                item.at = at
        self.units.sort(key=lambda unit: unit[0].at)
        self._positions()
        self.left = len(self.units)

    def _item(self, rng: Random) -> Item:
        item = Item(len(self.items) + 1, rng.choice(_LANES))
        self.items[item.number] = item
        if item.lane == KEYED:
            item.key = f"k{rng.randrange(_KEYS)}"
        elif item.lane == "fair":
            item.key = f"t{rng.randrange(_TENANTS)}"
        elif item.lane in ("plain", "grouped"):
            item.delay = rng.uniform(0.5, 10) if rng.random() < 0.15 else None
            item.deliver_by = rng.uniform(0.5, 20) if rng.random() < 0.15 else None
        if rng.random() < 0.3:
            item.mishaps = [rng.choice(_MISHAPS) for _ in range(rng.choice((1, 1, 2, 3)))]
        item.is_poisoned = rng.random() < 0.03
        item.is_rolled_back = rng.random() < 0.05
        for lane in ("local", "answer"):
            if rng.random() < 0.2:
                follow_up = Item(1_000 + 10 * item.number + len(item.follow_ups), lane)
                item.follow_ups.append(follow_up)
        return item

    def _positions(self) -> None:
        positions: Counter[Any] = Counter()
        for unit in self.units:
            for item in unit:
                if item.order is not None:
                    positions[item.order] += 1
                    item.position = positions[item.order]
        for item in list(self.items.values()):
            self.items |= {each.number: each for each in item.follow_ups}

    # ------------------------------------------------------------------ the services

    def make_bus(self, process: Process) -> Bus:
        bus = Bus(
            process.service,
            settings=process.settings,
            transports=[SimulatedTransport(self._world.network, process)],
        )
        bus.listen(f"sim://{process.service}")
        bus.listen(f"sim://{process.service}/{WHOLE}")
        if process.service == A:
            for lane in ("plain", KEYED, "grouped", "fair", "guarded"):
                bus.route(CLASSES[lane], to="sim://b")
            bus.route(Whole, to=f"sim://b/{WHOLE}", ordered=True)
            self._handles(bus, process, "answer", Answer)
            self._handles(bus, process, TICK, Tick)
            bus.every("* * * * *", lambda at: Tick(int(at.timestamp())), name=TICK)
            return bus
        bus.route(Answer, to="sim://a")
        self._handles(bus, process, "plain", Plain)
        self._handles(bus, process, KEYED, Keyed)
        self._handles(bus, process, "grouped", Grouped, max_batch=4)
        self._handles(bus, process, "fair", Fair, fair_by="tenant")
        self._handles(bus, process, WHOLE, Whole, ordered=True)
        breaker = CircuitBreaker(failure_rate=0.5, at_least=3, window=10, open_for=2, longest=5)
        self._handles(bus, process, "guarded", Guarded, circuit_breaker=breaker)
        self._handles(bus, process, "local", Local)
        return bus

    def _handles(self, bus: Bus, process: Process, lane: str, cls: type, **options: Any) -> None:
        async def handle(message: Any, session: AsyncSession) -> None:
            item = self.items.get(message.number) or Item(message.number, TICK)
            await self._handle(bus, process, item, session)

        handle.__annotations__["message"] = cls
        bus.handles(cls, retry=Retry(1, (1, 3)), **options)(handle)

    async def _handle(self, bus: Bus, process: Process, item: Item, session: AsyncSession) -> None:
        self.attempts[item.number] += 1
        number = self.attempts[item.number]
        mishap = item.mishaps[number - 1] if number <= len(item.mishaps) else None
        process.at("handler begins")
        if mishap in ("slow", "hang"):
            await asyncio.sleep(2.0 if mishap == "slow" else 30.0)
        await session.execute(EFFECT, _row(item))
        for each in item.follow_ups:
            await session.execute(SENT, _row(each))
            self.ids[each.number] = bus.send(CLASSES[each.lane](each.number))
        process.at("handler has sent")
        await asyncio.sleep(0.001)
        if mishap == "rollback":
            await session.rollback()
        elif mishap == "pause":
            await bus.pause(type(CLASSES[item.lane](0)), for_=2)
        elif mishap == "raise" or item.is_poisoned:
            raise Mishap
        process.at("handler ends")

    # ------------------------------------------------------------------ the clients

    def start(self) -> None:
        """Send each unit at its time; of an order one after another."""
        chains: dict[Any, asyncio.Task[None]] = {}
        for unit in self.units:
            orders = {item.order for item in unit if item.order is not None}
            before = [chains[order] for order in sorted(orders, key=str) if order in chains]
            task = self._world.loop.start(self._send(unit, before), self._world.outside.copy(), "client")
            chains |= dict.fromkeys(orders, task)

    async def _send(self, unit: list[Item], before: list[asyncio.Task[None]]) -> None:
        for task in before:
            await asyncio.wait({task})
        loop = self._world.loop
        await asyncio.sleep(max(0.0, unit[0].at - loop.time()))
        while (process := self._world.process_of(A)) is None:  # noqa: ASYNC110  the world tells no task of it
            await asyncio.sleep(0.2)
        task = loop.start(self._unit_of_work(process, unit), process.context.copy(), "unit of work")
        await bounded(task, process, _WAIT)
        if not task.done() or task.exception() is not None:
            await asyncio.sleep(_WAIT if process.state is not State.RUNNING else 15.0)
        self.left -= 1

    async def _unit_of_work(self, process: Process, unit: list[Item]) -> None:
        bus = process.bus
        async with bus.unit_of_work() as uow:
            for item in unit:
                if not item.is_rolled_back:
                    await self._send_one(process, item, uow.session, uow.outbox)
                    continue
                try:
                    async with uow.session.begin_nested():
                        await self._send_one(process, item, uow.session, uow.outbox)
                        raise Mishap
                except Mishap:
                    process.at("a savepoint is rolled back")
            process.at("a unit of work ends")
            if all(item.is_rolled_back for item in unit) and len(unit) > 1:
                raise Mishap

    async def _send_one(self, process: Process, item: Item, session: AsyncSession, outbox: Outbox) -> None:
        await session.execute(SENT, _row(item))
        options: dict[str, Any] = {}
        if item.lane == KEYED:
            options["key"] = item.key
        elif item.lane == "fair":
            options["tenant"] = item.key
        if not process.offset:
            options |= {"delay": item.delay} if item.delay is not None else {}
            options |= {"deliver_by": item.deliver_by} if item.deliver_by is not None else {}
        self.ids[item.number] = outbox.send(CLASSES[item.lane](item.number), **options)


def _row(item: Item) -> dict[str, Any]:
    return {"number": item.number, "lane": item.lane, "key": item.key, "position": item.position}
