"""Health of a service: rules over a status that was read.

    unhealthy, always                                       unhealthy, when its setting says so
    a dormant node owns work that nobody takes over         health_lag            something has waited for so long
    the database refuses to change a message that waits     health_latched        a destination is latched for so long
    partitions are missing for today or tomorrow            health_dead_letters   so many are unresolved
    no node is alive, and work has waited for
    health_unattended; or scheduled work is overdue by it
    work has waited for health_unattended, and none of the
    nodes that are alive handles its type
    a schedule is late by health_unattended, or has failed
    for so long
    messages have waited for an encryption key for
    health_unattended
    messages wait behind a dead letter that has parked
    their key, or their ordered handler, for so long

What is latched or paused may wait as long as it likes. `durable-agent status` and the monitor of each process judge by
these rules.

Work for an operator is more: a latched destination, an open handler, dead letters, and messages that wait while no node
is alive need somebody at once, with no limit. `durable-agent status` and the console tell it by needs().
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from enum import StrEnum
from typing import NamedTuple

from durable.envelope import NodeId
from durable.grammar import lasting, several
from durable.observability.stops import Stops
from durable.recovery.policy import DormancyPolicy, NodeFacts
from durable.redaction import printable
from durable.settings import Settings
from durable.storage.circuits import CircuitKind
from durable.storage.gauges import MOST_COUNTED, Gauges, Side, Unowned

_NEEDED_DAYS = 2

Waits = Mapping[tuple[Side, str], timedelta]
"""The wait of the oldest message of each destination, or message type."""


class NodeState(StrEnum):
    ALIVE = "alive"
    STALE = "stale"
    """The node holds its lock and writes no heartbeat: it is paused, or behind a half-open connection. A heartbeat of a
    future time is from before the database's clock was set back."""
    DEAD = "dead"
    """The node has lost its lock."""


def owners(gauges: Gauges) -> set[NodeId]:
    return {node for owned in gauges.owned.values() for node in owned}


def node_states(gauges: Gauges, stale: timedelta) -> dict[NodeId, NodeState]:
    """Return the state of every registered node, and of every owner without a registration."""
    ages = {node.node_id: node.heartbeat_age for node in gauges.nodes}
    return {node: _state(node in gauges.locked, ages.get(node), stale) for node in sorted(ages.keys() | owners(gauges))}


def troubled_first(states: Mapping[NodeId, NodeState]) -> list[tuple[NodeId, NodeState]]:
    """Sort nodes for a list: those that do not work first."""
    return sorted(states.items(), key=lambda each: each[1] is NodeState.ALIVE)


def _state(holds_lock: bool, heartbeat_age: timedelta | None, stale: timedelta) -> NodeState:
    if not holds_lock or heartbeat_age is None:
        return NodeState.DEAD
    return NodeState.STALE if abs(heartbeat_age) >= stale else NodeState.ALIVE


def dormant(policy: DormancyPolicy, gauges: Gauges, now: float) -> list[NodeId]:
    """The nodes that are dormant by the rule that recovery follows; `now` is monotonic."""
    beats = {node.node_id: node.heartbeat_at for node in gauges.nodes}
    facts = [NodeFacts(node, node in gauges.locked, beats.get(node)) for node in beats.keys() | owners(gauges)]
    return policy.dormant(facts, server_started_at=gauges.server_started_at, now=now)


def unowned_waits(gauges: Gauges) -> Waits:
    return {(side, group.name): group.oldest_age for side, groups in gauges.unowned.items() for group in groups}


def problems(gauges: Gauges, dormant: list[NodeId], waits: Waits, settings: Settings) -> list[str]:
    """Return the reasons why this process is not healthy, with the advice for each; none when it is."""
    found = [
        *_abandoned(gauges, dormant),
        *_refused(gauges),
        *_unattended(gauges, settings),
        *_late_schedules(gauges, settings),
        *_unclaimed(gauges, settings),
        *_parked(gauges, settings),
        *_behind(gauges, settings),
        *_late(gauges, waits, settings.health_lag),
        *_latched(gauges, settings.health_latched),
        *_dead_letters(gauges, settings.health_dead_letters),
        *_unpartitioned(gauges),
    ]
    return [printable(each) for each in found]


class Need(NamedTuple):
    """Work for an operator: the whole text, and the same in a few words, as a number of things or without one."""

    text: str
    things: str
    number: int | None = None
    state: str = ""
    is_problem: bool = False


def needs(gauges: Gauges, problems: Sequence[str], settings: Settings) -> list[Need]:
    """Return the work for operators: messages without a node, the problems, and what failures stopped, at once."""
    return [
        *_without_node(gauges, settings),
        *(Need(problem, "problems", 1, is_problem=True) for problem in problems),
        *_orphaned(gauges, settings),
        *_stopped(gauges, settings.health_latched),
        *_to_resolve(gauges, settings.health_dead_letters),
    ]


