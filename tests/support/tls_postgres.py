"""A private Postgres that takes encrypted connections alone: the embedded one is built without OpenSSL."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import psycopg
from psycopg import sql

from durable.embedded.ports import free_port
from durable.errors import InvalidSetting
from durable.storage import migrator
from tests.support.servers import older_servers
from tests.support.tls import Authority, Pem

PASSWORD = "p@ss:w/rd?%40 #x"
USER = "app@orders"
_NOBODY = 65_534
_STARTS_WITHIN = 60.0  # seconds

_HBA = """\
local     all  all          trust
hostnossl all  all     all  reject
hostssl   all  certain all  cert
hostssl   all  all     all  scram-sha-256
"""


@dataclass(frozen=True)
class TlsPostgres:
    """A migrated database, reached at 127.0.0.1 and this port; `client` is a certificate for the role `certain`."""

    port: int
    authority: Path
    client: Pem
    socket_folder: Path

    def url(self, query: str = "", *, driver: str = "", user: str = USER, host: str = "127.0.0.1") -> str:
        scheme = f"postgresql+{driver}" if driver else "postgresql"
        userinfo = f"{quote(user, safe='')}:{quote(PASSWORD, safe='')}" if user == USER else user
        return f"{scheme}://{userinfo}@{host}:{self.port}/orders" + (f"?{query}" if query else "")


@contextmanager
def tls_postgres() -> Iterator[TlsPostgres]:
    folder = Path(tempfile.mkdtemp(prefix="durable-tls-pg-", dir="/tmp"))
    os.chmod(folder, 0o755)
    try:
        authority = Authority(folder)
        own, client = authority.issue("127.0.0.1"), authority.issue("certain", common_name="certain")
        with _running(folder, own) as port:
            upgraded = f"postgresql+psycopg://owner@/orders?host={folder}&port={port}"
            with psycopg.connect(f"postgresql://owner@/postgres?host={folder}&port={port}", autocommit=True) as conn:
                conn.execute("CREATE DATABASE orders")
                conn.execute("CREATE ROLE certain LOGIN SUPERUSER")
                role = sql.SQL("CREATE ROLE {} LOGIN SUPERUSER PASSWORD {}")
                conn.execute(role.format(sql.Identifier(USER), sql.Literal(PASSWORD)))
            migrator.upgrade(upgraded, "durable")
            yield TlsPostgres(port, authority.pem, client, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _running(folder: Path, own: Pem) -> Iterator[int]:
    versions = older_servers()
    if not versions:
        raise InvalidSetting("no Postgres with OpenSSL is installed; run: apt-get install postgresql")
    binaries = Path(f"/usr/lib/postgresql/{versions[-1]}/bin")
    user = _NOBODY if os.getuid() == 0 else None
    data, port = folder / "data", free_port()
    os.chmod(own.key, 0o600)
    for path in (folder, own.key, own.certificate):
        if user is not None:
            os.chown(path, user, -1)
    initdb: list[str | Path] = [binaries / "initdb", "-D", data, "-U", "owner", "--auth=trust", "--no-sync"]
    subprocess.run(initdb, user=user, check=True, capture_output=True, cwd="/")
    (data / "pg_hba.conf").write_text(_HBA)
    settings = {
        "ssl": "on",
        "ssl_cert_file": own.certificate,
        "ssl_key_file": own.key,
        "ssl_ca_file": own.ca,
        "listen_addresses": "127.0.0.1",
        "port": port,
        "unix_socket_directories": folder,
        "fsync": "off",
    }
    (data / "postgresql.auto.conf").write_text("".join(f"{name} = '{value}'\n" for name, value in settings.items()))
    command: list[str | Path] = [binaries / "postgres", "-D", data]
    with (
        open(folder / "log", "wb") as log,
        subprocess.Popen(command, user=user, cwd="/", stderr=log, stdout=log) as process,
    ):
        try:
            _wait_for(f"postgresql://owner@/postgres?host={folder}&port={port}", process, folder / "log")
            yield port
        finally:
            process.terminate()
            process.wait(_STARTS_WITHIN)


def _wait_for(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + _STARTS_WITHIN
    while True:
        try:
            psycopg.connect(url).close()
            return
        except psycopg.OperationalError:
            if process.poll() is not None or time.monotonic() > deadline:
                raise InvalidSetting(f"the Postgres with TLS does not start: {log.read_text()}") from None
            time.sleep(0.1)
