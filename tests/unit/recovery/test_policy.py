"""Who is dead, and what was forgotten: never on the first suspicion, and never a node that lives."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from durable.envelope import LeaseKey, NodeId
from durable.recovery.policy import BackwardSteps, DormancyPolicy, ForgottenPolicy, NodeFacts

STARTED = datetime(2026, 5, 4, tzinfo=UTC)
RESTARTED = STARTED + timedelta(hours=1)
BEAT = RESTARTED + timedelta(hours=1)
GRACE, STALE_SECONDS = 2, 20


def policy() -> DormancyPolicy:
    return DormancyPolicy(grace=timedelta(seconds=GRACE), stale=timedelta(seconds=STALE_SECONDS))


def alive(node: int, at: float) -> NodeFacts:
    """A node that has just written its heartbeat."""
    return NodeFacts(NodeId(node), True, BEAT + timedelta(seconds=at))


def without_lock(node: int) -> NodeFacts:
    return NodeFacts(NodeId(node), False, BEAT)


def paused(node: int) -> NodeFacts:
    """A node whose heartbeat stays the same."""
    return NodeFacts(NodeId(node), True, BEAT)


def look(rule: DormancyPolicy, *facts: NodeFacts, now: float, started_at: datetime = STARTED) -> list[NodeId]:
    return rule.dormant(facts, server_started_at=started_at, now=now)


class TestDormancy:
    def test_node_with_its_lock_and_new_heartbeats_is_alive(self) -> None:
        rule = policy()
        assert [look(rule, alive(1, now), now=now) for now in (0, 10, 100, 1e6)] == [[], [], [], []]

    def test_a_node_without_its_lock_is_dormant_a_grace_later_and_not_before(self) -> None:
        rule = policy()
        assert [look(rule, without_lock(1), now=now) for now in (10, 11.9, 12)] == [[], [], [1]]

    def test_lock_back_at_the_next_look_restarts_the_grace(self) -> None:
        rule = policy()
        assert look(rule, without_lock(1), now=0) == []
        assert look(rule, alive(1, 1), now=1) == []
        assert look(rule, without_lock(1), now=2) == []
        assert look(rule, without_lock(1), now=4) == [1]

    def test_node_with_its_lock_is_dormant_when_its_heartbeat_stays_the_same(self) -> None:
        rule = policy()
        assert [look(rule, paused(1), now=now) for now in (0, 19.9, 21.8, 21.9)] == [[], [], [], []]
        rule = policy()
        assert [look(rule, paused(1), now=now) for now in (0, 20, 21.9, 22)] == [[], [], [], [1]]

    def test_heartbeat_after_the_first_stale_look_restarts_everything(self) -> None:
        rule = policy()
        assert [look(rule, paused(1), now=now) for now in (0, 60)] == [[], []]
        assert look(rule, alive(1, 61), now=61) == []
        assert look(rule, alive(1, 61), now=80.9) == []
        assert look(rule, alive(1, 61), now=82.9) == []

    def test_owner_without_a_registration_is_dormant_after_a_grace_with_or_without_its_lock(self) -> None:
        for holds_lock in (True, False):
            rule = policy()
            unknown = NodeFacts(NodeId(1), holds_lock, None)
            assert [look(rule, unknown, now=now) for now in (0, 2)] == [[], [1]]

    @pytest.mark.parametrize("fact", [without_lock(1), paused(1)], ids=["dead", "paused"])
    def test_restart_of_the_server_clears_every_suspicion(self, fact: NodeFacts) -> None:
        rule, needed = policy(), GRACE if not fact.holds_lock else STALE_SECONDS + GRACE
        assert [look(rule, fact, now=now) for now in (0, needed - 1)] == [[], []]
        again = [look(rule, fact, now=100 + now, started_at=RESTARTED) for now in (0, needed - 0.1)]
        assert again == [[], []]

    def test_unregistered_node_is_forgotten(self) -> None:
        rule = policy()
        look(rule, without_lock(1), now=0)
        assert look(rule, now=5) == []
        assert look(rule, without_lock(1), now=6) == []

    def test_dormant_nodes_are_sorted_by_id(self) -> None:
        rule, facts = policy(), [without_lock(3), paused(2), without_lock(1)]
        for now in (0, 20):
            look(rule, *facts, alive(4, now), now=now)
        assert look(rule, *facts, alive(4, 22), now=22) == [1, 2, 3]

    @given(st.lists(st.tuples(st.booleans(), st.floats(0, 5)), max_size=30))
    def test_a_beating_node_is_dormant_only_after_a_grace_without_its_lock(
        self, looks: list[tuple[bool, float]]
    ) -> None:
        rule, now, missing_since = policy(), 0.0, None
        for count, (holds_lock, passed) in enumerate(looks):
            now += passed
            missing_since = None if holds_lock else now if missing_since is None else missing_since
            expected = missing_since is not None and now - missing_since >= GRACE
            fact = replace(alive(1, count), holds_lock=holds_lock)
            assert look(rule, fact, now=now) == ([1] if expected else [])


SPANS = st.sampled_from([-3_600.0, -60.0, -1.0, 0.0, 1.0, 60.0, 3_600.0, 1e7])


@dataclass
class Database:
    """A database server with a clock that is set, and the nodes as their rows and locks show them."""

    offset: float = 0.0
    started_at: datetime = STARTED
    alive: dict[int, datetime] = field(default_factory=dict)
    """The heartbeats of the nodes that live, of which each beats once a second."""
    gone: dict[int, NodeFacts] = field(default_factory=dict)
    gone_since: dict[int, float] = field(default_factory=dict)

    def clock(self, now: float) -> datetime:
        return BEAT + timedelta(seconds=now + self.offset)

    def lose(self, node: int, now: float, *, is_paused: bool) -> None:
        if (beat := self.alive.pop(node, None)) is not None:
            self.gone[node], self.gone_since[node] = NodeFacts(NodeId(node), is_paused, beat), now

    def restart(self, now: float) -> None:
        """All nodes lose their locks, and come again under other ids."""
        self.started_at = self.clock(now)
        self.gone = {node: replace(fact, holds_lock=False) for node, fact in self.gone.items()}
        for node in list(self.alive):
            self.lose(node, now, is_paused=False)
            self.alive[node + 100] = self.clock(now)
        self.gone_since = dict.fromkeys(self.gone_since, now)

    def facts(self, now: float) -> list[NodeFacts]:
        self.alive = dict.fromkeys(self.alive, self.clock(now))
        return [*(NodeFacts(NodeId(node), True, beat) for node, beat in self.alive.items()), *self.gone.values()]


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("step"), SPANS),
            st.tuples(st.just("restart"), SPANS),
            st.tuples(st.sampled_from(["kill", "pause"]), st.integers(1, 4)),
            st.tuples(st.just("another looker"), st.none()),
            st.tuples(st.just("wait"), st.integers(1, 30)),
        ),
        max_size=20,
    )
)
def test_steps_of_the_databases_clock_change_no_verdict(events: list[tuple[str, Any]]) -> None:
    database, rule, now = Database(alive=dict.fromkeys(range(1, 5), BEAT)), policy(), 0.0
    seen_by_rule = now
    for kind, what in [*events, ("wait", STALE_SECONDS + GRACE + 2)]:
        if kind == "step":
            database.offset += what
        elif kind == "restart":
            database.offset += what
            database.restart(now)
        elif kind in ("kill", "pause"):
            database.lose(what, now, is_paused=kind == "pause")
        elif kind == "another looker":
            rule, seen_by_rule = policy(), now + 1
        for _ in range(what if kind == "wait" else 1):
            now += 1
            facts = database.facts(now)
            dormant = set(look(rule, *facts, now=now, started_at=database.started_at))
            assert not dormant & database.alive.keys()
            for node, fact in database.gone.items():
                within = GRACE + 2 + (STALE_SECONDS if fact.holds_lock else 0)
                if now - max(seen_by_rule, database.gone_since[node]) >= within:
                    assert node in dormant


READ = datetime(2026, 5, 4, tzinfo=UTC)


@given(st.lists(st.tuples(st.floats(0.1, 100), st.floats(0, 30), st.floats(0, 1), SPANS), max_size=20))
def test_backward_steps_are_told_and_nothing_else(looks: list[tuple[float, float, float, float]]) -> None:
    rule, now, offset = BackwardSteps(), 0.0, 0.0
    taken_before = 0.0
    for count, (passed, taken, share, span) in enumerate(looks):
        step, now = (span if count else 0.0), now + passed
        offset += step
        read = READ + timedelta(seconds=now + taken * share + offset)
        told = rule.step(read, begun=now, ended=now + taken)
        now += taken
        if told is not None:
            assert 1 <= told.total_seconds() <= -step + 1e-3
        else:
            assert step > -(1 + taken + taken_before)
        taken_before = taken


def leases(*numbers: int) -> set[LeaseKey]:
    return {(UUID(int=number), "billing", 0) for number in numbers}


class TestForgotten:
    def test_lease_missing_at_two_looks_is_forgotten(self) -> None:
        rule = ForgottenPolicy()
        assert rule.forgotten(leases(1, 2), leases(2)) == set()
        assert rule.forgotten(leases(1, 2), leases(2)) == leases(1)

    def test_lease_committed_just_before_a_look_is_not_forgotten(self) -> None:
        rule = ForgottenPolicy()
        assert rule.forgotten(leases(1), set()) == set()
        assert rule.forgotten(leases(1), leases(1)) == set()
        assert rule.forgotten(leases(1), set()) == set()

    def test_lease_released_once_needs_two_looks_again(self) -> None:
        rule = ForgottenPolicy()
        rule.forgotten(leases(1), set())
        assert rule.forgotten(leases(1), set()) == leases(1)
        assert rule.forgotten(leases(1), set()) == set()

    def test_lease_of_another_epoch_is_another_lease(self) -> None:
        rule = ForgottenPolicy()
        rule.forgotten(leases(1), set())
        assert rule.forgotten({(UUID(int=1), "billing", 1)}, set()) == set()

    @given(st.lists(st.tuples(st.sets(st.integers(0, 5)), st.sets(st.integers(0, 5))), max_size=15))
    def test_held_lease_is_never_forgotten(self, looks: list[tuple[set[int], set[int]]]) -> None:
        rule = ForgottenPolicy()
        for owned, held in looks:
            forgotten = rule.forgotten(leases(*owned), leases(*held))
            assert forgotten <= leases(*owned) - leases(*held)
