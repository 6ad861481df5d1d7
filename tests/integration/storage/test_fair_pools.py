"""Engines with fewer connections than there is work: who takes one again in the moment of giving it back waits, too."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from itertools import pairwise
from typing import Any, Final

import pytest
from sqlalchemy import URL, make_url, text

from durable.settings import Settings
from durable.storage.engines import Limits, make_async_engine, make_engine

LIMITS: Final = Limits.of(timedelta(seconds=10))
ONE: Final[dict[str, Any]] = {"pool_size": 1, "max_overflow": 0}
_ROUNDS = 50
_SELECT = text("SELECT 1")


def url(database_url: str, driver: str) -> URL:
    return make_url(database_url).set(drivername=f"postgresql+{driver}")


def changes(turns: Sequence[str]) -> int:
    """How often the next turn was the other one's."""
    return sum(one != other for one, other in pairwise(turns))


@pytest.mark.parametrize("driver", ["asyncpg", "psycopg"])
async def test_tasks_take_turns(database_url: str, driver: str) -> None:
    turns: list[str] = []
    engine = make_async_engine(url(database_url, driver), Settings(), LIMITS, **ONE)

    async def use(name: str) -> None:
        for _ in range(_ROUNDS):
            connection = await engine.connect()
            await connection.execute(_SELECT)
            await connection.close()
            turns.append(name)

    try:
        await asyncio.gather(use("one"), use("other"))
    finally:
        await engine.dispose()
    assert changes(turns) > _ROUNDS, turns


def test_threads_take_turns(database_url: str) -> None:
    turns: list[str] = []
    began = threading.Barrier(2)
    engine = make_engine(url(database_url, "psycopg"), Settings(), LIMITS, **ONE)

    def use(name: str) -> None:
        began.wait(10)
        for _ in range(_ROUNDS):
            with engine.connect() as connection:
                connection.execute(_SELECT)
            turns.append(name)

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(use, ("one", "other")))
    engine.dispose()
    assert changes(turns) > _ROUNDS, turns
