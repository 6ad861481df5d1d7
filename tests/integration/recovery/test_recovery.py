"""Recovery with real nodes on a real Postgres: membership, takeovers, schedules, expiry, circuits."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest
from psycopg import sql
from sqlalchemy import Connection

from durable import Bus
from durable.calls.singletons import Singletons
from durable.clock import SystemClock
from durable.embedded.ports import free_port
from durable.envelope import ANY_NODE, NodeId
from durable.recovery.dormant_nodes import DormantNodes
from durable.recovery.forgotten_rows import Forgotten
from durable.recovery.former_memberships import Memberships
from durable.recovery.membership import Membership
from durable.settings import load_settings
from durable.storage import leases, nodes
from durable.storage.locks import Job, nodes_class, try_lock
from durable.storage.sql import housekeeping
from durable.storage.sql.recovery import INCOMING
from durable.storage.sql.statement import Statement
from durable.telemetry import Event
from durable.transports.memory import MemoryTransport
from tests.failure import leftovers
from tests.failure.app import ADD_ORDER, OrderPlaced
from tests.failure.books import open_books, read_books, waits_for_a_lock
from tests.failure.leftovers import SCHEMA
from tests.failure.waiting import eventually
from tests.failure.workbench import QUICK, Clerk, Workbench

PEER = "memory://billing"
NEVER = timedelta(minutes=5)


@pytest.fixture
def shop(database_url: str) -> str:
    """One database that is the sender's and the receiver's."""
    open_books(database_url)
    return database_url


def make_bus(database: str, clerk: Clerk | None = None, **options: Any) -> Bus:
    """A node of `billing`; with a clerk it handles orders."""
    concurrency = options.pop("concurrency", None)
    bus = Bus("billing", database, **{**QUICK, **options})
    if clerk is not None:
        bus.handles(OrderPlaced, concurrency=concurrency)(clerk.handle)
    return bus


async def place(bus: Bus, order_id: int, **options: Any) -> None:
    async with bus.unit_of_work() as uow:
        envelope_id = uow.send(OrderPlaced(order_id), **options)
        await uow.session.execute(ADD_ORDER, {"order_id": order_id, "envelope_id": envelope_id})


def all_handled(database: str) -> bool:
    books = read_books(database)
    assert not books.violations()
    return True


def registered(database: str) -> dict[NodeId, timedelta]:
    """The registered nodes and the age of their heartbeats."""
    with leftovers.transaction(database) as conn:
        return {node.node_id: node.heartbeat_age for node in nodes.read(conn, SCHEMA)}


def locked(database: str) -> set[NodeId]:
    with leftovers.transaction(database) as conn:
        return nodes.locked(conn, SCHEMA)


def cut_membership(database: str) -> None:
    """End the nodes' own connections, as a failover would."""
    with psycopg.connect(database, autocommit=True) as conn:
        conn.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE application_name LIKE 'durable % node' AND datname = current_database()"
        )


# ---------------------------------------------------------------- membership


@asynccontextmanager
async def member(database: str, **options: Any) -> AsyncIterator[Membership]:
    settings = load_settings(database_url=database, **{**QUICK, **options})
    membership = Membership(
        "billing",
        settings,
        handlers={"a.b": "a.b"},
        wake=lambda new: None,
        singletons=Singletons(),
        registry_changed=lambda: None,
    )
    await membership.join()
    ticking = asyncio.create_task(membership.tick())
    try:
        yield membership
    finally:
        ticking.cancel()
        await membership.leave()


async def test_member_is_registered_and_holds_its_lock_until_leaving(database_url: str) -> None:
    async with member(database_url) as first, member(database_url) as second:
        assert second.node > first.node
        assert registered(database_url).keys() == locked(database_url) == {first.node, second.node}
    assert registered(database_url).keys() == locked(database_url) == set()


