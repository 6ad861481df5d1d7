"""Node of a service as a process: `python -m tests.chaos.node orders 0`, with everything else in the environment.

CHAOS_LISTEN   where it receives              CHAOS_PAUSE   mean pause between transactions of a producer, seconds
CHAOS_SEND_TO  where the other service does   CHAOS_CALM    file whose existence ends the producers
CHAOS_DELAYS   pauses between attempts, seconds
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from datetime import datetime
from pathlib import Path

from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from durable import Bus, CircuitBreaker, Context, Retry
from tests.chaos.child import begin
from tests.chaos.ledger import ADD_EFFECT, ADD_SENT, IS_STORMY, effect_row, sent_row
from tests.chaos.messages import (
    ANSWERS,
    FAILS,
    FAILS_AT_FIRST,
    SLOW,
    TICK_SECONDS,
    Charge,
    Kind,
    Note,
    Offer,
    Order,
    Receipt,
    Reminder,
    Tick,
    kind_of,
)
from tests.chaos.producer import TASKS, Producer

DELAYS = tuple(map(float, os.environ["CHAOS_DELAYS"].split()))
RETRY = Retry(immediate=1, delays=DELAYS)
PATIENT = Retry(immediate=0, delays=(*DELAYS, *DELAYS[-1:] * 2))
BREAKER = CircuitBreaker(failure_rate=0.6, at_least=10, window=5, open_for=1, longest=4)


class Failure(Exception):
    """Raised by a handler whose message is to fail."""


async def take(message: Kind, session: AsyncSession, ctx: Context) -> None:
    """Write the effect first, so that a failed attempt that is not rolled back would be seen."""
    await session.execute(ADD_EFFECT, effect_row(ctx.id, kind_of(message), message.key, message.number))
    if message.behaviour == SLOW:
        await asyncio.sleep(0.5)
    if message.behaviour == FAILS or (message.behaviour == FAILS_AT_FIRST and ctx.attempt <= 2):
        raise Failure(message.behaviour)


def orders() -> Bus:
    bus = Bus("orders")
    for cls in (Order, Charge, Reminder, Offer, Tick):
        bus.route(cls, to=os.environ["CHAOS_SEND_TO"])
    bus.listen(os.environ["CHAOS_LISTEN"], name="orders")
    bus.every(f"*/{TICK_SECONDS} * * * * *", Tick(), name="ticks", misfire="all")

    @bus.handles(Note, retry=RETRY)
    async def take_note(note: Note, session: AsyncSession, ctx: Context) -> None:
        await take(note, session, ctx)

    @bus.handles(Receipt, retry=RETRY)
    async def take_receipt(receipt: Receipt, session: AsyncSession, ctx: Context) -> None:
        await take(receipt, session, ctx)

    return bus


def billing() -> Bus:
    bus = Bus("billing")
    bus.route(Receipt, to=os.environ["CHAOS_SEND_TO"])
    bus.listen(os.environ["CHAOS_LISTEN"], name="billing")

    @bus.handles(Order, retry=RETRY)
    async def take_order(order: Order, session: AsyncSession, ctx: Context) -> None:
        if order.behaviour == ANSWERS:
            receipt = Receipt(order.number, order.key)
            envelope_id = bus.send(receipt, key=order.key)
            await session.execute(ADD_SENT, sent_row(envelope_id, receipt))
        await take(order, session, ctx)

    @bus.handles(Charge, retry=PATIENT, max_batch=10, circuit_breaker=BREAKER)
    async def take_charge(charge: Charge, session: AsyncSession, ctx: Context) -> None:
        await take(charge, session, ctx)
        if await session.scalar(IS_STORMY):
            raise ConnectionError("the bank is away")

    @bus.handles(Reminder, retry=RETRY)
    async def take_reminder(reminder: Reminder, session: AsyncSession, ctx: Context) -> None:
        await take(reminder, session, ctx)

    @bus.handles(Offer, retry=RETRY)
    def take_offer(offer: Offer, session: Session, ctx: Context) -> None:
        session.execute(ADD_EFFECT, effect_row(ctx.id, kind_of(offer), offer.key, offer.number))
        time.sleep(0.02)

    @bus.handles(Tick, retry=RETRY, max_batch=20)
    async def take_tick(tick: Tick, session: AsyncSession, ctx: Context) -> None:
        occurrence = datetime.fromisoformat(ctx.headers["occurrence"])
        await session.execute(ADD_EFFECT, effect_row(ctx.id, "tick", "", round(occurrence.timestamp())))

    return bus


async def serve(service: str, slot: str) -> None:
    bus = {"orders": orders, "billing": billing}[service]()
    calm, pause = Path(os.environ["CHAOS_CALM"]), float(os.environ["CHAOS_PAUSE"])
    tasks = range(TASKS if service == "orders" else 0)
    producers = [Producer(bus, f"{slot}{task}", pause, calm) for task in tasks]
    async with asyncio.TaskGroup() as group:
        working = [group.create_task(each.run(), name=f"producer {number}") for number, each in enumerate(producers)]
        await bus.serve()
        for task in working:
            task.cancel()


if __name__ == "__main__":
    begin()
    asyncio.run(serve(sys.argv[1], sys.argv[2]))
