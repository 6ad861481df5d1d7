"""The claim rule, on the tables alone: whose turn it is, when two nodes ask at once, and what it costs to ask."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import msgspec
import psycopg
import pytest
from sqlalchemy import Connection, create_engine

from durable.envelope import ANY_NODE, Envelope, LeasedEnvelope, NodeId, new_id
from durable.messages.ordering import OrderingRules, QueueKeys
from durable.storage import agenda, circuits, inbox, leases, ordering, outbox, trials
from durable.storage.circuits import CircuitKind
from durable.storage.inbox import Arrival
from durable.storage.ordering import Lane, Turn, Turns
from durable.storage.outbox import Sent
from durable.storage.sql import ordering as sql
from durable.storage.sql.recovery import INCOMING
from durable.storage.sql.statement import Statement
from tests.failure.leftovers import envelope

SCHEMA = "durable"
A, B = NodeId(101), NodeId(102)
TYPES = ["ordering.a", "ordering.b"]


class Desk:
    """Connections to one database, and what a node would do with them."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.engine = create_engine(url.replace("postgresql:", "postgresql+psycopg:"), pool_size=5)

    def run(self, work: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with self.engine.begin() as conn:
            return work(conn, SCHEMA, *args, **kwargs)

    def receive(self, *numbers: int, key: str | None = "k", message_type: str = TYPES[0], **changes: Any) -> None:
        given = [make(number, key, message_type, **changes) for number in numbers]
        self.run(inbox.store, [Arrival("shop", each, ANY_NODE, OrderingRules().incoming(each)) for each in given])

    def claim(
        self, *keys: str, node: NodeId = A, types: Sequence[str] = TYPES, size: int = 100
    ) -> list[LeasedEnvelope]:
        return list(self.run(claim_in, keys=keys or ("k",), node=node, types=types, size=size))

    def rows(self, query: str) -> list[tuple[Any, ...]]:
        with psycopg.connect(self.url) as conn:
            return conn.execute(query.encode()).fetchall()


def make(number: int, key: str | None, message_type: str = TYPES[0], **changes: Any) -> Envelope:
    made = envelope(number, envelope_id=new_id())
    headers = {"number": str(number)} | changes.pop("headers", {})
    return msgspec.structs.replace(made, message_type=message_type, partition_key=key, headers=headers, **changes)


def claim_in(
    conn: Connection, schema: str, *, keys: Sequence[str], node: NodeId, types: Sequence[str], size: int
) -> list[LeasedEnvelope]:
    found = ordering.claim(
        conn, schema, Turns([Turn(key) for key in keys], {t: t for t in types}), batch_size=size, node=node
    )
    return found.leases


def number(lease: LeasedEnvelope) -> int:
    return int(lease.envelope.headers["number"])


def numbers(claimed: Sequence[LeasedEnvelope]) -> list[int]:
    return [number(lease) for lease in claimed]


@pytest.fixture
def desk(database_url: str) -> Iterator[Desk]:
    made = Desk(database_url)
    yield made
    made.engine.dispose()


class TestTurns:
    def test_run_of_a_key_is_claimed_together_and_blocks_the_key_until_finished(self, desk: Desk) -> None:
        desk.receive(1, 2, 3)
        first = desk.claim()
        assert numbers(first) == [1, 2, 3]
        desk.receive(4)
        assert desk.claim(node=B) == desk.claim(node=A) == []
        desk.run(inbox.finish_handled, A, first[:2])
        assert desk.claim(node=B) == []
        desk.run(inbox.finish_handled, A, first[2:])
        assert numbers(desk.claim(node=B)) == [4]

    @pytest.mark.parametrize("size", range(3, 8))
    def test_claim_with_room_for_a_part_of_its_runs_takes_their_beginnings(self, desk: Desk, size: int) -> None:
        for key in (1, 2, 3):
            desk.receive(*range(10 * key, 10 * key + 4), key=f"k{key}")
        seen: list[int] = []
        while claimed := desk.claim("k1", "k2", "k3", size=size):
            assert len(claimed) <= size
            desk.run(inbox.finish_handled, A, claimed)
            seen += numbers(claimed)
        for key in (1, 2, 3):
            assert [each for each in seen if each // 10 == key] == [*range(10 * key, 10 * key + 4)]

    def test_message_waiting_for_its_retry_holds_only_its_own_key(self, desk: Desk) -> None:
        desk.receive(1, 2)
        desk.receive(3, key="other")
        first, second = desk.claim()
        desk.run(inbox.retry_later, A, first, delay=timedelta(hours=1))
        desk.run(leases.release, INCOMING, A, [second.key])
        assert numbers(desk.claim("k", "other")) == [3]
        self.make_due(desk)
        assert numbers(desk.claim("k", node=B)) == [1, 2]

    @staticmethod
    def make_due(desk: Desk) -> None:
        with psycopg.connect(desk.url) as conn:
            conn.execute("UPDATE durable.incoming_envelopes SET execution_time = NULL")

    def test_message_delayed_by_its_sender_holds_no_other_until_due(self, desk: Desk) -> None:
        later = envelope(0).sent_at + timedelta(days=1)
        desk.receive(1, execution_time=later)
        desk.receive(2)
        claimed = desk.claim()
        assert numbers(claimed) == [2]
        desk.receive(3)
        desk.run(inbox.finish_handled, A, claimed)
        self.make_due(desk)
        assert numbers(desk.claim()) == [1, 3]

    def test_message_with_its_attempt_taken_back_stays_first_of_its_key(self, desk: Desk) -> None:
        desk.receive(1, 2, 3)
        (first,) = desk.claim(size=1)
        assert desk.run(inbox.begin_suspect_attempt, A, first) == 1
        assert desk.run(inbox.take_back_attempt, A, first)
        assert numbers(desk.claim(node=B, size=1)) == [1]

    def test_order_spans_types_and_a_run_has_one_type(self, desk: Desk) -> None:
        desk.receive(1, 2)
        desk.receive(3, message_type=TYPES[1])
        desk.receive(4)
        assert desk.claim(types=TYPES[1:]) == []
        for expected in ([1, 2], [3], [4]):
            claimed = desk.claim()
            assert numbers(claimed) == expected
            desk.run(inbox.finish_handled, A, claimed)

    def test_batch_serves_every_key_before_a_second_turn(self, desk: Desk) -> None:
        desk.receive(*range(10), key="long")
        desk.receive(100, key="short")
        assert numbers(desk.claim("long", "short", size=4)) == [0, 1, 100]
        assert desk.claim("long", "short") == []

    def test_expired_message_is_passed_over(self, desk: Desk) -> None:
        desk.receive(1, deliver_by=envelope(0).sent_at - timedelta(days=1))
        desk.receive(2)
        assert numbers(desk.claim()) == [2]

    @pytest.mark.parametrize("guarded", [True, False], ids=["guarded", "unguarded"])
    def test_message_committed_late_waits_for_owned_ones_behind(
        self, desk: Desk, monkeypatch: pytest.MonkeyPatch, guarded: bool
    ) -> None:
        """Two transactions at once: the first to insert is the last to commit."""
        if not guarded:
            change(monkeypatch, "HAVING count(*) FILTER (WHERE owner_id <> 0) = 0", "")
        late = make(1, "k")
        with desk.engine.connect() as slow:
            inbox.store(slow, SCHEMA, [Arrival("shop", late, ANY_NODE, QueueKeys("k"))])
            desk.receive(2)
            claimed = desk.claim()
            assert numbers(claimed) == [2]
            slow.commit()
        assert numbers(desk.claim(node=B)) == ([] if guarded else [1])
        desk.run(inbox.finish_handled, A, claimed)
        assert numbers(desk.claim(node=B)) == ([1] if guarded else [])

    def test_retry_holds_the_messages_behind_and_not_one_committed_late_before(self, desk: Desk) -> None:
        late = make(1, "k")
        with desk.engine.connect() as slow:
            inbox.store(slow, SCHEMA, [Arrival("shop", late, ANY_NODE, QueueKeys("k"))])
            desk.receive(2, 3)
            second, third = desk.claim()
            desk.run(inbox.retry_later, A, second, delay=timedelta(hours=1))
            desk.run(leases.release, INCOMING, A, [third.key])
            slow.commit()
        assert numbers(desk.claim()) == [1]

    def test_a_parked_key_is_not_claimed_and_others_are(self, desk: Desk) -> None:
        desk.receive(1)
        desk.receive(2, key="other")
        with psycopg.connect(desk.url) as conn:
            conn.execute("INSERT INTO durable.circuits (kind, key, reason, actor) VALUES ('key', 'k', 'x', 'y')")
        assert numbers(desk.claim("k", "other")) == [2]
        with psycopg.connect(desk.url) as conn:
            conn.execute("UPDATE durable.circuits SET until = now() - interval '1 second'")
        assert numbers(desk.claim("k")) == [1]

    def test_paused_handler_holds_the_keys_at_its_turn(self, desk: Desk) -> None:
        desk.receive(1)
        desk.receive(2, message_type=TYPES[1])
        with psycopg.connect(desk.url) as conn:
            conn.execute(
                "INSERT INTO durable.circuits (kind, key, reason, actor) VALUES ('handler', %s, 'x', 'y')", [TYPES[0]]
            )
        assert desk.claim() == []

    def test_rows_of_one_statement_keep_its_order_for_any_ids(self, desk: Desk) -> None:
        rng = random.Random(7)
        given = [make(n, "k") for n in range(200)]
        given = [msgspec.structs.replace(each, id=rng_id(rng)) for each in given]
        desk.run(joining_by_id, [Arrival("shop", each, ANY_NODE, QueueKeys("k")) for each in given])
        sent = [msgspec.structs.replace(each, destination="tcp://127.0.0.1:1", id=rng_id(rng)) for each in given]
        desk.run(outbox.store, [Sent(each, None, ANY_NODE, QueueKeys("k")) for each in sent])
        for table in ("incoming", "outgoing"):
            found = desk.rows(
                f"SELECT CAST(headers ->> 'number' AS integer) FROM durable.{table}_envelopes ORDER BY seq"
            )
            assert [value for (value,) in found] == list(range(200))

    def test_row_with_an_ordering_key_is_stored_without_an_owner(self, desk: Desk) -> None:
        desk.run(inbox.store, [Arrival("shop", make(1, "k"), A, QueueKeys("k"))])
        desk.run(
            outbox.store, [Sent(make(1, "k"), None, A, QueueKeys("k")), Sent(make(2, "k"), "local", A, QueueKeys("k"))]
        )
        for table in ("incoming", "outgoing"):
            assert set(desk.rows(f"SELECT owner_id FROM durable.{table}_envelopes")) == {(0,)}

    def test_ordinary_claim_takes_no_ordered_or_shared_rows(self, desk: Desk) -> None:
        desk.receive(1)
        desk.run(inbox.store, [Arrival("shop", make(2, None), ANY_NODE, QueueKeys(None, "blue"))])
        desk.receive(3, key=None)
        ordinary = desk.run(inbox.claim, message_type=TYPES[0], batch_size=10, node=A)
        assert numbers(ordinary) == [3]
        assert desk.run(agenda.read, after="", count=10).message_types == []


def joining_by_id(conn: Connection, schema: str, arrivals: Sequence[Arrival]) -> None:
    """Store these by the plan that sorts them, which the planner may choose for its own reasons."""
    conn.exec_driver_sql("SET LOCAL enable_hashjoin = off")
    conn.exec_driver_sql("SET LOCAL enable_nestloop = off")
    inbox.store(conn, schema, arrivals)


def rng_id(rng: random.Random) -> Any:
    from uuid import UUID

    return UUID(int=rng.getrandbits(128), version=4)


@pytest.mark.parametrize("paused", TYPES)
def test_claim_takes_no_older_version_while_its_type_or_handler_is_paused(desk: Desk, paused: str) -> None:
    older, newer = TYPES
    turns = Turns([Turn("k")], {older: newer})
    desk.receive(1, message_type=older)
    desk.run(circuits.pause, CircuitKind.HANDLER, paused, reason="a test", actor="ops", duration=None)
    assert desk.run(ordering.claim, turns, batch_size=9, node=A).leases == []
    desk.run(circuits.resume, CircuitKind.HANDLER, paused)
    assert numbers(desk.run(ordering.claim, turns, batch_size=9, node=A).leases) == [1]


class TestTwoAtOnce:
    def test_key_being_claimed_by_one_node_is_contested_for_another(self, desk: Desk) -> None:
        desk.receive(1, 2)
        with desk.engine.connect() as first:
            claim_in(first, SCHEMA, keys=["k"], node=A, types=TYPES, size=1)
            turns = Turns([Turn("k"), Turn("other")], {t: t for t in TYPES})
            found = desk.run(ordering.claim, turns, batch_size=9, node=B)
            assert (found.leases, found.contested) == ([], [Turn("k")])
            first.commit()
        assert desk.claim(node=B) == []

    @pytest.mark.parametrize("guarded", [True, False], ids=["guarded", "unguarded"])
    def test_claim_begun_before_the_commit_of_another_takes_nothing_of_its_key(
        self, desk: Desk, monkeypatch: pytest.MonkeyPatch, guarded: bool
    ) -> None:
        """Without the lock both would have the key: the second takes what the first has left of it."""
        if not guarded:
            lock = sql.INCOMING.lock._sql.partition("WHERE")[0]
            monkeypatch.setattr(sql.INCOMING, "lock", Statement(lock))
        desk.receive(1, 2, 3)
        with desk.engine.connect() as first:
            owned = numbers(claim_in(first, SCHEMA, keys=["k"], node=A, types=TYPES, size=1))
            with desk.engine.connect() as second:
                second.exec_driver_sql("SET lock_timeout = '300ms'")
                try:
                    also = numbers(claim_in(second, SCHEMA, keys=["k"], node=B, types=TYPES, size=3))
                except Exception as error:
                    also = [type(error).__name__]  # type: ignore[list-item]
                second.commit() if guarded else second.rollback()
            first.commit()
        assert owned == [1]
        assert (also == []) == guarded


def change(monkeypatch: pytest.MonkeyPatch, guard: str, instead: str) -> None:
    """Take a guard out of the claim."""
    claim = sql.INCOMING.claim._sql
    assert guard in claim, f"the claim has no {guard!r}: name its guard anew"
    monkeypatch.setattr(sql.INCOMING, "claim", Statement(claim.replace(guard, instead)))


HELD = "(owner_id <> 0 OR (execution_time IS NOT NULL AND attempts > 0))"
GUARDS = {
    "nothing of it is owned": (HELD, "(execution_time IS NOT NULL AND attempts > 0)"),
    "a retry holds those behind it": (HELD, "owner_id <> 0"),
    "a run has one type": ("bool_and(message_type = found.message_type)", "bool_and(true)"),
}


@pytest.mark.parametrize("seed", range(5))
def test_key_is_with_one_node_and_in_order_under_random_operations(desk: Desk, seed: int) -> None:
    assert play(desk, seed) == []


@pytest.mark.parametrize("guard", GUARDS)
def test_each_clause_of_the_claim_rule_is_needed(desk: Desk, monkeypatch: pytest.MonkeyPatch, guard: str) -> None:
    change(monkeypatch, *GUARDS[guard])
    assert any(play(desk, seed) for seed in range(8)), f"nothing goes wrong without: {guard}"


def play(desk: Desk, seed: int) -> list[str]:
    """Nodes claim, handle, put off, release and die in an order that the seed decides. Returns what went wrong."""
    with psycopg.connect(desk.url) as conn:
        conn.execute("TRUNCATE durable.incoming_envelopes, durable.received_ids, durable.failed_attempts")
    rng = random.Random(seed)
    nodes = [NodeId(n) for n in (101, 102, 103)]
    held: dict[NodeId, dict[str, list[LeasedEnvelope]]] = {node: {} for node in nodes}
    done: dict[str, list[int]] = defaultdict(list)
    wrong: list[str] = []
    sent = 0
    for _ in range(250):
        node = rng.choice(nodes)
        match rng.choice(["send", "send", "claim", "claim", "handle", "handle", "handle", "put off", "die", "due"]):
            case "send" if sent < 60:
                sent += 1
                desk.receive(sent, key=rng.choice("abc"), message_type=rng.choice(TYPES))
            case "claim":
                keys = rng.sample("abc", rng.randint(1, 3))
                claimed = desk.claim(*keys, node=node, types=TYPES, size=rng.choice([1, 3, 10]))
                for lease in claimed:
                    key = str(lease.ordering_key)
                    if any(each.get(key) for other, each in held.items() if other != node):
                        wrong.append(f"{key} is with two nodes")
                    run = held[node].setdefault(key, [])
                    if run and run[0].envelope.message_type != lease.envelope.message_type:
                        wrong.append(f"a run of {key} has two types")
                    run.append(lease)
            case "handle" if any(held[node].values()):
                key = rng.choice([key for key, run in held[node].items() if run])
                lease = held[node][key].pop(0)
                if desk.run(inbox.finish_handled, node, [lease]) == 1:
                    done[key].append(number(lease))
            case "put off" if any(held[node].values()):
                key = rng.choice([key for key, run in held[node].items() if run])
                first, *behind = held[node].pop(key)
                desk.run(inbox.retry_later, node, first, delay=timedelta(hours=1))
                if behind:
                    desk.run(leases.release, INCOMING, node, [lease.key for lease in behind])
            case "die":
                desk.run(leases.release_dormant, INCOMING, node, 1_000)
                held[node] = {}
            case "due":
                with psycopg.connect(desk.url) as conn:
                    conn.execute("UPDATE durable.incoming_envelopes SET execution_time = NULL")
            case _:
                pass
    wrong += [f"{key} was handled as {order}" for key, order in done.items() if order != sorted(order)]
    return wrong


class TestLooking:
    def look(self, desk: Desk, after: str = "", count: int = 100) -> list[tuple[str, str | None]]:
        lane = Lane(message_type=TYPES[0])
        return [tuple(each) for each in desk.run(ordering.scan, {lane: after}, count=count)[lane]]

    def test_look_returns_a_page_of_keys_with_the_type_at_its_turn(self, desk: Desk) -> None:
        for key in "abc":
            desk.receive(1, key=key)
        desk.receive(2, key="a", message_type=TYPES[1])
        assert self.look(desk, count=2) == [("a", TYPES[0]), ("b", TYPES[0])]
        assert self.look(desk, after="b", count=2) == [("c", TYPES[0])]

    def test_held_key_is_found_without_a_type(self, desk: Desk) -> None:
        desk.receive(1, 2, 3)
        first, *behind = desk.claim()
        desk.receive(4)
        assert self.look(desk) == [("k", None)]
        desk.run(inbox.retry_later, A, first, delay=timedelta(hours=1))
        desk.run(leases.release, INCOMING, A, [lease.key for lease in behind])
        assert self.look(desk) == [("k", None)]

    def test_key_at_the_turn_of_another_node_wakes_the_others(self, desk: Desk) -> None:
        with psycopg.connect(desk.url, autocommit=True) as listening:
            listening.execute("LISTEN durable_durable")

            def claim(types: list[str]) -> int:
                desk.run(
                    ordering.claim,
                    Turns([Turn("k")], {t: t for t in types}),
                    batch_size=9,
                    node=A,
                    tell_others=types,
                )
                return len(list(listening.notifies(timeout=0.2)))

            desk.receive(1, message_type=TYPES[1])
            desk.receive(2)
            assert claim(TYPES[:1]) == 1
            assert claim(TYPES) == 0
            assert claim(TYPES[:1]) == 0, "it is held"


class TestTrials:
    def trial(self, desk: Desk, looked: trials.Looked) -> trials.Trial:
        opened = {"reason": "down", "actor": "a", "duration": timedelta(0)}
        desk.run(circuits.open_circuit, CircuitKind.HANDLER, TYPES[0], **opened)
        found = desk.run(
            trials.claim_trial,
            handler=TYPES[0],
            message_type=TYPES[0],
            node=B,
            lease=timedelta(0),
            looked=looked,
        )
        assert isinstance(found, trials.Trial)
        return found

    @pytest.mark.parametrize(
        "place", [None, QueueKeys("k", None), QueueKeys(None, "k")], ids=["alone", "in order", "shared out"]
    )
    def test_paused_version_is_not_tried_with_its_handler(self, desk: Desk, place: QueueKeys | None) -> None:
        old, handler = TYPES[1], TYPES[0]
        waiting = Arrival("shop", make(1, None, old), ANY_NODE, place or QueueKeys())
        desk.run(inbox.store, [waiting])
        desk.run(circuits.open_circuit, CircuitKind.HANDLER, handler, reason="a", actor="a", duration=timedelta(0))
        desk.run(circuits.pause, CircuitKind.HANDLER, old, reason="a", actor="a", duration=None)
        tried = {"handler": handler, "message_type": old, "node": A, "lease": timedelta(0)}
        assert desk.run(trials.claim_trial, **tried).lease is None
        desk.run(circuits.resume, CircuitKind.HANDLER, old)
        assert desk.run(trials.claim_trial, **tried).lease is not None

    @pytest.mark.parametrize("in_the_way", ["held", "parked", "another's turn", "another share"])
    def test_trial_finds_a_message_behind_more_than_one_look(
        self, desk: Desk, monkeypatch: pytest.MonkeyPatch, in_the_way: str
    ) -> None:
        monkeypatch.setattr(trials, "_KEYS_AT_ONCE", 4)
        monkeypatch.setattr(trials, "_LOOKS", 2)
        keys = [f"key {n:02}" for n in range(11)]
        late = make(0, None, deliver_by=envelope(0).sent_at - timedelta(days=1))
        for key in keys:
            if in_the_way == "another share":
                place = QueueKeys(None, key)
                desk.run(inbox.store, [Arrival("shop", msgspec.structs.replace(late, id=new_id()), ANY_NODE, place)])
            if in_the_way == "another's turn":
                desk.receive(1, key=key, message_type=TYPES[1])
            if in_the_way == "parked":
                desk.run(circuits.pause, CircuitKind.KEY, key, reason="a", actor="a", duration=None)
            if in_the_way != "another share":
                desk.receive(2, 3, key=key)
            if in_the_way == "held":
                assert desk.claim(key, size=1)
        if in_the_way == "another share":
            desk.run(inbox.store, [Arrival("shop", make(7, None), ANY_NODE, QueueKeys(None, "last"))])
        else:
            desk.receive(7, key="last")

        looked, found = trials.Looked(), []
        for _ in range(8 if in_the_way == "another share" else 2):  # of the shares, each look sees one
            lease, looked = self.trial(desk, looked)
            found += [] if lease is None else [number(lease)]
        assert found == [7]

    def test_a_parked_key_is_found_without_a_type(self, desk: Desk) -> None:
        desk.receive(1)
        desk.run(circuits.pause, CircuitKind.KEY, "k", reason="a", actor="a", duration=None)
        lane = Lane(message_type=TYPES[0])
        assert desk.run(ordering.scan, {lane: ""}, count=9) == {lane: [("k", None)]}


class TestShares:
    def receive(self, desk: Desk, tenant: str, count: int) -> None:
        rows = [Arrival("shop", make(n, None), ANY_NODE, QueueKeys(None, tenant)) for n in range(count)]
        desk.run(inbox.store, rows)

    def claim(self, desk: Desk, size: int, start: str = "", **weights: int) -> tuple[list[str], str]:
        with psycopg.connect(desk.url) as conn:
            before = {row[0] for row in conn.execute("SELECT id FROM durable.incoming_envelopes WHERE owner_id <> 0")}
        _, after = desk.run(
            ordering.claim_shares,
            ordering.Share(TYPES[0], start, weights, size),
            node=A,
        )
        with psycopg.connect(desk.url) as conn:
            owned = conn.execute("SELECT id, fair_key FROM durable.incoming_envelopes WHERE owner_id <> 0").fetchall()
        return sorted(tenant for id_, tenant in owned if id_ not in before), after

    def test_batch_has_messages_of_every_tenant(self, desk: Desk) -> None:
        self.receive(desk, "large", 50)
        self.receive(desk, "small", 1)
        assert self.claim(desk, 10) == (["large"] * 5 + ["small"], "")

    def test_weights_are_respected(self, desk: Desk) -> None:
        self.receive(desk, "gold", 50)
        self.receive(desk, "tin", 50)
        assert self.claim(desk, 8, gold=3) == (["gold"] * 6 + ["tin"] * 2, "")

    def test_more_tenants_than_fit_are_served_over_several_batches(self, desk: Desk) -> None:
        for tenant in "abcde":
            self.receive(desk, tenant, 5)
        first, after = self.claim(desk, 2)
        assert (first, after) == (["a", "b"], "c")
        assert self.claim(desk, 2, start=after) == (["c", "d"], "e")
        assert self.claim(desk, 2, start="e") == (["e", "e"], "")

    def test_types_with_shares_are_found(self, desk: Desk) -> None:
        assert desk.run(agenda.read, after="", count=10).shared_types == []
        self.receive(desk, "a", 1)
        assert desk.run(agenda.read, after="", count=10).shared_types == [TYPES[0]]
