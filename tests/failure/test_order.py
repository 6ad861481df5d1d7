"""I5: order per key while nodes are killed in the middle of their handlers, and handlers fail at random."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import psycopg
import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession

from durable import Bus, Retry, message
from tests.failure.app import Service
from tests.failure.books import STEPS, violations_of_order
from tests.failure.services import Running
from tests.failure.waiting import eventually
from tests.failure.workbench import QUICK

KEYS, NUMBERS = 200, 50
RETRY = Retry(immediate=0, delays=[0.02] * 100)
ADD_STEP = text("INSERT INTO steps (key, number, process) VALUES (:key, :number, :process)")


@message("failure.left")
class Left(msgspec.Struct):
    key: str
    number: int


@message("failure.right")
class Right(msgspec.Struct):
    key: str
    number: int


class Stumbled(Exception):
    """What a handler raises now and then."""


@dataclass(frozen=True)
class Walker(Service):
    """A node with handlers for both types; one message in a hundred fails, again and again perhaps."""

    async def _serve(self) -> None:
        bus = Bus(self.name, self.database, pool_size=8)
        rng = random.Random(os.getpid())

        async def step(left_or_right: Left | Right, session: AsyncSession) -> None:
            values = {"key": left_or_right.key, "number": left_or_right.number, "process": os.getpid()}
            await session.execute(ADD_STEP, values)
            if rng.random() < 0.01:
                raise Stumbled

        @bus.handles(Left, retry=RETRY, max_batch=20)
        async def left(left: Left, session: AsyncSession) -> None:
            await step(left, session)

        @bus.handles(Right, retry=RETRY, max_batch=20)
        async def right(right: Right, session: AsyncSession) -> None:
            await step(right, session)

        stopped = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
        async with bus:
            await stopped.wait()


@pytest.fixture
def start(database_url: str, tmp_path: Path) -> Iterator[Callable[..., Running]]:
    with psycopg.connect(database_url) as conn:
        conn.execute(STEPS)
    started: list[Running] = []

    def begin(failpoint: str = "") -> Running:
        started.append(Running(Walker("walkers", database_url, tmp_path / "walkers.log", failpoint=failpoint)))
        return started[-1]

    yield begin
    for process in started:
        process.kill()


def handled(database: str) -> int:
    with psycopg.connect(database) as conn:
        row = conn.execute("SELECT count(*) FROM steps").fetchone()
    assert row is not None
    return int(row[0])


async def send_everything(database: str) -> None:
    """One transaction for each number, with a message of it for every key."""
    bus = Bus("walkers", database, mode="send-only", **QUICK)
    for cls in (Left, Right):
        bus.application.routes.handled_here(f"failure.{cls.__name__.lower()}")
    for number in range(NUMBERS):
        async with bus.unit_of_work() as uow:
            for key in range(KEYS):
                step = Left if (number // 5 + key) % 2 else Right
                uow.send(step(f"k{key}", number), key=f"k{key}")
    await bus.runtime.stop()


async def test_a_key_is_handled_in_order_and_once_while_nodes_are_killed(
    database_url: str, start: Callable[..., Running]
) -> None:
    await send_everything(database_url)
    dies, stays = start("C15:40"), start()
    dies.crashes_at_its_failpoint(within=60)
    last = start()
    await eventually(lambda: handled(database_url) >= KEYS * NUMBERS // 3, within=60)
    stays.kill()
    await eventually(lambda: handled(database_url) >= KEYS * NUMBERS, within=100)
    assert violations_of_order(database_url, KEYS, NUMBERS) == []
    last.stop()
    with psycopg.connect(database_url) as conn:
        left = conn.execute(
            "SELECT count(*), (SELECT count(*) FROM durable.dead_letters) FROM durable.nodes"
        ).fetchone()
        marked = conn.execute("SELECT count(*) FROM durable.envelope_history WHERE interruptions > 0").fetchone()
    assert left == (0, 0)
    assert marked is not None
    assert marked[0] > 0, "nobody died while it had work"
