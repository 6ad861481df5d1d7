"""Node of a long run: `python -m tests.soak.node orders 0`, with everything else in the environment.

`orders` sends all the time: each message goes to an address of its own, under a key of its own, or to its own queue.
All addresses of this machine's loopback network lead to `billing`, by a proxy of the run.

SOAK_PORT     port of the proxy    SOAK_PACE   transactions a second of one node of orders
CHAOS_LISTEN  where it receives    CHAOS_CALM  file that ends the senders
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec
from sqlalchemy.ext.asyncio import AsyncSession

from durable import Bus, Context, message
from tests.chaos.child import begin
from tests.chaos.ledger import ADD_EFFECT, ADD_SENT, effect_row

PER_TRANSACTION: Final = 10
"""Messages to each of the two places."""

log = logging.getLogger("soak")


@message("soak.passing")
class Passing(msgspec.Struct):
    number: int


def make_bus(service: str) -> Bus:
    bus = Bus(service)
    bus.listen(os.environ["CHAOS_LISTEN"])

    @bus.handles(Passing)
    async def pass_(passing: Passing, session: AsyncSession, ctx: Context) -> None:
        await session.execute(ADD_EFFECT, effect_row(ctx.id, "passing", "", passing.number))

    return bus


class Sender:
    """Sends numbered messages at a constant pace, whatever becomes of a transaction."""

    def __init__(self, bus: Bus, slot: int) -> None:
        self._bus = bus
        self._rng = random.Random(f"{slot} {os.getpid()}")
        self._pause = 1 / float(os.environ["SOAK_PACE"])
        self._calm = Path(os.environ["CHAOS_CALM"])
        self._number = 0

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        while not self._bus.runtime.is_running:  # noqa: ASYNC110  nobody announces it
            await asyncio.sleep(0.05)
        due = loop.time()
        while not self._calm.exists():
            due = max(due + self._pause, loop.time() - 1)
            try:
                await self._transaction()
            except Exception as error:
                log.info("transaction failed: %s", type(error).__qualname__)
            await asyncio.sleep(due - loop.time())

    async def _transaction(self) -> None:
        async with self._bus.unit_of_work() as uow:
            rows = [self._send(place) for place in self._places()]
            await uow.session.execute(ADD_SENT, rows)

    def _places(self) -> Iterator[str | None]:
        for _ in range(PER_TRANSACTION):
            yield None
            host = ".".join(str(self._rng.randrange(1, 255)) for _ in range(3))
            yield f"tcp://127.{host}:{os.environ['SOAK_PORT']}"

    def _send(self, to: str | None) -> dict[str, object]:
        self._number += 1
        key = f"{os.getpid()}-{self._number}" if to is not None else ""
        sent = self._bus.send(Passing(self._number), to=to, key=key or None)
        row = {"envelope_id": sent, "kind": "passing", "key": key, "number": self._number, "behaviour": ""}
        return {**row, "due_at": None, "deliver_by": None, "process": os.getpid()}


async def serve(service: str, slot: int) -> None:
    bus = make_bus(service)
    async with asyncio.TaskGroup() as group:
        sending = group.create_task(Sender(bus, slot).run()) if service == "orders" else None
        await bus.serve()
        if sending is not None:
            sending.cancel()


if __name__ == "__main__":
    begin()
    asyncio.run(serve(sys.argv[1], int(sys.argv[2])))
