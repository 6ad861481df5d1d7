"""Whether a schema is healthy: rules over what was read.

A schema is healthy when it is at this code's version, no envelope is owned by a dormant node, and today's and
tomorrow's partitions are there. Latched circuits and dead letters are shown, and are no fault of the schema.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Set
from datetime import timedelta
from enum import StrEnum

from durable.envelope import NodeId
from durable.recovery.policy import DormancyPolicy, NodeFacts
from durable.settings import Settings
from durable.storage.status import Picture

_NEEDED_DAYS = 2


class NodeState(StrEnum):
    ALIVE = "alive"
    STALE = "stale"
    """It holds its lock and writes no heartbeat: paused, or behind a half-open connection."""
    DEAD = "dead"
    """Its lock is gone."""


def owners(picture: Picture) -> Set[NodeId]:
    return picture.owned_outgoing.keys() | picture.owned_incoming.keys()


def node_states(picture: Picture, stale: timedelta) -> dict[NodeId, NodeState]:
    """Of every registered node, and of every owner that is not registered any more."""
    ages = {node.node_id: node.heartbeat_age for node in picture.nodes}
    return {
        node: _state(node in picture.locked, ages.get(node), stale) for node in sorted(ages.keys() | owners(picture))
    }


def _state(holds_lock: bool, heartbeat_age: timedelta | None, stale: timedelta) -> NodeState:
    if not holds_lock or heartbeat_age is None:
        return NodeState.DEAD
    return NodeState.STALE if heartbeat_age >= stale else NodeState.ALIVE


def look(read: Callable[[], Picture], settings: Settings) -> tuple[Picture, list[NodeId]]:
    """The picture, and the nodes that are dormant by the rule that recovery follows.

    A node that died a moment ago is not: its work is about to be taken over. So when one that owns something seems
    dead, this looks again after dormant_grace.
    """
    policy = DormancyPolicy(grace=settings.dormant_grace, stale=settings.heartbeat_stale)
    picture = read()
    dormant = _dormant(policy, picture)
    states = node_states(picture, settings.heartbeat_stale)
    if any(states[owner] is NodeState.DEAD for owner in owners(picture)):
        time.sleep(settings.dormant_grace.total_seconds())
        picture = read()
        dormant = _dormant(policy, picture)
    return picture, dormant


def problems(picture: Picture, dormant: list[NodeId]) -> list[str]:
    """Why this is not healthy, and what to do about it; nothing when it is."""
    found = []
    for node in dormant:
        count = picture.owned_outgoing.get(node, 0) + picture.owned_incoming.get(node, 0)
        if count:
            found.append(
                f"node {node} is dormant, owns {count} envelopes and nobody takes them over: "
                "start a node with durable-agent run APP:BUS"
            )
    if picture.partitioned_days < _NEEDED_DAYS:
        found.append(
            "partitions are missing for today or tomorrow: a running node makes them; "
            "if one runs, see its log for 'maintenance failed'"
        )
    return found


def _dormant(policy: DormancyPolicy, picture: Picture) -> list[NodeId]:
    ages = {node.node_id: node.heartbeat_age for node in picture.nodes}
    facts = [NodeFacts(node, node in picture.locked, ages.get(node)) for node in ages.keys() | owners(picture)]
    return policy.dormant(facts, server_uptime=picture.uptime, now=time.monotonic())
