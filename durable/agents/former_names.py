"""Names under which messages were received, and where nothing is received any more: most often of a renamed service.

A message is a duplicate under the name of its listener only. So one that is delivered again, after its service was
renamed, is handled again.
"""

from __future__ import annotations

from durable.application.application import Application
from durable.messages.routing import LOCAL
from durable.messages.scope import listener_of
from durable.storage import known_names
from durable.storage.database import Database
from durable.telemetry import log


async def warn(database: Database, application: Application) -> None:
    """Log the names of which the inbox remembers messages, where a bus that listens has no listener of the name."""
    listening = application.endpoints
    if not listening:
        return
    remembered = {listener_of(each) for each in await database.transaction(known_names.oldest_endpoints)}
    if former := remembered - listening - {LOCAL, application.service}:
        log.warning(
            "messages were received under the name %s, where this bus does not listen: if the service was renamed, "
            "messages that are delivered again are handled again; give its listeners that name",
            ", ".join(sorted(former)),
        )
