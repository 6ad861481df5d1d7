"""A private PgBouncer in transaction mode: the server connection behind a client's changes with each transaction.

with pooler(database_url) as pooled_url:
    ...                                             # the same database, through the pooler
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
from sqlalchemy.engine import URL, make_url

from durable.errors import InvalidSetting

_STARTS_WITHIN = 30.0  # seconds


@contextmanager
def pooler(database: str, *, pool_mode: str = "transaction", server_connections: int = 3) -> Iterator[str]:
    """The URL of this database through a PgBouncer of our own, with fewer server connections than a node has."""
    target = make_url(database)
    folder = Path(tempfile.mkdtemp(prefix="durable-pooler-"))
    user = _owner(target)
    try:
        port = _free_port()
        configuration = folder / "pgbouncer.ini"
        configuration.write_text(_configuration(target, folder, port, pool_mode, server_connections))
        if user is not None:
            os.chown(folder, user, -1)
        command = [_binary(), "--quiet", str(configuration)]
        with subprocess.Popen(command, user=user, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
            try:
                pooled = URL.create(
                    target.drivername, target.username, None, "127.0.0.1", port, target.database
                ).render_as_string(hide_password=False)
                _wait_for(pooled, process, folder)
                yield pooled
                if process.poll() is not None:
                    raise RuntimeError(f"PgBouncer has ended with {process.returncode}: {_said(folder)}")
            finally:
                process.kill()
    finally:
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
logfile = {folder}/pgbouncer.log
"""


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


def _wait_for(url: str, process: subprocess.Popen[bytes], folder: Path) -> None:
    deadline = time.monotonic() + _STARTS_WITHIN
    while True:
        try:
            psycopg.connect(url).close()
        except psycopg.OperationalError:
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"PgBouncer did not start: {_said(folder)}") from None
            time.sleep(0.05)
        else:
            return


def _said(folder: Path) -> str:
    """The end of its log."""
    log = folder / "pgbouncer.log"
    return log.read_text()[-2_000:] if log.exists() else ""
