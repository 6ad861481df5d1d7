"""A node that is a process of its own: `python -m tests.benchmarks.node '{"url": ..., "sends": true, "address": ...}'`.

    sends             to the address, what waits in its outbox
    does not send     handles lists of what waits in its inbox, and listens at the address if there is one

Each list has an effect: a row of the table business with its length.
"""

from __future__ import annotations

import asyncio
import json
import logging
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Final

import psycopg
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession

from durable import Bus
from durable.errors import InvalidSetting
from tests.benchmarks import floor
from tests.benchmarks.floor import Note

START_SECONDS: Final = 60.0
STOP_SECONDS: Final = 30.0
_LOOK_SECONDS: Final = 0.02
_EFFECT: Final = text("INSERT INTO business (number) VALUES (:number)")


Process = subprocess.Popen[bytes]


@dataclass(frozen=True, slots=True)
class Order:
    """What a node is to do, and where."""

    url: str
    address: str = ""
    sends: bool = False


@contextmanager
def running(order: Order, nodes: int = 1) -> Iterator[Sequence[Process]]:
    """Run so many nodes for the time of this block, which begins when all have joined.

    Raises InvalidSetting when they do not.
    """
    command = [sys.executable, "-m", __name__, json.dumps(asdict(order))]
    processes = [subprocess.Popen(command) for _ in range(nodes)]
    try:
        _await_nodes(order.url, processes)
        yield processes
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def handled(conn: psycopg.Connection) -> int:
    """Read how many messages have had their effect."""
    row = conn.execute("SELECT COALESCE(sum(number), 0) FROM business").fetchone()
    assert row is not None
    return int(row[0])


def check(processes: Sequence[Process]) -> None:
    """Raise InvalidSetting when one of these has ended."""
    for process in processes:
        if process.poll() is not None:
            raise InvalidSetting(f"a node ended with exit code {process.returncode}; it wrote to stderr why")


def _await_nodes(url: str, processes: Sequence[Process]) -> None:
    deadline = time.monotonic() + START_SECONDS
    with psycopg.connect(url, autocommit=True) as conn:
        while (row := conn.execute("SELECT count(*) FROM durable.nodes").fetchone()) and row[0] < len(processes):
            check(processes)
            if time.monotonic() > deadline:
                raise InvalidSetting(f"{row[0]} of {len(processes)} nodes have joined within {START_SECONDS:g} s")
            time.sleep(_LOOK_SECONDS)


def _make_bus(order: Order) -> Bus:
    if order.sends:
        bus = Bus("sender", order.url)
        bus.route(Note, to=order.address)
        return bus
    bus = Bus("bench", order.url, pool_size=floor.CONNECTIONS)
    bus.handles(Note, max_batch=floor.BATCH, concurrency=floor.CONNECTIONS)(_take)
    if order.address:
        bus.listen(order.address)
    return bus


async def _take(notes: list[Note], session: AsyncSession) -> None:
    await session.execute(_EFFECT, {"number": len(notes)})


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    asyncio.run(_make_bus(Order(**json.loads(sys.argv[1]))).serve())
