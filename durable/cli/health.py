"""How `status` looks at a schema: twice, when a node seems to have died a moment ago."""

from __future__ import annotations

import time
from collections.abc import Callable

from durable.envelope import NodeId
from durable.observability import health
from durable.observability.health import NodeState
from durable.recovery.policy import DormancyPolicy
from durable.settings import Settings
from durable.storage.gauges import Side
from durable.storage.status import StatusSnapshot


def read_twice(read: Callable[[], StatusSnapshot], settings: Settings) -> tuple[StatusSnapshot, list[NodeId]]:
    """The picture, and the nodes that are dormant by the rule that recovery follows.

    A node that died a moment ago is not: its work is about to be taken over. So when one that owns something seems
    dead, this looks again after dormant_grace.
    """
    policy = DormancyPolicy(grace=settings.dormant_grace, stale=settings.heartbeat_stale)
    picture = read()
    dormant = health.dormant(policy, picture.gauges, time.monotonic())
    states = health.node_states(picture.gauges, settings.heartbeat_stale)
    if any(states[owner] is NodeState.DEAD for owner in health.owners(picture.gauges)):
        time.sleep(settings.dormant_grace.total_seconds())
        picture = read()
        dormant = health.dormant(policy, picture.gauges, time.monotonic())
    return picture, dormant


def problems(picture: StatusSnapshot, dormant: list[NodeId], settings: Settings) -> list[str]:
    """Why this is not healthy, and what to do about it; nothing when it is."""
    waits = {
        (side, group.name): group.oldest_age
        for side, groups in ((Side.OUTGOING, picture.outgoing), (Side.INCOMING, picture.incoming))
        for group in groups
        if group.oldest_age is not None
    }
    return health.problems(picture.gauges, dormant, waits, settings)
