"""A private Postgres with a migrated database and the tables that the tests' books are kept in."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from durable.embedded import postgres
from durable.storage import migrator
from tests.failure.books import open_books


@contextmanager
def migrated_database(folder: Path) -> Iterator[str]:
    with warnings.catch_warnings(action="ignore"), postgres(folder) as server:
        url = server.url("shop")
        migrator.upgrade(url.replace("postgresql://", "postgresql+psycopg://"), "durable")
        open_books(url)
        yield url
