"""A busy service with its console, for browsers: it handles, fails, is latched, paused, and carries markup everywhere.

It runs in a thread with an event loop of its own, because the tests that drive a browser are not async.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, Final

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.routing import Mount

from durable import Bus, Retry, message
from durable.console import Person, Role, console_app
from durable.storage import actions, circuits
from durable.storage.circuits import CircuitKind
from durable.testing import eventually
from tests.support.tables import Tables

TOKEN: Final = "a token for the browser"
MARKUP: Final = "<script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"
LONG: Final = f"\u202e{'W' * 300}"
"""Text that turns around all that follows it, and a word that is wider than a window."""
_FEW: Final = 40


@message("parcels.order-placed")
class OrderPlaced(msgspec.Struct):
    order_id: int
    note: str = ""


@message("parcels.payment-due")
class PaymentDue(msgspec.Struct):
    order_id: int


@message("parcels.report")
class Report(msgspec.Struct):
    day: str


@dataclass
class Shop:
    """A console that is served, and the tables behind it."""

    address: str
    tables: Tables
    bus: Bus
    loop: asyncio.AbstractEventLoop

    def call(self, work: Any) -> Any:
        """Run a coroutine in the loop of the service."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(60)


def make_bus(url: str) -> Bus:
    bus = Bus("shop", url, poll_interval="100ms")
    bus.route(PaymentDue, to="tcp://127.0.0.1:1")

    @bus.handles(OrderPlaced, retry=Retry(immediate=1, delays=[]), concurrency=4)
    async def place_order(order: OrderPlaced) -> None:
        if order.order_id % 10 == 0:
            raise LookupError(f"no such article in order {order.order_id}: {order.note}")
        if order.order_id % 15 == 7:
            raise ValueError(f"the price of order {order.order_id} is negative")

    @bus.handles(Report)
    async def write_report(report: Report) -> None: ...

    bus.every("0 3 * * *", lambda: Report("today"), name="nightly report")
    return bus


@contextmanager
def served(tables: Tables, *, note: str = MARKUP + LONG, reason: str = f"new prices {MARKUP} {LONG}") -> Iterator[Shop]:
    """Serve the console of a shop, with a node that runs, for a block; with these texts in its data."""
    loop, started, stopping = asyncio.new_event_loop(), threading.Event(), asyncio.Event()
    found: list[Shop | BaseException] = []

    async def run() -> None:
        try:
            bus = make_bus(tables.url)
            async with bus:
                await _fill(bus, tables, note, reason)
                app = Starlette(routes=[Mount("/console", console_app(bus, tokens={TOKEN: Person("ada", Role.ADMIN)}))])
                server = uvicorn.Server(uvicorn.Config(app, port=0, log_config=None, lifespan="off"))
                server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
                serving = asyncio.create_task(server._serve())  # the signals belong to pytest
                await eventually(lambda: server.started, within=60, what="the console serves")
                port = server.servers[0].sockets[0].getsockname()[1]
                found.append(Shop(f"http://127.0.0.1:{port}", tables, bus, loop))
                started.set()
                await stopping.wait()
                server.should_exit = server.force_exit = True
                await serving
        except BaseException as error:
            found.append(error)
            started.set()
            raise

    thread = threading.Thread(target=lambda: loop.run_until_complete(run()), name="shop", daemon=True)
    thread.start()
    started.wait(300)
    if not found or isinstance(found[0], BaseException):
        raise AssertionError(f"the shop did not start: {found}")
    try:
        yield found[0]
    finally:
        loop.call_soon_threadsafe(stopping.set)
        thread.join(60)
        loop.close()


async def _fill(bus: Bus, tables: Tables, note: str, reason: str) -> None:
    async with bus.unit_of_work() as uow:
        for number in range(_FEW):
            uow.send(OrderPlaced(number, note=note), headers={"trace": note})
        uow.send(PaymentDue(1))
        uow.send(Report("tomorrow"), delay=timedelta(hours=20))
        uow.send(OrderPlaced(3), delay=timedelta(hours=2))
    database = bus.runtime.database
    paused: dict[str, Any] = {
        "reason": reason,
        "actor": "console: olga",
        "duration": timedelta(hours=3),
    }
    await database.transaction(actions.pause, [(CircuitKind.HANDLER, "parcels.report")], **paused)
    await database.transaction(actions.pause, [(CircuitKind.KEY, "tenant-7")], **paused)
    await database.transaction(actions.pause, [(CircuitKind.KEY, reason)], **paused)
    stop = partial(circuits.open_circuit, reason=reason, actor="node 1")
    await database.transaction(stop, CircuitKind.HANDLER, f"parcels.{'w' * 150}")
    await eventually(lambda: tables.count("dead_letters") == 7, within=120, what="orders have failed")
    latched = "SELECT count(*)::int FROM durable.circuits WHERE kind = 'destination'"
    await eventually(lambda: tables.one(latched) == 1, within=120, what="the destination is latched")
