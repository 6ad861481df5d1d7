"""Who is dead, and what was forgotten: rules over facts that were read, with no clock and no database.

lock held, heartbeat fresh                     alive
lock absent                                    suspect; dormant when still absent a grace later
lock held, heartbeat stale                     dormant: paused, or its connection is half open
no row in nodes                                struck off before; suspect, then dormant, whatever its lock says
server younger than the grace                  no verdict: every lock went with the restart
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from dataclasses import dataclass
from datetime import timedelta

from durable.envelope import Lease, NodeId


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """What one sweep saw of a node. `heartbeat_age` is by the database's clock; None: the node has no row."""

    node_id: NodeId
    holds_lock: bool
    heartbeat_age: timedelta | None


class DormancyPolicy:
    """Decides over successive sweeps which nodes are dormant. `now` is monotonic, in seconds."""

    def __init__(self, *, grace: timedelta, stale: timedelta) -> None:
        self._grace = grace
        self._stale = stale
        self._suspect_since: dict[NodeId, float] = {}

    def dormant(self, seen: Iterable[NodeFacts], *, server_uptime: timedelta, now: float) -> list[NodeId]:
        """The nodes whose work others must take over, in the order of their ids."""
        if server_uptime < self._grace:
            self._suspect_since.clear()
            return []
        facts = {fact.node_id: fact for fact in seen}
        suspects = {node for node, fact in facts.items() if not fact.holds_lock or fact.heartbeat_age is None}
        self._suspect_since = {node: self._suspect_since.get(node, now) for node in suspects}
        gone = {node for node, since in self._suspect_since.items() if now - since >= self._grace.total_seconds()}
        paused = {
            node
            for node, fact in facts.items()
            if fact.holds_lock and fact.heartbeat_age is not None and fact.heartbeat_age >= self._stale
        }
        return sorted(gone | paused)


class ForgottenPolicy:
    """Finds rows that this node owns and does not work on, by looking twice.

    A commit whose reply was lost leaves such rows. One look is not enough: a row may be committed a moment before
    the agent hears of it.
    """

    def __init__(self) -> None:
        self._missing: Set[Lease] = frozenset()

    def forgotten(self, owned: Set[Lease], held: Set[Lease]) -> Set[Lease]:
        """What was owned and not held at this look and at the one before."""
        missing = owned - held
        twice = missing & self._missing
        self._missing = missing - twice
        return twice
