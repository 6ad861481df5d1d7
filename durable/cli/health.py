"""The reading of a schema for `status`: twice, when a node seems to be dead or paused."""

from __future__ import annotations

import time
from collections.abc import Callable

from durable.envelope import NodeId
from durable.observability import health
from durable.observability.health import Need, NodeState
from durable.settings import Settings
from durable.storage.gauges import Side
from durable.storage.status import StatusSnapshot


def read_twice(read: Callable[[], StatusSnapshot], settings: Settings) -> tuple[StatusSnapshot, list[NodeId]]:
    """Read the state of the service, and the owners of messages that were no living nodes at two looks.

    The messages of a node that died a moment ago are about to be claimed by others, and a node that lives is stale for
    a moment when the database's clock is set. So when an owner seems dead or paused, the state is read again after
    dormant_grace. Recovery looks for longer: it sees for heartbeat_stale that a heartbeat stays the same.
    """
    snapshot = read()
    suspects = _owners_without_life(snapshot, settings)
    if suspects:
        time.sleep(settings.dormant_grace.total_seconds())
        snapshot = read()
        suspects &= _owners_without_life(snapshot, settings)
    return snapshot, sorted(suspects)


def _owners_without_life(snapshot: StatusSnapshot, settings: Settings) -> set[NodeId]:
    states = health.node_states(snapshot.gauges, settings.heartbeat_stale)
    return {owner for owner in health.owners(snapshot.gauges) if states[owner] is not NodeState.ALIVE}


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
