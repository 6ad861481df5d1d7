"""Makes due rows claimable and finishes expired ones, by the database's clock."""

from __future__ import annotations

from durable.envelope import NodeId
from durable.failpoints import failpoint
from durable.settings import Settings
from durable.storage import leases
from durable.storage.database import Database
from durable.storage.expiry import bury
from durable.storage.leases import NO_BURIALS, Burials
from durable.storage.recovery_statements import INCOMING, OUTGOING
from durable.telemetry import Counters, Event

_BURIED_AT_ONCE = 100  # each is a statement of its own


async def promote_due(database: Database, settings: Settings, counters: Counters) -> None:
    """Bounded batches, each in its own transaction; SKIP LOCKED lets several nodes share the work."""
    for table in (OUTGOING, INCOMING):
        most = promoted = settings.recovery_batch_size
        while promoted == most:
            promoted = await database.transaction(leases.promote_due, table, most)
            counters.add(Event.PROMOTED, promoted)
            if promoted:
                failpoint("C20")


async def expire(database: Database, settings: Settings, node: NodeId, counters: Counters, burials: Burials) -> None:
    """Also what waits for a latched destination."""
    keep_body = settings.history_bodies
    for table in (OUTGOING, INCOMING):
        buries = burials.of(table)
        most = expired = settings.recovery_batch_size
        while expired == most:
            expired = await database.transaction(leases.expire, table, node, most, buries, keep_body=keep_body)
            counters.add(Event.EXPIRED, expired)
        buried = _BURIED_AT_ONCE
        while buries != NO_BURIALS and buried == _BURIED_AT_ONCE:
            buried = await database.transaction(bury, table, node, _BURIED_AT_ONCE, buries, keep_body=keep_body)
            counters.add(Event.DEAD_LETTERED, buried)