async def test_member_updates_its_heartbeat(database_url: str) -> None:
    def beats() -> datetime:
        with psycopg.connect(database_url) as conn:
            row = conn.execute("SELECT heartbeat_at FROM durable.nodes").fetchone()
        assert row is not None
        beat: datetime = row[0]
        return beat

    async with member(database_url):
        first = beats()
        await eventually(lambda: beats() > first)
        second = beats()
        await eventually(lambda: beats() > second)


async def test_member_notices_a_cut_connection_before_its_next_heartbeat(database_url: str) -> None:
    async with member(database_url, heartbeat_interval=NEVER, heartbeat_stale=3 * NEVER) as membership:
        cut_membership(database_url)
        async with asyncio.timeout(30):
            await membership.lost.wait()
        await eventually(lambda: not locked(database_url))


async def test_unregistered_member_notices_with_its_next_heartbeat(database_url: str) -> None:
    async with member(database_url) as membership:
        with leftovers.transaction(database_url) as conn:
            nodes.remove(conn, SCHEMA, membership.node)
        async with asyncio.timeout(30):
            await membership.lost.wait()


async def test_member_without_its_lock_notices_with_its_next_heartbeat(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only its own session can give the lock back, as a pooler that resets sessions does."""
    async with member(database_url) as membership:
        unlocking = " AND pg_advisory_unlock_all() IS NOT NULL RETURNING"
        beat = Statement(housekeeping.HEARTBEAT._sql.replace(" RETURNING", unlocking))
        monkeypatch.setattr(housekeeping, "HEARTBEAT", beat)
        async with asyncio.timeout(30):
            await membership.lost.wait()


async def test_node_without_membership_joins_again_under_a_new_id(shop: str) -> None:
    bus = make_bus(shop, Clerk(NodeId(0)))
    async with bus:
        before = bus.runtime.node_id
        cut_membership(shop)
        await eventually(lambda: bus.runtime.node_id not in (before, ANY_NODE))

        assert bus.runtime.node_id > before
        await eventually(lambda: registered(shop).keys() == {bus.runtime.node_id})
        await place(bus, 1)
        await eventually(lambda: all_handled(shop))


async def test_message_held_by_a_lost_node_is_handled_after_the_rejoining(shop: str) -> None:
    clerk = Clerk(NodeId(0), held=True)
    bus = make_bus(shop, clerk)
    async with bus:
        await place(bus, 1)
        await clerk.begun.wait()
        cut_membership(shop)
        await eventually(lambda: bus.runtime.node_id == ANY_NODE)
        clerk.go_on()

        await eventually(lambda: all_handled(shop))


async def test_node_joins_again_at_once_with_a_batch_under_way(make_database: Callable[[str], str]) -> None:
    """Nothing waits for drain_timeout: what was being stored is stored, or is sent again."""
    ours, theirs = make_database("orders"), make_database("billing")
    open_books(ours, theirs)
    uri = f"tcp://127.0.0.1:{free_port()}"
    orders = Bus("orders", ours, **QUICK)
    orders.route(OrderPlaced, to=uri)
    billing = make_bus(theirs, Clerk(NodeId(0)), drain_timeout=timedelta(seconds=40))
    billing.listen(uri)
    async with billing, orders:
        before = billing.runtime.node_id
        with psycopg.connect(theirs) as conn:
            # In a thread: it waits for what the agents do in this loop.
            await asyncio.to_thread(conn.execute, "LOCK TABLE durable.received_ids")
            await place(orders, 1)
            await eventually(lambda: waits_for_a_lock(theirs))
            cut_membership(theirs)
            await eventually(lambda: billing.runtime.node_id not in (before, ANY_NODE))
        await eventually(lambda: not read_books(ours, theirs).violations())


async def test_former_memberships_are_bounded_and_taken_back_together(
    shop: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The rows of the oldest ids are left to the sweep."""
    caplog.set_level("INFO")
    memberships = Memberships()
    former = [leftovers.dead_node(shop) for _ in range(103)]
    for node in former:
        memberships.owns(node)
    memberships.died(former[-1])
    memberships.died(NodeId(77_777))  # it never owned anything
    orders = iter(range(2_000))
    for node, count in ((former[0], 3), (former[3], 990), (former[-1], 20)):
        received = [leftovers.envelope(next(orders)) for _ in range(count)]
        leftovers.received_orders(shop, shop, received, node)
    async with Workbench(shop) as bench:
        await memberships.take_back(bench.database, bench.counters)
        await memberships.take_back(bench.database, bench.counters)
    with psycopg.connect(shop) as conn:
        owned = conn.execute("SELECT owner_id, count(*) FROM durable.incoming_envelopes GROUP BY 1 ORDER BY 1")
        assert owned.fetchall() == [(ANY_NODE, 1_010), (former[0], 3)]
    assert registered(shop).keys() == set(former[:3])
    assert bench.counters[Event.RECOVERED] == 1_010
    assert sum("took back" in record.getMessage() for record in caplog.records) == 1


# ---------------------------------------------------------------- dormant nodes


async def test_work_of_a_dead_node_is_taken_over_and_its_registration_removed(shop: str) -> None:
    dead = leftovers.dead_node(shop)
    leftovers.received_orders(shop, shop, [leftovers.envelope(order_id) for order_id in range(5)], dead)
    leftovers.unsent_orders(shop, range(5, 10), PEER, dead)
    memory = MemoryTransport(load_settings(database_url=shop))
    bus = make_bus(shop, Clerk(NodeId(0)), transports=[memory])
    bus.listen(PEER)

    async with bus:
        await eventually(lambda: all_handled(shop))
        assert registered(shop).keys() == {bus.runtime.node_id}
        await eventually(lambda: bus.runtime.counters[Event.RECOVERED] == 10)  # counted just after the commit
    assert not read_books(shop).violations_after_shutdown()


async def test_node_with_an_old_heartbeat_is_dormant_despite_its_lock(shop: str) -> None:
    paused = leftovers.dead_node(shop)
    leftovers.received_orders(shop, shop, [leftovers.envelope(1)], paused)
    with psycopg.connect(shop, autocommit=True) as conn:
        conn.execute("SELECT pg_advisory_lock(%s, %s)", (nodes_class(SCHEMA), paused))
        conn.execute("UPDATE durable.nodes SET heartbeat_at = now() - interval '1 hour'")

        async with make_bus(shop, Clerk(NodeId(0))):
            await eventually(lambda: all_handled(shop))
            assert paused not in registered(shop)


async def test_clock_of_the_database_set_back_is_told_once(
    shop: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ahead = timedelta(hours=1)
    read = nodes.server_times

    def read_ahead(conn: Connection, schema: str) -> nodes.ServerTimes:
        times = read(conn, schema)
        return times._replace(now=times.now + ahead)

    monkeypatch.setattr(nodes, "server_times", read_ahead)
    async with Workbench(shop) as bench:
        sweeper = DormantNodes(bench.context())
        await sweeper.sweep()
        ahead = timedelta(0)
        for _ in range(3):
            await sweeper.sweep()
    told = [record.getMessage() for record in caplog.records if "clock" in record.getMessage()]
    assert told == [
        "the database's clock was set back by 3600 s: delayed messages, retries and schedules wait for as long"
    ]


async def test_living_node_keeps_its_work(shop: str) -> None:
    async with member(shop) as membership, Workbench(shop) as bench:
        leftovers.received_orders(shop, shop, [leftovers.envelope(1)], membership.node)
        sweeper = DormantNodes(bench.context())
        until = asyncio.get_running_loop().time() + 3 * bench.settings.dormant_grace.total_seconds()
        while asyncio.get_running_loop().time() < until:
            assert await sweeper.sweep() == 0

        assert [row.owner_id for row in read_books(shop).pending] == [membership.node]
        assert membership.node in registered(shop)


async def test_sweep_runs_on_one_node_at_a_time(shop: str) -> None:
    dead = leftovers.dead_node(shop)
    leftovers.received_orders(shop, shop, [leftovers.envelope(1)], dead)
    async with Workbench(shop, dormant_grace=timedelta(microseconds=1)) as bench:
        sweeper = DormantNodes(bench.context())
        with leftovers.transaction(shop) as conn:
            assert try_lock(conn, SCHEMA, Job.SWEEP)
            assert [await sweeper.sweep() for _ in range(3)] == [0, 0, 0]
        await eventually(sweeper.sweep)


# ---------------------------------------------------------------- forgotten


async def test_rows_owned_by_a_node_and_unknown_there_are_released_and_handled(shop: str) -> None:
    bus = make_bus(shop, Clerk(NodeId(0)))
    async with bus:
        leftovers.received_orders(shop, shop, [leftovers.envelope(1)], bus.runtime.node_id)

        await eventually(lambda: all_handled(shop))
        await eventually(lambda: bus.runtime.counters[Event.FORGOTTEN] == 1)  # counted just after the commit


@pytest.mark.parametrize("is_held_after", [True, False], ids=["came meanwhile", "ended meanwhile"])
async def test_row_coming_or_ending_during_the_look_is_not_forgotten(
    shop: str, monkeypatch: pytest.MonkeyPatch, is_held_after: bool
) -> None:
    """The agent is asked what it holds before the rows are read, and after it."""
    has_read, read = False, leases.owned_by

    def reading(*args: Any) -> Any:
        nonlocal has_read
        has_read = True
        return read(*args)

    async with Workbench(shop) as bench:
        leftovers.received_orders(shop, shop, [leftovers.envelope(1)], NodeId(7))
        (lease,) = await bench.database.transaction(leases.owned_by, INCOMING, NodeId(7))
        monkeypatch.setattr(leases, "owned_by", reading)
        forgotten = Forgotten(
            bench.context(NodeId(7)), INCOMING, lambda: {lease} if has_read is is_held_after else set()
        )
        for _ in range(4):
            has_read = False
            assert await forgotten.poll() == 0


# ---------------------------------------------------------------- time


@pytest.mark.parametrize("skew", [timedelta(hours=-1), timedelta(hours=1)], ids=["slow clock", "fast clock"])
async def test_clock_of_the_database_decides_when_messages_are_due(
    shop: str, monkeypatch: pytest.MonkeyPatch, skew: timedelta
) -> None:
    monkeypatch.setattr(SystemClock, "now", lambda self: datetime.now(UTC) + skew)
    leftovers.received_orders(shop, shop, [leftovers.envelope(1)])
    due = set_time(shop, "execution_time", "0.5 seconds")

    async with make_bus(shop, Clerk(NodeId(0))):
        await eventually(lambda: all_handled(shop))
    with psycopg.connect(shop) as conn:
        row = conn.execute("SELECT finished_at FROM durable.envelope_history").fetchone()
    assert row is not None
    assert due < row[0] < due + timedelta(minutes=1)


def set_time(database: str, column: str, after: str) -> datetime:
    with psycopg.connect(database) as conn:
        change = "UPDATE durable.incoming_envelopes SET {0} = clock_timestamp() + CAST(%s AS interval) RETURNING {0}"
        row = conn.execute(sql.SQL(change).format(sql.Identifier(column)), (after,)).fetchone()
    assert row is not None
    moment: datetime = row[0]
    return moment


async def test_a_delayed_message_is_handled_after_its_delay_and_not_before(shop: str) -> None:
    async with make_bus(shop, Clerk(NodeId(0))) as bus:
        sent = datetime.now(UTC)
        await place(bus, 1, delay=0.5)
        await eventually(lambda: all_handled(shop))

        assert datetime.now(UTC) - sent >= timedelta(seconds=0.5)
        await eventually(lambda: bus.runtime.counters[Event.PROMOTED] == 1)  # counted just after the commit


async def test_message_expires_during_its_wait_for_an_owner(shop: str) -> None:
    leftovers.received_orders(shop, shop, [leftovers.envelope(1)])
    set_time(shop, "deliver_by", "-1 second")

    async with make_bus(shop, Clerk(NodeId(0))) as bus:
        await eventually(lambda: all_handled(shop))
        await eventually(lambda: bus.runtime.counters[Event.EXPIRED] == 1)  # counted just after the commit
    assert len(read_books(shop).finished("incoming", "expired")) == 1
    assert not read_books(shop).effects


async def test_a_message_expires_while_its_destination_is_latched(shop: str) -> None:
    memory = MemoryTransport(load_settings(database_url=shop))  # nobody listens
    async with make_bus(shop, transports=[memory]) as bus:
        await place(bus, 1, to=PEER)
        await eventually(lambda: is_latched(shop))
        await place(bus, 2, to=PEER, deliver_by=0.3)

        await eventually(lambda: len(read_books(shop).finished("outgoing", "expired")) == 1)
        waiting = [read_books(shop).sent[row.id] for row in read_books(shop).waiting("outgoing")]
        assert waiting == [1]


async def test_message_expiring_behind_a_slow_one_is_not_handled(shop: str) -> None:
    clerk = Clerk(NodeId(0), held=True)
    async with make_bus(shop, clerk, concurrency=1) as bus:
        await place(bus, 1)
        await clerk.begun.wait()
        await place(bus, 2, deliver_by=0.2)
        await eventually(lambda: has_passed(shop, 2))
        clerk.go_on()

        await eventually(lambda: all_handled(shop))
    books = read_books(shop)
    assert [books.sent[key] for key in books.effects] == [1]
    assert [books.sent[key] for key in books.finished("incoming", "expired")] == [2]


def has_passed(database: str, order_id: int) -> bool:
    with psycopg.connect(database) as conn:
        row = conn.execute(
            "SELECT deliver_by < clock_timestamp() FROM durable.incoming_envelopes JOIN orders ON id = envelope_id "
            "WHERE order_id = %s",
            (order_id,),
        ).fetchone()
    return row is not None and bool(row[0])


# ---------------------------------------------------------------- claims and wake-ups


async def test_two_nodes_share_a_backlog_and_no_message_is_claimed_twice(shop: str) -> None:
    leftovers.received_orders(shop, shop, [leftovers.envelope(order_id) for order_id in range(200)])
    clerks = [Clerk(NodeId(1), held=True), Clerk(NodeId(2), held=True)]
    first, second = (make_bus(shop, clerk, buffer_size=100, concurrency=2) for clerk in clerks)

    async with first, second:
        await eventually(lambda: all(row.owner_id for row in read_books(shop).pending))
        rows = read_books(shop).pending
        owners = [row.owner_id for row in rows]
        assert {row.epoch for row in rows} == {1}, "each row was claimed once"
        assert owners.count(first.runtime.node_id) == owners.count(second.runtime.node_id) == 100
        for clerk in clerks:
            clerk.go_on()
        await eventually(lambda: all_handled(shop), within=60)
    with psycopg.connect(shop) as conn:
        assert conn.execute("SELECT count(*) FROM effects GROUP BY process").fetchall() == [(100,), (100,)]


async def test_commit_in_another_process_wakes_the_nodes_before_their_next_poll(
    make_database: Callable[[str], str],
) -> None:
    """Both for messages that are handled here and for those that are sent on."""
    here, there = make_database("here"), make_database("there")
    open_books(here, there)
    memory = MemoryTransport(load_settings(database_url=here))
    peer = make_bus(there, Clerk(NodeId(1)), transports=[memory], poll_interval=NEVER)
    peer.listen(PEER)
    full = make_bus(here, Clerk(NodeId(2)), transports=[memory], poll_interval=NEVER)
    web = Bus("billing", here, mode="send-only", transports=[memory], **QUICK)
    web.handles(OrderPlaced)(Clerk(NodeId(3)).handle)

    async with peer, full, web:
        await place(web, 1)
        await place(web, 2, to=PEER)

        await eventually(lambda: not read_books(here, there).violations())
    assert read_books(here).effects.total() == read_books(there).effects.total() == 1


@pytest.mark.parametrize("sizes", [(10, 25), (100, 25)], ids=["batches fit in", "a batch is larger than the buffer"])
async def test_node_with_room_again_claims_the_rest_without_polling(shop: str, sizes: tuple[int, int]) -> None:
    leftovers.received_orders(shop, shop, [leftovers.envelope(order_id) for order_id in range(100)])
    leftovers.unsent_orders(shop, range(100, 200), PEER, ANY_NODE)
    memory = MemoryTransport(load_settings(database_url=shop))
    bus = make_bus(
        shop, Clerk(NodeId(0)), transports=[memory], poll_interval=NEVER, batch_size=sizes[0], buffer_size=sizes[1]
    )
    bus.listen(PEER)

    async with bus:
        await eventually(lambda: all_handled(shop), within=30)


# ---------------------------------------------------------------- circuits


def is_latched(database: str) -> bool:
    with psycopg.connect(database) as conn:
        return conn.execute("SELECT 1 FROM durable.circuits WHERE key = %s", (PEER,)).fetchone() is not None


async def test_latch_is_a_row_obeyed_by_every_node_until_a_ping_is_answered(
    make_database: Callable[[str], str],
) -> None:
    orders, billing = make_database("orders"), make_database("billing")
    open_books(orders, billing)
    memory = MemoryTransport(load_settings(database_url=orders))
    receiver = make_bus(billing, Clerk(NodeId(0)), transports=[memory])
    receiver.listen(PEER)
    first, second = (Bus("orders", orders, transports=[memory], **QUICK) for _ in range(2))
    for bus in (first, second):
        bus.route(OrderPlaced, to=PEER)

    async with first, second:
        await place(first, 1)
        await eventually(lambda: is_latched(orders))
        await eventually(lambda: latched_in(second))
        assert second.runtime.counters[Event.SEND_FAILED] == 0, "it has heard of the latch, not tried for itself"
        await place(second, 2)
        await eventually(lambda: all(row.owner_id == ANY_NODE for row in read_books(orders).pending))

        async with receiver:
            await eventually(lambda: not is_latched(orders))
            await eventually(lambda: not read_books(orders, billing).violations())
            await eventually(lambda: not latched_in(first) and not latched_in(second))


def latched_in(bus: Bus) -> bool:
    assert bus.runtime.node is not None
    return bus.runtime.node.agents.senders[PEER].circuit.latched


@pytest.mark.parametrize("declared", [True, False], ids=["declared", "undeclared"])
async def test_the_latch_of_a_dead_node_is_cleared_by_another(
    make_database: Callable[[str], str], declared: bool
) -> None:
    orders, billing = make_database("orders"), make_database("billing")
    open_books(orders, billing)
    with psycopg.connect(orders) as conn:
        conn.execute(
            "INSERT INTO durable.circuits (kind, key, reason, actor, probing)"
            " VALUES ('destination', %s, 'gone', 'node 99', true)",
            (PEER,),
        )
    leftovers.unsent_orders(orders, [1], PEER, ANY_NODE)
    memory = MemoryTransport(load_settings(database_url=orders))
    receiver = make_bus(billing, Clerk(NodeId(0)), transports=[memory])
    receiver.listen(PEER)
    sender = Bus("orders", orders, transports=[memory], **QUICK)
    if declared:
        sender.route(OrderPlaced, to=PEER)

    async with receiver, sender:
        await eventually(lambda: not is_latched(orders))
        await eventually(lambda: not read_books(orders, billing).violations())
