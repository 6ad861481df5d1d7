"""Rules for dormant nodes and forgotten rows: facts that were read in, decisions out; no clock and no database.

lock held, heartbeat new                       alive
lock absent                                    suspect
lock held, heartbeat the same for `stale`      suspect: paused, or its connection is half open
no row in nodes                                struck off before: suspect, whatever its lock says
suspect at each look for a grace               dormant
another start of the server                    what was seen before counts no more: every lock went with the restart
this node has lost its membership              it joins again after a moment that grows with failed tries alone

Every span is measured by the monotonic clock of the node that looks: the clock of the database may be set.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Set
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final, TypeVar

from durable.envelope import LeaseKey, NodeId

K = TypeVar("K")


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """Facts about a node, read in one sweep. `heartbeat_at` is of the database's clock; None: the node has no row."""

    node_id: NodeId
    holds_lock: bool
    heartbeat_at: datetime | None


class DormancyPolicy:
    """Decides over successive sweeps which nodes are dormant. `now` is monotonic, in seconds."""

    def __init__(self, *, grace: timedelta, stale: timedelta) -> None:
        self._grace = grace.total_seconds()
        self._stale = stale.total_seconds()
        self._server_started_at: datetime | None = None
        self._beats: dict[tuple[NodeId, datetime | None], float] = {}
        """Since when the last heartbeat of each node is seen."""
        self._suspects: dict[NodeId, float] = {}
        """Since when each is suspect."""

    def dormant(self, seen: Iterable[NodeFacts], *, server_started_at: datetime, now: float) -> list[NodeId]:
        """The nodes whose work others must take over, in the order of their ids."""
        if server_started_at != self._server_started_at:
            self._server_started_at = server_started_at
            self._beats, self._suspects = {}, {}
        facts = list(seen)
        self._beats = _since(self._beats, ((fact.node_id, fact.heartbeat_at) for fact in facts), now)
        self._suspects = _since(self._suspects, (fact.node_id for fact in facts if self._is_suspect(fact, now)), now)
        return sorted(node for node, since in self._suspects.items() if now - since >= self._grace)

    def _is_suspect(self, fact: NodeFacts, now: float) -> bool:
        beat = fact.node_id, fact.heartbeat_at
        return not fact.holds_lock or fact.heartbeat_at is None or now - self._beats[beat] >= self._stale


def _since(known: dict[K, float], keys: Iterable[K], now: float) -> dict[K, float]:
    return {key: known.get(key, now) for key in keys}


class BackwardSteps:
    """Finds out when the clock of the database was set back, by the monotonic clock of the node that looks.

    A look takes time, during which the node may stand still: what it reads is of some moment between its ends.
    """

    LEAST: Final = timedelta(seconds=1)

    def __init__(self) -> None:
        self._least: timedelta | None = None

    def step(self, read: datetime, *, begun: float, ended: float) -> timedelta | None:
        """Return how far it was set back since the last look, if it was for sure."""
        most, least = (timedelta(seconds=read.timestamp() - at) for at in (begun, ended))
        before, self._least = self._least, least
        return before - most if before is not None and before - most >= self.LEAST else None


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
