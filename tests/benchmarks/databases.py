"""Fresh databases on one server."""

from __future__ import annotations

import psycopg

from durable.embedded import Embedded
from durable.storage import migrator


class Databases:
    """Each with durable's tables and a table of an application."""

    def __init__(self, server: Embedded) -> None:
        self._server = server
        self._made = 0

    def fresh(self) -> str:
        self._made += 1
        url = self._server.url(f"bench_{self._made}")
        migrator.upgrade(url.replace("postgresql://", "postgresql+psycopg://", 1), "durable")
        with psycopg.connect(url) as conn:
            conn.execute("CREATE TABLE business (number integer NOT NULL)")
        return url
