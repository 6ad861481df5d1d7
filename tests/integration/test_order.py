"""Order per key, over two nodes: through failures, retries, types, parking."""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict

import msgspec

from durable import Bus, Retry, message
from tests.failure.waiting import eventually
from tests.failure.workbench import QUICK


@message("order.step")
class Step(msgspec.Struct):
    key: str
    number: int


class Shop:
    def __init__(self, database: str, nodes: int = 2, **options) -> None:
        self.database = database
        self.done: dict[str, list[int]] = defaultdict(list)
        self.running: set[str] = set()
        self.rng = random.Random(1)
        self.nodes = [self._node(options) for _ in range(nodes)]

    def _node(self, options) -> Bus:
        bus = Bus("shop", self.database, **QUICK)

        @bus.handles(Step, retry=Retry(immediate=0, delays=[0.02] * 20), **options)
        async def handle(step: Step) -> None:
            assert step.key not in self.running
            self.running.add(step.key)
            try:
                await asyncio.sleep(0)
                if self.rng.random() < 0.2:
                    raise RuntimeError("random")
            finally:
                self.running.remove(step.key)
            self.done[step.key].append(step.number)

        return bus


async def test_keyed_messages_are_handled_in_order(database_url: str) -> None:
    shop = Shop(database_url)
    async with shop.nodes[0], shop.nodes[1]:
        for number in range(20):
            for key in "abcde":
                async with shop.nodes[number % 2].unit_of_work() as uow:
                    uow.send(Step(key, number), key=key)
        await eventually(lambda: sum(map(len, shop.done.values())) == 100, within=30)
    assert all(done == list(range(20)) for done in shop.done.values())
