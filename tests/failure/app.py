"""Two small services, each a process: `orders` sends, `billing` handles.

    orders     writes an order and its message in one transaction, some of which it rolls back
    billing    writes an effect in the transaction that handles the message

A process is forked from a server that has imported everything (multiprocessing's forkserver): it starts in a tenth of
the time, and is as separate from the others as any.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import logging
import os
import signal
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import UUID

import msgspec
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession

from durable import Bus, Context, Retry, failpoints, message
from durable.testing import Chaos

RETRY = Retry(immediate=0, delays=(0.1, 0.1))

SETTINGS = {
    "HEARTBEAT_INTERVAL": "0.3",
    "HEARTBEAT_STALE": "1.5",
    "DORMANT_GRACE": "0.1",
    "SWEEP_INTERVAL": "0.1",
    "POLL_INTERVAL": "0.1",
    "FORGOTTEN_AFTER": "1",
    "PING_INTERVAL": "0.1",
    "DELETE_LINGER": "0.01",
    "DRAIN_TIMEOUT": "3",
}

ADD_ORDER = text("INSERT INTO orders (order_id, envelope_id) VALUES (:order_id, :envelope_id)")
ADD_EFFECT = text("INSERT INTO effects (envelope_id, order_id, process) VALUES (:envelope_id, :order_id, :process)")
GATE_IS_OPEN = text("SELECT EXISTS (SELECT FROM gate WHERE opened)")


@message("failure.order-placed")
class OrderPlaced(msgspec.Struct):
    """`behaviour` is what its handler does besides writing the effect."""

    order_id: int
    behaviour: str = ""


@dataclass(frozen=True)
class Work:
    """What `orders` does when it has started: so many transactions with so many orders each.

    The transactions in `rolled_back` (from 0) are rolled back, after their messages were sent.
    """

    transactions: int = 4
    orders_each: int = 5
    first_order: int = 1
    rolled_back: tuple[int, ...] = (2,)
    delay: float | None = None
    behaviours: dict[int, str] = field(default_factory=dict)

    def orders(self, transaction: int) -> range:
        first = self.first_order + transaction * self.orders_each
        return range(first, first + self.orders_each)

    def committed(self) -> set[int]:
        """The orders that are there when all of it was done."""
        kept = set(range(self.transactions)) - set(self.rolled_back)
        return {order for transaction in kept for order in self.orders(transaction)}


@dataclass(frozen=True)
class Service:
    """A process to start. `orders` sends to `uri`, and `billing` listens on it, unless it is empty."""

    name: str
    database: str
    log: Path
    uri: str = ""
    work: Work | None = None
    failpoint: str = ""
    settings: dict[str, str] = field(default_factory=dict)
    chaos: dict[str, Any] = field(default_factory=dict)
    """What Chaos is given; empty: there is none."""

    def run(self) -> None:
        """The whole life of the process."""
        output = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(output, sys.stdout.fileno())
        os.dup2(output, sys.stderr.fileno())
        logging.basicConfig(level=logging.INFO, format=f"%(asctime)s {self.name} {os.getpid()} %(message)s", force=True)
        os.environ.update({f"DURABLE_{name}": value for name, value in {**SETTINGS, **self.settings}.items()})
        os.environ["DURABLE_FAILPOINT"] = self.failpoint
        importlib.reload(failpoints)  # it reads its variable when it is imported; that was in the server
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        bus = Bus(self.name, self.database)
        if self.chaos:
            bus.use(Chaos(**self.chaos))
        if self.name == "orders":
            bus.route(OrderPlaced, to=self.uri)
        else:
            bus.handles(OrderPlaced, retry=RETRY)(bill)
            if self.uri:
                bus.listen(self.uri)
        stopped = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
        async with bus:
            if self.work is not None:
                await place_orders(bus, self.work)
            await stopped.wait()


async def place_orders(bus: Bus, work: Work) -> None:
    for transaction in range(work.transactions):
        with contextlib.suppress(OutOfStock):
            await _place(bus, work, transaction)


async def _place(bus: Bus, work: Work, transaction: int) -> None:
    async with bus.unit_of_work() as uow:
        for order_id in work.orders(transaction):
            placed = OrderPlaced(order_id, work.behaviours.get(order_id, ""))
            envelope_id = bus.send(placed, delay=work.delay) if work.delay else bus.send(placed)
            await uow.session.execute(ADD_ORDER, {"order_id": order_id, "envelope_id": envelope_id})
        if transaction in work.rolled_back:
            raise OutOfStock


class OutOfStock(Exception):
    """Why an order is rolled back."""


async def bill(order: OrderPlaced, session: AsyncSession, ctx: Context) -> None:
    await add_effect(session, ctx.id, order.order_id)
    match order.behaviour:
        case "fails once" if ctx.attempt == 1:
            raise RuntimeError("the first attempt fails")
        case "fails":
            raise RuntimeError("every attempt fails")
        case "kills":
            os.kill(os.getpid(), signal.SIGKILL)
        case "waits":
            await until_the_gate_is_open(session)
        case _:
            pass


async def until_the_gate_is_open(session: AsyncSession) -> None:
    while not (await session.execute(GATE_IS_OPEN)).scalar_one():  # noqa: ASYNC110  a row, which nobody announces
        await asyncio.sleep(0.02)


async def add_effect(session: AsyncSession, envelope_id: UUID, order_id: int) -> None:
    await session.execute(ADD_EFFECT, {"envelope_id": envelope_id, "order_id": order_id, "process": os.getpid()})
