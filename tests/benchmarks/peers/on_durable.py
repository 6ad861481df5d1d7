"""durable, in the shape of its peers: a send-only process enlists, a node of the same service handles.

    plain    a transaction for each message
    auto     max_batch="auto": as many messages in a transaction as take 20 ms
    here     `pace` only: the process that enlists is the node that handles
    tcp      `pace` only: a node sends to a node of another service
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

import msgspec
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession

from durable import Bus, message
from durable.storage import migrator
from tests.benchmarks.peers.program import AT_ONCE, INSERT, TEXT, Enlist, Order, Program, main

SECOND_SCHEMA: Final = "durable_second"
_INSERT = text(INSERT)


@message("bench.note")
class Note(msgspec.Struct):
    number: int
    text: str


async def take(note: Note, session: AsyncSession) -> None:
    await session.execute(_INSERT, {"number": -note.number})


def make_handling_bus(order: Order) -> Bus:
    """A bus with the handler, in the mode of this variant."""
    second = order.variant == "tcp"
    mode = "send-only" if order.work != "handle" and order.variant != "here" else "full"
    bus = Bus("second" if second else "bench", order.url, mode=mode, pool_size=AT_ONCE)
    if second:
        bus.configure(db_schema=SECOND_SCHEMA)
        bus.listen(order.address)
    max_batch = "auto" if order.variant == "auto" else 1
    bus.handles(Note, max_batch=max_batch, concurrency=AT_ONCE)(take)
    return bus


def make_sending_bus(order: Order) -> Bus:
    bus = Bus("bench", order.url, pool_size=AT_ONCE)
    bus.route(Note, to=order.address)
    return bus


async def install(order: Order) -> None:
    migrator.upgrade(order.url_for("psycopg"), "durable")
    if order.variant == "tcp":
        migrator.upgrade(order.url_for("psycopg"), SECOND_SCHEMA)


@asynccontextmanager
async def enlisting(order: Order) -> AsyncIterator[Enlist]:
    bus = make_sending_bus(order) if order.variant == "tcp" else make_handling_bus(order)

    async def enlist(number: int) -> None:
        async with bus.unit_of_work() as uow:
            await uow.session.execute(_INSERT, {"number": number})
            bus.send(Note(number, TEXT))

    async with bus:
        yield enlist


async def handle(order: Order) -> None:
    await make_handling_bus(order).serve()


if __name__ == "__main__":
    main(Program("durable-bus", install, enlisting, handle))
