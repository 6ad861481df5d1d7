"""Orders of ordered handlers that a release gives up while messages, or parks, are left in them.

An upcaster from a message of another name, or one that is gone, gives the messages of a handler another ordering key.
New messages then do not wait for those with the former key.
"""

from __future__ import annotations

from durable.application.application import Application
from durable.messages.ordering import name_of_order
from durable.storage import placements
from durable.storage.database import Database
from durable.telemetry import log


async def warn(database: Database, application: Application) -> None:
    """Log each order that is left, before the declarations of this node override those of the node before it."""
    declared = application.placements()
    left = await database.transaction(placements.left_orders, declared)
    for name, former in left.items():
        log.warning(
            "new messages of %s have another order, and overtake messages and parks that are left in the order %s: "
            "deploy upcasters from, or to, another name when nothing waits there; until then use those of the last "
            "release",
            name,
            name_of_order(former),
        )
