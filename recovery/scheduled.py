"""Makes due rows claimable and finishes expired ones, by the database's clock."""

from __future__ import annotations

from durable.envelope import NodeId
from durable.failpoints import failpoint
from durable.settings import Settings
from durable.storage import leases
from durable.storage.database import Database
from durable.storage.expiry import bury
from durable.storage.leases import NO_BURIALS, Burials
from durable.storage.sql.recovery import INCOMING, OUTGOING
from durable.telemetry import Counters, Event

_BURIED_AT_ONCE = 100  # each is a statement of its own


async def promote_due(database: Database, settings: Settings, counters: Counters) -> bool:
    """A batch of each table, in its own transaction; SKIP LOCKED lets several nodes share the work.

    Returns whether there may be more: other work has its turn before that.
    """
    most, there_is_more = settings.recovery_batch_size, False
    for table in (OUTGOING, INCOMING):
        promoted = await database.transaction(leases.promote_due, table, most)
        counters.add(Event.PROMOTED, promoted)
        if promoted:
            failpoint("C20")
        there_is_more |= promoted == most
    return there_is_more


async def expire(database: Database, settings: Settings, node: NodeId, counters: Counters, burials: Burials) -> bool:
    """Also what waits for a latched destination. Returns whether there may be more."""
    keep_body, most, there_is_more = settings.history_bodies, settings.recovery_batch_size, False
    for table in (OUTGOING, INCOMING):
        buries = burials.of(table)
        expired = await database.transaction(leases.expire, table, node, most, buries, keep_body=keep_body)
        counters.add(Event.EXPIRED, expired)
        there_is_more |= expired == most
        if buries != NO_BURIALS:
            buried = await database.transaction(bury, table, node, _BURIED_AT_ONCE, buries, keep_body=keep_body)
            counters.add(Event.DEAD_LETTERED, buried)
            there_is_more |= buried == _BURIED_AT_ONCE
    return there_is_more
