"""Fixtures of the failure tests: many small databases, quickly made, and pairs of services on them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg
import pytest

from durable.embedded import Embedded
from tests.conftest import EMBEDDED
from tests.failure.services import Pair, pair_of_services


@pytest.fixture
def server(servers: Callable[[int], Embedded]) -> Embedded:
    """The embedded Postgres. Processes crash here, never the machine: without fsync databases are made and dropped in
    a fraction of the time."""
    server = servers(EMBEDDED)
    with psycopg.connect(server.server.get_uri(), autocommit=True) as conn:
        conn.execute("ALTER SYSTEM SET fsync = off")
        conn.execute("SELECT pg_reload_conf()")
    return server


@pytest.fixture
def pair(make_database: Callable[[str], str], tmp_path: Path) -> Iterator[Pair]:
    """Two services, not started yet."""
    with pair_of_services(make_database("orders"), make_database("billing"), tmp_path) as services:
        yield services
