"""The reading of a schema for `status`: twice, when a node seems to have died a moment ago."""

from __future__ import annotations

import time
from collections.abc import Callable

from durable.envelope import NodeId
from durable.observability import health
from durable.observability.health import Need, NodeState
from durable.recovery.policy import DormancyPolicy
from durable.settings import Settings
from durable.storage.gauges import Side
from durable.storage.status import StatusSnapshot


def read_twice(read: Callable[[], StatusSnapshot], settings: Settings) -> tuple[StatusSnapshot, list[NodeId]]:
    """Read the state of the service, and the nodes that are dormant by the rule of recovery.

    A node that died a moment ago is not dormant: its messages are about to be claimed by others. So when a node that
    owns messages seems dead, the state is read again after dormant_grace.
    """
    policy = DormancyPolicy(grace=settings.dormant_grace, stale=settings.heartbeat_stale)
    snapshot = read()
    dormant = health.dormant(policy, snapshot.gauges, time.monotonic())
    states = health.node_states(snapshot.gauges, settings.heartbeat_stale)
    if any(states[owner] is NodeState.DEAD for owner in health.owners(snapshot.gauges)):
        time.sleep(settings.dormant_grace.total_seconds())
        snapshot = read()
        dormant = health.dormant(policy, snapshot.gauges, time.monotonic())
    return snapshot, dormant


def needs(snapshot: StatusSnapshot, problems: list[str], settings: Settings) -> list[Need]:
    """List the work for operators beside these problems: the same that the console shows."""
    return health.needs(snapshot.gauges, problems, settings)


def problems(snapshot: StatusSnapshot, dormant: list[NodeId], settings: Settings) -> list[str]:
    """List the problems, each with advice; an empty list when the service is healthy."""
    waits = {
        (side, group.name): group.oldest_age
        for side, groups in ((Side.OUTGOING, snapshot.outgoing), (Side.INCOMING, snapshot.incoming))
        for group in groups
        if group.oldest_age is not None
    }
    return health.problems(snapshot.gauges, dormant, waits, settings)
