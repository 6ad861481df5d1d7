"""Who is dead, and what was forgotten: never on the first suspicion, and never a node that lives."""

from __future__ import annotations

from datetime import timedelta
from uuid import UUID

from hypothesis import given
from hypothesis import strategies as st

from durable.envelope import LeaseKey, NodeId
from durable.recovery.policy import DormancyPolicy, ForgottenPolicy, NodeFacts

UP = timedelta(hours=1)  # how long the server has been running
FRESH = timedelta(seconds=1)
STALE = timedelta(seconds=30)


def policy() -> DormancyPolicy:
    return DormancyPolicy(grace=timedelta(seconds=2), stale=timedelta(seconds=20))


def alive(node: int) -> NodeFacts:
    return NodeFacts(NodeId(node), True, FRESH)


def without_lock(node: int) -> NodeFacts:
    return NodeFacts(NodeId(node), False, FRESH)


class TestDormancy:
    def test_node_with_its_lock_and_a_fresh_heartbeat_is_alive(self) -> None:
        rule = policy()
        assert [rule.dormant([alive(1)], server_uptime=UP, now=now) for now in (0, 10, 1e6)] == [[], [], []]

    def test_a_node_without_its_lock_is_dormant_a_grace_later_and_not_before(self) -> None:
        rule = policy()
        seen = [rule.dormant([without_lock(1)], server_uptime=UP, now=now) for now in (10, 11.9, 12)]
        assert seen == [[], [], [1]]

    def test_lock_back_at_the_next_look_restarts_the_grace(self) -> None:
        rule = policy()
        assert rule.dormant([without_lock(1)], server_uptime=UP, now=0) == []
        assert rule.dormant([alive(1)], server_uptime=UP, now=1) == []
        assert rule.dormant([without_lock(1)], server_uptime=UP, now=2) == []
        assert rule.dormant([without_lock(1)], server_uptime=UP, now=4) == [1]

    def test_node_with_its_lock_and_a_stale_heartbeat_is_dormant(self) -> None:
        paused = NodeFacts(NodeId(1), True, timedelta(seconds=20))
        assert policy().dormant([paused], server_uptime=UP, now=0) == [1]
        nearly = NodeFacts(NodeId(1), True, timedelta(seconds=19.9))
        assert policy().dormant([nearly], server_uptime=UP, now=0) == []

    def test_owner_without_a_registration_is_dormant_after_a_grace_with_or_without_its_lock(self) -> None:
        for holds_lock in (True, False):
            rule = policy()
            unknown = NodeFacts(NodeId(1), holds_lock, None)
            assert rule.dormant([unknown], server_uptime=UP, now=0) == []
            assert rule.dormant([unknown], server_uptime=UP, now=2) == [1]

    def test_nodes_are_not_judged_just_after_a_start_of_the_server(self) -> None:
        paused = NodeFacts(NodeId(2), True, STALE)
        assert policy().dormant([paused], server_uptime=timedelta(seconds=1.9), now=0) == []
        assert policy().dormant([paused], server_uptime=timedelta(seconds=2), now=0) == [2]

    def test_restart_of_the_server_clears_every_suspicion(self) -> None:
        rule = policy()
        rule.dormant([without_lock(1)], server_uptime=UP, now=0)
        assert rule.dormant([without_lock(1)], server_uptime=timedelta(seconds=1), now=2) == []
        assert rule.dormant([without_lock(1)], server_uptime=UP, now=3) == []  # the grace begins anew
        assert rule.dormant([without_lock(1)], server_uptime=UP, now=5) == [1]

    def test_unregistered_node_is_forgotten(self) -> None:
        rule = policy()
        rule.dormant([without_lock(1)], server_uptime=UP, now=0)
        assert rule.dormant([], server_uptime=UP, now=5) == []
        assert rule.dormant([without_lock(1)], server_uptime=UP, now=6) == []

    def test_dormant_nodes_are_sorted_by_id(self) -> None:
        rule = policy()
        facts = [without_lock(3), NodeFacts(NodeId(2), True, STALE), without_lock(1), alive(4)]
        rule.dormant(facts, server_uptime=UP, now=0)
        assert rule.dormant(facts, server_uptime=UP, now=2) == [1, 2, 3]

    @given(st.lists(st.tuples(st.booleans(), st.floats(0, 5)), max_size=30))
    def test_a_beating_node_is_dormant_only_after_a_grace_without_its_lock(
        self, looks: list[tuple[bool, float]]
    ) -> None:
        rule, now, missing_since = policy(), 0.0, None
        for holds_lock, passed in looks:
            now += passed
            missing_since = None if holds_lock else now if missing_since is None else missing_since
            expected = missing_since is not None and now - missing_since >= 2
            fact = NodeFacts(NodeId(1), holds_lock, FRESH)
            assert rule.dormant([fact], server_uptime=UP, now=now) == ([1] if expected else [])


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
