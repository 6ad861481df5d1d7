"""Each guard is taken away, and then an invariant breaks: so the guard is needed, and the check can fail.

Every scenario is the same with and without its guard, in the same order, put there by hand.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import psycopg
import pytest
from sqlalchemy import Connection
from sqlalchemy.ext.asyncio import AsyncSession

from durable import Bus, Context, Retry
from durable.agents import fence
from durable.agents.handling import HandlingAgent
from durable.agents.receiving import ReceivingAgent
from durable.application.retry import Policy
from durable.envelope import ANY_NODE, Envelope, LeasedEnvelope, NodeId
from durable.errors import StorageUnavailable
from durable.outbox.outbox import Outbox
from durable.outbox.pending import Pending
from durable.outcomes import DUPLICATE, STORED, Outcome
from durable.recovery.dormant_nodes import DormantNodes
from durable.recovery.forgotten_rows import Forgotten
from durable.storage import inbox, leases
from durable.storage.sql import inbox as statements
from durable.storage.sql.recovery import INCOMING
from durable.storage.sql.statement import Statement
from tests.failure import leftovers
from tests.failure.app import ADD_EFFECT, ADD_ORDER, OrderPlaced
from tests.failure.books import open_books, read_books
from tests.failure.waiting import eventually
from tests.failure.workbench import QUICK, Clerk, DirectSender, Workbench

A, B = NodeId(1_001), NodeId(1_002)

both_ways = pytest.mark.parametrize("guarded", [True, False], ids=["guarded", "unguarded"])


@pytest.fixture
def shop(database_url: str) -> str:
    """One database that is the sender's and the receiver's."""
    open_books(database_url)
    return database_url


def remove(monkeypatch: pytest.MonkeyPatch, name: str, condition: str, instead: str = "true") -> None:
    """Take a condition out of a statement."""
    statement: Statement = getattr(statements, name)
    assert condition in statement._sql, f"{name} has no {condition!r}: name its guard anew"
    monkeypatch.setattr(statements, name, Statement(statement._sql.replace(condition, instead)))


def check(violations: Sequence[str], breaks: str, *, guarded: bool) -> None:
    """With its guard nothing is broken; without it, this is."""
    if guarded:
        assert not violations, "\n".join(violations)
    else:
        assert [violation for violation in violations if violation.startswith(breaks)], (
            f"{breaks} should break without its guard; found: {violations}"
        )


def handled_by(database: str) -> list[NodeId]:
    """The nodes whose effects were committed."""
    with psycopg.connect(database) as conn:
        return [NodeId(node) for (node,) in conn.execute("SELECT process FROM effects")]


async def hold(bench: Workbench, database: str, clerk: Clerk, order_id: int = 1) -> HandlingAgent:
    """A node that is in the middle of handling an order when it is declared dead."""
    agent = bench.handling(clerk.node, clerk.handle)
    leftovers.received_orders(database, database, [leftovers.envelope(order_id)])
    await bench.claim_incoming(agent, clerk.node)
    await clerk.begun.wait()
    await bench.declare_dead(clerk.node)
    return agent


async def idle(agent: HandlingAgent) -> None:
    await eventually(lambda: not agent.held())


# ---------------------------------------------------------------- the fence


@both_ways
async def test_node_declared_dead_leaves_no_second_effect(
    shop: str, monkeypatch: pytest.MonkeyPatch, guarded: bool
) -> None:
    if not guarded:
        finish = inbox.finish_handled

        def uncounted(
            conn: Connection, schema: str, node: NodeId, owned: Sequence[LeasedEnvelope], **options: bool
        ) -> int:
            finish(conn, schema, node, owned, **options)
            return len(owned)

        monkeypatch.setattr(inbox, "finish_handled", uncounted)
    async with Workbench(shop) as bench:
        late = Clerk(A, held=True)
        paused = await hold(bench, shop, late)
        successor = bench.handling(B, Clerk(B).handle)
        await bench.claim_incoming(successor, B)
        await idle(successor)

        late.go_on()
        await idle(paused)

        check(read_books(shop).violations(), "I2", guarded=guarded)


@both_ways
async def test_node_declared_dead_cannot_finish_a_message_of_another_owner(
    shop: str, monkeypatch: pytest.MonkeyPatch, guarded: bool
) -> None:
    if not guarded:
        remove(monkeypatch, "FINISH_HANDLED", "row.epoch = mine.epoch AND row.owner_id + 0 = :node")
    async with Workbench(shop) as bench:
        late, current = Clerk(A, held=True), Clerk(B, held=True)
        paused = await hold(bench, shop, late)
        successor = bench.handling(B, current.handle)
        await bench.claim_incoming(successor, B)
        await current.begun.wait()

        late.go_on()
        await idle(paused)
        current.go_on()
        await idle(successor)

        assert not read_books(shop).violations()
        assert handled_by(shop) == ([B] if guarded else [A]), "I4: only the owner may commit"


@both_ways
@pytest.mark.parametrize("name", ["RETRY_LATER", "DEAD_LETTER_INCOMING"])
async def test_node_declared_dead_cannot_settle_a_failure_of_a_message_of_another_owner(
    shop: str, monkeypatch: pytest.MonkeyPatch, guarded: bool, name: str
) -> None:
    if not guarded:
        remove(monkeypatch, name, "owner_id + 0 = :node AND epoch = :epoch")
    async with Workbench(shop) as bench:
        late, current = Clerk(A, held=True), Clerk(B, held=True)
        paused = await hold(bench, shop, late)
        successor = bench.handling(B, current.handle)
        await bench.claim_incoming(successor, B)
        await current.begun.wait()

        verdict = Retry(immediate=0, delays=(60,)) if name == "RETRY_LATER" else Retry(immediate=0, delays=())
        paused._delivery._policy = Policy(verdict)
        late.go_on(RuntimeError("too late"))
        await idle(paused)
        current.go_on()
        await idle(successor)

        assert handled_by(shop) == ([B] if guarded else []), "I4: the owner's work was thrown away"


# ---------------------------------------------------------------- receiving


@both_ways
async def test_envelope_repeated_after_its_handling_is_a_duplicate(
    shop: str, monkeypatch: pytest.MonkeyPatch, guarded: bool
) -> None:
    if not guarded:
        remove(monkeypatch, "STORE_RECEIVED", "FROM received JOIN fresh USING (id, endpoint)", "FROM received")
    order = leftovers.envelope(1)
    leftovers.record_orders(shop, [order])
    async with Workbench(shop) as bench:
        receiving, agent = bench.receiving(A), bench.handling(A, Clerk(A).handle)

        outcomes: list[Outcome] = []
        for _ in range(2):  # the second time because the first answer was lost
            outcomes += await receiving.receive("billing", [order])
            await bench.claim_incoming(agent, A)
            await idle(agent)

        assert outcomes == [STORED, DUPLICATE if guarded else STORED]
        check(read_books(shop).violations(), "I2", guarded=guarded)


@both_ways
async def test_answer_follows_the_commit(
    make_database: Callable[[str], str], monkeypatch: pytest.MonkeyPatch, guarded: bool
) -> None:
    orders, billing = make_database("orders"), make_database("billing")
    open_books(orders, billing)
    refusals = fail_first(monkeypatch, inbox, "store", StorageUnavailable("the disk is full"))
    if not guarded:
        monkeypatch.setattr(ReceivingAgent, "receive", answer_at_once(ReceivingAgent.receive))
    leftovers.unsent_orders(orders, [1], "direct", ANY_NODE)
    async with Workbench(orders) as sender, Workbench(billing) as receiver:
        agent = sender.sending(A, "direct", DirectSender(receiver.receiving(B)))
        handler = receiver.handling(B, Clerk(B).handle)

        await sender.claim_outgoing(agent, A)
        await eventually(lambda: refusals and not agent.held())
        await receiver.claim_incoming(handler, B)
        await idle(handler)

        check(read_books(orders, billing).violations(), "I1 lost", guarded=guarded)


def fail_first(monkeypatch: pytest.MonkeyPatch, module: Any, name: str, error: Exception) -> list[Exception]:
    """The first call of this function raises; the list says whether it has been called."""
    function = getattr(module, name)
    raised: list[Exception] = []

    def failing_first(*args: Any, **kwargs: Any) -> Any:
        if not raised:
            raised.append(error)
            raise error
        return function(*args, **kwargs)

    monkeypatch.setattr(module, name, failing_first)
    return raised


def answer_at_once(receive: Callable[..., Any]) -> Callable[..., Any]:
    """A `receive` that stores after it has answered."""
    storing: set[asyncio.Task[None]] = set()

    async def answering(self: ReceivingAgent, endpoint: str, batch: Sequence[Envelope]) -> list[Outcome]:
        storing.add(asyncio.create_task(receive(self, endpoint, batch)))
        return [STORED] * len(batch)

    return answering


# ---------------------------------------------------------------- recovery


@both_ways
async def test_rows_of_a_dead_node_are_handled_by_another(
    shop: str, monkeypatch: pytest.MonkeyPatch, guarded: bool
) -> None:
    if not guarded:
        monkeypatch.setattr(DormantNodes, "sweep", do_nothing)
    dead = leftovers.dead_node(shop)
    leftovers.received_orders(shop, shop, [leftovers.envelope(1)], dead)
    async with Workbench(shop) as bench:
        sweeper = DormantNodes(bench.context())
        agent = bench.handling(B, Clerk(B).handle)

        await (eventually(sweeper.sweep) if guarded else sweeper.sweep())
        await bench.claim_incoming(agent, B)
        await idle(agent)

        check(read_books(shop).violations(), "I1", guarded=guarded)


@both_ways
async def test_rows_left_by_a_lost_reply_are_handled_in_the_end(
    shop: str, monkeypatch: pytest.MonkeyPatch, guarded: bool
) -> None:
    if not guarded:
        monkeypatch.setattr(Forgotten, "poll", do_nothing)
    leftovers.received_orders(shop, shop, [leftovers.envelope(1)], A)  # A lives, and does not know of it
    async with Workbench(shop) as bench:
        agent = bench.handling(A, Clerk(A).handle)
        forgotten = Forgotten(bench.context(A), INCOMING, agent.held)

        assert [await forgotten.poll() for _ in range(2)] == ([0, 1] if guarded else [0, 0])
        await bench.claim_incoming(agent, A)
        await idle(agent)

        check(read_books(shop).violations(), "I1", guarded=guarded)


@both_ways
async def test_message_killing_every_node_becomes_a_dead_letter(
    shop: str, monkeypatch: pytest.MonkeyPatch, guarded: bool
) -> None:
    if not guarded:
        monkeypatch.setattr(inbox, "begin_suspect_attempt", lambda conn, schema, node, lease: lease.attempts + 1)
    leftovers.received_orders(shop, shop, [leftovers.envelope(1)])
    retry = Retry(immediate=1, delays=())
    for death in range(3 + retry.max_attempts):
        node = NodeId(A + death)
        async with Workbench(shop) as bench:  # left in the middle of the handler: the node dies
            clerk = Clerk(node, held=True)
            agent = bench.handling(node, clerk.handle, retry=retry)
            await bench.claim_incoming(agent, node)
            await eventually(lambda: clerk.begun.is_set() or not agent.held())  # noqa: B023
        async with Workbench(shop) as bench:
            await bench.declare_dead(node)

    assert len(read_books(shop).dead) == guarded
    check(read_books(shop).violations(), "I1", guarded=guarded)


async def do_nothing(self: object) -> int:
    return 0


# ---------------------------------------------------------------- transactions


@both_ways
async def test_messages_of_a_rolled_back_transaction_are_discarded(
    shop: str, monkeypatch: pytest.MonkeyPatch, guarded: bool
) -> None:
    if not guarded:
        monkeypatch.setattr(Pending, "forget", lambda self, transaction: [])
    async with Workbench(shop) as bench:
        async with bench.sessions.open() as session:
            outbox = bench.sessions.outbox(session)
            outbox.send(OrderPlaced(1))
            await session.rollback()
            await add_order(session, outbox, 2)
            await session.commit()
        await handle_all(bench)

        check(read_books(shop).violations(), "I3", guarded=guarded)


@both_ways
async def test_messages_of_a_rolled_back_savepoint_are_discarded(
    shop: str, monkeypatch: pytest.MonkeyPatch, guarded: bool
) -> None:
    if not guarded:
        monkeypatch.setattr(Pending, "_cut", lambda self, place, end=None: [])
    async with Workbench(shop) as bench:
        async with bench.sessions.open() as session:
            outbox = bench.sessions.outbox(session)
            savepoint = await session.begin_nested()
            await add_order(session, outbox, 1)
            await savepoint.rollback()
            await add_order(session, outbox, 2)
            await session.commit()
        await handle_all(bench)

        check(read_books(shop).violations(), "I3", guarded=guarded)


@both_ways
async def test_handler_committing_its_session_has_no_effect(
    shop: str, monkeypatch: pytest.MonkeyPatch, guarded: bool
) -> None:
    if not guarded:
        monkeypatch.setattr(
            Outbox, "commit_allowed", property(lambda self: True, lambda self, value: None), raising=False
        )
        monkeypatch.setattr(fence, "_is_guarded", lambda connection: False)

    async def impatient(order: OrderPlaced, session: AsyncSession, ctx: Context) -> None:
        await session.execute(ADD_EFFECT, {"envelope_id": ctx.id, "order_id": order.order_id, "process": 0})
        await session.commit()
        raise RuntimeError("after the commit")

    leftovers.received_orders(shop, shop, [leftovers.envelope(1)])
    async with Workbench(shop) as bench:
        agent = bench.handling(A, impatient, retry=Retry(immediate=1, delays=()))
        await bench.claim_incoming(agent, A)
        await idle(agent)

        assert len(read_books(shop).dead) == 1
        check(read_books(shop).violations(), "I2", guarded=guarded)


async def add_order(session: AsyncSession, outbox: Outbox, order_id: int) -> None:
    envelope_id = outbox.send(OrderPlaced(order_id))
    await session.execute(ADD_ORDER, {"order_id": order_id, "envelope_id": envelope_id})


async def handle_all(bench: Workbench) -> None:
    agent = bench.handling(A, Clerk(A).handle)
    await bench.claim_incoming(agent, A)
    await idle(agent)


# ---------------------------------------------------------------- the end of a node


@both_ways
async def test_node_stopped_in_good_order_owns_nothing(
    shop: str, monkeypatch: pytest.MonkeyPatch, guarded: bool
) -> None:
    if not guarded:
        monkeypatch.setattr(leases, "release_all", lambda conn, schema, table, node: 0)
    clerk = Clerk(A, held=True)
    bus = Bus("billing", shop, **dict[str, Any](QUICK, drain_timeout=timedelta(seconds=0.1)))
    bus.handles(OrderPlaced, concurrency=1)(clerk.handle)
    leftovers.received_orders(shop, shop, [leftovers.envelope(order_id) for order_id in range(5)])

    async with bus:
        await clerk.begun.wait()

    owned = [violation for violation in read_books(shop).violations_after_shutdown() if "I1" not in violation]
    check(owned, "I9", guarded=guarded)
