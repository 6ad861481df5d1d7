"""Every function of storage on every supported Postgres and with both drivers: claims, fences, duplicates, bad rows."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import NAMESPACE_URL, uuid5

import msgspec
import psycopg
import pytest
from psycopg import sql
from sqlalchemy import Connection, make_url, text
from sqlalchemy.exc import DBAPIError

from durable.embedded import Embedded
from durable.encryption.repeats import is_another
from durable.encryption.ring import KeyRing
from durable.envelope import ANY_NODE, Envelope, LeasedEnvelope, NodeId, new_id
from durable.errors import InvalidMessage, StorageUnavailable
from durable.settings import load_settings
from durable.storage import circuits, dead_letters, delayed, inbox, leases, locks, maintenance, nodes, outbox, trials
from durable.storage.circuits import CircuitKind
from durable.storage.database import Database, channel
from durable.storage.dead_letters import LetterRange
from durable.storage.inbox import Arrival
from durable.storage.locks import Job
from durable.storage.outbox import Sent
from durable.storage.rows import ONCE, Letter, Tried
from durable.storage.sql import housekeeping
from durable.storage.sql import inbox as inbox_statements
from durable.storage.sql import outbox as outbox_statements
from durable.storage.sql.recovery import INCOMING, OUTGOING, Recovery
from durable.storage.sql.statement import Statement
from tests.conftest import fresh_databases
from tests.failure.books import waits_for_a_lock
from tests.failure.leftovers import MESSAGE_TYPE, SCHEMA, envelope
from tests.failure.waiting import eventually
from tests.support.servers import EMBEDDED, older_servers

A, B = NodeId(1), NodeId(2)
PEER = "tcp://127.0.0.1:2301"
LETTER = Letter.because("a test", "test")


# The drivers differ in what they accept, the servers in how they plan: not every pair is worth its time.
PLACES = [(EMBEDDED, "psycopg"), *((version, "asyncpg") for version in [EMBEDDED, *older_servers()])]


@pytest.fixture(params=PLACES, ids=lambda place: f"pg{place[0]}-{place[1]}")
def place(request: pytest.FixtureRequest, servers: Callable[[int], Embedded]) -> tuple[Embedded, str]:
    version, driver = request.param
    return servers(version), driver


@pytest.fixture
def url(place: tuple[Embedded, str]) -> Iterator[str]:
    with fresh_databases(place[0]) as make:
        yield make("storage")


@pytest.fixture
async def database(place: tuple[Embedded, str], url: str) -> AsyncIterator[Database]:
    """A migrated database, as agents use it, with one driver or the other."""
    through = make_url(url).set(drivername=f"postgresql+{place[1]}").render_as_string(hide_password=False)
    database = Database(load_settings(database_url=through))
    yield database
    await database.close()


class Store:
    """The functions of storage, each in a transaction of its own."""

    def __init__(self, database: Database) -> None:
        self.database = database

    async def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return await self.database.transaction(function, *args, **kwargs)

    async def send(self, *envelopes: Envelope, owner: NodeId = ANY_NODE) -> None:
        await self.run(outbox.store, [Sent(each, None, owner) for each in envelopes])

    async def receive(self, *envelopes: Envelope, owner: NodeId = ANY_NODE, endpoint: str = "billing") -> set[Any]:
        fresh = await self.run(inbox.store, [Arrival(endpoint, each, owner) for each in envelopes])
        return {envelope_id for envelope_id, _ in fresh}

    async def claim_outgoing(
        self, node: NodeId = A, batch_size: int = 100, destination: str = PEER
    ) -> list[LeasedEnvelope]:
        claimed: list[LeasedEnvelope] = await self.run(
            outbox.claim, destination=destination, batch_size=batch_size, node=node
        )
        return claimed

    async def claim_incoming(
        self, node: NodeId = A, batch_size: int = 100, of: str = MESSAGE_TYPE
    ) -> list[LeasedEnvelope]:
        claimed: list[LeasedEnvelope] = await self.run(inbox.claim, message_type=of, batch_size=batch_size, node=node)
        return claimed

    async def rows(self, statement: str, **params: Any) -> list[Any]:
        def read(conn: Connection, schema: str) -> list[Any]:
            return [tuple(row) for row in conn.execute(text(statement), params)]

        return await self.database.transaction(read)

    async def one(self, statement: str, **params: Any) -> Any:
        (row,) = await self.rows(statement, **params)
        return row[0] if len(row) == 1 else row

    async def set(self, table: str, assignments: str) -> None:
        await self.rows(f"UPDATE durable.{table}_envelopes SET {assignments} RETURNING 1")


@pytest.fixture
def store(database: Database) -> Store:
    return Store(database)


def outgoing(order_id: int = 1, **changes: Any) -> Envelope:
    return msgspec.structs.replace(envelope(order_id, destination=PEER), **changes)


def orders(claimed: Sequence[LeasedEnvelope]) -> list[int]:
    return [json.loads(lease.envelope.body)["order_id"] for lease in claimed]


# ---------------------------------------------------------------- in and out


async def test_envelope_is_unchanged_by_the_outbox(store: Store) -> None:
    sent = outgoing(
        causation_id=new_id(),
        partition_key="order-17",
        headers={"trace": 'a "quoted" \N{SNOWMAN}', "empty": ""},
        body=bytes(range(256)),
        deliver_by=datetime.now(UTC) + timedelta(days=1),
    )
    await store.send(sent)

    assert await store.claim_outgoing() == [LeasedEnvelope(sent, epoch=1, endpoint=PEER)]


async def test_an_envelope_comes_back_from_the_inbox_with_its_endpoint(store: Store) -> None:
    received = msgspec.structs.replace(envelope(1), headers={"a": "b"})
    await store.receive(received, endpoint="desk")

    expected = msgspec.structs.replace(received, destination="desk")
    assert await store.claim_incoming() == [LeasedEnvelope(expected, epoch=1, endpoint="desk")]


async def test_one_commit_sends_to_several_destinations_and_to_its_own_inbox(store: Store) -> None:
    event = outgoing()
    other = msgspec.structs.replace(event, destination="tcp://127.0.0.1:2302")
    local = msgspec.structs.replace(event, destination="local")
    later = outgoing(2, execution_time=datetime.now(UTC) + timedelta(days=1))
    await store.run(
        outbox.store,
        [Sent(event, None, A), Sent(other, None, ANY_NODE), Sent(local, "local", B), Sent(later, None, ANY_NODE)],
    )

    assert await store.rows(
        "SELECT id, destination, owner_id, execution_time IS NOT NULL FROM durable.outgoing_envelopes ORDER BY seq"
    ) == [(event.id, PEER, A, False), (event.id, other.destination, 0, False), (later.id, PEER, 0, True)]
    assert await store.rows("SELECT id, endpoint, owner_id FROM durable.incoming_envelopes") == [(event.id, "local", B)]
    assert await store.rows("SELECT id FROM durable.received_ids") == [], "a local row is its own token"


async def test_local_message_under_a_known_business_key_is_not_stored_again(store: Store) -> None:
    local = under_key(destination="local")
    assert await store.run(outbox.store, [Sent(local, "local", ANY_NODE)]) == set()
    await store.rows("DELETE FROM durable.incoming_envelopes RETURNING 1")

    known = await store.run(outbox.store, [Sent(under_key(destination="local"), "local", ANY_NODE)])

    assert known == {(local.id, "local")}
    assert await store.one("SELECT count(*) FROM durable.incoming_envelopes") == 0


async def test_thousand_rows_are_stored_and_deleted_by_one_statement_each(store: Store) -> None:
    sent = [outgoing(number) for number in range(1_000)]
    await store.send(*sent)
    assert await store.receive(*sent) == {each.id for each in sent}

    claimed = await store.claim_outgoing(batch_size=1_000)
    assert [lease.envelope for lease in claimed] == sent
    assert await store.run(outbox.delete_sent, A, claimed) == 1_000
    handled = await store.claim_incoming(batch_size=1_000)
    assert await store.run(inbox.finish_handled, A, handled) == 1_000
    assert await store.rows(
        "SELECT side, outcome, count(*) FROM durable.envelope_history GROUP BY 1, 2 ORDER BY 1"
    ) == [
        ("incoming", "handled", 1_000),
        ("outgoing", "sent", 1_000),
    ]


@pytest.mark.parametrize("owner", [ANY_NODE, A], ids=["unowned", "owned"])
async def test_storing_rows_announces_nothing(store: Store, url: str, owner: NodeId) -> None:
    with psycopg.connect(url, autocommit=True) as conn:
        conn.execute(sql.SQL("LISTEN {}").format(sql.Identifier(channel(SCHEMA))))
        await store.send(outgoing(), owner=owner)
        conn.execute("SELECT 1")  # what was announced before comes with its answer
        heard = list(conn.notifies(timeout=0))

    assert heard == []


async def test_nodes_are_woken_by_a_separate_transaction(store: Store, url: str) -> None:
    with psycopg.connect(url, autocommit=True) as conn:
        conn.execute(sql.SQL("LISTEN {}").format(sql.Identifier(channel(SCHEMA))))
        await store.run(outbox.wake_nodes)
        assert len(list(conn.notifies(timeout=20, stop_after=1))) == 1


async def test_a_commit_of_scheduled_rows_announces_nothing(store: Store, url: str) -> None:
    with psycopg.connect(url, autocommit=True) as conn:
        conn.execute(sql.SQL("LISTEN {}").format(sql.Identifier(channel(SCHEMA))))
        await store.send(outgoing(execution_time=datetime.now(UTC) + timedelta(days=1)))
        conn.execute("SELECT 1")
        assert not list(conn.notifies(timeout=0))


# ---------------------------------------------------------------- claims


async def test_oldest_rows_are_claimed_first_and_at_most_the_requested_number(store: Store) -> None:
    for number in range(5):
        await store.send(outgoing(number))
        await store.receive(envelope(number))

    assert orders(await store.claim_outgoing(batch_size=3)) == [0, 1, 2]
    assert orders(await store.claim_outgoing(batch_size=3)) == [3, 4]
    assert orders(await store.claim_incoming(batch_size=3)) == [0, 1, 2]
    assert orders(await store.claim_incoming(batch_size=3)) == [3, 4]


async def test_claim_takes_only_unowned_due_and_unexpired_rows(store: Store) -> None:
    now = datetime.now(UTC)
    await store.send(
        outgoing(1),
        outgoing(2, execution_time=now - timedelta(seconds=1)),
        outgoing(3, deliver_by=now - timedelta(seconds=1)),
        outgoing(4, deliver_by=now + timedelta(days=1)),
        msgspec.structs.replace(outgoing(5), destination="tcp://127.0.0.1:2302"),
    )
    await store.send(outgoing(6), owner=B)

    assert orders(await store.claim_outgoing()) == [1, 4]
    assert [lease.epoch for lease in await store.claim_outgoing()] == []


async def test_only_messages_of_the_type_are_claimed(store: Store) -> None:
    await store.receive(envelope(1), msgspec.structs.replace(envelope(2), message_type="another.type"))

    assert orders(await store.claim_incoming(of="another.type")) == [2]
    assert orders(await store.claim_incoming()) == [1]


async def test_claim_takes_nothing_for_open_circuits(store: Store) -> None:
    await store.send(outgoing(1))
    await store.receive(envelope(2))
    opened = ((CircuitKind.DESTINATION, PEER), (CircuitKind.HANDLER, MESSAGE_TYPE))
    for kind, key in opened:
        await store.run(circuits.open_circuit, kind, key, reason="a test", actor="node 1")
    assert (await store.claim_outgoing(), await store.claim_incoming()) == ([], [])

    for kind, key in opened:
        await store.run(circuits.pause, kind, key, reason="a test", actor="ops", duration=timedelta(seconds=-1))
    assert (orders(await store.claim_outgoing()), orders(await store.claim_incoming())) == ([1], [2])


async def test_ended_circuit_can_be_opened_again_and_is_closed_by_maintenance(store: Store) -> None:
    ended = {"reason": "ended", "actor": "ops", "duration": timedelta(seconds=-1)}
    for kind in (CircuitKind.DESTINATION, CircuitKind.HANDLER):
        await store.run(circuits.pause, kind, PEER, **ended)
    assert await store.run(circuits.read) == []

    await store.run(circuits.open_circuit, CircuitKind.DESTINATION, PEER, reason="again", actor="node 1")
    assert [circuit.reason for circuit in await store.run(circuits.read)] == ["again"]
    await store.run(circuits.close_ended)
    assert await store.rows("SELECT kind FROM durable.circuits") == [("destination",)]


async def test_several_targets_are_paused_together_or_not_at_all(store: Store) -> None:
    paused = {"reason": "moved", "actor": "ops", "duration": None}
    named = [(CircuitKind.DESTINATION, key) for key in ("tcp://b.example:1", "tcp://c.example:1")]
    with pytest.raises((DBAPIError, InvalidMessage)):
        await store.run(circuits.pause_each, [*named, (CircuitKind.DESTINATION, "tcp://nul.example\0")], **paused)
    assert await store.run(circuits.read) == []

    await store.run(circuits.pause_each, named, **paused)
    assert [circuit.key for circuit in await store.run(circuits.read)] == [key for _, key in named]
    assert await store.run(circuits.resume_each, named)
    assert not await store.run(circuits.resume_each, named)


async def test_success_ends_no_pause(store: Store) -> None:
    paused = {"reason": "stocktaking", "actor": "ops", "duration": None}
    await store.run(circuits.open_circuit, CircuitKind.HANDLER, MESSAGE_TYPE, reason="down", actor="node 1")
    await store.run(circuits.pause, CircuitKind.HANDLER, MESSAGE_TYPE, **paused)
    assert not await store.run(circuits.close_circuit, CircuitKind.HANDLER, MESSAGE_TYPE)
    assert [circuit.reason for circuit in await store.run(circuits.read)] == ["stocktaking"]

    await store.run(circuits.resume, CircuitKind.HANDLER, MESSAGE_TYPE)
    await store.run(circuits.open_circuit, CircuitKind.HANDLER, MESSAGE_TYPE, reason="down", actor="node 1")
    assert await store.run(circuits.close_circuit, CircuitKind.HANDLER, MESSAGE_TYPE)


async def test_failures_do_not_replace_a_pause(store: Store) -> None:
    paused = {"reason": "stocktaking", "actor": "ops", "duration": timedelta(hours=1)}
    await store.run(circuits.pause, CircuitKind.HANDLER, MESSAGE_TYPE, **paused)
    await store.run(circuits.open_circuit, CircuitKind.HANDLER, MESSAGE_TYPE, reason="down", actor="node 1")
    assert [(circuit.reason, circuit.probing) for circuit in await store.run(circuits.read)] == [("stocktaking", False)]


async def _stop(store: Store, duration: timedelta) -> None:
    await store.run(
        circuits.open_circuit, CircuitKind.HANDLER, MESSAGE_TYPE, reason="down", actor="node 1", duration=duration
    )


async def _claim_trial(store: Store, node: NodeId = A) -> LeasedEnvelope | None:
    trial: trials.Trial = await store.run(
        trials.claim_trial,
        message_type=MESSAGE_TYPE,
        handler=MESSAGE_TYPE,
        node=node,
        lease=timedelta(minutes=1),
    )
    return trial.lease


async def test_ended_circuit_is_tried_by_one_node_with_one_message(store: Store) -> None:
    await store.receive(*(envelope(number) for number in range(3)))
    await _stop(store, timedelta(hours=1))
    assert await _claim_trial(store) is None

    await store.rows("UPDATE durable.circuits SET until = now() RETURNING key")
    assert await store.claim_incoming() == []  # still open: only trials
    trial = await _claim_trial(store)
    assert trial is not None
    assert (orders([trial]), trial.epoch) == ([0], 1)
    assert await _claim_trial(store, B) is None

    await store.rows("UPDATE durable.circuits SET until = now() RETURNING key")  # the node that tried it has died
    trial = await _claim_trial(store, B)
    assert trial is not None
    assert orders([trial]) == [1]


async def test_circuit_without_a_message_for_its_trial_stays_due(store: Store) -> None:
    await _stop(store, timedelta(seconds=-1))
    assert await _claim_trial(store) is None
    await store.receive(envelope(1))
    assert await _claim_trial(store) is not None


@pytest.mark.parametrize(
    ("open_for", "next_try"),
    [(timedelta(0), 10), (timedelta(seconds=20), 20), (timedelta(minutes=2), 120), (timedelta(hours=1), 300)],
)
async def test_failed_trial_doubles_the_time_to_the_next(store: Store, open_for: timedelta, next_try: int) -> None:
    await _stop(store, timedelta(seconds=-1))
    await store.rows("UPDATE durable.circuits SET since = now() - CAST(:t AS interval) RETURNING key", t=open_for)
    bounds = {"shortest": timedelta(seconds=10), "longest": timedelta(minutes=5)}
    await store.run(circuits.put_off_probe, MESSAGE_TYPE, reason="still down", **bounds)
    ((reason, seconds),) = await store.rows(
        "SELECT reason, CAST(extract(epoch FROM until - clock_timestamp()) AS float) FROM durable.circuits"
    )
    assert reason == "still down"
    assert next_try - 5 < seconds <= next_try + 5


@pytest.mark.parametrize("side", ["outgoing", "incoming"])
async def test_concurrent_claims_of_two_nodes_take_different_rows_without_waiting(store: Store, side: str) -> None:
    await store.send(*(outgoing(number) for number in range(10)))
    await store.receive(*(envelope(number) for number in range(10)))

    def claim(conn: Connection, node: NodeId) -> list[LeasedEnvelope]:
        if side == "outgoing":
            return outbox.claim(conn, SCHEMA, destination=PEER, batch_size=6, node=node)
        return inbox.claim(conn, SCHEMA, message_type=MESSAGE_TYPE, batch_size=6, node=node)

    async with store.database.engine.begin() as first, store.database.engine.begin() as second:
        mine = await first.run_sync(claim, A)
        async with asyncio.timeout(30):
            others = await second.run_sync(claim, B)

    assert (orders(mine), orders(others)) == ([0, 1, 2, 3, 4, 5], [6, 7, 8, 9])


async def test_every_claim_raises_the_epoch(store: Store) -> None:
    await store.send(outgoing())
    for epoch in (1, 3, 5):
        (lease,) = await store.claim_outgoing()
        assert lease.epoch == epoch
        assert await store.run(leases.release, OUTGOING, A, [lease.key]) == 1


# ---------------------------------------------------------------- the fence

Change = Callable[[Store, NodeId, LeasedEnvelope], Any]


async def _begin(store: Store, node: NodeId, lease: LeasedEnvelope) -> bool:
    return await store.run(inbox.begin_suspect_attempt, node, lease) is not None


async def _count(store: Store, node: NodeId, lease: LeasedEnvelope) -> bool:
    before = await store.one("SELECT sum(attempts) FROM durable.outgoing_envelopes")
    await store.run(outbox.count_failed_attempt, node, [lease])
    return bool(await store.one("SELECT sum(attempts) FROM durable.outgoing_envelopes") > before)


async def _dead_letter_outgoing(store: Store, node: NodeId, lease: LeasedEnvelope) -> bool:
    await store.run(outbox.dead_letter, node, [(lease, LETTER)])
    return bool(await store.one("SELECT count(*) FROM durable.dead_letters"))


CHANGES: dict[str, tuple[str, Change]] = {
    "delete sent": ("outgoing", lambda store, node, lease: store.run(outbox.delete_sent, node, [lease])),
    "count a failed attempt": ("outgoing", _count),
    "dead-letter outgoing": ("outgoing", _dead_letter_outgoing),
    "release outgoing": ("outgoing", lambda store, node, lease: store.run(leases.release, OUTGOING, node, [lease.key])),
    "finish handled": ("incoming", lambda store, node, lease: store.run(inbox.finish_handled, node, [lease])),
    "begin a suspect attempt": ("incoming", _begin),
    "retry later": (
        "incoming",
        lambda store, node, lease: store.run(inbox.retry_later, node, lease, delay=timedelta(seconds=1)),
    ),
    "dead-letter incoming": ("incoming", lambda store, node, lease: store.run(inbox.dead_letter, node, lease, LETTER)),
    "expire": ("incoming", lambda store, node, lease: store.run(inbox.expire, node, lease)),
    "release incoming": ("incoming", lambda store, node, lease: store.run(leases.release, INCOMING, node, [lease.key])),
}


@pytest.mark.parametrize("change", CHANGES)
async def test_a_row_is_changed_only_by_its_owner_in_its_epoch(store: Store, change: str) -> None:
    side, apply = CHANGES[change]
    await store.send(outgoing())
    await store.receive(envelope(1))
    (lease,) = await (store.claim_outgoing() if side == "outgoing" else store.claim_incoming())
    if change == "expire":
        await store.set("incoming", "deliver_by = now() - interval '1 second'")
    before = await store.rows(f"SELECT * FROM durable.{side}_envelopes")

    for stranger, claimed in (
        (B, lease),
        (ANY_NODE, lease),
        (A, msgspec.structs.replace(lease, epoch=lease.epoch + 1)),
        (A, msgspec.structs.replace(lease, epoch=lease.epoch - 1)),
        (A, msgspec.structs.replace(lease, endpoint="elsewhere")),
        (A, msgspec.structs.replace(lease, envelope=envelope(2))),
    ):
        assert not await apply(store, stranger, claimed)
        assert await store.rows(f"SELECT * FROM durable.{side}_envelopes") == before
    assert await apply(store, A, lease)
    assert await store.rows(f"SELECT * FROM durable.{side}_envelopes") != before


async def test_finish_deletes_only_the_rows_still_owned(store: Store) -> None:
    await store.receive(*(envelope(number) for number in range(3)))
    claimed = await store.claim_incoming()
    await store.run(leases.release, INCOMING, A, [claimed[1].key])

    assert await store.run(inbox.finish_handled, A, claimed) == 2


# ---------------------------------------------------------------- the fence, as the planner sees it

FENCED = {
    outbox_statements.DELETE_SENT: "outgoing",
    outbox_statements.COUNT_FAILED_SEND: "outgoing",
    outbox_statements.DEAD_LETTER_OUTGOING: "outgoing",
    outbox_statements.EXPIRE_OWNED_OUTGOING: "outgoing",
    OUTGOING.release: "outgoing",
    inbox_statements.FINISH_HANDLED: "incoming",
    INCOMING.release: "incoming",
    inbox_statements.BEGIN_SUSPECT_ATTEMPT: "incoming",
    inbox_statements.RETRY_LATER: "incoming",
    inbox_statements.DEAD_LETTER_INCOMING: "incoming",
    inbox_statements.EXPIRE_OWNED_INCOMING: "incoming",
}


async def test_a_fence_uses_the_primary_key_and_never_the_owner_index(store: Store, url: str) -> None:
    """With statistics from when the tables were empty, and 20,000 rows that one node owns."""
    with psycopg.connect(url, autocommit=True) as conn:
        for side in ("outgoing", "incoming"):
            conn.execute(f"ALTER TABLE durable.{side}_envelopes SET (autovacuum_enabled = false)")
            conn.execute(f"ANALYZE durable.{side}_envelopes")
    for first in range(0, 20_000, 2_000):
        await store.send(*(outgoing(number) for number in range(first, first + 2_000)), owner=A)
        await store.receive(*(envelope(number) for number in range(first, first + 2_000)), owner=A)

    for statement, side in FENCED.items():
        address = "destination" if side == "outgoing" else "endpoint"
        keys = await store.rows(f"SELECT id, {address}, 0 FROM durable.{side}_envelopes LIMIT 100")
        plan = await store.run(explain, statement, keys)
        indexes = {index for index in _find(plan, "Index Name") if index.startswith(side)}
        assert indexes == {f"{side}_envelopes_pkey"}, f"{statement.within('')} uses {indexes or 'no index'}: {plan}"


def explain(conn: Connection, schema: str, statement: Statement, keys: Sequence[tuple[Any, str, int]]) -> Any:
    """The plan of a fenced statement for these rows of node A."""
    params = leases.fence(A, keys) | dict(zip(("id", "endpoint", "epoch"), keys[0], strict=True))
    params |= LETTER.parameters() | ONCE.columns() | {"message_digest": 0}
    params |= {"delay": timedelta(seconds=1), "counted": 1, "within": timedelta(0), "keep_body": False}
    explained = text(f"EXPLAIN (FORMAT JSON) {statement.within(schema).text}")
    plan = conn.execute(explained, {key: params[key] for key in explained.compile().params}).scalar_one()
    return json.loads(plan) if isinstance(plan, str) else plan


def _find(plan: Any, key: str) -> Iterator[str]:
    if isinstance(plan, dict):
        if key in plan:
            yield plan[key]
        plan = list(plan.values())
    if isinstance(plan, list):
        for part in plan:
            yield from _find(part, key)


# ---------------------------------------------------------------- duplicates


async def test_received_envelope_is_a_duplicate_after_its_handling(store: Store) -> None:
    first, second = envelope(1), envelope(2)
    assert await store.receive(first) == {first.id}
    assert await store.receive(first, second) == {second.id}
    await store.run(inbox.finish_handled, A, await store.claim_incoming())
    assert await store.receive(first, second) == set()
    assert await store.claim_incoming() == []


async def test_another_endpoint_receives_the_same_envelope_for_itself(store: Store) -> None:
    event = envelope(1)
    assert await store.receive(event, endpoint="billing") == {event.id}
    assert await store.receive(event, endpoint="shipping") == {event.id}
    assert await store.one("SELECT count(*) FROM durable.incoming_envelopes") == 2


async def test_second_of_two_concurrent_receptions_waits_and_finds_a_duplicate(store: Store, url: str) -> None:
    received = envelope(1)

    def receive(conn: Connection, schema: str) -> set[inbox.Key]:
        return inbox.store(conn, SCHEMA, [Arrival("billing", received, A)])

    async with store.database.engine.begin() as first:
        assert await first.run_sync(receive, SCHEMA) == {(received.id, "billing")}
        second = asyncio.create_task(store.database.transaction(receive))
        await eventually(lambda: waits_for_a_lock(url))
    assert await second == set()


async def test_an_id_twice_in_one_call_is_stored_once(store: Store) -> None:
    received = envelope(1)
    assert await store.receive(received, received) == {received.id}

    assert await store.one("SELECT count(*) FROM durable.incoming_envelopes") == 1


async def test_known_id_with_another_body_is_found(store: Store) -> None:
    first, second = envelope(1), envelope(2)
    await store.receive(first, second)
    changed = msgspec.structs.replace(first, body=b"another")
    arrivals = [Arrival("billing", changed, ANY_NODE), Arrival("billing", second, ANY_NODE)]

    found = await store.run(inbox.find_known, arrivals)
    others = {
        each.key for each in arrivals if is_another(KeyRing(), found[each.key][0], each.envelope, found[each.key][1])
    }
    assert others == {(first.id, "billing")}


# ---------------------------------------------------------------- ids without a day

OLD = timedelta(days=30)
KEEP = timedelta(days=8)
EVERYTHING = LetterRange(0, 2**62, 100)


def under_key(key: str = "invoice-17", **changes: Any) -> Envelope:
    """A message under a business key, sent now."""
    envelope_id = uuid5(NAMESPACE_URL, key)
    return msgspec.structs.replace(envelope(1, envelope_id=envelope_id), sent_at=datetime.now(UTC), **changes)


async def forget_old(store: Store) -> None:
    """As a month later: what is remembered has become old, and is purged."""
    for table in ("undated_ids", "received_ids"):
        await store.rows(f"UPDATE durable.{table} SET received_at = now() - interval '30 days' RETURNING 1")
    for statement in maintenance.PURGES:
        await store.run(maintenance.purge, statement, keep=KEEP)


async def test_id_is_remembered_while_its_row_waits_and_forgotten_after(store: Store) -> None:
    waiting = under_key()
    await store.receive(waiting)
    await forget_old(store)
    assert await store.receive(waiting, envelope(2)) != {waiting.id}
    await store.run(inbox.finish_handled, A, await store.claim_incoming())
    assert await store.receive(waiting) == set(), "remembered for as long again, since it waited"

    await forget_old(store)
    assert await store.receive(waiting) == {waiting.id}


@pytest.mark.parametrize("remembered", ["undated_ids", "received_ids"])
async def test_forgotten_id_with_a_waiting_row_is_a_duplicate_and_harms_no_neighbour(
    store: Store, remembered: str
) -> None:
    waiting = under_key() if remembered == "undated_ids" else envelope(1)
    await store.receive(waiting)
    await store.rows(f"DELETE FROM durable.{remembered} RETURNING 1")
    neighbour = envelope(2)

    assert await store.receive(waiting, neighbour) == {neighbour.id}
    assert len(await store.claim_incoming()) == 2


async def test_forgotten_business_key_with_a_waiting_row_fails_no_commit(store: Store) -> None:
    local = under_key(destination="local")
    await store.run(outbox.store, [Sent(local, "local", ANY_NODE)])
    await store.rows("DELETE FROM durable.undated_ids RETURNING 1")

    assert await store.run(outbox.store, [Sent(local, "local", ANY_NODE)]) == {(local.id, "local")}


async def give_up_by_cancel(store: Store) -> None:
    await store.set("incoming", "owner_id = 0, execution_time = now() + interval '1 hour'")
    cancelled = await store.run(
        delayed.cancel, delayed.Selection(), EVERYTHING, side="incoming", actor="ada", reason=None
    )
    assert len(cancelled.done) == 1


async def give_up_by_discard(store: Store) -> None:
    (lease,) = await store.claim_incoming()
    await store.run(inbox.dead_letter, A, lease, LETTER)
    discarded = await store.run(
        dead_letters.discard, dead_letters.Selection(), EVERYTHING, actor="ada", reason="a test"
    )
    assert len(discarded.done) == 1


GIVING_UP = {"cancelled": give_up_by_cancel, "discarded": give_up_by_discard}


@pytest.mark.parametrize("give_up", GIVING_UP)
async def test_message_under_an_abandoned_key_is_new(store: Store, give_up: str) -> None:
    given_up = under_key()
    await store.receive(given_up)
    await GIVING_UP[give_up](store)

    assert await store.receive(given_up) == set(), "what a sender without an answer repeats stays given up"
    again = under_key()
    assert await store.receive(again) == {given_up.id}
    assert await store.receive(again) == set()


@pytest.mark.parametrize("give_up", GIVING_UP)
async def test_local_message_under_an_abandoned_key_is_new(store: Store, give_up: str) -> None:
    await store.run(outbox.store, [Sent(under_key(destination="local"), "local", ANY_NODE)])
    await GIVING_UP[give_up](store)

    assert await store.run(outbox.store, [Sent(under_key(destination="local"), "local", ANY_NODE)]) == set()
    assert len(await store.claim_incoming()) == 1


async def test_replayed_letter_holds_its_key_again(store: Store) -> None:
    await store.receive(under_key())
    await give_up_by_discard(store)
    await store.rows("UPDATE durable.dead_letters SET resolution = NULL, resolved_at = NULL RETURNING 1")
    await store.run(dead_letters.replay, dead_letters.Selection(), EVERYTHING, actor="ada")

    assert await store.receive(under_key()) == set()


async def test_replayed_letter_of_a_dropped_day_fills_no_partition(store: Store) -> None:
    await store.receive(envelope(1))
    (lease,) = await store.claim_incoming()
    await store.run(inbox.dead_letter, A, lease, LETTER)
    await store.rows("DELETE FROM durable.received_ids RETURNING 1")
    await store.rows(
        "UPDATE durable.dead_letters SET id = CAST('00' || substr(CAST(id AS text), 3) AS uuid) RETURNING 1"
    )

    replayed = await store.run(dead_letters.replay, dead_letters.Selection(), EVERYTHING, actor="ada")

    assert len(replayed.done) == 1
    assert await store.one("SELECT count(*) FROM durable.received_ids") == 0


# ---------------------------------------------------------------- ends

HISTORY = "SELECT side, outcome, address, attempts, interruptions, node_id, error FROM durable.envelope_history"


async def test_finished_message_is_in_the_history(store: Store) -> None:
    await store.send(outgoing())
    (lease,) = await store.claim_outgoing()
    await store.run(outbox.count_failed_attempt, A, [lease])
    await store.run(outbox.delete_sent, A, [lease])

    assert await store.one(HISTORY) == ("outgoing", "sent", PEER, 1, 0, A, None)
    assert await store.one(
        "SELECT id = :id AND xid > 0 AND finished_at >= sent_at FROM durable.envelope_history", id=lease.envelope.id
    )


async def test_the_history_of_both_sides_keeps_the_deadline(store: Store) -> None:
    deadline = datetime.now(UTC) + timedelta(days=1)
    await store.send(outgoing(1, deliver_by=deadline))
    await store.receive(msgspec.structs.replace(envelope(2), deliver_by=deadline))
    await store.run(outbox.delete_sent, A, await store.claim_outgoing())
    await store.run(inbox.finish_handled, A, await store.claim_incoming())
    kept = "SELECT count(*) FROM durable.envelope_history WHERE deliver_by = :deadline"
    assert await store.one(kept, deadline=deadline) == 2


async def test_dead_letter_keeps_the_whole_envelope_and_the_reason(store: Store) -> None:
    await store.receive(msgspec.structs.replace(envelope(1), headers={"a": "b"}, partition_key="k", body=b"\0raw"))
    (lease,) = await store.claim_incoming()
    letter = Letter.from_error(ValueError("no such order \0"))
    assert await store.run(inbox.dead_letter, A, lease, letter, Tried(3))

    row = await store.one(
        "SELECT side, address, id, message_type, source, CAST(headers AS text), partition_key, body, attempts, "
        "exception_type, reason, traceback, fingerprint, replay_count, node_id FROM durable.dead_letters"
    )
    assert row == (
        "incoming", "billing", lease.envelope.id, MESSAGE_TYPE, "orders", '{"a": "b"}', "k", b"\0raw", 3,
        "ValueError", "no such order \N{REPLACEMENT CHARACTER}", letter.traceback, letter.fingerprint, 0, A,
    )  # fmt: skip
    assert await store.one(HISTORY) == ("incoming", "dead-lettered", "billing", 0, 0, A, letter.reason)
    assert await store.one("SELECT count(*) FROM durable.incoming_envelopes") == 0


async def test_message_rejected_by_the_peer_is_a_dead_letter_of_the_outgoing_side(store: Store) -> None:
    await store.send(outgoing(1), outgoing(2))
    first, second = await store.claim_outgoing()
    await store.run(outbox.dead_letter, A, [(first, LETTER)])

    assert await store.rows("SELECT side, address, id FROM durable.dead_letters") == [
        ("outgoing", PEER, first.envelope.id)
    ]
    assert await store.rows("SELECT id FROM durable.outgoing_envelopes") == [(second.envelope.id,)]


@pytest.mark.parametrize("known", [True, False], ids=["envelope", "bytes alone"])
async def test_unstorable_envelope_is_quarantined_with_its_bytes(store: Store, known: bool) -> None:
    strange = envelope(1) if known else None
    await store.run(
        inbox.quarantine, A, inbox.Unfit("billing", b"\xff\0", "a test", strange, {"routing-key": "a\0b\ud800"})
    )

    row = await store.one("SELECT id, message_type, body, reason, headers FROM durable.dead_letters")
    known_columns = (strange.id if strange else None, MESSAGE_TYPE if strange else None)
    assert row == (*known_columns, b"\xff\0", "a test", {"routing-key": "a\N{REPLACEMENT CHARACTER}b?"})


async def test_retry_is_due_after_its_delay_by_the_clock_of_the_database(store: Store) -> None:
    await store.receive(envelope(1))
    (lease,) = await store.claim_incoming()
    assert await store.run(inbox.retry_later, A, lease, Tried(2), delay=timedelta(hours=1))

    owner, epoch, attempts, due = await store.one(
        "SELECT owner_id, epoch, attempts, execution_time - now() FROM durable.incoming_envelopes"
    )
    assert (owner, epoch, attempts) == (ANY_NODE, 2, 2)
    assert timedelta(minutes=59) < due <= timedelta(hours=1)
    assert await store.run(leases.promote_due, INCOMING, 100) == 0
    assert await store.claim_incoming() == []

    await store.set("incoming", "execution_time = now()")
    assert await store.run(leases.promote_due, INCOMING, 100) == 1
    (again,) = await store.claim_incoming(B)
    assert (again.attempts, again.epoch, again.interruptions) == (2, 3, 0)


async def test_owned_message_expires_by_the_clock_of_the_database(store: Store) -> None:
    await store.receive(msgspec.structs.replace(envelope(1), deliver_by=datetime.now(UTC) + timedelta(hours=1)))
    (lease,) = await store.claim_incoming()
    assert not await store.run(inbox.expire, A, lease)
    await store.set("incoming", "deliver_by = now() - interval '1 second'")
    assert await store.run(inbox.expire, A, lease)

    assert (await store.one(HISTORY))[:2] == ("incoming", "expired")


async def test_suspect_attempt_is_counted_before_its_run(store: Store) -> None:
    await store.receive(envelope(1))
    (lease,) = await store.claim_incoming()
    assert [await store.run(inbox.begin_suspect_attempt, A, lease) for _ in range(2)] == [1, 2]


# ---------------------------------------------------------------- recovery

SIDES = pytest.mark.parametrize("table", [OUTGOING, INCOMING], ids=["outgoing", "incoming"])


async def fill(store: Store, table: Recovery, *numbers: int, owner: NodeId = ANY_NODE, **changes: Any) -> None:
    """Rows in one of the two tables."""
    for number in numbers:
        if table is OUTGOING:
            await store.send(outgoing(number, **changes), owner=owner)
        else:
            await store.receive(msgspec.structs.replace(envelope(number), **changes), owner=owner)


def side_of(table: Recovery) -> str:
    return "outgoing" if table is OUTGOING else "incoming"


@SIDES
async def test_a_dead_nodes_rows_are_released_in_bounded_batches_and_marked(store: Store, table: Recovery) -> None:
    await fill(store, table, *range(5), owner=A)
    await fill(store, table, 5, owner=B)

    assert [await store.run(leases.release_dormant, table, A, 2) for _ in range(4)] == [2, 2, 1, 0]
    rows = await store.rows(
        f"SELECT owner_id, epoch, interruptions, count(*) FROM durable.{side_of(table)}_envelopes "
        "GROUP BY 1, 2, 3 ORDER BY 1"
    )
    assert rows == [(ANY_NODE, 1, 1, 5), (B, 0, 0, 1)]


@SIDES
async def test_locked_rows_are_left_for_the_next_sweep(store: Store, table: Recovery) -> None:
    await fill(store, table, *range(3), owner=A)
    async with store.database.engine.begin() as conn:
        await conn.execute(text(f"SELECT FROM durable.{side_of(table)}_envelopes LIMIT 1 FOR UPDATE"))
        async with asyncio.timeout(30):
            assert await store.run(leases.release_dormant, table, A, 10) == 2
    assert await store.run(leases.release_dormant, table, A, 10) == 1


@SIDES
async def test_stopping_node_releases_its_rows_unmarked(store: Store, table: Recovery) -> None:
    await fill(store, table, *range(3), owner=A)
    await fill(store, table, 3, owner=B)

    assert await store.run(leases.release_all, table, A) == 3
    assert await store.run(leases.owners, table) == {B}
    assert await store.one(f"SELECT sum(interruptions) FROM durable.{side_of(table)}_envelopes") == 0


@SIDES
async def test_owners_and_their_rows_are_listed(store: Store, table: Recovery) -> None:
    await fill(store, table, *range(2), owner=A)
    await fill(store, table, 2, owner=NodeId(7))
    await fill(store, table, 3)

    assert await store.run(leases.owners, table) == {A, 7}
    owned = await store.run(leases.owned_by, table, A)
    assert {(address, epoch) for _, address, epoch in owned} == {(PEER if table is OUTGOING else "billing", 0)}
    assert len(owned) == 2


async def test_groups_with_unowned_work_are_listed_once(store: Store) -> None:
    later = datetime.now(UTC) + timedelta(days=1)
    for number, name in enumerate(["a", "b", "b", "c"]):
        await fill(store, OUTGOING, number, destination=name)
        await fill(store, INCOMING, number, message_type=name)
    await fill(store, OUTGOING, 5, destination="owned", owner=A)
    await fill(store, OUTGOING, 6, destination="later", execution_time=later)
    await fill(store, INCOMING, 5, message_type="owned", owner=A)

    assert await store.run(leases.unowned_groups, OUTGOING) == ["a", "b", "c"]
    assert await store.run(leases.unowned_groups, INCOMING) == ["a", "b", "c"]


@SIDES
async def test_empty_tables_have_no_groups_and_no_owners(store: Store, table: Recovery) -> None:
    assert await store.run(leases.unowned_groups, table) == []
    assert await store.run(leases.owners, table) == set()
    assert await store.run(leases.backlog, table) == []


@SIDES
async def test_due_rows_are_promoted_the_earliest_first_and_bounded(store: Store, table: Recovery) -> None:
    await fill(store, table, *range(3))
    side = side_of(table)
    await store.set(side, "execution_time = now() - seq * interval '1 second'")
    await fill(store, table, 3)
    await store.rows(f"UPDATE durable.{side}_envelopes SET execution_time = now() + interval '1 hour' "
                     f"WHERE execution_time IS NULL RETURNING 1")  # fmt: skip

    assert await store.run(leases.promote_due, table, 1) == 1
    assert await store.one(f"SELECT max(seq) = 3 FROM durable.{side}_envelopes WHERE execution_time IS NULL")
    assert [await store.run(leases.promote_due, table, 10) for _ in range(2)] == [2, 0]


@SIDES
async def test_unowned_rows_expire_bounded_and_owned_ones_do_not(store: Store, table: Recovery) -> None:
    past = datetime.now(UTC) - timedelta(seconds=1)
    await fill(store, table, *range(3), deliver_by=past)
    await fill(store, table, 3, deliver_by=past, owner=A)
    await fill(store, table, 4)
    await fill(store, table, 5, deliver_by=datetime.now(UTC) + timedelta(hours=1))

    assert [await store.run(leases.expire, table, B, 2) for _ in range(3)] == [2, 1, 0]
    assert await store.one(f"SELECT count(*) FROM durable.{side_of(table)}_envelopes") == 3
    assert await store.rows(
        "SELECT side, outcome, node_id, count(*) FROM durable.envelope_history GROUP BY 1, 2, 3"
    ) == [(side_of(table), "expired", B, 3)]


async def test_backlog_is_counted_by_destination_and_delayed_rows_do_not_age_the_group(store: Store) -> None:
    now = datetime.now(UTC)
    day, tomorrow = timedelta(days=1), now + timedelta(days=1)
    await store.send(outgoing(1, sent_at=now - day), outgoing(2))
    await store.send(outgoing(3, sent_at=now - 2 * day), owner=A)
    await store.send(outgoing(4, sent_at=now - 3 * day, execution_time=tomorrow))

    [group] = await store.run(leases.backlog, OUTGOING)

    assert group[:4] == (PEER, 4, 3, 1)
    assert [age is not None and age // day for age in group[4:]] == [2, 1]


# ---------------------------------------------------------------- nodes, locks, circuits


async def test_nodes_are_read_with_the_age_of_their_heartbeat(store: Store) -> None:
    params = {"service": "billing", "description": "host:1", "version": "1", "capabilities": '{"message_types": ["a"]}'}

    def register(conn: Connection, schema: str) -> None:
        for _ in range(2):
            conn.execute(housekeeping.REGISTER_NODE.within(SCHEMA), params)

    await store.database.transaction(register)
    first, second = await store.run(nodes.read)
    assert second.node_id > first.node_id
    assert (first.service, first.description, json.loads(first.capabilities)) == (
        "billing", "host:1", {"message_types": ["a"]},
    )  # fmt: skip
    assert timedelta(0) <= first.heartbeat_age < timedelta(minutes=1)
    await store.run(nodes.remove, first.node_id)
    assert [node.node_id for node in await store.run(nodes.read)] == [second.node_id]


async def test_locks_of_nodes_are_read_for_this_schema_and_database_alone(store: Store, url: str) -> None:
    with psycopg.connect(url, autocommit=True) as conn:
        lock = "SELECT pg_advisory_lock(%s, %s)"
        conn.execute(lock, (locks.nodes_class(SCHEMA), 17))
        conn.execute(lock, (locks.nodes_class("another"), 18))
        conn.execute(lock, (locks.jobs_class(SCHEMA), 19))
        conn.execute("SELECT pg_advisory_lock(20)")
        assert await store.run(nodes.locked) == {17}
    await eventually(lambda: store.run(_nothing_locked))


def _nothing_locked(conn: Connection, schema: str) -> bool:
    return not nodes.locked(conn, schema)


async def test_lock_of_a_job_is_held_by_one_transaction_at_a_time(store: Store) -> None:
    def try_lock(conn: Connection, job: Job) -> bool:
        return locks.try_lock(conn, SCHEMA, job)

    async with store.database.engine.begin() as first, store.database.engine.begin() as second:
        assert await first.run_sync(try_lock, Job.SWEEP)
        assert not await second.run_sync(try_lock, Job.SWEEP)
        assert await second.run_sync(try_lock, Job.PARTITIONS)
    assert await store.run(locks.try_lock, Job.SWEEP)


def test_lock_classes_never_change() -> None:
    """Nodes of two versions, and the functions in the database, must mean the same lock."""
    assert (locks.nodes_class("durable"), locks.jobs_class("durable")) == (1509190759, 1708623273)
    assert [int(job) for job in Job] == [1, 2, 3, 4]


async def test_uptime_of_the_server_is_read(store: Store) -> None:
    assert timedelta(0) < await store.run(nodes.server_uptime) < timedelta(days=1)


async def test_open_circuit_keeps_its_reason_and_its_start(store: Store) -> None:
    await store.run(circuits.open_circuit, CircuitKind.DESTINATION, PEER, reason="first", actor="node 1")
    (opened,) = await store.run(circuits.read)
    await store.run(circuits.open_circuit, CircuitKind.DESTINATION, PEER, reason="second", actor="node 2")
    await store.run(
        circuits.open_circuit, CircuitKind.HANDLER, PEER, reason="paused", actor="ops", duration=timedelta(hours=1)
    )

    destination, handler = await store.run(circuits.read)
    assert destination == opened
    assert (opened.kind, opened.key, opened.reason, opened.until, opened.actor) == (
        "destination", PEER, "first", None, "node 1",
    )  # fmt: skip
    assert timedelta(minutes=59) < handler.until - handler.since <= timedelta(hours=1)
    await store.run(circuits.close_circuit, CircuitKind.DESTINATION, PEER)
    assert [circuit.kind for circuit in await store.run(circuits.read)] == ["handler"]


# ---------------------------------------------------------------- bad rows and bad times

BAD: dict[str, dict[str, Any]] = {
    "a NUL in a column": {"partition_key": "a\0b"},
    "a NUL in a header": {"headers": {"a": "b\0"}},
    "a NUL in the type": {"message_type": "a\0b"},
    "a lone surrogate": {"partition_key": "\ud800"},
    "a lone surrogate in a header": {"headers": {"a": "\udfff"}},
}


@pytest.mark.parametrize("flaw", BAD)
async def test_a_bad_row_is_an_invalid_message_and_stores_none_of_its_neighbours(store: Store, flaw: str) -> None:
    batch = [envelope(1), msgspec.structs.replace(envelope(2), **BAD[flaw]), envelope(3)]
    with pytest.raises(InvalidMessage):
        await store.receive(*batch)

    assert await store.receive(batch[0], batch[2]) == {batch[0].id, batch[2].id}, "nothing is left of the first try"


async def test_a_lost_connection_is_an_unavailable_storage_and_the_next_transaction_has_another(
    store: Store, url: str
) -> None:
    await store.receive(envelope(1))
    with psycopg.connect(url, autocommit=True) as conn:
        conn.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )
    with pytest.raises(StorageUnavailable):
        await store.receive(envelope(2))
    assert await store.receive(envelope(3))
