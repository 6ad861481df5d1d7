"""Makes due rows claimable and finishes expired ones, by the database's clock."""

from __future__ import annotations

from durable.envelope import NodeId
from durable.failpoints import failpoint
from durable.settings import Settings
from durable.storage import leases
from durable.storage.database import Database
from durable.storage.recovery_statements import INCOMING, OUTGOING
from durable.telemetry import Counters, Event


async def promote_due(database: Database, settings: Settings, counters: Counters) -> None:
    """Bounded batches, each in its own transaction; SKIP LOCKED lets several nodes share the work."""
    for table in (OUTGOING, INCOMING):
        most = promoted = settings.recovery_batch_size
        while promoted == most:
            promoted = await database.transaction(leases.promote_due, table, most)
            counters.add(Event.PROMOTED, promoted)
            if promoted:
                failpoint("C20")


async def expire(database: Database, settings: Settings, node: NodeId, counters: Counters) -> None:
    """Also what waits for a latched destination."""
    for table in (OUTGOING, INCOMING):
        most = expired = settings.recovery_batch_size
        while expired == most:
            expired = await database.transaction(leases.expire, table, node, most, keep_body=settings.history_bodies)
            counters.add(Event.EXPIRED, expired)
