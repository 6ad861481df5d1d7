"""Writing the offers of one source, in such a way that none which the database refuses stops the others."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from sqlalchemy.exc import DBAPIError

from durable.calls import stored_listings
from durable.envelope import NodeId
from durable.errors import InvalidMessage
from durable.storage import registry as storage
from durable.storage.database import Database
from durable.telemetry import log
from durable.transports.frames import Listing


async def write(
    database: Database, source: str, listings: Sequence[Listing], *, lease: timedelta, node: NodeId | None = None
) -> int:
    """Make these the offers of a source; those that the database refuses are left out, with a warning for each.

    Returns the number of rows. Raises StorageUnavailable; InvalidMessage or DBAPIError when all together are refused.
    """
    rows, methods = stored_listings.rows_of(listings)
    try:
        await database.transaction(storage.write, source, rows, methods, lease=lease, node=node)
        return len(rows)
    except (InvalidMessage, DBAPIError):
        refused = await database.transaction(storage.refused, rows, methods)
        if not refused:
            raise
    for service, reason in refused.items():
        log.warning("offer of %s is known to this process alone, as the database refuses it: %s", service, reason)
    left = [each for each in rows if each.service not in refused]
    await database.transaction(storage.write, source, left, methods, lease=lease, node=node)
    return len(left)
