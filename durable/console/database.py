"""The pages of the database and of the pipeline: what an operator of Postgres and of the lake looks at."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Final, NamedTuple

from sqlalchemy import Connection
from starlette.requests import Request
from starlette.responses import Response

from durable.bus import Bus
from durable.console.access import Person, Role
from durable.console.pages import Pages
from durable.storage import archives, erasures, horizons, sizes
from durable.storage.archives import Archive
from durable.storage.erasures import Erasure
from durable.storage.horizons import Holder, Lag

_TABLES: Final = ("envelope_history", "dead_letters")
_MOST_ERASURES: Final = 20


class Archived(NamedTuple):
    """A table and its archive, if it has one; `lag` is of one that goes on."""

    table: str
    archive: Archive | None
    lag: Lag | None
    is_numbered_anew: bool
    gaps: Sequence[tuple[datetime, datetime]]


class Pipeline(NamedTuple):
    """The archives, as the database knows them."""

    identity: str
    horizon: int
    holder: Holder | None
    tables: Sequence[Archived]
    erasures: Sequence[Erasure]


class DatabasePages:
    """The pages of one database."""

    def __init__(self, bus: Bus, pages: Pages) -> None:
        self._bus = bus
        self._pages = pages

    async def database(self, request: Request, person: Person) -> Response:
        """Show sizes, dead rows, what holds vacuum up, connections, and the slowest statements."""
        found = await self._bus.runtime.database.transaction(sizes.read)
        return self._pages.render(
            request, "database.html", person, found=found, shows_queries=person.role >= Role.OPERATOR
        )

    async def pipeline(self, request: Request, person: Person) -> Response:
        """Show how far the archives have come, what holds them back, gaps and erasures."""
        found = await self._bus.runtime.database.transaction(read_pipeline)
        return self._pages.render(
            request, "pipeline.html", person, found=found, shows_queries=person.role >= Role.OPERATOR
        )


def read_pipeline(conn: Connection, schema: str) -> Pipeline:
    return Pipeline(
        archives.identity(conn, schema),
        horizons.horizon(conn, schema),
        horizons.holder(conn, schema),
        [_archived(conn, schema, table) for table in _TABLES],
        erasures.read(conn, schema)[-_MOST_ERASURES:],
    )


def _archived(conn: Connection, schema: str, table: str) -> Archived:
    archive = archives.find(conn, schema, table)
    if archive is None or archive.ended_at is not None:
        return Archived(table, archive, None, False, [])
    return Archived(
        table,
        archive,
        horizons.lag(conn, schema, table, archive.archived_below),
        archives.is_numbered_anew(conn, schema, table),
        archives.gaps(conn, schema, table),
    )
