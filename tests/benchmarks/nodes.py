"""Nodes of one database: the rate of 2, 4 and 8 of them beside that of one, and the work of a dead one.

Each node is a process of its own. They have joined before the rows are there, and the rate is that from the first
effect to the last. With fewer cores than nodes it says what they cost each other; the title has the number of cores.

The takeover begins when a node starts that is alive, and ends when it has released every row of the dead one; two
seconds of it are the setting dormant_grace. Beside it stands one UPDATE that does the same to these rows.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import psycopg

from durable import Bus
from durable.embedded import postgres
from durable.envelope import NodeId
from durable.telemetry import Event
from tests.benchmarks import filling, node
from tests.benchmarks.databases import Databases
from tests.benchmarks.floor import Note
from tests.benchmarks.node import Order
from tests.benchmarks.progressing import progress
from tests.benchmarks.racing import until
from tests.benchmarks.rows import Relation

ROWS: Final = 50_000
OWNED: Final = 100_000
SIZES: Final = (1, 2, 4, 8)
_LOOK_SECONDS: Final = 0.01
_DEAD: Final = """
INSERT INTO durable.nodes (service, description, version) VALUES ('bench', 'dead', '0') RETURNING node_id
"""
_RELEASE: Final = """
UPDATE durable.incoming_envelopes SET owner_id = 0, epoch = epoch + 1, interruptions = interruptions + 1
WHERE owner_id = %s
"""


def title(rows: int | None) -> str:
    return f"{rows or ROWS:,} messages by nodes of one database, on {os.cpu_count()} cores"


def relations(rates: Mapping[int, float]) -> list[Relation]:
    """Compare the rates by number of nodes with that of one."""
    return [
        Relation(f"handle on {size} nodes", "one node", "messages/s", rates[1], rate)
        for size, rate in rates.items()
        if size != 1
    ]


def run(rounds: int, rows: int | None = None) -> list[Relation]:
    """Measure the rates, each the best of its rounds, and the takeover once."""
    rates: dict[int, float] = dict.fromkeys(SIZES, 0.0)
    with tempfile.TemporaryDirectory() as folder, postgres(Path(folder)) as server:
        databases = Databases(server)
        with progress("nodes", rounds * len(SIZES)) as advance:
            for _ in range(rounds):
                for size in SIZES:
                    rates[size] = max(rates[size], _rate(databases.fresh(), size, rows or ROWS))
                    advance(1)
        return [*relations(rates), _take_over(databases)]


def _rate(url: str, nodes: int, rows: int) -> float:
    with node.running(Order(url), nodes) as processes, psycopg.connect(url, autocommit=True) as conn:

        def await_handled(count: int) -> int:
            while (found := node.handled(conn)) < count:
                node.check(processes)
                time.sleep(_LOOK_SECONDS)
            return found

        filling.fill_inbox(url, rows)
        before = await_handled(1)
        began = time.monotonic()
        await_handled(rows)
        return (rows - before) / (time.monotonic() - began)


def _take_over(databases: Databases) -> Relation:
    beside, dead = _owned_by_the_dead(databases)
    began = time.monotonic()
    with psycopg.connect(beside) as conn:
        conn.execute(_RELEASE, (dead,))
    updated = time.monotonic() - began
    url, _ = _owned_by_the_dead(databases)
    name = f"take over {OWNED:,} rows of a dead node"
    return Relation(name, "one UPDATE of these rows", "s", updated, asyncio.run(_seconds_to_take_over(url)))


def _owned_by_the_dead(databases: Databases) -> tuple[str, NodeId]:
    """Make a database with rows of a node that died."""
    url = databases.fresh()
    with psycopg.connect(url, autocommit=True) as conn:
        row = conn.execute(_DEAD).fetchone()
    assert row is not None
    dead = NodeId(row[0])
    filling.fill_inbox(url, OWNED, owner=dead)
    return url, dead


async def _seconds_to_take_over(url: str) -> float:
    bus = Bus("bench", url)
    bus.handles(Note, max_batch=100)(_take)
    began = time.monotonic()
    async with bus:
        await until(lambda: bus.runtime.counters[Event.RECOVERED] >= OWNED)
        return time.monotonic() - began


async def _take(notes: list[Note]) -> None:
    """Do nothing, for many at once."""
