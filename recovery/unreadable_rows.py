"""Rows that were claimed and cannot be read: put aside after their neighbours are in the hands of an agent."""

from __future__ import annotations

from sqlalchemy.exc import DBAPIError

from durable.agents.context import AgentContext
from durable.errors import DurableError
from durable.storage import isolation
from durable.storage.isolation import Claimed
from durable.storage.outages import described
from durable.storage.sql.recovery import Recovery
from durable.telemetry import log


async def put_aside(context: AgentContext, table: Recovery, claimed: Claimed) -> None:
    """Make dead letters of those that cannot be read. While the database refuses that, too, they are released and
    claimed again and again, and hold nothing up.
    """
    if not claimed.unreadable:
        return
    try:
        await context.database.transaction(isolation.put_aside, table, context.node, claimed.unreadable)
    except (DurableError, DBAPIError) as error:
        log.error(
            "rows cannot be read, and are tried again in %g s, because they cannot be put aside: %s; %s",
            context.settings.forgotten_after.total_seconds(),
            ", ".join(f"{envelope_id} at {address}: {why}" for (envelope_id, address, _), why in claimed.unreadable),
            described(error) if isinstance(error, DBAPIError) else error,
        )
