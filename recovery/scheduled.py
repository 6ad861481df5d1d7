"""Makes due rows claimable and finishes expired ones, by the database's clock."""

from __future__ import annotations

from durable.envelope import NodeId
from durable.failpoints import failpoint
from durable.settings import Settings
from durable.storage import leases
from durable.storage.database import Database
from durable.storage.recovery_statements import INCOMING, OUTGOING
from durable.telemetry import Counters, Event

_AT_ONCE = 1_000


async def promote_due(database: Database, counters: Counters) -> bool:
    """A batch of each table, in its own transaction; SKIP LOCKED lets several nodes share the work.

    Returns whether there may be more: other work has its turn before that.
    """
    most = 0
    for table in (OUTGOING, INCOMING):
        promoted = await database.transaction(leases.promote_due, table, _AT_ONCE)
        counters.add(Event.PROMOTED, promoted)
        if promoted:
            failpoint("C20")
        most = max(most, promoted)
    return most == _AT_ONCE


async def expire(database: Database, settings: Settings, node: NodeId, counters: Counters) -> bool:
    """Also what waits for a latched destination. Returns whether there may be more."""
    most = 0
    for table in (OUTGOING, INCOMING):
        expired = await database.transaction(leases.expire, table, node, _AT_ONCE, keep_body=settings.history_bodies)
        counters.add(Event.EXPIRED, expired)
        most = max(most, expired)
    return most == _AT_ONCE
