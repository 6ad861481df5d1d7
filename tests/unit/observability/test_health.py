"""The rules of health: each alone, and what silences it."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from durable.envelope import NodeId
from durable.observability import health
from durable.observability.health import NodeState
from durable.recovery.policy import DormancyPolicy
from durable.settings import Settings
from durable.storage.circuits import OpenCircuit
from durable.storage.gauges import MOST_COUNTED, Gauges, Side, Unowned
from durable.storage.nodes import Node
from durable.storage.parked import Parked
from durable.storage.schedules import Late
from tests.support.quiet import quiet_gauges

NOW = datetime(2026, 5, 1, 12, tzinfo=UTC)
MINUTE = timedelta(minutes=1)
PEER = "tcp://127.0.0.1:1"
NODE = NodeId(1)


def node(heartbeat_age: timedelta = timedelta(seconds=1), *handled: str) -> Node:
    capabilities = json.dumps({"message_types": handled})
    return Node(NODE, "orders", "host:1", "0", NOW, NOW - heartbeat_age, heartbeat_age, capabilities)


def latched(minutes: int, kind: str = "destination", key: str = PEER, probing: bool = True) -> OpenCircuit:
    return OpenCircuit(kind, key, "refused", NOW - minutes * MINUTE, None, "node 1", probing)


def parked(minutes: int, key: str, kind: str = "key") -> OpenCircuit:
    return latched(minutes, kind, key, probing=False)._replace(parked=True, ordering_key=key)


def found(**changes: Any) -> Gauges:
    """A schema in which a node is alive and nothing waits, except for these."""
    return quiet_gauges(NOW, node(), **changes)


def unowned(minutes: int) -> dict[Side, list[Unowned]]:
    return {Side.OUTGOING: [Unowned(PEER, 3, minutes * MINUTE)], Side.INCOMING: []}


def of_type(name: str, minutes: int) -> dict[Side, list[Unowned]]:
    return {Side.OUTGOING: [], Side.INCOMING: [Unowned(name, 3, minutes * MINUTE)]}


def late(by: timedelta = MINUTE, *, name: str = "nightly", is_live: bool = True, error: str | None = None) -> Late:
    return Late(name, is_live, by, error)


def problems(gauges: Gauges, *, dormant: list[NodeId] | None = None, **settings: Any) -> list[str]:
    return health.problems(gauges, dormant or [], health.unowned_waits(gauges), Settings(**settings))


@pytest.mark.parametrize(
    ("gauges", "settings"),
    [
        (found(), {}),
        (found(nodes=[], locked=set(), unowned=unowned(0)), {}),
        (found(unowned=unowned(600)), {}),
        (found(unowned=unowned(600), circuits=[latched(600)], dead_letters=MOST_COUNTED), {}),
        (found(unowned=unowned(600), circuits=[latched(1)]), {"health_lag": MINUTE}),
        (found(circuits=[latched(4)]), {"health_latched": 5 * MINUTE}),
        (found(circuits=[latched(600, kind="handler", key="a.b")]), {"health_latched": MINUTE}),
        (found(circuits=[latched(600, probing=False)]), {"health_latched": MINUTE}),
        (found(dead_letters=9), {"health_dead_letters": 10}),
        (found(overdue=timedelta(seconds=59)), {}),
        (found(late_schedules=[late(timedelta(seconds=59), error="KeyError: 'a'")]), {}),
        (found(late_schedules=[late(9 * MINUTE, is_live=False)]), {}),
        (found(parked=[Parked("2026-11", 3, timedelta(seconds=59))]), {}),
        (found(circuits=[parked(1, "order-7")]), {}),
        (found(circuits=[parked(0, "order-7")], behind={"order-7": 1}), {}),
        (found(circuits=[parked(1, "order-7")._replace(parked=False)], behind={"order-7": 1}), {}),
    ],
    ids=[
        "nothing waits", "no node, and nothing has waited for long", "a backlog, and a node", "nobody wants to hear it",
        "what is latched may lag", "latched for less", "a handler is no destination",
        "a pause is no latch", "fewer dead letters", "hardly overdue", "hardly late", "an orphaned schedule",
        "parked for less", "nothing behind a dead letter", "behind a dead letter of now", "paused by a handler",
    ],
)  # fmt: skip
def test_service_is_healthy(gauges: Gauges, settings: dict[str, Any]) -> None:
    assert problems(gauges, **settings) == []


@pytest.mark.parametrize(
    ("gauges", "settings", "said"),
    [
        (found(nodes=[], locked=set(), unowned=unowned(1)), {}, "work has waited for 60 s and no node is alive"),
        (found(nodes=[node(MINUTE)], unowned=unowned(1)), {}, "work has waited for 60 s and no node is alive"),
        (found(locked=set(), unowned=unowned(1)), {}, "work has waited for 60 s and no node is alive"),
        (found(nodes=[], locked=set(), unowned=unowned(1)), {"health_unattended": 2 * MINUTE}, None),
        (found(parked=[Parked("2026-11", 3, MINUTE)]), {}, "3 messages wait for encryption key 2026-11, the oldest"),
        (found(parked=[Parked("2026-11", 1, MINUTE)]), {}, "1 message waits for encryption key 2026-11, the oldest"),
        (
            found(circuits=[parked(1, "order 7")], behind={"order 7": 1}),
            {},
            "key order 7 is parked by a dead letter (refused), and 1 message waits behind it: resolve the letter, then "
            "run durable-agent resume APP:BUS --key 'order 7'",
        ),
        (
            found(
                circuits=[parked(1, "a.b", kind="handler")],
                unowned=of_type("a.b", 1),
                behind={"a.b": 3},
                parked_types={"a.b": {"a.b"}},
            ),
            {},
            "handler a.b is parked by a dead letter (refused), and 3 messages wait behind it: resolve the letter, then "
            "run durable-agent resume APP:BUS --handler a.b",
        ),
        (found(overdue=MINUTE), {}, "scheduled work is overdue by 60 s: see the log of a node"),
        (found(overdue=MINUTE, nodes=[]), {}, "scheduled work is overdue by 60 s: start a node"),
        (
            found(late_schedules=[late(error="KeyError: 'a'"), late(MINUTE / 2, name="hourly")]),
            {},
            "schedule nightly has failed for 60 s: KeyError: 'a'; correct what makes its message, or pause it with "
            "durable-agent scheduled pause nightly",
        ),
        (found(late_schedules=[late()]), {}, "schedule nightly is late by 60 s: see the log"),
        (
            found(late_schedules=[late(is_live=False)], nodes=[]),
            {},
            "schedule nightly is late by 60 s: start a node with durable-agent run APP:BUS",
        ),
        (found(unowned=unowned(2)), {"health_lag": MINUTE}, f"outgoing {PEER} lags: its oldest message has waited"),
        (found(circuits=[latched(5)]), {"health_latched": 5 * MINUTE}, f"{PEER} is latched for 300 s: refused"),
        (found(dead_letters=10), {"health_dead_letters": 10}, "10 dead letters are unresolved"),
        (found(dead_letters=1000), {"health_dead_letters": 10}, "1000 or more dead letters are unresolved"),
        (found(partitioned_days=1), {}, "partitions are missing for today or tomorrow"),
        (
            found(refused={Side.OUTGOING: 0, Side.INCOMING: 1}),
            {},
            "1 incoming message is marked by owner_id -1, for the database refuses to change it: see the log",
        ),
        (
            found(refused={Side.OUTGOING: MOST_COUNTED, Side.INCOMING: 0}),
            {},
            "1000 or more outgoing messages are marked by owner_id -1, for the database refuses to change them",
        ),
    ],
    ids=[
        "nobody is there", "the only node is stale", "the only node is dead", "nobody is there, and may be", "parked",
        "one parked", "behind a dead letter", "behind a dead letter of an ordered handler",
        "overdue",
        "overdue and nobody is there", "a failing schedule", "a late schedule", "a late schedule and nobody is there",
        "it lags", "latched", "dead letters", "very many dead letters", "no partitions",
        "refused", "very many refused",
    ],
)  # fmt: skip
def test_unhealthy_service_names_the_problem(gauges: Gauges, settings: dict[str, Any], said: str | None) -> None:
    assert [problem[: len(said or "")] for problem in problems(gauges, **settings)] == ([said] if said else [])


@pytest.mark.parametrize(
    ("gauges", "is_told"),
    [
        (found(unowned=of_type("a.b", 10)), True),
        (found(unowned=of_type("a.b", 10), nodes=[node(MINUTE / 60, "a.b.v2")]), True),
        (found(unowned=of_type("a.b", 10), nodes=[node(MINUTE / 60, "a.b")]), False),
        (found(unowned=of_type("a.b", 10), circuits=[latched(1, kind="handler", key="a.b")]), False),
        (found(unowned=of_type("a.b", 0)), False),
    ],
    ids=["no handler", "a handler of another version", "handled", "paused", "not for long"],
)
def test_work_handled_by_no_living_node_is_a_problem(gauges: Gauges, is_told: bool) -> None:
    said = (
        "a.b: 3 messages wait, the oldest for 600 s, and no living node handles them: start a node whose code has a "
        "handler for them, or an upcaster to one"
    )
    assert problems(gauges) == ([said] if is_told else [])


def test_work_handled_only_by_a_dead_node_is_reported_as_unattended() -> None:
    gauges = found(unowned=of_type("a.b", 10), nodes=[node(MINUTE / 60, "a.b")], locked=set())
    assert problems(gauges) == [
        "work has waited for 600 s and no node is alive: start one with durable-agent run APP:BUS"
    ]


def test_dormant_node_is_a_problem_only_with_owned_rows() -> None:
    owning = found(nodes=[], owned={Side.OUTGOING: {NODE: 2}, Side.INCOMING: {NODE: 3}})
    assert problems(found(), dormant=[NODE]) == []
    [problem] = problems(owning, dormant=[NODE])
    assert problem.startswith("node 1 is dormant, owns 5 envelopes")


def test_node_is_dormant_when_found_dead_by_two_looks_a_grace_apart() -> None:
    policy = DormancyPolicy(grace=timedelta(seconds=2), stale=timedelta(seconds=20))
    dead = found(locked=set())
    assert [health.dormant(policy, dead, now) for now in (0.0, 1.0, 2.0)] == [[], [], [NODE]]
    assert health.dormant(policy, found(), 3.0) == []


def test_unregistered_owner_is_dead() -> None:
    gauges = found(owned={Side.OUTGOING: {NodeId(9): 1}, Side.INCOMING: {}})
    assert health.node_states(gauges, 20 * MINUTE) == {NODE: NodeState.ALIVE, NodeId(9): NodeState.DEAD}


@pytest.mark.parametrize(
    ("age", "state"),
    [
        (timedelta(0), NodeState.ALIVE),
        (timedelta(seconds=19), NodeState.ALIVE),
        (timedelta(seconds=20), NodeState.STALE),
        (timedelta(seconds=-1), NodeState.ALIVE),
        (timedelta(hours=-1), NodeState.STALE),
    ],
)
def test_heartbeat_far_from_now_is_stale(age: timedelta, state: NodeState) -> None:
    gauges = found(nodes=[node(age)])
    assert health.node_states(gauges, timedelta(seconds=20)) == {NODE: state}


def needs(gauges: Gauges, **settings: Any) -> list[health.Need]:
    return health.needs(gauges, problems(gauges, **settings), Settings(**settings))


def test_needs_follow_no_limit_of_health() -> None:
    waits = found(nodes=[], locked=set(), unowned=unowned(0), circuits=[latched(0)], dead_letters=MOST_COUNTED)

    assert problems(waits) == []
    assert health.in_short(needs(waits)) == "no node runs, 1 destination latched, 1,000+ dead letters"


@pytest.mark.parametrize(("by", "is_told"), [(MINUTE, True), (MINUTE / 2, False)])
def test_orphaned_schedule_needs_an_operator(by: timedelta, is_told: bool) -> None:
    waits = found(late_schedules=[late(by, name="a b", is_live=False)])
    assert health.in_short(needs(waits)) == ("1 schedule orphaned" if is_told else "")
    assert ["durable-agent scheduled cancel 'a b'" in need.text for need in needs(waits)] == [True] * is_told


def test_needs_tell_a_problem_once() -> None:
    limits: dict[str, Any] = {"health_latched": MINUTE, "health_dead_letters": 1}
    waits = found(nodes=[], locked=set(), unowned=unowned(2), circuits=[latched(2)], dead_letters=2)

    assert [need.text for need in needs(waits, **limits)] == problems(waits, **limits)
    assert len(needs(waits, **limits)) == 3
    assert len(needs(waits)) == 3


def test_owned_messages_need_an_operator_when_no_node_is_alive() -> None:
    owned = {Side.OUTGOING: {NODE: 4}, Side.INCOMING: {}}
    assert needs(found(owned=owned)) == []
    assert health.in_short(needs(found(owned=owned, nodes=[node(2 * MINUTE)]))) == "no node runs"
    handler = latched(1, "handler", "orders.order-placed")
    assert health.in_short(needs(found(circuits=[handler]))) == "1 handler stopped"
