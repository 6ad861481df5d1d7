"""Releases what this node owns and does not work on: the remains of commits whose reply was lost."""

from __future__ import annotations

from collections.abc import Callable

from durable.agents.context import AgentContext
from durable.envelope import LeaseKey
from durable.grammar import several
from durable.recovery.policy import ForgottenPolicy
from durable.storage import leases
from durable.storage.sql.recovery import Recovery
from durable.telemetry import Event, log

Held = Callable[[], set[LeaseKey]]


class Forgotten:
    """Watch over one table: rows that are missing in memory at two looks are released."""

    def __init__(self, context: AgentContext, table: Recovery, held: Held) -> None:
        self._database = context.database
        self._table = table
        self._node = context.node
        self._counters = context.counters
        self._held = held
        self._policy = ForgottenPolicy()

    async def poll(self) -> int:
        # Held before and after the read: what is finished meanwhile was held, what came meanwhile is held now.
        held = self._held()
        owned = await self._database.transaction(leases.owned_by, self._table, self._node)
        forgotten = self._policy.forgotten(owned, held | self._held())
        if not forgotten:
            return 0
        released = await self._database.transaction(leases.release, self._table, self._node, forgotten)
        log.warning("released %s that a lost reply had left behind", several(released, "envelopes"))
        self._counters.add(Event.FORGOTTEN, released)
        return released
