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


def make_bus(order: Order) -> Bus:
    """Make the bus of the process that handles, or of one of the same service."""
    is_node = order.work == "handle" or order.variant == "here"
    bus = Bus("bench", order.url, mode="full" if is_node else "send-only", pool_size=AT_ONCE)
    bus.handles(Note, max_batch="auto" if order.variant == "auto" else 1, concurrency=AT_ONCE)(take)
    return bus


def make_sending_bus(order: Order) -> Bus:
    bus = Bus("bench", order.url, pool_size=AT_ONCE)
    bus.route(Note, to=order.address)
    return bus


def make_receiving_bus(order: Order) -> Bus:
    bus = Bus("second", order.url, pool_size=AT_ONCE, db_schema=SECOND_SCHEMA)
    bus.listen(order.address)
    bus.handles(Note, concurrency=AT_ONCE)(take)
    return bus


async def install(order: Order) -> None:
    migrator.upgrade(order.url_for("psycopg"), "durable")
    if order.variant == "tcp":
        migrator.upgrade(order.url_for("psycopg"), SECOND_SCHEMA)


@asynccontextmanager
async def enlisting(order: Order) -> AsyncIterator[Enlist]:
    bus = make_sending_bus(order) if order.variant == "tcp" else make_bus(order)

    async def enlist(number: int) -> None:
        async with bus.unit_of_work() as uow:
            await uow.session.execute(_INSERT, {"number": number})
            bus.send(Note(number, TEXT))

    async with bus:
        yield enlist


async def handle(order: Order) -> None:
    bus = make_receiving_bus(order) if order.variant == "tcp" else make_bus(order)
    await bus.serve()


if __name__ == "__main__":
    main(Program("durable-bus", install, enlisting, handle))
