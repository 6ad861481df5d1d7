"""A fresh punctuality service with a Postgres of its own: what is replayed into its outbox, it sends to itself.

Its messages go the whole way once more: outbox, TCP, inbox, handler. It knows nothing of those that came before.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from durable.demo import fleet, observer, roads
from durable.demo.fleet import SLOTS, Fleet
from durable.demo.observer import Observer
from durable.demo.stage import make_database
from durable.embedded import postgres
from durable.errors import DurableError
from durable.grammar import several

SERVICE = "punctuality"
LOOK_SECONDS = 0.2
STALL_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Again:
    """`url` of its database, `address` at which it listens."""

    url: str
    address: str
    nodes: Fleet
    watch: Observer

    def wait_until_handled(self, count: int) -> None:
        """Wait until the sums contain this many messages and none waits. Raises DurableError when progress stops."""
        seen, moved = -1, time.monotonic()
        while (handled := self.watch.handled()) < count or not self.watch.is_settled():
            self.nodes.check()
            if handled != seen:
                seen, moved = handled, time.monotonic()
            elif time.monotonic() - moved > STALL_SECONDS:
                raise DurableError(f"replay stalled: {handled:,} of {several(count, 'messages', 'were')} handled")
            time.sleep(LOOK_SECONDS)


@contextmanager
def fresh_service(folder: Path) -> Iterator[Again]:
    """Run the nodes of a fresh service until the block ends."""
    for name in ("logs", "counts"):
        (folder / name).mkdir(parents=True)
    with postgres(folder) as server, roads.opened("tcp", folder) as road:
        url = make_database(server, SERVICE)
        environment = {
            "DURABLE_DATABASE_URL": url,
            "DURABLE_HISTORY_BODIES": "true",
            "COUNTS_FOLDER": str(folder / "counts"),
            "PUNCTUALITY_LISTENS_ON": road.listens_on,
        }
        with (
            observer.observing({SERVICE: url}) as watch,
            fleet.running(folder / "logs", {SERVICE: environment}) as nodes,
        ):
            while len(watch.nodes(SERVICE)) < SLOTS:
                nodes.check()
                time.sleep(LOOK_SECONDS)
            yield Again(url, road.sends_to, nodes, watch)
