"""Releases what this node owns and does not work on: the remains of commits whose reply was lost."""

from __future__ import annotations

from collections.abc import Callable

from durable.envelope import LeaseKey, NodeId
from durable.recovery.policy import ForgottenPolicy
from durable.storage import leases
from durable.storage.database import Database
from durable.storage.sql.recovery import Recovery
from durable.telemetry import Counters, Event, log

Held = Callable[[], set[LeaseKey]]


class Forgotten:
    """Looks at one table at intervals; what is missing in memory at two looks is released."""

    def __init__(self, database: Database, table: Recovery, node: NodeId, counters: Counters, held: Held) -> None:
        self._database = database
        self._table = table
        self._node = node
        self._counters = counters
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
        log.warning("released %d envelopes that a lost reply had left behind", released)
        self._counters.add(Event.FORGOTTEN, released)
        return released
