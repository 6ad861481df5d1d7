"""Environment shared by the agents of one node."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from durable.clock import Clock, SystemClock
from durable.encryption.ring import KeyRing
from durable.envelope import LeasedEnvelope, NodeId
from durable.settings import Settings
from durable.storage.database import Database
from durable.telemetry import Counters, Subject


@dataclass(frozen=True, slots=True)
class AgentContext:
    """Database, id, settings, clock and encryption keys of one node, with the counters of one subject or of all."""

    database: Database
    node: NodeId
    settings: Settings
    clock: Clock = field(default_factory=SystemClock)
    counters: Counters = field(default_factory=Counters)
    ring: KeyRing = field(default_factory=KeyRing)
    is_own: Callable[[LeasedEnvelope], bool] = lambda _lease: True
    """Tell whether a message is of this service, rather than of another one with the same tables."""
    left_alone: dict[str, float] = field(default_factory=dict)
    """The message types of other services that wait here, each with the monotonic time until which it is left alone."""
    failures: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(1))
    """Held while the database learns that a destination fails: those that fail together wait for each other, and the
    others for none of them."""

    def at(self, node: NodeId) -> AgentContext:
        """The same for this node."""
        return replace(self, node=node)

    def of(self, subject: Subject, name: str) -> AgentContext:
        """The same for the agent of one subject, which counts for itself."""
        return replace(self, counters=self.counters.of(subject, name))
