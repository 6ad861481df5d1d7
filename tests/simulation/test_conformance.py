"""The tables in memory do what Postgres does: each storage function that the simulation meets, on both of them.

The work of both is that of durable.storage; results and rows are compared after each step. One transaction may be held
open meanwhile: then both skip the same rows, and wait at the same ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any, ClassVar
from uuid import UUID, uuid5

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from sqlalchemy import text

from durable.envelope import Envelope, LeasedEnvelope, NodeId
from durable.messages.ordering import QueueKeys, Rule
from durable.storage import (
    circuits,
    delayed,
    expiry,
    inbox,
    leases,
    nodes,
    ordering,
    outbox,
    parked,
    placements,
    schedules,
    trials,
)
from durable.storage.circuits import CircuitKind
from durable.storage.inbox import Arrival, Unfit
from durable.storage.leases import Burials
from durable.storage.ordering import Lane, Share, Turns
from durable.storage.outbox import Sent
from durable.storage.placements import Declared
from durable.storage.rows import Failure, Letter, Tried
from durable.storage.schedules import Declaration
from durable.storage.sql.recovery import INCOMING, OUTGOING
from tests.simulation.rows import NodeRow
from tests.simulation.stores import LOCKED, Memory, Postgres, plain, same_columns

HOUR = timedelta(hours=1)
_DATED = [UUID(int=(1_800_000_000_000 + n) << 80 | 7 << 76 | 2 << 62 | n) for n in range(3)]
_NAMED = [uuid5(_DATED[0], str(n)) for n in range(2)]
_CAUSED = [UUID(int=n << 80 | 8 << 76 | 2 << 62 | n) for n in range(1, 3)]
IDS = [*_DATED, *_NAMED, *_CAUSED]
TYPES, ENDPOINTS, DESTINATIONS = ["t.one", "t.two"], ["shop", "local"], ["sim://b", "sim://c"]
KEYS, TENANTS, SCHEDULES = ["k1", "k2"], ["x", "y"], ["s1", "s2"]
CIRCUITS = [("destination", "sim://b"), ("handler", "t.one"), ("handler", "t.two"), ("key", "k1"), ("schedule", "s1")]

offsets = st.sampled_from([None, None, None, -HOUR, HOUR])
node_ids = st.sampled_from([NodeId(1), NodeId(2)])
tables = st.sampled_from([OUTGOING, INCOMING])
sizes = st.sampled_from([1, 2, 100])
durations = st.sampled_from([None, HOUR, -HOUR, 2 * HOUR])
circuit_names = st.sampled_from(CIRCUITS)


@st.composite
def envelopes(draw: Any, address: Any) -> Callable[[datetime], tuple[Envelope, QueueKeys]]:
    """An envelope and its place, as of a time."""
    key = draw(st.sampled_from([None, None, *KEYS]))
    due, late = draw(offsets), draw(offsets)
    values = {
        "id": draw(st.sampled_from(IDS)),
        "message_type": draw(st.sampled_from(TYPES)),
        "destination": draw(address),
        "source": "tests",
        "correlation_id": IDS[0],
        "body": draw(st.sampled_from([b"{}", b"[]"])),
        "partition_key": key,
        "headers": draw(st.sampled_from([{}, {"tenant": "x"}])),
    }
    tenant = draw(st.sampled_from([None, None, *TENANTS]))
    sent = draw(st.sampled_from([timedelta(0), -HOUR]))

    def at(now: datetime) -> tuple[Envelope, QueueKeys]:
        envelope = Envelope(
            **values,
            sent_at=now + sent,
            execution_time=None if due is None else now + due,
            deliver_by=None if late is None else now + late,
        )
        return envelope, QueueKeys(key, tenant)

    return at


outgoing = st.lists(
    st.tuples(envelopes(st.sampled_from(DESTINATIONS)), st.booleans(), st.sampled_from([0, 0, 1])), max_size=4
)
incoming = st.lists(
    st.tuples(envelopes(st.just("sim://a")), st.sampled_from(ENDPOINTS), st.sampled_from([0, 0, 2])), max_size=4
)


class BothStores(RuleBasedStateMachine):
    """Each step on both stores."""

    url: ClassVar[str]

    def __init__(self) -> None:
        super().__init__()
        self.memory, self.postgres = Memory(), Postgres(self.url)
        self.postgres.empty()
        self.now = datetime.now(UTC).replace(microsecond=0)
        self.taken: dict[str, list[tuple[NodeId, LeasedEnvelope]]] = {"outgoing": [], "incoming": []}
        self.holds = False
        self._registers()

    def teardown(self) -> None:
        self.postgres.close()

    def _registers(self) -> None:
        """Both know node 1; node 2 is unknown."""
        row = NodeRow(node_id=1, service="tests", capabilities="{}", started_at=self.now, heartbeat_at=self.now)
        self.memory.store.tables["nodes"].rows[1] = row
        sql = "INSERT INTO durable.nodes (node_id, service, description, version) VALUES (1, 'tests', '', '')"
        with self.postgres.engine.begin() as conn:
            conn.execute(text(sql))

    # ------------------------------------------------------------------ both

    def both(self, work: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Do the work on both, compare the results, and return that of the memory."""
        ours, theirs = self.memory.run(work, *args, **kwargs), self.postgres.run(work, *args, **kwargs)
        assert plain(ours, self.now) == plain(theirs, self.now), work.__name__
        return ours

    def took(self, side: str, node: NodeId, found: Any) -> None:
        if found != LOCKED:
            self.taken[side] += [(node, lease) for lease in found]

    def chosen(self, data: st.DataObject, side: str) -> tuple[NodeId, list[LeasedEnvelope]]:
        """Leases of one node, also such as are none any more."""
        node = data.draw(node_ids)
        own = [lease for owner, lease in self.taken[side] if owner == node]
        if not own:
            return node, []
        picked = data.draw(st.lists(st.sampled_from(range(len(own))), max_size=3, unique=True))
        by_key = {own[place].key[:2]: own[place] for place in picked}
        return node, list(by_key.values())

    @invariant()
    def rows_are_the_same(self) -> None:
        ours, theirs = same_columns(self.memory.rows(), self.postgres.rows(), self.now)
        assert ours == theirs

    # ------------------------------------------------------------------ arrivals and sends

    def _sent(self, made: Any) -> list[Sent]:
        found: dict[Any, Sent] = {}
        for at, is_local, owner in made:
            envelope, place = at(self.now)
            sent = Sent(envelope, "local" if is_local else None, NodeId(owner), place)
            found.setdefault(sent.key, sent)
        return list(found.values())

    def _arrivals(self, made: Any) -> list[Arrival]:
        found: dict[Any, Arrival] = {}
        for at, endpoint, owner in made:
            envelope, place = at(self.now)
            found.setdefault((envelope.id, endpoint), Arrival(endpoint, envelope, NodeId(owner), place))
        return list(found.values())

    def _owned(self, side: str, rows: list[Any], found: Any) -> None:
        """Rows that are born with an owner are leases, too."""
        if found == LOCKED:
            return
        for row in rows:
            address = getattr(row, "endpoint", None) or row.envelope.destination
            if row.owner and row.place.ordering_key is None:
                self.taken[side].append((row.owner, LeasedEnvelope(row.envelope, endpoint=address)))

    @rule(made=outgoing)
    def sends(self, made: Any) -> None:
        sent = self._sent(made)
        found = self.both(outbox.store, sent)
        self._owned("outgoing", [each for each in sent if each.endpoint is None], found)

    @rule(made=incoming)
    def receives(self, made: Any) -> None:
        arrivals = self._arrivals(made)
        self._owned("incoming", arrivals, self.both(inbox.store, arrivals))

    @rule(made=incoming)
    def looks_for_changes(self, made: Any) -> None:
        self.both(inbox.find_changed, self._arrivals(made))

    @rule(made=incoming, replayable=st.booleans())
    def quarantines(self, made: Any, replayable: bool) -> None:
        for endpoint, envelope, node, place in self._arrivals(made)[:1]:
            unfit = Unfit(endpoint, envelope.body, "unfit", envelope, replayable=replayable, place=place)
            self.both(inbox.quarantine, node, unfit)

    # ------------------------------------------------------------------ claims

    @rule(destination=st.sampled_from(DESTINATIONS), size=sizes, node=node_ids)
    def claims_to_send(self, destination: str, size: int, node: NodeId) -> None:
        found = self.both(outbox.claim, destination=destination, batch_size=size, node=node)
        self.took("outgoing", node, found)

    @rule(message_type=st.sampled_from(TYPES), size=sizes, node=node_ids, is_trial=st.booleans())
    def claims_to_handle(self, message_type: str, size: int, node: NodeId, is_trial: bool) -> None:
        found = self.both(inbox.claim, message_type=message_type, batch_size=size, node=node, is_trial=is_trial)
        self.took("incoming", node, found)

    @rule(keys=st.sampled_from([["k1"], ["k2"], KEYS]), types=st.sampled_from([TYPES, TYPES[:1]]), node=node_ids)
    def claims_in_order(self, keys: list[str], types: list[str], node: NodeId) -> None:
        turns = Turns(keys, handlers={name: name for name in types})
        found = self.both(ordering.claim, turns, batch_size=100, node=node, tell_others=types)
        self.took("incoming", node, found if found == LOCKED else found.leases)

    @rule(keys=st.sampled_from([["k1"], KEYS]), node=node_ids, size=st.sampled_from([1, 100]))
    def claims_to_send_in_order(self, keys: list[str], node: NodeId, size: int) -> None:
        turns = Turns(keys[:1] if size == 1 else keys, "sim://b")
        found = self.both(ordering.claim, turns, batch_size=size, node=node)
        self.took("outgoing", node, found if found == LOCKED else found.leases)

    @rule(start=st.sampled_from(["", "x", "y"]), size=sizes, node=node_ids, is_trial=st.booleans())
    def claims_shares(self, start: str, size: int, node: NodeId, is_trial: bool) -> None:
        share = Share("t.one", start, {"x": 2}, size)
        found = self.both(ordering.claim_shares, share, node=node, is_trial=is_trial)
        self.took("incoming", node, found if found == LOCKED else found[0])
        share = Share("sim://b", start, {}, size)
        found = self.both(ordering.claim_outgoing_shares, share, node=node)
        self.took("outgoing", node, found if found == LOCKED else found[0])

    @rule(node=node_ids, message_type=st.sampled_from(TYPES))
    def tries(self, node: NodeId, message_type: str) -> None:
        found = self.both(trials.claim_trial, handler="t.one", message_type=message_type, node=node, lease=HOUR)
        self.took("incoming", node, [found.lease] if found != LOCKED and found.lease is not None else [])

    @rule(after=st.sampled_from(["", "k1"]), count=st.sampled_from([1, 10]))
    def looks(self, after: str, count: int) -> None:
        for lane in (Lane("sim://b"), Lane(message_type="t.one")):
            self.both(ordering.scan, lane, after=after, count=count)
        for table in (OUTGOING, INCOMING):
            self.both(leases.unowned_groups, table)
            self.both(leases.owners, table)
            self.both(leases.owned_by, table, NodeId(1))
        for work in (ordering.lanes, ordering.shared_types, ordering.shared_destinations, delayed.next_due):
            self.both(work)
        self.both(outbox.waited_for, DESTINATIONS)

    # ------------------------------------------------------------------ ends

    @rule(data=st.data(), keep_body=st.booleans())
    def finishes(self, data: st.DataObject, keep_body: bool) -> None:
        self.both(inbox.finish_handled, *self.chosen(data, "incoming"), keep_body=keep_body)

    @rule(data=st.data(), keep_body=st.booleans())
    def deletes(self, data: st.DataObject, keep_body: bool) -> None:
        self.both(outbox.delete_sent, *self.chosen(data, "outgoing"), keep_body=keep_body)

    @rule(data=st.data(), work=st.sampled_from([outbox.expire, expiry.bury_outgoing, outbox.count_failed_attempt]))
    def ends_to_send(self, data: st.DataObject, work: Any) -> None:
        self.both(work, *self.chosen(data, "outgoing"))

    @rule(data=st.data())
    def dead_letters_to_send(self, data: st.DataObject) -> None:
        node, owned = self.chosen(data, "outgoing")
        self.both(outbox.dead_letter, node, [(lease, Letter.because("refused", "by the peer")) for lease in owned])

    @rule(
        data=st.data(),
        kind=st.sampled_from(["later", "back", "letter", "park", "expire", "bury", "count", "uncount"]),
        delay=st.sampled_from([timedelta(0), HOUR]),
        failures=st.integers(0, 3),
        kept=st.integers(1, 3),
    )
    def settles(self, data: st.DataObject, kind: str, delay: timedelta, failures: int, kept: int) -> None:
        node, owned = self.chosen(data, "incoming")
        tried = Tried(failures, [Failure(n, self.now, "E", f"r{n}", "") for n in range(failures)], kept)
        for lease in owned[:1]:
            letter = Letter.because("it failed", "test")
            match kind:
                case "later":
                    self.both(inbox.retry_later, node, lease, tried, delay=delay)
                case "back":
                    changed: dict[str, Any] = {"headers": {"h": "1"}, "fair_key": "y", "body": b"new"}
                    self.both(inbox.put_back, node, lease, tried, **changed)
                case "letter" | "park":
                    parks = "t.one" if kind == "park" else None
                    self.both(inbox.dead_letter, node, lease, letter, tried, parks=parks)
                case "expire":
                    self.both(inbox.expire, node, lease, within=delay)
                case "bury":
                    self.both(expiry.bury_incoming, node, lease, within=delay)
                case "count":
                    self.both(inbox.begin_suspect_attempt, node, lease)
                case "uncount":
                    self.both(inbox.take_back_attempt, node, lease)

    @rule(data=st.data(), side=st.sampled_from(["outgoing", "incoming"]))
    def releases(self, data: st.DataObject, side: str) -> None:
        node, owned = self.chosen(data, side)
        table = OUTGOING if side == "outgoing" else INCOMING
        self.both(leases.release, table, node, [lease.key for lease in owned])

    # ------------------------------------------------------------------ recovery

    @rule(
        table=tables, node=node_ids, work=st.sampled_from([leases.release_dormant, leases.release_former, leases.release_all])
    )
    def recovers(self, table: Any, node: NodeId, work: Any) -> None:
        self.both(work, table, node, *(() if work is leases.release_all else (100,)))

    @rule(table=tables)
    def promotes(self, table: Any) -> None:
        self.both(leases.promote_due, table, 100)

    @rule(table=tables, buries=st.sampled_from([Burials(), Burials(True), Burials(False, ["t.one"])]))
    def expires(self, table: Any, buries: Burials) -> None:
        self.both(leases.expire, table, NodeId(1), 100, buries)
        self.both(expiry.bury, table, NodeId(1), 100, buries)

    @rule()
    def releases_parked(self) -> None:
        self.both(parked.release, [], 100)

    # ------------------------------------------------------------------ circuits

    @rule(name=circuit_names, duration=durations, work=st.sampled_from(["open", "pause", "at least"]))
    def opens(self, name: tuple[str, str], duration: timedelta | None, work: str) -> None:
        works = {"open": circuits.open_circuit, "pause": circuits.pause, "at least": circuits.pause_at_least}
        said: dict[str, Any] = {"reason": work, "actor": "test", "duration": duration}
        self.both(works[work], CircuitKind(name[0]), name[1], **said)

    @rule(name=circuit_names, work=st.sampled_from([circuits.close_circuit, circuits.resume]))
    def closes(self, name: tuple[str, str], work: Any) -> None:
        self.both(work, CircuitKind(name[0]), name[1])

    @rule(work=st.sampled_from([circuits.close_ended, circuits.read]))
    def reads_circuits(self, work: Any) -> None:
        self.both(work)

    @rule(handler=st.sampled_from(TYPES), node=node_ids, count=st.integers(0, 2), kind=st.integers(0, 3))
    def counts(self, handler: str, node: NodeId, count: int, kind: int) -> None:
        match kind:
            case 0:
                self.both(circuits.begin_trial, handler, lease=HOUR)
            case 1:
                self.both(circuits.put_off_probe, handler, reason="again", shortest=HOUR, longest=2 * HOUR)
            case 2:
                self.both(circuits.try_again, handler)
            case _:
                self.both(circuits.share_counts, handler, node, messages=count, failures=count, window=HOUR)

    # ------------------------------------------------------------------ nodes, placements, schedules

    @rule()
    def removes_a_node(self) -> None:
        self.both(nodes.remove, NodeId(1))

    @rule(name=st.sampled_from(TYPES), key=st.sampled_from([None, "whole"]))
    def declares_places(self, name: str, key: str | None) -> None:
        self.both(placements.declare, [Declared("incoming", name, Rule(key, None))])

    @rule(node=node_ids, cron=st.sampled_from(["* * * * *", "0 * * * *"]))
    def declares_schedules(self, node: NodeId, cron: str) -> None:
        declared = [Declaration(name, cron, "UTC", "once", "t.one", None, cron) for name in SCHEDULES]
        self.both(schedules.declare, node, declared)

    @rule(name=st.sampled_from(SCHEDULES), cron=st.sampled_from(["* * * * *", "0 * * * *"]), kind=st.integers(0, 2))
    def runs_schedules(self, name: str, cron: str, kind: int) -> None:
        self.both(schedules.read, SCHEDULES)
        if kind == 0:
            self.both(schedules.lock_due, name, cron)
        elif kind == 1:
            moved: dict[str, Any] = {"occurrence_at": self.now, "due_at": self.now + HOUR, "last_at": self.now}
            self.both(schedules.move_on, name, **moved, ran=True, message_type="t.two")
        else:
            self.both(schedules.fail, name, cron, occurrence_at=None, delay=HOUR, error="no message")

    # ------------------------------------------------------------------ another transaction, which is open

    @precondition(lambda self: not self.holds)
    @rule(data=st.data(), kind=st.sampled_from(["handle", "send", "claim", "order", "schedule", "circuit"]), made=outgoing)
    def holds_a_transaction(self, data: st.DataObject, kind: str, made: Any) -> None:
        work: Any
        args: Any
        kwargs: dict[str, Any] = {}
        match kind:
            case "handle":
                work, args = inbox.finish_handled, self.chosen(data, "incoming")
            case "send":
                work, args = outbox.store, (self._sent(made),)
            case "claim":
                work, args = inbox.claim, ()
                kwargs = {"message_type": "t.one", "batch_size": 1, "node": NodeId(1)}
            case "order":
                work, args = ordering.claim, (Turns(KEYS[:1], handlers={name: name for name in TYPES}),)
                kwargs = {"batch_size": 100, "node": NodeId(1)}
            case "schedule":
                work, args = schedules.lock_due, (SCHEDULES[0], "* * * * *")
            case _:
                work, args = circuits.resume, (CircuitKind.HANDLER, "t.one")
        ours, theirs = self.memory.hold(work, *args, **kwargs), self.postgres.hold(work, *args, **kwargs)
        assert plain(ours, self.now) == plain(theirs, self.now), work.__name__
        self.holds = True

    @precondition(lambda self: self.holds)
    @rule(commit=st.booleans())
    def ends_the_transaction(self, commit: bool) -> None:
        self.memory.end(commit=commit)
        self.postgres.end(commit=commit)
        self.holds = False


@pytest.fixture
def both_stores(database_url: str) -> Iterator[type[BothStores]]:
    BothStores.url = database_url
    yield BothStores


@pytest.mark.timeout(600)
def test_tables_in_memory_do_what_postgres_does(both_stores: type[BothStores]) -> None:
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        both_stores,
        settings=settings(
            max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )
