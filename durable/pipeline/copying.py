"""Copy of rows out of Postgres: one COPY for each slice, in Arrow batches, by ADBC. No row is ever a Python object.

A session has formats of its own, and no limits: whatever was set for the database or the role. A pooler in transaction
mode takes no settings of a session, and gives each transaction another server connection: so nothing is sent to it
outside of a transaction, which begins with the settings, and no prepared statement has a name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

from sqlalchemy import Connection, Engine, create_engine, event, pool
from sqlalchemy.exc import DBAPIError

from durable import database_url
from durable.errors import InvalidMessage, InvalidSetting, StorageUnavailable
from durable.storage import engines
from durable.storage.isolation import refusal
from durable.storage.migrator import refuse_encoding
from durable.storage.outages import GRANT, described, is_conflict, translated
from durable.storage.session_limits import unlimited
from durable.storage.slices import Share, Slice, join_sql, refuse_other_file

if TYPE_CHECKING:
    import pyarrow
    from adbc_driver_manager import AdbcDatabase, dbapi
    from adbc_driver_manager._reader import AdbcRecordBatchReader

_Published = TypeVar("_Published")
_MOST_CONFLICTS: Final = 20
_BATCH_BYTES = 4 << 20
_PREPARE_AFTER: Final = 5  # executions, as is psycopg's default
_MILLISECOND = timedelta(milliseconds=1)
_NO_PERMISSION = "42501"
_NETWORK = {  # a peer that is gone is noticed within some 20 seconds
    "connect_timeout": "10",
    "keepalives_idle": "5",
    "keepalives_interval": "5",
    "keepalives_count": "3",
    "application_name": "durable-pipeline",
    "client_encoding": "utf8",
}
# Values as the drivers write and read them, names as the server says them.
_FORMATS: Final = {
    "DateStyle": "ISO,YMD",
    "IntervalStyle": "postgres",
    "quote_all_identifiers": "off",
    "standard_conforming_strings": "on",
    "array_nulls": "on",
}


def copy(
    url: str, share: Share, columns: Sequence[str], *, snapshot: str | None = None, patience: timedelta | None = None
) -> Iterator[pyarrow.RecordBatch]:
    """The rows of these slices. `patience`: the longest wait for a table that somebody else has locked.

    Raises StorageUnavailable when the database cannot be used, the snapshot is over, or a table was written into
    another file since its blocks were planned; InvalidSetting when the role may not read them.
    """
    from adbc_driver_postgresql import StatementOptions

    options = {StatementOptions.BATCH_SIZE_HINT_BYTES.value: str(_BATCH_BYTES)}
    with told("reading from the database failed"), arrow_connection(url) as conn, closing(conn.cursor()) as cursor:
        cursor.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY")
        if snapshot is not None:
            cursor.execute(join_sql(snapshot))
        if patience is not None:
            cursor.execute(f"SET LOCAL lock_timeout = {patience // _MILLISECOND}")
        cursor.adbc_statement.set_options(**options)
        for part in share:
            if part.file is not None:
                _hold_file(cursor, part)
            cursor.execute(part.select(columns))
            with closing(_batches(cursor)) as batches:
                yield from (batch for batch in batches if batch.num_rows)


@contextmanager
def told(fault: str) -> Iterator[None]:
    """Translate an error of ADBC. Raises StorageUnavailable; InvalidSetting where the role lacks a right."""
    from adbc_driver_manager import Error

    try:
        yield
    except Error as error:
        said = f"{fault}: {' '.join(str(error).split())}"
        if error.sqlstate == _NO_PERMISSION:
            raise InvalidSetting(f"{said}; {GRANT}") from error
        raise StorageUnavailable(said) from error


def _batches(cursor: dbapi.Cursor) -> AdbcRecordBatchReader:
    """Return the result. Its errors are the driver's, with their SQLSTATE; those of the cursor's own are bare OSErrors
    amid the rows.
    """
    from adbc_driver_manager._reader import AdbcRecordBatchReader

    stream = cursor.fetch_arrow()
    return AdbcRecordBatchReader._import_from_c(stream.address)


def _hold_file(cursor: dbapi.Cursor, part: Slice) -> None:
    """Raise StorageUnavailable unless the blocks of this slice are those that were planned, to the end."""
    cursor.execute(part.hold_file())
    cursor.execute(part.read_file())
    refuse_other_file(part, *cursor.fetchone() or (None,))


@contextmanager
def arrow_connection(url: str) -> Iterator[dbapi.Connection]:
    """A transaction of ADBC, rolled back at the end. Raises the errors of the driver, and StorageUnavailable."""
    from adbc_driver_manager import AdbcConnection, dbapi

    database: Any = _database(libpq_url(url))
    with closing(AdbcConnection(database.handle)) as handle, closing(dbapi.Connection(database, handle)) as conn:
        if is_pooled(url):
            with closing(conn.cursor()) as cursor:
                for statement in _at_begin(url):
                    cursor.execute(statement)
        yield conn
        conn.rollback()


class _Database:
    """A database of ADBC that ends with its last user, a connection or the cache. The driver frees none by itself."""

    def __init__(self, handle: AdbcDatabase) -> None:
        self.handle = handle

    def close(self) -> None:
        """Stay open for other connections: each would close its database with itself."""

    def __del__(self) -> None:
        self.handle.close()


@lru_cache(maxsize=4)
def _database(url: str) -> _Database:
    """Return the database of this process: a new one reads the catalog, with each column of each table."""
    import adbc_driver_postgresql

    return _Database(adbc_driver_postgresql.connect(url))


@contextmanager
def connection(url: str) -> Iterator[Connection]:
    """A transaction of our own, committed at the end. Raises StorageUnavailable."""
    with opened(url) as engine, translated(), engine.begin() as conn:
        yield conn


def publishing(url: str, publish: Callable[[Connection], _Published], *, done: str) -> _Published:
    """Publish in a transaction, which is tried again where it is rolled back for another one: batches with the same
    rows may come to them in different orders. `done`: what is published where it is refused.

    Raises InvalidMessage where the database refuses a row, by a trigger or a constraint, also at the COMMIT; and
    StorageUnavailable.
    """
    for _ in range(_MOST_CONFLICTS):
        try:
            return _published(url, publish, done)
        except StorageUnavailable as error:
            if error.__cause__ is None or not is_conflict(error.__cause__):
                raise
    return _published(url, publish, done)


def _published(url: str, publish: Callable[[Connection], _Published], done: str) -> _Published:
    try:
        with connection(url) as conn:
            return publish(conn)
    except DBAPIError as error:
        if (found := refusal(error)) is None or found.may_be_of_the_wiring:
            raise
        raise InvalidMessage(
            f"the database refuses a row: {described(error)}; {done}; put that right and run the same again, which "
            "goes on from there"
        ) from error


@contextmanager
def opened(url: str) -> Iterator[Engine]:
    """An engine without a pool: a connection is closed when it is given back."""
    yield _engine(url)


@lru_cache(maxsize=4)
def _engine(url: str) -> Engine:
    """Return the engine of this process: a new one asks the server some questions, and compiles each statement."""
    import psycopg  # with the drivers, which load when used

    def connect() -> psycopg.Connection[tuple[Any, ...]]:
        conn = psycopg.connect(libpq_url(url), prepare_threshold=None if is_pooled(url) else _PREPARE_AFTER)
        try:
            refuse_encoding(conn.info.parameter_status("server_encoding"))
        except InvalidSetting:
            conn.close()
            raise
        return conn

    engine = create_engine("postgresql+psycopg://", creator=connect, poolclass=pool.NullPool)

    @event.listens_for(engine, "begin")
    def _begun(conn: Connection) -> None:
        if is_pooled(url):
            conn.exec_driver_sql("; ".join(_at_begin(url)))

    return engine


def libpq_url(url: str) -> str:
    """Return the URL in libpq's form, for all drivers that are built on it. Raises StorageUnavailable."""
    parsed = database_url.parse(url)
    if is_pooled(url):
        return parsed.libpq(**_NETWORK)
    settings = " ".join(f"-c {name}={value}" for name, value in _settings(url).items())
    options = f"{settings} {parsed.query.get('options', '')}".strip()
    return replace(parsed, query={**parsed.query, "options": options}).libpq(**_NETWORK)


class _Server(NamedTuple):
    """Findings of the first connection."""

    is_pooled: bool
    version: int


def is_pooled(url: str) -> bool:
    """Tell whether the database is behind a pooler. Raises StorageUnavailable."""
    return _server(url).is_pooled


@lru_cache(maxsize=4)
def _server(url: str) -> _Server:
    import psycopg

    plain = database_url.parse(url).libpq(**_NETWORK)
    engine = create_engine(
        "postgresql+psycopg://",
        creator=lambda: psycopg.connect(plain, prepare_threshold=None),
        poolclass=pool.NullPool,
    )
    with translated(), engine.connect() as conn:
        first: Any = conn.connection.dbapi_connection
        return _Server(engines.is_pooled(first), first.info.server_version)


def _settings(url: str) -> dict[str, str]:
    return _FORMATS | unlimited(_server(url).version)


def _at_begin(url: str) -> list[str]:
    """Return statements for one transaction, which may still become another kind: none of them needs a snapshot."""
    return [f"SET LOCAL {name} = {value}" for name, value in _settings(url).items()]
