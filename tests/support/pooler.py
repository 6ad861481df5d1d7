"""A private PgBouncer in transaction mode: the server connection behind a client's changes with each transaction.

with pooler(database_url) as pooled_url:
    ...                                             # the same database, through the pooler
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
from sqlalchemy.engine import URL, make_url

from durable.embedded.ports import free_port
from durable.errors import InvalidSetting

_STARTS_WITHIN = 30.0  # seconds


class Pooler:
    """A PgBouncer of our own before a database; `url` is that database through it, whichever process it is."""

    def __init__(self, database: str, folder: Path, *, pool_mode: str, server_connections: int) -> None:
        target = make_url(database)
        self._folder = folder
        self._user = _owner(target)
        port = free_port()
        self._configuration = folder / "pgbouncer.ini"
        self._configuration.write_text(_configuration(target, folder, port, pool_mode, server_connections))
        if self._user is not None:
            os.chown(folder, self._user, -1)
        self.url = URL.create(
            target.drivername, target.username, None, "127.0.0.1", port, target.database
        ).render_as_string(hide_password=False)
        self.expected_away = False
        """True while a test has killed it."""
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, unless it runs."""
        if self.has_ended():
            command = [_binary(), "--quiet", str(self._configuration)]
            self._process = subprocess.Popen(
                command, user=self._user, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            )

    def has_ended(self) -> bool:
        """True when there is no process, or one that has ended, as some versions do by a bug of theirs."""
        return self._process is None or self._process.poll() is not None

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def said(self) -> str:
        """The end of its log."""
        log = self._folder / "pgbouncer.log"
        return log.read_text()[-2_000:] if log.exists() else ""

    def wait(self) -> None:
        """Return when it answers."""
        deadline = time.monotonic() + _STARTS_WITHIN
        while True:
            try:
                psycopg.connect(self.url).close()
            except psycopg.OperationalError:
                if self.has_ended() or time.monotonic() > deadline:
                    raise RuntimeError(f"PgBouncer did not start: {self.said()}") from None
                time.sleep(0.05)
            else:
                return


@contextmanager
def pooler(database: str, *, pool_mode: str = "transaction", server_connections: int = 3) -> Iterator[str]:
    """The URL of this database through a PgBouncer of our own, with fewer server connections than a node has."""
    with own_pooler(database, pool_mode=pool_mode, server_connections=server_connections) as running:
        yield running.url


@contextmanager
def own_pooler(database: str, *, pool_mode: str = "transaction", server_connections: int = 3) -> Iterator[Pooler]:
    """The same, as an object that may be killed and started again."""
    folder = Path(tempfile.mkdtemp(prefix="durable-pooler-"))
    made = Pooler(database, folder, pool_mode=pool_mode, server_connections=server_connections)
    try:
        made.start()
        made.wait()
        yield made
    finally:
        made.kill()
        shutil.rmtree(folder, ignore_errors=True)


def _binary() -> str:
    found = shutil.which("pgbouncer", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
    if found is None:
        raise InvalidSetting("PgBouncer is not installed; run: scripts/pgbouncer.sh")
    return found


def _owner(target: URL) -> int | None:
    """As root PgBouncer must be another user: the one who may use the server's socket."""
    if os.getuid() != 0:
        return None
    folder = target.query.get("host")
    return Path(str(folder)).stat().st_uid if folder else 65_534


def _configuration(target: URL, folder: Path, port: int, pool_mode: str, server_connections: int) -> str:
    host = target.query.get("host") or target.host
    password = f" password={target.password}" if target.password else ""
    return f"""\
[databases]
* = host={host} port={target.port or 5432} user={target.username}{password}

[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {port}
unix_socket_dir =
auth_type = any
pool_mode = {pool_mode}
default_pool_size = {server_connections}
max_client_conn = 500
server_round_robin = 1
server_login_retry = 1
logfile = {folder}/pgbouncer.log
"""
