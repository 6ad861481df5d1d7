"""A node of the service that a storm of failures hits: `durable-agent run tests.load.storm_node:bus`.

Of its two handlers the healthy one always succeeds, and the stormy one fails for as long as the table `gate` has a row.
"""

from __future__ import annotations

import os

import msgspec
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession

from durable import Bus, CircuitBreaker, Context, Retry, message

BREAKER = CircuitBreaker() if os.environ.get("STORM_BREAKER") == "yes" else None
IS_STORMY = text("SELECT EXISTS (SELECT FROM gate)")
ADD_EFFECT = text("INSERT INTO effects (envelope_id, order_id, process) VALUES (:id, :number, :process)")


@message("storm.healthy")
class Healthy(msgspec.Struct):
    number: int


@message("storm.stormy")
class Stormy(msgspec.Struct):
    number: int


bus = Bus("storm")


async def add_effect(session: AsyncSession, ctx: Context, number: int) -> None:
    await session.execute(ADD_EFFECT, {"id": ctx.id, "number": number, "process": os.getpid()})


@bus.handles(Healthy)
async def handle(healthy: Healthy, session: AsyncSession, ctx: Context) -> None:
    await add_effect(session, ctx, healthy.number)


@bus.handles(Stormy, retry=Retry(immediate=2, delays=[1, 10, 60]), circuit_breaker=BREAKER)
async def handle_stormy(stormy: Stormy, session: AsyncSession, ctx: Context) -> None:
    await add_effect(session, ctx, stormy.number)
    if await session.scalar(IS_STORMY):
        raise ConnectionError("the warehouse is down")
