"""Servers, networks and processes that fail in the middle of traffic."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import psycopg
import pytest
from sqlalchemy import event, make_url
from sqlalchemy.ext.asyncio import AsyncEngine

from durable import Bus, Retry
from durable.embedded import Embedded
from durable.envelope import NodeId
from durable.settings import load_settings
from durable.storage import migrator
from durable.storage.engines import is_in_autocommit
from durable.telemetry import Event
from durable.transports.memory import MemoryTransport
from tests.failure.app import ADD_ORDER, OrderPlaced, Work
from tests.failure.books import Books, open_books, read_books
from tests.failure.services import Pair
from tests.failure.waiting import eventually
from tests.failure.workbench import QUICK, Clerk
from tests.support.proxy import DOWN, ChaosProxy
from tests.support.servers import EMBEDDED, address_of, own_postgres

PEER = "memory://billing"
ONE = Work(transactions=1, rolled_back=())
MANY = Work(transactions=12)
AFTER = Work(transactions=1, first_order=101, rolled_back=())


async def place(bus: Bus, order_id: int) -> None:
    async with bus.unit_of_work() as uow:
        envelope_id = uow.send(OrderPlaced(order_id))
        await uow.session.execute(ADD_ORDER, {"order_id": order_id, "envelope_id": envelope_id})


# ---------------------------------------------------------------- COMMITs whose reply is lost


class Commit(NamedTuple):
    """The statement by which it is known, what has happened when it has, and how its loss is seen in the end."""

    marker: str
    has_happened: Callable[[Books], bool]
    seen_as: Event


COMMITS = {
    "of the unit of work": Commit("outgoing_envelopes (destination", lambda books: bool(books.sent), Event.FORGOTTEN),
    "of the inbox": Commit(
        "WITH received AS MATERIALIZED", lambda books: bool(books.waiting("incoming")), Event.FORGOTTEN
    ),
    "of the handler": Commit("WITH handled AS", lambda books: bool(books.effects), Event.LEASE_LOST),
    "of the delete": Commit(
        "WITH sent AS (\n    DELETE", lambda books: not books.waiting("outgoing"), Event.LEASE_LOST
    ),
}


_KNOWS = "knows the statement"


CUT_IN_TIME: dict[str, Any] = QUICK | {"forgotten_after": timedelta(seconds=3)}
"""What a lost reply leaves is found after the cut: before it the reply of the search, too, would be swallowed."""


class LostReply:
    """Swallows the reply to the first COMMIT after a certain statement, or to that statement when it commits by itself;
    when it has happened, cuts the connection.

    A statement that commits by itself is swallowed on a connection that has run it before: on another one the driver
    asks for its description first, and without that reply it would never run.
    """

    def __init__(self, proxy: ChaosProxy, marker: str, has_happened: Callable[[], bool]) -> None:
        self._proxy = proxy
        self._marker = marker
        self._has_happened = has_happened
        self._cutting: asyncio.Task[None] | None = None
        self._marked: Any = None

    def watch(self, engine: AsyncEngine) -> None:
        event.listen(engine.sync_engine, "before_cursor_execute", self._execute)
        event.listen(engine.sync_engine, "after_cursor_execute", self._executed)
        event.listen(engine.sync_engine, "commit", self._commit)

    @property
    def has_begun(self) -> bool:
        return self._cutting is not None

    @property
    def happened(self) -> bool:
        return self._cutting is not None and self._cutting.done()

    def _execute(self, conn: Any, cursor: Any, statement: str, *rest: Any) -> None:
        if self._marker in statement and self._cutting is None:
            self._marked = conn
            if is_in_autocommit(conn) and _KNOWS in conn.info:
                self._swallow()

    def _executed(self, conn: Any, cursor: Any, statement: str, *rest: Any) -> None:
        if self._marker in statement:
            conn.info[_KNOWS] = True

    def _commit(self, conn: Any) -> None:
        if conn is self._marked and self._cutting is None and not is_in_autocommit(conn):
            self._swallow()

    def _swallow(self) -> None:
        self._proxy.swallow(DOWN)
        self._cutting = asyncio.get_running_loop().create_task(self._cut(), name="cut after the lost reply")

    async def _cut(self) -> None:
        await eventually(self._has_happened)
        self._proxy.cut()
        self._proxy.restore()


@contextlib.asynccontextmanager
async def proxied(database: str) -> AsyncIterator[tuple[ChaosProxy, str]]:
    """A proxy in front of the database's server, and the URL of the database behind it."""
    url = make_url(database)
    async with ChaosProxy(address_of(database)) as proxy:
        port = int(proxy.uri.rpartition(":")[2])
        behind = url.set(drivername="postgresql+asyncpg", host="127.0.0.1", port=port, query={})
        yield proxy, behind.render_as_string(hide_password=False)


