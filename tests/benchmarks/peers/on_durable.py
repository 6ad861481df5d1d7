"""durable, in the shape of its peers: a send-only process enlists, a node of the same service handles.

default                as in all the following but one: as many messages in a transaction as take 20 ms
alone                  a transaction for each message
groups                 up to 100 messages in a transaction
lists                  up to 100 messages for one call of the handler, with one effect for all of them
here                   the process that enlists is the node that handles
tcp, http, rabbitmq    a node sends to a node of another service
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final

import msgspec
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession

from durable import Bus, message
from durable.storage import migrator
from tests.benchmarks.peers.program import AT_ONCE, INSERT, POOL, TEXT, Enlist, Order, Program, main

SECOND_SCHEMA: Final = "durable_second"
_TRANSPORTS: Final = ("tcp", "http", "rabbitmq")
_POOL: Final = {"pool_size": AT_ONCE, "pool_timeout": POOL["pool_timeout"]}
_INSERT = text(INSERT)
_INSERT_ALL = text("INSERT INTO business (number) SELECT unnest(CAST(:numbers AS integer[]))")
_MAX_BATCH: Final = {"alone": 1, "groups": 100, "lists": 100}


@message("bench.note")
class Note(msgspec.Struct):
    number: int
    text: str


async def take(note: Note, session: AsyncSession) -> None:
    await session.execute(_INSERT, {"number": -note.number})


async def take_all(notes: list[Note], session: AsyncSession) -> None:
    await session.execute(_INSERT_ALL, {"numbers": [-note.number for note in notes]})


def make_bus(order: Order) -> Bus:
    """Make the bus of the process that handles, or of one of the same service."""
    is_node = order.work == "handle" or order.variant == "here"
    bus = Bus("bench", order.url, mode="full" if is_node else "send-only", **_POOL)
    handler = take_all if order.variant == "lists" else take
    bus.handles(Note, max_batch=_MAX_BATCH.get(order.variant), concurrency=AT_ONCE)(handler)
    return bus


def make_sending_bus(order: Order) -> Bus:
    bus = Bus("bench", order.url, **_POOL, **_broker(order))
    bus.route(Note, to=order.address)
    return bus


def make_receiving_bus(order: Order) -> Bus:
    bus = Bus("second", order.url, **_POOL, db_schema=SECOND_SCHEMA, **_broker(order))
    bus.listen(order.address)
    bus.handles(Note, concurrency=AT_ONCE)(take)
    return bus


def _broker(order: Order) -> dict[str, Any]:
    return {"amqp_url": order.broker} if order.broker else {}


async def install(order: Order) -> None:
    migrator.upgrade(order.url_for("psycopg"), "durable")
    if order.variant in _TRANSPORTS:
        migrator.upgrade(order.url_for("psycopg"), SECOND_SCHEMA)


@asynccontextmanager
async def enlisting(order: Order) -> AsyncIterator[Enlist]:
    bus = make_sending_bus(order) if order.variant in _TRANSPORTS else make_bus(order)

    async def enlist(number: int) -> None:
        async with bus.unit_of_work() as uow:
            await uow.session.execute(_INSERT, {"number": number})
            bus.send(Note(number, TEXT))

    async with bus:
        yield enlist


async def handle(order: Order) -> None:
    bus = make_receiving_bus(order) if order.variant in _TRANSPORTS else make_bus(order)
    await bus.serve()


if __name__ == "__main__":
    main(Program("durable-bus", install, enlisting, handle))
