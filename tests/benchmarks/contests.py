"""The rows of each transport: durable against asyncpg alone, and against the plain client of that transport.

For each the time runs from messages that wait at the sender, committed where there is a database, until all are at the
receiver, stored where there is one, and settled at the sender. Durable and the clients run as two processes; asyncpg
alone, which has no network between its databases, runs in one.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count as counter

from durable.embedded.rabbitmq import Broker
from tests.benchmarks import floor, http_floor, rabbitmq_floor
from tests.benchmarks.databases import Databases
from tests.benchmarks.racing import Contender, Processes, Race, Result
from tests.benchmarks.rows import Row
from tests.benchmarks.shipping import DURABLE

_numbers = counter()


@dataclass
class Contest:
    """One transport: a new destination for each race, durable's settings, and the clients by what they do."""

    name: str
    make_destination: Callable[[], str]
    clients: Mapping[str, Contender] = field(default_factory=dict)
    settings: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._without_network = Row(f"outbox to peer's inbox over {self.name}", "asyncpg: claim, insert there, delete")
        self._rows = {client: Row("the same", client) for client in self.clients}

    @property
    def rows(self) -> Sequence[Row]:
        return [self._without_network, *self._rows.values()]

    def run_round(self, databases: Databases, processes: Processes, count: int) -> None:
        def race(contender: Contender) -> Result:
            urls = databases.fresh(), databases.fresh()
            return processes.race(contender, Race(count, self.make_destination(), *urls, settings=self.settings))

        row = self._without_network
        row.floor = max(row.floor, asyncio.run(_rate_of_asyncpg(databases, count)))
        for name, client in self.clients.items():
            row = self._rows[name]
            row.floor = max(row.floor, race(client).rate)
        ours = race(DURABLE)
        for row in self.rows:
            row.ours = max(row.ours, ours.rate)
            row.cost(ours.counts, count)


def of(name: str, broker: Broker | None) -> Contest:
    """The contest of this transport."""
    if name == "tcp":
        return Contest("TCP", lambda: f"tcp://127.0.0.1:{_free_port()}")
    if name == "http":
        clients = {
            "httpx posts the same batches": http_floor.ALONE,
            "httpx, and asyncpg at both ends": http_floor.STORED,
        }
        return Contest("HTTP", lambda: f"http://127.0.0.1:{_free_port()}", clients)
    assert broker is not None
    clients = {
        "aio-pika publishes, consumes and acks the same bodies": rabbitmq_floor.ALONE,
        "aio-pika, and asyncpg at both ends": rabbitmq_floor.STORED,
    }
    settings = {"amqp_url": broker.url}
    return Contest("RabbitMQ", lambda: f"rabbitmq://default/queue/bench-{next(_numbers)}", clients, settings)


async def _rate_of_asyncpg(databases: Databases, count: int) -> float:
    async with floor.open_pool(databases.fresh()) as sender, floor.open_pool(databases.fresh()) as receiver:
        await floor.fill_outbox(sender, floor.envelopes(count))
        began = time.monotonic()
        await floor.ship(sender, receiver, count)
        return count / (time.monotonic() - began)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