def in_short(needs: Sequence[Need]) -> str:
    """Tell needs in a few words each, those of a kind together: "2 destinations latched, 10 dead letters"."""
    numbers: dict[tuple[str, str], int | None] = {}
    for need in needs:
        kind = need.things, need.state
        numbers[kind] = None if need.number is None else (numbers.get(kind) or 0) + need.number
    told = (
        things if number is None else f"{several(number, things, written=_counted(number))} {state}".rstrip()
        for (things, state), number in numbers.items()
    )
    return ", ".join(told)


def _without_node(gauges: Gauges, settings: Settings) -> Iterator[Need]:
    """Tell of messages while no node is alive, unless that is a problem already."""
    unowned = sum(group.waiting for groups in gauges.unowned.values() for group in groups)
    waiting = unowned + sum(count for owned in gauges.owned.values() for count in owned.values())
    is_attended = NodeState.ALIVE in node_states(gauges, settings.heartbeat_stale).values()
    if waiting and not is_attended and not any(_unattended(gauges, settings)):
        text = f"no node is alive, and {several(waiting, 'messages', 'wait')}: start one with durable-agent run APP:BUS"
        yield Need(text, "no node runs")


def _stopped(gauges: Gauges, limit: timedelta | None) -> Iterator[Need]:
    """Tell of circuits that failures have opened; a latch that is a problem already is left out."""
    for circuit in gauges.circuits:
        if circuit.probing and not any(_latched(gauges._replace(circuits=[circuit]), limit)):
            age = lasting(gauges.now - circuit.since)
            text = f"{circuit.kind} {circuit.key} has been stopped by failures for {age}: {circuit.reason}"
            state = "latched" if circuit.kind == CircuitKind.DESTINATION else "stopped"
            yield Need(printable(text), f"{circuit.kind}s", 1, state)


def _to_resolve(gauges: Gauges, limit: int | None) -> Iterator[Need]:
    if gauges.dead_letters and not any(_dead_letters(gauges, limit)):
        number = gauges.dead_letters
        letters = several(number, "dead letters", "wait", written=_counted(number))
        yield Need(f"{letters} to be replayed or discarded", "dead letters", number)


def _counted(number: int) -> str:
    return f"{number:,}{'+' if number >= MOST_COUNTED else ''}"


def _abandoned(gauges: Gauges, dormant: list[NodeId]) -> Iterator[str]:
    for node in dormant:
        count = sum(owned.get(node, 0) for owned in gauges.owned.values())
        if count:
            yield (
                f"node {node} is dormant, owns {_several(count, 'envelopes')} and nobody takes them over: "
                "start a node with durable-agent run APP:BUS"
            )


def _refused(gauges: Gauges) -> Iterator[str]:
    for side, count in gauges.refused.items():
        if count:
            them = "it" if count == 1 else "them"
            yield (
                f"{_several(count, f'{side} messages', 'are')} marked by owner_id -1, for the database refuses "
                f"to change {them}: see the log of a node for the reason, and docs/operations.md, 'Rows that the "
                "database refuses', for the release"
            )


def _unattended(gauges: Gauges, settings: Settings) -> Iterator[str]:
    limit = settings.health_unattended
    is_attended = NodeState.ALIVE in node_states(gauges, settings.heartbeat_stale).values()
    oldest = max(unowned_waits(gauges).values(), default=None)
    if not is_attended and oldest is not None and oldest >= limit:
        yield f"work has waited for {_seconds(oldest)} and no node is alive: start one with durable-agent run APP:BUS"
    if gauges.overdue is not None and gauges.overdue >= limit:
        todo = (
            "see the log of a node for 'promote due work'"
            if is_attended
            else "start a node with durable-agent run APP:BUS"
        )
        yield f"scheduled work is overdue by {_seconds(gauges.overdue)}: {todo}"


def _late_schedules(gauges: Gauges, settings: Settings) -> Iterator[str]:
    """Tell of schedules that do not run. While nodes live, one that none of them declares is work for an operator."""
    is_attended = NodeState.ALIVE in node_states(gauges, settings.heartbeat_stale).values()
    for schedule in gauges.late_schedules:
        if schedule.late < settings.health_unattended or (is_attended and not schedule.is_live):
            continue
        if schedule.error is not None:
            yield (
                f"schedule {schedule.name} has failed for {_seconds(schedule.late)}: {schedule.error}; correct what "
                f"makes its message, or pause it with durable-agent scheduled pause {shlex.quote(schedule.name)}"
            )
        else:
            todo = "see the log of a node" if is_attended else "start a node with durable-agent run APP:BUS"
            yield f"schedule {schedule.name} is late by {_seconds(schedule.late)}: {todo}"


