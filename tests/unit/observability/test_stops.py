"""Circuits of handlers, and the versions of messages that they stop: in health, tables of commands, and the console."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from durable.cli import views
from durable.console import reading
from durable.envelope import NodeId
from durable.listed import Listed
from durable.observability import health
from durable.observability.metrics import service
from durable.observability.metrics.families import Declared
from durable.observability.stops import Stops
from durable.settings import Settings
from durable.storage.circuits import CircuitKind, OpenCircuit
from durable.storage.gauges import Gauges, Side, Unowned
from durable.storage.leases import Backlog
from durable.storage.nodes import Node, capabilities
from durable.storage.status import StatusSnapshot
from tests.support.quiet import quiet_gauges

NOW = datetime(2026, 5, 1, 12, tzinfo=UTC)
HOUR = timedelta(hours=1)
OLD, NEW, OTHER = "po.order", "po.order.v2", "po.mail"
ORDER = "\x1fpo.booking"
HANDLERS = {OLD: NEW, NEW: NEW, OTHER: OTHER}
CIRCUITS = {
    "paused": OpenCircuit("handler", NEW, "by an operator", NOW - HOUR, None, "ada", False),
    "latched": OpenCircuit("handler", NEW, "failures", NOW - HOUR, None, "node 1", True),
    "parked": OpenCircuit("handler", OLD, "dead letter 7", NOW - HOUR, None, "node 1", False, True, ORDER),
    "parked under another name": OpenCircuit(
        "handler", "po.booking", "dead letter 7", NOW - HOUR, None, "node 1", False, True, ORDER
    ),
    "one version paused": OpenCircuit("handler", OLD, "by an operator", NOW - HOUR, None, "ada", False),
}
STOPPED = {name: {OLD, NEW} if circuit.key == NEW or circuit.parked else {OLD} for name, circuit in CIRCUITS.items()}


def node(number: int, handlers: dict[str, str]) -> Node:
    started = NOW + timedelta(seconds=number)
    return Node(NodeId(number), "po", "host:1", "0", started, NOW, timedelta(0), capabilities(handlers))


def found(circuit: OpenCircuit, *waiting: str, nodes: list[Node] | None = None) -> Gauges:
    """A schema in which three messages of each of these types wait, and this circuit is open."""
    unowned = {Side.OUTGOING: [], Side.INCOMING: [Unowned(name, 3, HOUR) for name in waiting]}
    gauges = quiet_gauges(NOW, node(1, HANDLERS), unowned=unowned, circuits=[circuit])
    if circuit.parked:
        gauges = gauges._replace(parked_types={OLD: {ORDER}, NEW: {ORDER}}, behind=behind(*waiting))
    return gauges if nodes is None else gauges._replace(nodes=nodes)


def behind(*waiting: str) -> dict[str, int]:
    return {ORDER: 3 * len({*waiting} & {OLD, NEW})}


def problems(gauges: Gauges, **settings: Any) -> list[str]:
    return health.problems(gauges, [], health.unowned_waits(gauges), Settings(**settings))


@pytest.mark.parametrize("waiting", [[OLD], [NEW], [OLD, NEW], [OTHER]], ids=" ".join)
@pytest.mark.parametrize("name", CIRCUITS)
class TestStoppedVersions:
    def test_stopped_messages_do_not_lag(self, name: str, waiting: list[str]) -> None:
        told = problems(found(CIRCUITS[name], *waiting), health_lag="1m")
        assert {each.split()[1] for each in told if " lags" in each} == {*waiting} - STOPPED[name]

    def test_parked_handler_is_a_problem_for_each_version(self, name: str, waiting: list[str]) -> None:
        circuit, behind = CIRCUITS[name], {*waiting} & STOPPED[name]
        told = [each for each in problems(found(circuit, *waiting)) if "is parked" in each]
        expected = [f"and {3 * len(behind)} messages wait"] if circuit.parked and behind else []
        assert [text in each for text, each in zip(expected, told, strict=True)] == [True] * len(expected)

    def test_circuit_counts_the_messages_of_its_versions(self, name: str, waiting: list[str]) -> None:
        incoming = [Backlog(each, 3, 0, 0, None, None) for each in waiting]
        snapshot = SimpleNamespace(
            gauges=found(CIRCUITS[name]),
            circuits=Listed.of([CIRCUITS[name]]),
            incoming=incoming,
            outgoing=[],
            parked=behind(*waiting),
        )
        [row] = views.circuit_rows(cast(StatusSnapshot, snapshot)).rows
        assert row["waiting"] == 3 * len({*waiting} & STOPPED[name])

    def test_lane_of_the_console_is_stopped(self, name: str, waiting: list[str]) -> None:
        lanes = reading._lanes(found(CIRCUITS[name], *waiting), Side.INCOMING, CircuitKind.HANDLER, list(HANDLERS))
        assert {lane.name for lane in lanes if lane.circuits} == STOPPED[name] | {CIRCUITS[name].key}

    def test_stopped_messages_are_nobodys_to_claim(self, name: str, waiting: list[str]) -> None:
        gauges = found(CIRCUITS[name], *waiting, nodes=[node(1, {"po.else": "po.else"}), node(2, HANDLERS)])
        unclaimed = {group.name for group in health.unclaimed(gauges._replace(nodes=gauges.nodes[:1]), Settings())}
        stopped = STOPPED[name] if CIRCUITS[name].parked else {CIRCUITS[name].key}
        known = stopped  # without a node that tells of it, a handler has the name of its type
        assert unclaimed == {*waiting} - known


def test_pause_beside_a_park_stops_the_same_messages() -> None:
    both = [CIRCUITS["paused"], CIRCUITS["parked"]]
    stops = Stops(found(both[1])._replace(circuits=both))
    assert [stops.of(name) for name in (OLD, NEW, OTHER)] == [both, both, []]
    assert [stops.waiting(circuit, {OLD: 3, NEW: 2, OTHER: 1}, {ORDER: 4}) for circuit in both] == [5, 4]


def test_park_has_an_age_of_its_own_beside_a_pause() -> None:
    paused, parked = CIRCUITS["paused"], CIRCUITS["parked"]._replace(since=NOW - 2 * HOUR)
    gauges = found(paused)._replace(circuits=[paused, parked])
    family = service._circuits(gauges, Declared(set(), {NEW}, {NEW}, set(), set()))
    assert {each.labels["parked"]: each.value for each in family.samples} == {"false": 3600, "true": 7200}


def test_newest_node_knows_the_handler_best_when_none_is_alive() -> None:
    circuit = CIRCUITS["paused"]
    before, after = node(1, {OLD: OLD}), node(2, HANDLERS)
    for nodes in ([before, after], [after, before]):
        assert Stops(found(circuit, nodes=nodes)._replace(locked=set())).of(OLD) == [circuit]
    assert Stops(found(circuit, nodes=[before])._replace(locked=set())).of(OLD) == []


RELEASES = ({OLD: OLD}, {OLD: NEW, NEW: NEW}, {OLD: OTHER, NEW: OTHER, OTHER: OTHER}, {OTHER: OTHER})
"""What nodes of several releases say that they handle."""


@given(
    releases=st.lists(st.sampled_from(RELEASES), min_size=1, max_size=4),
    alive=st.sets(st.integers(0, 3)),
    stopped=st.sets(st.sampled_from([OLD, NEW, OTHER])),
)
@example(releases=[RELEASES[0], RELEASES[1]], alive={0, 1}, stopped={NEW})
@example(releases=[RELEASES[0], RELEASES[1]], alive={0, 1}, stopped={OLD, NEW})
def test_type_with_a_living_handler_waits_behind_no_stop(
    releases: list[dict[str, str]], alive: set[int], stopped: set[str]
) -> None:
    circuits = [CIRCUITS["paused"]._replace(key=each) for each in sorted(stopped)]
    nodes = [node(number, handlers) for number, handlers in enumerate(releases)]
    gauges = found(CIRCUITS["paused"], OLD, NEW, OTHER, nodes=nodes)
    gauges = gauges._replace(circuits=circuits, locked={NodeId(number) for number in alive})
    living = [handlers for number, handlers in enumerate(releases) if number in alive]
    lags = {each.split()[1] for each in problems(gauges, health_lag="1m") if " lags" in each}
    for name in (OLD, NEW, OTHER):
        takers = [handlers[name] for handlers in living if name in handlers]
        if takers:
            is_handled = name not in stopped and not stopped.issuperset(takers)
            assert (name in lags) is is_handled
            counted = [Stops(gauges).waiting(circuit, {name: 3}, {}) for circuit in circuits]
            assert any(counted) is not is_handled