@pytest.mark.parametrize("commit", COMMITS)
async def test_commit_with_a_lost_reply_leads_to_one_effect(make_database: Callable[[str], str], commit: str) -> None:
    orders, billing = make_database("orders"), make_database("billing")
    open_books(orders, billing)
    memory = MemoryTransport(load_settings(database_url=orders, **CUT_IN_TIME))
    async with proxied(orders) as (orders_proxy, orders_url), proxied(billing) as (billing_proxy, billing_url):
        sender = Bus("orders", orders_url, lock_database_url=orders, transports=[memory], **CUT_IN_TIME)
        sender.route(OrderPlaced, to=PEER)
        receiver = Bus("billing", billing_url, lock_database_url=billing, transports=[memory], **CUT_IN_TIME)
        receiver.listen(PEER)
        receiver.handles(OrderPlaced, retry=Retry(immediate=1))(Clerk(NodeId(0)).handle)
        here = sender if commit in ("of the unit of work", "of the delete") else receiver
        marker, has_happened, seen_as = COMMITS[commit]
        lost = LostReply(
            orders_proxy if here is sender else billing_proxy,
            marker,
            lambda: has_happened(read_books(orders, billing)),
        )

        async with receiver, sender:
            lost.watch(here.runtime.database.engine)
            lost.watch(here.runtime.sessions.engine)
            placed = 0
            while not lost.has_begun:
                placed += 1
                with (
                    pytest.raises(Exception, match="connection")
                    if commit == "of the unit of work"
                    else contextlib.nullcontext()
                ):
                    await place(sender, placed)
                await eventually(partial(begun_or_handled, lost, orders, billing, placed), within=60)
            await eventually(lambda: lost.happened)
            await eventually(lambda: handled_once(orders, billing, placed), within=60)

            await eventually(lambda: here.runtime.counters[seen_as] == 1, within=60)
    assert not read_books(orders, billing).violations_after_shutdown()


def begun_or_handled(lost: LostReply, orders: str, billing: str, placed: int) -> bool:
    return lost.has_begun or bool(handled_once(orders, billing, placed))


def handled_once(orders: str, billing: str, placed: int) -> Books:
    """None lost, none twice, none that waits: there are as many effects as orders."""
    books = read_books(orders, billing)
    assert not books.violations()
    assert books.effects.total() == placed
    return books


# ---------------------------------------------------------------- Postgres


@pytest.fixture
def own_server() -> Iterator[Embedded]:
    with own_postgres(EMBEDDED) as server:
        yield server


async def test_restart_of_postgres_under_traffic_loses_nothing(own_server: Embedded) -> None:
    orders, billing = migrated(own_server, "orders"), migrated(own_server, "billing")
    open_books(orders, billing)
    memory = MemoryTransport(load_settings(database_url=orders, **QUICK))
    sender = Bus("orders", orders, transports=[memory], **QUICK)
    sender.route(OrderPlaced, to=PEER)
    receiver = Bus("billing", billing, transports=[memory], **QUICK)
    receiver.listen(PEER)
    receiver.handles(OrderPlaced)(Clerk(NodeId(0)).handle)
    async with receiver, sender:
        nodes = sender.runtime.node_id, receiver.runtime.node_id
        traffic = asyncio.create_task(keep_placing(sender), name="traffic")
        await eventually(lambda: read_books(billing).effects.total() >= 20)
        await asyncio.to_thread(own_server.restart)
        before = read_books(billing).effects.total()
        await eventually(lambda: read_books(billing).effects.total() >= before + 20, within=30)
        traffic.cancel()
        await asyncio.gather(traffic, return_exceptions=True)

        await eventually(lambda: not read_books(orders, billing).violations(), within=30)
        assert sender.runtime.node_id > nodes[0]
        assert receiver.runtime.node_id > nodes[1]
        await eventually(lambda: len(read_books(orders, billing).nodes) == 2)
    assert not read_books(orders, billing).violations_after_shutdown()


