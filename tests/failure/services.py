"""Starting and stopping the processes of a test, and what to say when one does not do what it should."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from multiprocessing.process import BaseProcess
from pathlib import Path

from durable.failpoints import EXIT_STATUS
from tests.failure.app import Service, Work
from tests.failure.books import Books, open_books, read_books
from tests.failure.waiting import eventually
from tests.support.broker import foreign

_PROCESSES = multiprocessing.get_context("forkserver")
_PROCESSES.set_forkserver_preload(
    ["pytest", "tests.failure.app", "durable.transports.http.transport", "durable.transports.rabbitmq.transport"]
)


@dataclass(frozen=True)
class Way:
    """How envelopes travel between the two: to which address, with which settings, and through which queue if any."""

    uri: str
    settings: dict[str, str] = field(default_factory=dict)
    broker: str = ""
    queue: str = ""

    async def queued(self) -> int:
        """Envelopes that the broker has, and that nobody holds; none without a broker."""
        if not self.broker:
            return 0
        async with foreign(self.broker) as client:
            return await client.count(self.queue)

    async def has_consumer(self) -> bool:
        """Does a listener consume the queue?"""
        async with foreign(self.broker) as client:
            return await client.exists(self.queue) and await client.consumers(self.queue) > 0


class Running:
    """A started process."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self._process: BaseProcess = _PROCESSES.Process(target=service.run, name=service.name, daemon=True)
        self._process.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def exit_status(self, *, within: float) -> int:
        """Wait until it has ended; a signal that ended it is negative."""
        self._process.join(within)
        status = self._process.exitcode
        assert status is not None, f"{self._name()} still runs after {within:g} seconds\n{self.output()}"
        return status

    def crashes_at_its_failpoint(self, within: float = 20.0) -> None:
        status = self.exit_status(within=within)
        assert status == EXIT_STATUS, (
            f"{self._name()} ended with {status}, not at {self.service.failpoint}\n{self.output()}"
        )

    def kill(self) -> None:
        self._process.kill()
        self._process.join()

    def stop(self, within: float = 20.0) -> None:
        """As an operator stops it; it must drain and end well."""
        self.signal(signal.SIGTERM)
        status = self.exit_status(within=within)
        assert status == 0, f"{self._name()} ended with {status} after SIGTERM\n{self.output()}"

    def output(self) -> str:
        """The last of what this service has logged."""
        return self.service.log.read_text()[-4000:] if self.service.log.exists() else ""

    def is_running(self) -> bool:
        return self._process.is_alive()

    def _name(self) -> str:
        return f"{self.service.name} (process {self.pid})"


class Pair:
    """An `orders` and a `billing` service with a database each, and whatever of their processes runs."""

    def __init__(self, orders_database: str, billing_database: str, folder: Path, way: Way) -> None:
        open_books(orders_database, billing_database)
        self.way = way
        self.orders = Service("orders", orders_database, folder / "orders.log", way.uri, settings=way.settings)
        self.billing = Service("billing", billing_database, folder / "billing.log", way.uri, settings=way.settings)
        self.processes: list[Running] = []

    def start(self, service: Service, *, failpoint: str = "", work: Work | None = None) -> Running:
        process = Running(replace(service, failpoint=failpoint, work=work))
        self.processes.append(process)
        return process

    def billing_without_listener(self) -> Service:
        """A second node of `billing`, which handles what the first has received."""
        return replace(self.billing, uri="")

    def books(self) -> Books:
        return read_books(self.orders.database, self.billing.database)

    async def settle(self, work: Sequence[Work], *, may_be_missing: Work | None = None, within: float = 30.0) -> None:
        """Wait until this work is committed and nothing waits any more, and dead nodes are struck off."""
        expected = set().union(*(each.committed() for each in work))
        optional = may_be_missing.committed() if may_be_missing else set()

        def settled() -> bool:
            books = self.books()
            missing = expected - set(books.sent.values())
            alive = sorted(process.pid for process in self.processes if process.is_running())
            assert not missing, f"orders {sorted(missing)} were never committed{self.output()}"
            assert not books.violations(), "\n".join([*books.violations(), self.output()])
            assert sorted(books.nodes) == alive, f"nodes of {books.nodes}, but {alive} are running{self.output()}"
            return True

        await eventually(settled, within=within)
        strangers = set(self.books().sent.values()) - expected - optional
        assert not strangers, f"orders {sorted(strangers)} were committed though they were rolled back"

    def stop(self) -> None:
        """Stop everything in good order and check what must be true then."""
        running = [process for process in self.processes if process.is_running()]
        for process in running:
            process.stop()
        broken = self.books().violations_after_shutdown()
        assert not broken, "\n".join([*broken, self.output()])

    def kill(self) -> None:
        for process in self.processes:
            process.kill()

    def output(self) -> str:
        logs = {process.service.log: process for process in self.processes}
        return "".join(f"\n--- {log.name}\n{process.output()}" for log, process in logs.items())


@contextmanager
def pair_of_services(orders_database: str, billing_database: str, folder: Path, way: Way) -> Iterator[Pair]:
    pair = Pair(orders_database, billing_database, folder, way)
    try:
        yield pair
    finally:
        pair.kill()
