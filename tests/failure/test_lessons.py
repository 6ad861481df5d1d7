"""What other messaging libraries have taught, each lesson as a test (the list is at the end of docs/guarantees.md)."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from types import TracebackType
from typing import Any, Self
from uuid import UUID

import psycopg
import pytest
from sqlalchemy import Engine, create_engine, event, make_url, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from durable import Bus, Context, Retry
from durable.envelope import ANY_NODE, Envelope, NodeId
from durable.errors import ConnectionFailed, StorageUnavailable
from durable.outcomes import STORED, Outcome
from durable.recovery.dormant_nodes import DormantNodes
from durable.recovery.policy import DormancyPolicy, NodeFacts
from durable.settings import load_settings
from durable.storage import inbox, maintenance, nodes, outbox
from durable.storage.rows import Letter
from durable.storage.sql import housekeeping
from durable.transports.memory import MemoryTransport
from tests.failure import leftovers
from tests.failure.app import ADD_ORDER, OrderPlaced
from tests.failure.books import count_old_ids, open_books, read_books, waits_for_a_lock
from tests.failure.leftovers import SCHEMA
from tests.failure.waiting import eventually
from tests.failure.workbench import QUICK, Clerk, Workbench

A, B = NodeId(1_001), NodeId(1_002)
PEER = "memory://billing"
NOWHERE = "tcp://127.0.0.1:9"


@pytest.fixture
def shop(database_url: str) -> str:
    """One database that is the sender's and the receiver's."""
    open_books(database_url)
    return database_url


async def place(bus: Bus, order_id: int) -> None:
    async with bus.unit_of_work() as uow:
        envelope_id = uow.send(OrderPlaced(order_id))
        await uow.session.execute(ADD_ORDER, {"order_id": order_id, "envelope_id": envelope_id})


def unsent(database: str) -> int:
    return len(read_books(database).waiting("outgoing"))


def async_engine(database: str) -> AsyncEngine:
    return create_async_engine(make_url(database).set(drivername="postgresql+asyncpg"))


def sync_engine(database: str) -> Engine:
    return create_engine(make_url(database).set(drivername="postgresql+psycopg"))


@contextlib.contextmanager
def statements_of(engine: Engine) -> Iterator[list[str]]:
    """Everything that is executed on this engine meanwhile, with BEGIN, COMMIT and ROLLBACK."""
    seen: list[str] = []

    def executed(conn: Any, cursor: Any, statement: str, *rest: Any) -> None:
        seen.append(statement)

    listeners: list[tuple[str, Callable[..., None]]] = [
        ("before_cursor_execute", executed),
        *((name, lambda conn, name=name: seen.append(name.upper())) for name in ("begin", "commit", "rollback")),
    ]
    for name, listener in listeners:
        event.listen(engine, name, listener)
    try:
        yield seen
    finally:
        for name, listener in listeners:
            event.remove(engine, name, listener)


# ---------------------------------------------------------------- the outbox and its session


async def test_every_commit_of_a_session_sends_not_only_the_first(shop: str) -> None:
    engine = async_engine(shop)
    async with Bus("orders", shop, mode="send-only") as bus, AsyncSession(engine) as session:
        with bus.enlist(session) as outbox:
            for count in (1, 2, 3):
                outbox.send(OrderPlaced(count), to=NOWHERE)
                await session.commit()
                assert unsent(shop) == count
    await engine.dispose()


def test_every_commit_of_a_plain_session_sends_too(shop: str) -> None:
    engine = sync_engine(shop)
    bus = Bus("orders", shop)
    with Session(engine) as session, bus.enlist(session) as outbox:
        outbox.send(OrderPlaced(1), to=NOWHERE)
        session.rollback()
        for count in (1, 2):
            outbox.send(OrderPlaced(count), to=NOWHERE)
            session.commit()
            assert unsent(shop) == count
    engine.dispose()


async def test_a_commit_after_a_rollback_sends_only_its_own(shop: str) -> None:
    engine = async_engine(shop)
    async with Bus("orders", shop, mode="send-only") as bus, AsyncSession(engine) as session:
        with bus.enlist(session) as outbox:
            outbox.send(OrderPlaced(1), to=NOWHERE)
            await session.rollback()
            kept = outbox.send(OrderPlaced(2), to=NOWHERE)
            await session.commit()
    await engine.dispose()

    assert [row.id for row in read_books(shop).pending] == [kept]


@pytest.mark.parametrize("end", ["release", "roll back"])
async def test_messages_of_a_savepoint_share_its_end(shop: str, end: str) -> None:
    engine = async_engine(shop)
    async with Bus("orders", shop, mode="send-only") as bus, AsyncSession(engine) as session:
        with bus.enlist(session) as outbox:
            before = outbox.send(OrderPlaced(1), to=NOWHERE)
            savepoint = await session.begin_nested()
            inside = outbox.send(OrderPlaced(2), to=NOWHERE)
            await (savepoint.commit() if end == "release" else savepoint.rollback())
            after = outbox.send(OrderPlaced(3), to=NOWHERE)
            await session.commit()
    await engine.dispose()

    kept = {before, inside, after} if end == "release" else {before, after}
    assert {row.id for row in read_books(shop).pending} == kept


async def test_released_savepoint_is_discarded_with_the_outer_one(shop: str) -> None:
    engine = async_engine(shop)
    async with Bus("orders", shop, mode="send-only") as bus, AsyncSession(engine) as session:
        with bus.enlist(session) as outbox:
            before = outbox.send(OrderPlaced(1), to=NOWHERE)
            outer = await session.begin_nested()
            inner = await session.begin_nested()
            outbox.send(OrderPlaced(2), to=NOWHERE)
            await inner.commit()
            await outer.rollback()
            await session.commit()
    await engine.dispose()

    assert [row.id for row in read_books(shop).pending] == [before]


async def test_send_never_flushes_or_commits_or_opens_a_connection(shop: str) -> None:
    engine = async_engine(shop)
    connections: list[object] = []
    event.listen(engine.sync_engine, "connect", lambda *args: connections.append(args))
    async with Bus("orders", shop, mode="send-only") as bus, AsyncSession(engine) as session:
        events: list[str] = []
        event.listen(session.sync_session, "before_flush", lambda *args: events.append("flush"))
        event.listen(session.sync_session, "before_commit", lambda *args: events.append("commit"))
        with bus.enlist(session) as outbox, statements_of(engine.sync_engine) as seen:
            outbox.send(OrderPlaced(1), to=NOWHERE)
            bus.send(OrderPlaced(2), to=NOWHERE)
            bus.publish(OrderPlaced(3))

            assert (connections, events, seen) == ([], [], [])
        await session.rollback()
    await engine.dispose()


async def test_failure_in_the_transaction_of_the_caller_is_raised_and_not_retried(shop: str) -> None:
    with psycopg.connect(shop) as conn:
        conn.execute("ALTER TABLE durable.outgoing_envelopes ADD CONSTRAINT refuse CHECK (false)")
    engine = async_engine(shop)
    async with Bus("orders", shop, mode="send-only") as bus, AsyncSession(engine) as session:
        with bus.enlist(session) as outbox, statements_of(engine.sync_engine) as seen:
            outbox.send(OrderPlaced(1), to=NOWHERE)
            with pytest.raises(DBAPIError):
                await session.commit()

            assert len([statement for statement in seen if "INSERT" in statement]) == 1
            assert "COMMIT" not in seen
            await session.rollback()
            await session.execute(text("SELECT 1"))  # the session is of use again, and has nothing left over
            await session.commit()
    await engine.dispose()
    assert not read_books(shop).pending


# ---------------------------------------------------------------- the sending agent


class ScriptedSender:
    """Fails (F) or succeeds (S) as the script says, and succeeds ever after."""

    def __init__(self, script: str) -> None:
        self.script = list(script)
        self.batches = 0
        self.reachable = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    async def send(self, batch: Sequence[Envelope]) -> list[Outcome]:
        self.batches += 1
        if self.script and self.script.pop(0) == "F":
            raise ConnectionFailed("as the script says")
        return [STORED] * len(batch)

    async def ping(self) -> None:
        if not self.reachable:
            raise ConnectionFailed("as the script says")


async def test_only_failures_in_a_row_latch_a_destination(shop: str) -> None:
    async with Workbench(shop, failures_to_latch=3) as bench:
        sender = ScriptedSender("FFSFFSFFFS")
        agent = bench.sending(A, PEER, sender)
        for order_id in (1, 2):
            leftovers.unsent_orders(shop, [order_id], PEER, ANY_NODE)
            await bench.claim_outgoing(agent, A)
            await eventually(lambda: not agent.held())
            assert not agent.circuit.latched, "two failures, a success, two failures: never three in a row"

        leftovers.unsent_orders(shop, [3], PEER, ANY_NODE)
        await bench.claim_outgoing(agent, A)
        await eventually(lambda: agent.circuit.latched and not agent.held())
        assert sender.batches == 9
        assert unsent(shop) == 1


async def test_unlatched_agent_sends_messages_from_before_during_and_after_the_outage(
    make_database: Callable[[str], str],
) -> None:
    orders, billing = make_database("orders"), make_database("billing")
    open_books(orders, billing)
    memory = MemoryTransport(load_settings(database_url=orders, **QUICK))
    clerk = Clerk(NodeId(0))
    sender = Bus("orders", orders, transports=[memory], **QUICK)
    sender.route(OrderPlaced, to=PEER)
    receiver = Bus("billing", billing, transports=[memory], **QUICK)
    receiver.listen(PEER)
    receiver.handles(OrderPlaced)(clerk.handle)

    async with receiver, sender:
        for outage in range(2):  # once is not enough: the loop must be whole again after the first
            memory.break_(PEER)
            await place(sender, 10 * outage + 1)
            await eventually(lambda: is_latched(orders))
            await place(sender, 10 * outage + 2)
            memory.restore(PEER)
            await eventually(lambda: not is_latched(orders))
            await place(sender, 10 * outage + 3)
            await eventually(lambda: not read_books(orders, billing).violations())
    assert sum(read_books(billing).effects.values()) == 6


def is_latched(database: str) -> bool:
    with psycopg.connect(database) as conn:
        return conn.execute("SELECT FROM durable.circuits WHERE key = %s", (PEER,)).fetchone() is not None


async def test_agent_repeats_a_failing_delete_until_success(shop: str, monkeypatch: pytest.MonkeyPatch) -> None:
    failures = iter(range(4))
    delete = outbox.delete_sent

    def failing(*args: Any, **options: Any) -> int:
        if next(failures, None) is not None:
            raise StorageUnavailable("the database is away")
        return delete(*args, **options)

    monkeypatch.setattr(outbox, "delete_sent", failing)
    leftovers.unsent_orders(shop, [1], PEER, ANY_NODE)
    async with Workbench(shop) as bench:
        sender = ScriptedSender("S")
        agent = bench.sending(A, PEER, sender)
        await bench.claim_outgoing(agent, A)

        await eventually(lambda: unsent(shop) == 0)
        assert sender.batches == 1, "it was sent once; only the delete is repeated"


async def test_unstored_batch_is_answered_failed(shop: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any) -> None:
        raise StorageUnavailable("the disk is full")

    monkeypatch.setattr(inbox, "store", full)
    async with Workbench(shop) as bench:
        outcomes = await bench.receiving(A).receive("billing", [leftovers.envelope(1), leftovers.envelope(2)])

    assert [type(outcome).__name__ for outcome in outcomes] == ["Failed", "Failed"]


# ---------------------------------------------------------------- nodes


async def test_a_busy_node_is_not_ejected(shop: str) -> None:
    """Its handler blocks the event loop for longer than a heartbeat may be old."""
    settings = {**QUICK, "heartbeat_interval": timedelta(seconds=0.2), "heartbeat_stale": timedelta(seconds=1)}
    bus = Bus("billing", shop, **settings)
    blocked, watched = threading.Event(), threading.Event()
    watch = Watch(shop, timedelta(seconds=1), blocked, watched)

    @bus.handles(OrderPlaced)
    async def block(order: OrderPlaced) -> None:
        blocked.set()
        watched.wait(timeout=20)

    async with bus:
        node = bus.runtime.node_id
        watch.start()
        await place(bus, 1)
        await eventually(watched.is_set)
        await eventually(lambda: not read_books(shop).pending)
        assert bus.runtime.node_id == node
    watch.join()
    assert watch.verdicts
    assert not any(watch.verdicts), f"declared dormant: {watch.verdicts}"


class Watch(threading.Thread):
    """Judges the nodes over and over, for three times as long as a heartbeat may be old, while a loop is blocked."""

    def __init__(self, database: str, stale: timedelta, blocked: threading.Event, watched: threading.Event) -> None:
        super().__init__(name="watch")
        self._database = database
        self._stale = stale
        self._blocked = blocked
        self._watched = watched
        self.verdicts: list[list[NodeId]] = []

    def run(self) -> None:
        self._blocked.wait(timeout=20)
        policy = DormancyPolicy(grace=timedelta(seconds=0.5), stale=self._stale)
        until = time.monotonic() + 3 * self._stale.total_seconds()
        try:
            while time.monotonic() < until:
                self.verdicts.append(self._judge(policy))
                time.sleep(0.05)
        finally:
            self._watched.set()

    def _judge(self, policy: DormancyPolicy) -> list[NodeId]:
        with leftovers.transaction(self._database) as conn:
            registered = {node.node_id: node.heartbeat_at for node in nodes.read(conn, SCHEMA)}
            started_at = nodes.server_times(conn, SCHEMA).started_at
            locked = nodes.locked(conn, SCHEMA)
        facts = [NodeFacts(node, node in locked, beat) for node, beat in registered.items()]
        return policy.dormant(facts, server_started_at=started_at, now=time.monotonic())


async def test_every_start_has_a_node_id_of_its_own(shop: str) -> None:
    bus = Bus("billing", shop, **QUICK)
    ids = []
    for _ in range(3):
        async with bus:
            ids.append(bus.runtime.node_id)

    assert len(set(ids)) == 3
    assert ids == sorted(ids), "an id comes from a sequence and is never used again"


# ---------------------------------------------------------------- statements that must not be two, or too large


async def test_a_move_into_the_dead_letters_is_one_statement(shop: str) -> None:
    leftovers.received_orders(shop, shop, [leftovers.envelope(1)])
    leftovers.unsent_orders(shop, [2], PEER, ANY_NODE)
    letter = Letter.because("a test", "test")
    async with Workbench(shop) as bench:
        (received,) = await bench.database.transaction(
            inbox.claim, message_type=leftovers.MESSAGE_TYPE, batch_size=1, node=A
        )
        (sent,) = await bench.database.transaction(outbox.claim, {PEER: 1}, node=A)
        with statements_of(bench.database.engine.sync_engine) as seen:
            await bench.database.transaction(inbox.dead_letter, A, received, letter)
            await bench.database.transaction(outbox.dead_letter, A, [(sent, letter)])

    moves = [each for each in seen if each not in ("BEGIN", "COMMIT") and "SAVEPOINT" not in each]
    assert len(moves) == 2
    assert all("DELETE" in move and "INSERT INTO" in move for move in moves)
    assert read_books(shop).dead.total() == 2


async def test_a_sweep_releases_in_bounded_batches_each_in_its_own_transaction(shop: str) -> None:
    dead = leftovers.dead_node(shop)
    leftovers.received_orders(shop, shop, [leftovers.envelope(order_id) for order_id in range(2_500)], dead)
    async with Workbench(shop) as bench:
        with statements_of(bench.database.engine.sync_engine) as seen:
            sweeper = DormantNodes(bench.context())
            assert await eventually(sweeper.sweep) == 2_500

    def releases(statement: str) -> bool:
        return "interruptions = row.interruptions + 1" in statement

    in_between = [statement for statement in seen if releases(statement) or statement == "COMMIT"]
    first = in_between.index(next(filter(releases, in_between)))
    # Nothing of the outbox; 1,000, 1,000 and 500 of the inbox.
    assert list(map(releases, in_between[first : first + 8])) == [True, False] * 4, "one release, one commit"
    assert len(list(filter(releases, seen))) == 4


async def test_old_ids_are_purged_in_bounded_batches(shop: str) -> None:
    leftovers.old_ids(shop, 12_000)
    purge, keep = housekeeping.PURGE_UNDATED_IDS, timedelta(days=8)
    async with Workbench(shop) as bench:
        purged = [await bench.database.transaction(maintenance.purge, purge, keep=keep) for _ in range(3)]

    assert purged == [10_000, 2_000, 0]
    assert count_old_ids(shop) == 0


async def test_recovery_goes_on_while_a_purge_is_stuck(shop: str) -> None:
    leftovers.old_ids(shop, 1)
    dead = leftovers.dead_node(shop)
    leftovers.received_orders(shop, shop, [leftovers.envelope(1)], dead)
    bus = Bus("billing", shop, **QUICK)
    bus.handles(OrderPlaced)(Clerk(A).handle)
    with psycopg.connect(shop) as conn:
        conn.execute("LOCK TABLE durable.undated_ids IN EXCLUSIVE MODE")
        async with bus:
            await eventually(lambda: waits_for_a_lock(shop))
            await eventually(lambda: not read_books(shop).violations())
            conn.rollback()


# ---------------------------------------------------------------- poison


@pytest.mark.parametrize("group", [1, 5], ids=["alone", "grouped"])
async def test_message_killing_its_node_spares_its_neighbours(shop: str, group: int) -> None:
    orders = [leftovers.envelope(order_id) for order_id in range(5)]
    poison = orders[0].id
    leftovers.received_orders(shop, shop, orders)
    retry = Retry(immediate=0, delays=())
    for death in range(5):
        node = NodeId(A + death)
        async with Workbench(shop) as bench:  # left while the poison is handled: the node dies
            deadly = Deadly(node, poison)
            agent = bench.handling(node, deadly.handle, retry=retry, max_batch=group, concurrency=4)
            await bench.claim_incoming(agent, node)
            await eventually(lambda: deadly.dies.is_set() or not agent.held())  # noqa: B023
        async with Workbench(shop) as bench:
            await bench.declare_dead(node)

    books = read_books(shop)
    assert not books.violations()
    assert set(books.dead) == {poison}
    assert len(books.effects) == 4


class Deadly(Clerk):
    """A handler whose process dies of one message, with whatever else it is handling then."""

    def __init__(self, node: NodeId, poison: UUID) -> None:
        super().__init__(node)
        self._poison = poison
        self.dies = asyncio.Event()

    async def handle(self, order: OrderPlaced, session: AsyncSession, ctx: Context) -> None:
        await super().handle(order, session, ctx)
        if ctx.id == self._poison:
            self.dies.set()
        with contextlib.suppress(TimeoutError):  # the others are slow: they are under way when it happens
            async with asyncio.timeout(0.2):
                await self.dies.wait()
        if self.dies.is_set():
            await asyncio.get_running_loop().create_future()
