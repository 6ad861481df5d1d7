"""Loads a web service of two workers with wrk, kills one of them in the middle, and compares what the clients were told
with what was handled: `make load`, or `python -m tests.load --seconds 30 --connections 64`.

Ends with 1 when that is not equal.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from durable.embedded.ports import free_port
from tests.failure.books import Books, read_books
from tests.failure.waiting import eventually
from tests.failure.web import is_refused
from tests.load.databases import migrated_database
from tests.support.web import ROOT, WebService, serving

SCRIPT = Path(__file__).with_name("orders.lua")
THREADS = 2
RECOVERY_SECONDS = 60.0


class Line(NamedTuple):
    """What was counted, and what it must be; None where it may be anything."""

    what: str
    counted: int
    expected: int | None = None

    @property
    def is_right(self) -> bool:
        return self.expected in (None, self.counted)


def compare(taken: Counter[int], books: Books) -> list[Line]:
    """`taken`: how often each order was answered with 201."""
    effects = Counter(books.sent.get(key, 0) for key in books.effects.elements())
    return [
        Line("answers 201", taken.total()),
        Line("their orders", len(taken), taken.total()),
        Line("  of them handled once", sum(effects[order] == 1 for order in taken), len(taken)),
        Line("orders committed", len(books.sent)),
        Line("  handled", len(effects), len(books.sent)),
        Line("  effects of them", effects.total(), len(books.sent)),
        Line("  refused with 409", sum(map(is_refused, books.sent.values())), 0),
        Line("dead letters", books.dead.total(), 0),
        Line("rows that wait, or are owned", len(books.pending), 0),
        Line("nodes that are registered", len(books.nodes), 0),
    ]


async def load(shop: WebService, folder: Path, seconds: int, connections: int) -> int:
    """Run wrk, kill a worker in the middle, and wait until all is handled; returns which worker it was."""
    await shop.ready()
    command = [wrk(), "-t", str(THREADS), "-c", str(connections), "-d", f"{seconds}s", "--timeout", "10s"]
    running = await asyncio.create_subprocess_exec(*command, "-s", str(SCRIPT), shop.url, "--", str(folder))
    await asyncio.sleep(seconds / 2)
    killed = shop.kill_a_worker()
    assert await running.wait() == 0, "wrk failed"
    await eventually(lambda: not read_books(shop.database).violations(), within=RECOVERY_SECONDS)
    return killed


def wrk() -> str:
    """wrk's path; on Debian root gets it installed."""
    if shutil.which("wrk") is None and shutil.which("apt-get") and os.geteuid() == 0:
        subprocess.run(["apt-get", "update", "-qq"], check=True)
        subprocess.run(["apt-get", "install", "-y", "-qq", "--no-install-recommends", "wrk"], check=True)
    path = shutil.which("wrk")
    if path is None:
        sys.exit("wrk is missing; on Debian and Ubuntu: sudo apt-get install wrk")
    return path


def answered(folder: Path) -> Counter[int]:
    """The orders of all answers that wrk has read."""
    return Counter(int(line) for path in folder.glob("taken-*") for line in path.read_text().split())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0] if __doc__ else None)
    parser.add_argument("--seconds", type=int, default=10)
    parser.add_argument("--connections", type=int, default=32)
    options = parser.parse_args()
    port = free_port()
    with tempfile.TemporaryDirectory() as name, migrated_database(Path(name)) as database:
        folder = Path(name)
        environment = {"DURABLE_DATABASE_URL": database, "SHOP_URL": f"http://127.0.0.1:{port}"}
        with serving("tests.failure.web:app", ROOT, port, folder / "log", environment) as shop:
            killed = asyncio.run(load(shop, folder, options.seconds, options.connections))
            shop.stop()
        lines = compare(answered(folder), read_books(database))
    table = Table("", "count", "expected", title=f"{options.seconds} seconds; worker {killed} was killed in the middle")
    for line in lines:
        expected = "" if line.expected is None else str(line.expected)
        table.add_row(line.what, str(line.counted), expected, style=None if line.is_right else "bold red")
    Console().print(table)
    return 0 if all(line.is_right for line in lines) else 1


if __name__ == "__main__":
    sys.exit(main())
