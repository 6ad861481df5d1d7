"""Makes due rows claimable and finishes expired ones, by the database's clock."""

from __future__ import annotations

from collections.abc import Sequence

from durable.agents.context import AgentContext
from durable.failpoints import failpoint
from durable.storage import leases
from durable.storage.expiry import bury
from durable.storage.leases import NO_BURIALS, Burials
from durable.storage.sql.recovery import INCOMING, OUTGOING
from durable.telemetry import Event

_BURIED_AT_ONCE = 100  # each is a statement of its own


async def promote_due(context: AgentContext) -> Sequence[int]:
    """A batch of each table, in its own transaction; SKIP LOCKED lets several nodes share the work.

    Returns the number in each. Where that is `recovery_batch_size` there may be more: other work has its turn before.
    """
    most, counts = context.settings.recovery_batch_size, []
    for table in (OUTGOING, INCOMING):
        promoted = await context.database.transaction(leases.promote_due, table, most)
        context.counters.add(Event.PROMOTED, promoted)
        if promoted:
            failpoint("C20")
        counts.append(promoted)
    return counts


async def expire(context: AgentContext, burials: Burials) -> bool:
    """Expire due rows, also of latched destinations. Returns whether there may be more."""
    node, keep_body = context.node, context.settings.history_bodies
    most, there_is_more = context.settings.recovery_batch_size, False
    for table in (OUTGOING, INCOMING):
        buries = burials.of(table)
        expired = await context.database.transaction(leases.expire, table, node, most, buries, keep_body=keep_body)
        context.counters.add(Event.EXPIRED, expired)
        there_is_more |= expired == most
        if buries != NO_BURIALS:
            buried = await context.database.transaction(bury, table, node, _BURIED_AT_ONCE, buries, keep_body=keep_body)
            context.counters.add(Event.EXPIRED, buried)
            there_is_more |= buried == _BURIED_AT_ONCE
    return there_is_more
