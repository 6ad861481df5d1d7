"""The database whose tables are archived, and the one archiver or erasure that may be at work on it."""

from __future__ import annotations

import operator
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from sqlalchemy import Connection, Engine
from sqlalchemy.exc import SQLAlchemyError
from tenacity import Retrying, retry_if_result, stop_after_delay, wait_fixed

from durable.errors import ArchiveConflict, InvalidSetting
from durable.messages.validation import check_service
from durable.pipeline.copying import connection, is_pooled
from durable.pipeline.lake_tables import SOURCES
from durable.settings import Settings
from durable.storage import archives, replays
from durable.storage.database import lock_url
from durable.storage.outages import translated
from durable.storage.readiness import check_ready


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """A service's tables."""

    url: str = field(repr=False)
    """Direct, not through a pooler: a lock and a snapshot last for as long as the archiver works."""
    schema: str
    service: str


def app_id(service: str, database: str, schema: str, source: str) -> str:
    """The name under which a lake keeps the offset of a table of this database."""
    return f"{service}:{database}.{schema}.{source}"


def hashed(app_id: str) -> str:
    """The name of an archive within the names of its files."""
    return f"{zlib.crc32(app_id.encode()):08x}"


def direct_url(settings: Settings) -> str:
    """Return the URL for connections that hold a lock. Raises InvalidSetting for one through a pooler."""
    url = lock_url(settings)
    if is_pooled(url):
        named = "database_url" if settings.lock_database_url is None else "lock_database_url"
        raise InvalidSetting(
            f"{named}: goes through a pooler, which cannot keep the lock of this command; set "
            "DURABLE_LOCK_DATABASE_URL to a direct connection"
        )
    return url


def find_origin(settings: Settings, service: str | None) -> Origin:
    """The database of these settings. Its service is the one that it is archived as; before the first archive it is
    what is given here, or the one whose nodes use it.

    Raises InvalidSetting when it has several or none, or another one than is given, or what is given is no name;
    SchemaMismatch; StorageUnavailable.
    """
    url, schema = direct_url(settings), settings.db_schema
    with connection(url) as conn:
        check_ready(conn, schema)
        archived = [each for source in SOURCES.values() if (each := archives.find(conn, schema, source)) is not None]
        known = archives.services(conn, schema) if service is None else [service]
    for archive in archived:
        if service not in (None, archive.service):
            raise InvalidSetting(
                f"service: the database is archived as {archive.service!r}, not as {service!r}; give --service "
                f"{archive.service}, or leave it out"
            )
    if service is not None and not archived:
        check_service("--service", service)
    if len(known) != 1:
        found = f"its nodes are of {', '.join(known)}" if known else "it has no nodes now"
        raise InvalidSetting(f"service: the owner of this history is unknown, {found}; give APP:BUS or --service NAME")
    return Origin(url=url, schema=schema, service=known[0])


@contextmanager
def locked(engine: Engine, schema: str) -> Iterator[Connection]:
    """A connection that holds the archiver's lock, each of whose statements is committed at once.

    Raises ArchiveConflict when another archiver still holds it after two seconds: that of one which has just died is
    free as soon as the database has noticed.
    """
    with translated(schema), engine.connect().execution_options(isolation_level="AUTOCOMMIT") as conn:
        check_ready(conn, schema)
        if not patiently(archives.try_lock, conn, schema):
            raise ArchiveConflict("another archiver is at work on this database; wait for it to end")
        try:
            yield conn
        finally:
            with suppress(SQLAlchemyError):  # a connection that is lost has lost its lock
                archives.unlock(conn, schema)


@contextmanager
def alone(conn: Connection, schema: str, advice: str) -> Iterator[None]:
    """Keep replays away from this database. Raises ArchiveConflict, with this advice, while one is at work."""
    if not patiently(replays.try_lock, conn, schema, is_shared=False):
        raise ArchiveConflict(f"database: a replay is at work on this database, {advice}")
    try:
        yield
    finally:
        with suppress(SQLAlchemyError):
            replays.unlock(conn, schema, is_shared=False)


patiently = Retrying(
    retry=retry_if_result(operator.not_),
    wait=wait_fixed(0.1),
    stop=stop_after_delay(2),
    retry_error_callback=lambda _: False,
)
"""Ask until the answer is true, for two seconds: a lock of one who has just died is free in a moment."""