def migrated(server: Embedded, name: str) -> str:
    url = server.url(name)
    migrator.upgrade(url.replace("postgresql://", "postgresql+psycopg://"), "durable")
    return url


async def keep_placing(bus: Bus) -> None:
    """Orders, one after another; what became of one whose commit failed is for the books to say."""
    order_id = 0
    while True:
        order_id += 1
        with contextlib.suppress(Exception):
            await place(bus, order_id)
        await asyncio.sleep(0.005)


# ---------------------------------------------------------------- processes


async def test_message_killing_its_process_becomes_a_dead_letter_and_its_neighbours_are_handled(
    pair: Pair,
) -> None:
    work = Work(transactions=1, rolled_back=(), behaviours={3: "kills"})
    pair.start(pair.orders, work=work)
    keeper = asyncio.create_task(keep_alive(pair), name="restart what dies")
    try:
        await pair.settle([work], within=60)
    finally:
        keeper.cancel()
        await asyncio.gather(keeper, return_exceptions=True)

    books = pair.books()
    assert [books.sent[key] for key in books.dead] == [3]
    assert sorted(books.sent[key] for key in books.effects) == [1, 2, 4, 5]
    pair.stop()


async def keep_alive(pair: Pair) -> None:
    """What an operator's supervisor does with `billing`."""
    while True:
        process = pair.start(pair.billing)
        await eventually(lambda: not process.is_running(), within=60)  # noqa: B023


async def test_paused_and_replaced_node_leaves_no_second_effect(pair: Pair) -> None:
    work = Work(transactions=1, rolled_back=(), behaviours=dict.fromkeys(range(1, 6), "waits"))
    paused = pair.start(pair.billing)
    pair.start(pair.orders, work=work)
    await eventually(lambda: wait_in_the_gate(pair, 5))

    paused.signal(signal.SIGSTOP)
    try:
        pair.start(pair.billing_without_listener())
        await eventually(lambda: wait_in_the_gate(pair, 10), within=30)
        open_gate(pair.billing.database)
        await eventually(lambda: pair.books().effects.total() == 5)
    finally:
        paused.signal(signal.SIGCONT)

    await pair.settle([work])
    pair.stop()


def wait_in_the_gate(pair: Pair, count: int) -> bool:
    """Do so many handlers wait in the middle of their transaction?"""
    with psycopg.connect(pair.billing.database) as conn:
        row = conn.execute(
            "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND xact_start IS NOT NULL "
            "AND query LIKE '%gate%' AND pid <> pg_backend_pid()"
        ).fetchone()
    assert row == (count,), f"{row} wait in the gate{pair.output()}"
    return True


def open_gate(database: str) -> None:
    with psycopg.connect(database) as conn:
        conn.execute("INSERT INTO gate VALUES (true)")


async def test_application_killed_and_started_again_loses_nothing(pair: Pair) -> None:
    pair.start(pair.billing)
    pair.start(pair.orders, work=MANY)
    await eventually(lambda: pair.books().effects.total() >= 5)

    pair.kill()
    pair.start(pair.billing)
    pair.start(pair.orders, work=AFTER)

    await pair.settle([AFTER], may_be_missing=MANY)
    pair.stop()


async def test_service_started_long_after_its_messages_gets_them_all(pair: Pair) -> None:
    pair.start(pair.orders, work=MANY)
    await eventually(lambda: is_latched(pair.orders.database))
    pair.start(pair.billing)

    await pair.settle([MANY])
    pair.stop()


def is_latched(database: str) -> bool:
    with psycopg.connect(database) as conn:
        return conn.execute("SELECT FROM durable.circuits").fetchone() is not None
