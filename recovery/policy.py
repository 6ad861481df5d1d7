"""Rules for dormant nodes and forgotten rows: facts that were read in, decisions out; no clock and no database.

lock held, heartbeat fresh                     alive
lock absent                                    suspect; dormant when still absent a grace later
lock held, heartbeat stale                     dormant: paused, or its connection is half open
no row in nodes                                struck off before; suspect, then dormant, whatever its lock says
server younger than the grace                  no verdict: every lock went with the restart
this node has lost its membership              it joins again after a moment that grows with failed tries alone
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Set
from dataclasses import dataclass
from datetime import timedelta
from typing import Final

from durable.envelope import LeaseKey, NodeId


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """Facts about a node, read in one sweep. `heartbeat_age` is by the database's clock; None: the node has no row."""

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


class RejoinPolicy:
    """Decides how long a process that is no node waits before it joins the nodes again.

    A database that is back must find its nodes back: the pause is short, and whatever has joined begins anew. Jitter
    keeps the nodes that lost one database from coming back in one moment.
    """

    SHORTEST: Final = 0.1
    LONGEST: Final = 2.0

    def __init__(self) -> None:
        self._failures = 0

    def ended_well(self) -> None:
        self._failures = 0

    def failed(self) -> None:
        self._failures += 1

    @property
    def has_failed_once(self) -> bool:
        """Tell whether this is the first failure since a node has ended well."""
        return self._failures == 1

    def pause(self) -> float:
        """Return the seconds to wait before the next try, at most LONGEST."""
        longest: float = min(self.LONGEST, self.SHORTEST * 2.0 ** min(self._failures, 10))
        return longest * random.uniform(0.5, 1.0)


class ForgottenPolicy:
    """Finds rows that this node owns and does not work on, by looking twice.

    A commit whose reply was lost leaves such rows. One look is not enough: a row may be committed a moment before
    the agent hears of it.
    """

    def __init__(self) -> None:
        self._missing: Set[LeaseKey] = frozenset()

    def forgotten(self, owned: Set[LeaseKey], held: Set[LeaseKey]) -> Set[LeaseKey]:
        """Return the rows that were owned and not held at this look and at the one before."""
        missing = owned - held
        twice = missing & self._missing
        self._missing = missing - twice
        return twice
