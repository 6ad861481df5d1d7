"""Replays under the same ids to another destination, as a lake of the sender knows them.

    pipeline replay --same-ids --destination ──> table replays ──> archive ──> LAKE/replays/<hash>.json ──> audit

A message that went to two addresses is two copies of an event, or one message whose receiver has moved: its rows do not
tell. So each archive notes where such replays went and when they began, before the rows that they sent are committed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from datetime import datetime
from typing import Final

import msgspec
from sqlalchemy import Connection

from durable.errors import InvalidSetting
from durable.messages.routing import LOCAL
from durable.pipeline import places
from durable.pipeline.lake import Lake
from durable.pipeline.lake_tables import Whose
from durable.storage import replays
from durable.transports.addresses import canonical_name

FOLDER: Final = "replays"
"""Within the lake. Nothing removes its files."""


class Readdressed(msgspec.Struct, frozen=True, kw_only=True):
    """Replay of messages of one database, under their ids, to this destination."""

    service: str
    database: str
    destination: str
    began_at: datetime


def note(conn: Connection, schema: str, lake: Lake, whose: Whose) -> None:
    """Let the lake know the replays that this database has begun. Raises DurableError where it cannot be written."""
    begun = [each for each in replays.readdressed(conn, schema) if each.destination != LOCAL]
    known = {*places.names(lake.url, FOLDER)} if begun else set()
    for each in begun:
        destination = canonical_name(each.destination)
        noted = Readdressed(
            service=whose.service, database=whose.database, destination=destination, began_at=each.began_at
        )
        content = msgspec.json.encode(noted)
        name = f"{hashlib.sha256(content).hexdigest()[:32]}.json"
        if name not in known:
            with places.replaced(lake.url, f"{FOLDER}/{name}") as file:
                file.write(content)


def noted(lakes: Iterable[Lake]) -> list[Readdressed]:
    """Read the replays that any of these lakes knows. Raises InvalidSetting for a file that cannot be read."""
    return [
        _read(lake, f"{FOLDER}/{name}")
        for lake in {lake.url: lake for lake in lakes}.values()
        for name in places.names(lake.url, FOLDER)
        if name.endswith(".json")
    ]


def _read(lake: Lake, path: str) -> Readdressed:
    try:
        return msgspec.json.decode(places.read(lake.url, path), type=Readdressed)
    except (msgspec.DecodeError, OSError) as error:
        raise InvalidSetting(
            f"lake {lake.url}: the note {path} of a replay cannot be read: {error}; remove it, and let durable-agent "
            "pipeline archive write it anew, or put it back from a backup of the lake"
        ) from error
