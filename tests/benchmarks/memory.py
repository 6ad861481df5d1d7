"""Peak memory of a node through which many messages pass: after half of them and after all, beside a tenth of them.

    inbox -> handler                    a node that handles lists of what waits in its inbox
    outbox -> TCP                       a node that sends what waits in its outbox
    TCP -> inbox -> handler             the node that receives and handles these

All rows are there before the nodes start. The peak is the kernel's (VmHWM), so there is no figure but on Linux.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import psycopg

from durable import Bus
from durable.embedded import postgres
from durable.embedded.ports import free_port
from durable.errors import InvalidSetting
from tests.benchmarks import filling, floor, node
from tests.benchmarks.databases import Databases
from tests.benchmarks.floor import Note
from tests.benchmarks.node import Order
from tests.benchmarks.progressing import progress
from tests.benchmarks.rows import Relation

ROWS: Final = 1_000_000
SHARES: Final = (0.1, 0.5, 1.0)
_LOOK_SECONDS: Final = 0.1
_MEGABYTE: Final = 1 << 20


def peak_bytes(status: str) -> int:
    """Return the peak in this text of /proc/PID/status."""
    for line in status.splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) << 10
    raise InvalidSetting("the kernel tells no peak of memory (VmHWM)")


class Peaks:
    """Peaks of one process, each as it was when its share of the messages had passed."""

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self.at: dict[float, int] = {}

    def note(self, passed: int, peak: int) -> None:
        for share in SHARES:
            if share not in self.at and passed >= share * self._rows:
                self.at[share] = peak


def relations(work: str, at: Mapping[float, int]) -> list[Relation]:
    """Compare the later peaks with the first."""
    first, *later = SHARES
    megabytes = {share: peak / _MEGABYTE for share, peak in at.items()}
    beside = f"peak after {first:.0%}"
    return [
        Relation(f"{work}, peak after {share:.0%}", beside, "MB", megabytes[first], megabytes[share]) for share in later
    ]


def run(rows: int | None = None) -> list[Relation]:
    """Let so many messages pass through each node."""
    with tempfile.TemporaryDirectory() as folder, postgres(Path(folder)) as server:
        databases = Databases(server)
        return [*_handle(databases, rows or ROWS), *_send(databases, rows or ROWS)]


def _handle(databases: Databases, rows: int) -> list[Relation]:
    url = databases.fresh()
    with progress("fill an inbox", rows) as advance:
        filling.fill_inbox(url, rows, advance=advance)
    return _watch({"handle from an inbox": Order(url)}, url, rows)


def _send(databases: Databases, rows: int) -> list[Relation]:
    url, peers_url, address = databases.fresh(), databases.fresh(), f"tcp://127.0.0.1:{free_port()}"
    bus = Bus("sender", url)
    bus.route(Note, to=address)
    destination = bus.runtime.transports.resolve(address, floor.MESSAGE_TYPE)
    with progress("fill an outbox", rows) as advance:
        filling.fill_outbox(url, rows, destination, advance=advance)
    orders = {
        "receive over TCP and handle": Order(peers_url, address),
        "send over TCP": Order(url, address, sends=True),
    }
    return _watch(orders, peers_url, rows)


def _watch(orders: Mapping[str, Order], url: str, rows: int) -> list[Relation]:
    """Run these nodes until all messages are handled, in the database of this URL."""
    with ExitStack() as stack:
        conn = stack.enter_context(psycopg.connect(url, autocommit=True))
        advance = stack.enter_context(progress(", ".join(orders), rows))
        processes = {work: stack.enter_context(node.running(order))[0] for work, order in orders.items()}
        peaks = {work: Peaks(rows) for work in orders}
        shown = passed = 0
        while passed < rows:
            time.sleep(_LOOK_SECONDS)
            node.check(list(processes.values()))
            passed = node.handled(conn)
            for work, process in processes.items():
                peaks[work].note(passed, peak_bytes(Path(f"/proc/{process.pid}/status").read_text()))
            advance(passed - shown)
            shown = passed
    return [relation for work, found in peaks.items() for relation in relations(work, found.at)]