def _orphaned(gauges: Gauges, settings: Settings) -> Iterator[Need]:
    is_attended = NodeState.ALIVE in node_states(gauges, settings.heartbeat_stale).values()
    for schedule in gauges.late_schedules:
        if is_attended and not schedule.is_live and schedule.late >= settings.health_unattended:
            text = (
                f"schedule {schedule.name} is declared by no running node: start one whose code declares it, or run "
                f"durable-agent scheduled cancel {shlex.quote(schedule.name)}"
            )
            yield Need(printable(text), "schedules", 1, "orphaned")


def unclaimed(gauges: Gauges, settings: Settings) -> list[Unowned]:
    """Message types of the inbox that have waited for health_unattended while no node that is alive handles them.

    Nothing while no node is alive at all.
    """
    states = node_states(gauges, settings.heartbeat_stale)
    alive = [node for node in gauges.nodes if states[node.node_id] is NodeState.ALIVE]
    handled = {name for node in alive for name in node.message_types}
    stops = Stops(gauges)
    return [
        group
        for group in gauges.unowned[Side.INCOMING]
        if alive
        and group.name not in handled
        and not stops.of(group.name)
        and group.oldest_age >= settings.health_unattended
    ]


def _unclaimed(gauges: Gauges, settings: Settings) -> Iterator[str]:
    for group in unclaimed(gauges, settings):
        waiting = _several(group.waiting, "messages", "wait")
        yield (
            f"{group.name}: {waiting}, the oldest for {_seconds(group.oldest_age)}, "
            "and no living node handles them: start a node whose code has a handler for them, or an upcaster to one"
        )


def _parked(gauges: Gauges, settings: Settings) -> Iterator[str]:
    for group in gauges.parked:
        if group.oldest_age >= settings.health_unattended:
            yield (
                f"{_several(group.waiting, 'messages', 'wait')} for encryption key {group.key_id}, the oldest for "
                f"{_seconds(group.oldest_age)}: give the nodes this key"
            )


def _behind(gauges: Gauges, settings: Settings) -> Iterator[str]:
    by_type, stops = {group.name: group.waiting for group in gauges.unowned[Side.INCOMING]}, Stops(gauges)
    for circuit in gauges.circuits:
        waiting = stops.waiting(circuit, by_type, gauges.behind)
        if circuit.parked and waiting and gauges.now - circuit.since >= settings.health_unattended:
            yield (
                f"{circuit.kind} {circuit.key} is parked by a dead letter ({circuit.reason}), and "
                f"{_several(waiting, 'messages', 'wait')} behind it: resolve the letter, then run durable-agent resume "
                f"APP:BUS --{circuit.kind} {shlex.quote(circuit.key)}"
            )


def _late(gauges: Gauges, waits: Waits, limit: timedelta | None) -> Iterator[str]:
    latched = {circuit.key for circuit in gauges.circuits if circuit.kind == CircuitKind.DESTINATION}
    stops = Stops(gauges)
    for (side, name), age in waits.items():
        is_stopped = name in latched if side is Side.OUTGOING else bool(stops.of(name))
        if limit is not None and age >= limit and not is_stopped:
            yield (
                f"{side} {name} lags: its oldest message has waited for {_seconds(age)} (health_lag is "
                f"{_seconds(limit)}); see durable-agent nodes, and add nodes or concurrency"
            )


def _latched(gauges: Gauges, limit: timedelta | None) -> Iterator[str]:
    for circuit in gauges.circuits:
        age = gauges.now - circuit.since
        if limit is not None and circuit.kind == CircuitKind.DESTINATION and circuit.probing and age >= limit:
            yield f"{circuit.key} is latched for {_seconds(age)}: {circuit.reason}; see to this peer"


def _dead_letters(gauges: Gauges, limit: int | None) -> Iterator[str]:
    if limit is not None and gauges.dead_letters >= min(limit, MOST_COUNTED):
        yield f"{_several(gauges.dead_letters, 'dead letters', 'are')} unresolved: see durable-agent dead-letters list"


def _unpartitioned(gauges: Gauges) -> Iterator[str]:
    if gauges.partitioned_days < _NEEDED_DAYS:
        yield (
            "partitions are missing for today or tomorrow: a running node makes them; "
            "if one runs, see its log for 'maintenance failed'"
        )


def _several(count: int, nouns: str, verb: str = "") -> str:
    return several(count, nouns, verb, written=str(count) if count < MOST_COUNTED else f"{MOST_COUNTED} or more")


def _seconds(duration: timedelta) -> str:
    return f"{duration.total_seconds():.0f} s"
