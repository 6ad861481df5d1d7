"""A node dies while it runs an occurrence, and another lives: no occurrence is lost and none is doubled.

Two processes of one service, with a schedule of one run a second that misses nothing. One dies at C22 inside the
transaction (its message is stored, and not committed), or right after the commit.
"""

from __future__ import annotations

import asyncio
import signal
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from itertools import pairwise
from pathlib import Path

import msgspec
import psycopg
import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession

from durable import Bus, Context, message
from tests.failure.app import Service
from tests.failure.services import Running
from tests.failure.waiting import eventually

ADD_RUN = text("INSERT INTO runs (envelope_id, occurrence) VALUES (:envelope_id, :occurrence)")


@message("failure.tick")
class Tick(msgspec.Struct):
    pass


@dataclass(frozen=True)
class Clockwork(Service):
    """A process that runs the schedule and writes each run down."""

    async def _serve(self) -> None:
        bus = Bus("clockwork", self.database)
        bus.every("* * * * * *", Tick(), name="seconds", misfire="all")
        bus.handles(Tick)(write_down)
        stopped = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
        async with bus:
            await stopped.wait()


async def write_down(tick: Tick, session: AsyncSession, ctx: Context) -> None:
    occurrence = datetime.fromisoformat(ctx.headers["occurrence"])
    await session.execute(ADD_RUN, {"envelope_id": ctx.id, "occurrence": occurrence})


def runs(database: str) -> list[datetime]:
    with psycopg.connect(database) as conn:
        return [row[0] for row in conn.execute("SELECT occurrence FROM runs ORDER BY occurrence")]


async def until_it_has_run(database: str, times: int) -> None:
    await eventually(lambda: len(runs(database)) >= times, within=30)


def is_whole(database: str) -> bool:
    """Is there one run a second? What a dead node had in hand comes when its rows are released."""
    occurrences = runs(database)
    assert len(set(occurrences)) == len(occurrences), f"doubled: {occurrences}"
    return {b - a for a, b in pairwise(occurrences)} == {timedelta(seconds=1)}


@pytest.fixture
def clockwork(database_url: str, tmp_path: Path) -> Clockwork:
    with psycopg.connect(database_url) as conn:
        conn.execute("CREATE TABLE runs (envelope_id uuid NOT NULL, occurrence timestamptz NOT NULL)")
    return Clockwork("clockwork", database_url, tmp_path / "clockwork.log")


@pytest.mark.parametrize("failpoint", ["C22", "C22:2"], ids=["before the commit", "after the commit"])
async def test_an_occurrence_is_neither_lost_nor_doubled_when_its_node_dies(
    clockwork: Clockwork, failpoint: str
) -> None:
    dies = Running(replace(clockwork, failpoint=failpoint))
    lives: list[Running] = []
    try:
        await asyncio.to_thread(dies.crashes_at_its_failpoint)
        lives = [Running(clockwork), Running(clockwork)]
        wanted = len(runs(clockwork.database)) + 3
        await until_it_has_run(clockwork.database, wanted)
        await eventually(lambda: is_whole(clockwork.database), within=30)
        for process in lives:
            process.stop()
    finally:
        for process in (dies, *lives):
            process.kill()
    assert is_whole(clockwork.database)


async def test_other_nodes_proceed_when_a_node_is_killed_during_an_occurrence(clockwork: Clockwork) -> None:
    nodes = [Running(clockwork) for _ in range(3)]
    try:
        await until_it_has_run(clockwork.database, 2)
        for victim in nodes[:2]:
            victim.signal(signal.SIGKILL)
            wanted = len(runs(clockwork.database)) + 2
            await until_it_has_run(clockwork.database, wanted)
        await eventually(lambda: is_whole(clockwork.database), within=30)
        nodes[2].stop()
    finally:
        for process in nodes:
            process.kill()
    assert is_whole(clockwork.database)
