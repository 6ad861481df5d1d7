"""A storm of failures: for a while every message of one type fails, and those of another are to feel little of it.

    normal   both types succeed          what the healthy one gets through is what the storm is held against
    storm    the stormy type fails       its attempts cost, and the circuit breaker stops paying for them
    after    it succeeds again           all of it comes to its end, none is lost, none handled twice

`python -m tests.load.storm --seconds 30` runs it without a circuit breaker, to see what the storm costs, and with one,
on two nodes. Ends with 1 when something is lost or handled twice, or when the healthy type falls below 80 % of normal
although there is a breaker.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import psycopg
from rich.console import Console
from rich.table import Table

from durable import Bus
from durable.testing import eventually
from tests.load import storm_node
from tests.load.databases import migrated_database
from tests.load.storm_node import Healthy, Stormy
from tests.support.web import ROOT

NODES = 2
BACKLOG = 2_000  # healthy messages that always wait, so that the nodes are never idle
STORMY_A_SECOND = 50
LEAST = 0.8
AFTERMATH_SECONDS = 180.0
BOOKS = """
SELECT (SELECT count(*) FROM durable.incoming_envelopes), (SELECT count(*) FROM durable.dead_letters),
    (SELECT count(*) FROM effects), (SELECT count(DISTINCT envelope_id) FROM effects)
"""
HANDLED = """
SELECT count(*) FROM durable.envelope_history WHERE message_type = 'storm.healthy' AND outcome = 'handled'
"""
WAITING = "SELECT count(*) FROM durable.incoming_envelopes WHERE message_type = 'storm.healthy'"


class Storm(NamedTuple):
    """What was seen: healthy messages a second, and how it ended."""

    normal: float
    storm: float
    sent: int
    waiting: int
    dead: int
    effects: int
    handled: int

    @property
    def share(self) -> float:
        return self.storm / self.normal

    def is_right(self, least: float) -> bool:
        return self.share >= least and self.sent == self.effects == self.handled and not self.waiting + self.dead


class Source:
    """Sends both types until it is stopped, and knows how many it has committed."""

    def __init__(self, bus: Bus, conn: psycopg.AsyncConnection) -> None:
        self.sent = 0
        self.stopping = False
        self._bus = bus
        self._conn = conn

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._keep_a_backlog(), name="healthy")
            tasks.create_task(self._send_steadily(), name="stormy")

    async def count(self, sql: str) -> int:
        row = await (await self._conn.execute(sql.encode())).fetchone()
        assert row is not None
        return int(row[0])

    async def _keep_a_backlog(self) -> None:
        while not self.stopping:
            missing = 2 * BACKLOG - await self.count(WAITING)
            for _ in range(missing // 100):
                await self._send(Healthy, 100)
            await asyncio.sleep(0.1)

    async def _send_steadily(self) -> None:
        while not self.stopping:
            await self._send(Stormy, STORMY_A_SECOND // 5)
            await asyncio.sleep(0.2)

    async def _send(self, cls: type[Healthy | Stormy], count: int) -> None:
        async with self._bus.unit_of_work() as uow:
            for number in range(self.sent, self.sent + count):
                uow.send(cls(number))
        self.sent += count


async def weather(database: str, seconds: float) -> Storm:
    """Send through calm and storm, and wait until all of it has come to its end."""
    bus = Bus("storm", database, mode="send-only")
    bus.application.routes.handled_here("storm.healthy")
    bus.application.routes.handled_here("storm.stormy")
    async with bus, await psycopg.AsyncConnection.connect(database, autocommit=True) as conn:
        source = Source(bus, conn)
        sending = asyncio.create_task(source.run(), name="source")
        try:
            await eventually(lambda: source.count(HANDLED), within=30)
            await asyncio.sleep(3)
            normal = await _rate(source, seconds / 2)
            await conn.execute("INSERT INTO gate VALUES (true)")
            storm = await _rate(source, seconds)
        finally:
            await conn.execute("DELETE FROM gate")
            source.stopping = True
            await sending

        async def books() -> tuple[int, ...]:
            row = await (await conn.execute(BOOKS)).fetchone()
            assert row is not None
            return row

        async def is_over() -> bool:
            return not (await books())[0]

        await eventually(is_over, within=AFTERMATH_SECONDS)
        return Storm(normal, storm, source.sent, *await books())


async def _rate(source: Source, seconds: float) -> float:
    """Healthy messages a second, by the clock of this process."""
    loop = asyncio.get_running_loop()
    began, before = loop.time(), await source.count(HANDLED)
    await asyncio.sleep(seconds)
    return (await source.count(HANDLED) - before) / (loop.time() - began)


@contextmanager
def nodes(database: str, folder: Path, *, breaker: bool) -> Iterator[None]:
    environment = {
        **os.environ,
        "DURABLE_DATABASE_URL": database,
        "STORM_BREAKER": "yes" if breaker else "no",
    }
    command = [sys.executable, "-m", "durable.cli", "run", f"{storm_node.__name__}:bus"]
    with (folder / "nodes.log").open("w") as log:
        running = [subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log) for _ in range(NODES)]
        try:
            yield
        finally:
            for process in running:
                process.terminate()
            for process in running:
                process.wait(timeout=30)


def run(seconds: float, *, breaker: bool) -> Storm:
    with (
        tempfile.TemporaryDirectory() as name,
        migrated_database(Path(name)) as database,
        nodes(database, Path(name), breaker=breaker),
    ):
        return asyncio.run(weather(database, seconds))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0] if __doc__ else None)
    parser.add_argument("--seconds", type=float, default=30)
    options = parser.parse_args()
    seen = {"none": (run(options.seconds, breaker=False), 0.0), "breaker": (run(options.seconds, breaker=True), LEAST)}
    columns = ("", "normal/s", "storm/s", "share", "sent", "handled", "effects", "waiting", "dead")
    table = Table(*columns, title=f"{options.seconds:g} s in which every message of another type fails; {NODES} nodes")
    for name, (storm, least) in seen.items():
        rates = f"{storm.normal:.0f}", f"{storm.storm:.0f}", f"{storm.share:.2f}"
        counts = (storm.sent, storm.handled, storm.effects, storm.waiting, storm.dead)
        table.add_row(name, *rates, *map(str, counts), style=None if storm.is_right(least) else "bold red")
    Console().print(table)
    return 0 if all(storm.is_right(least) for storm, least in seen.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
