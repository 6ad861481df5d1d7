"""The engines that durable makes: connections that answer in time or are closed, also through a pooler.

    connect     keepalives; a direct connection gets its limits now, as server settings; each wait is bounded from the
                first query on, which SQLAlchemy and the probe for a pooler make before any event
    check-out   one that is amid a transaction, or whose event loop was closed, is given up; one that idled is asked
                first; when it says nothing, the whole pool is opened anew
    BEGIN       through a pooler, and where a transaction has a limit of its own: SET LOCAL, in effect
    no answer   the connection is closed, and the pool with it

A pooler in transaction mode (PgBouncer) gives each transaction another server connection. So nothing may be left behind
on one: no SET, and no named prepared statement, which would be missing, or be another, on the next. Unnamed ones are
prepared again for each execution, within its transaction.
"""

from __future__ import annotations

import time
from datetime import timedelta
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from sqlalchemy import URL, Connection, Engine, create_engine, event
from sqlalchemy.engine import Dialect, ExceptionContext
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.exc import DisconnectionError, InvalidatePoolError, OperationalError
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine
from sqlalchemy.pool import ConnectionPoolEntry
from sqlalchemy.util import await_only

from durable.database_url import for_asyncpg
from durable.settings import Settings
from durable.storage import left_in_use, loops
from durable.storage.connection_names import UNNAMED, ConnectionName
from durable.storage.fair_pool import FairAsyncPool, FairPool
from durable.telemetry import log

if TYPE_CHECKING:
    from typing_extensions import TypeIs

    from durable.storage.answering import Answering, AsyncpgConnection

GRACE: Final = timedelta(seconds=5)
"""The margin by which the server's limit is shorter than ours: its error arrives before a connection is lost."""

OWN_PATH: Final = "pg_catalog,pg_temp"
"""For statements of durable, which name the schema of each table and function of their own."""

LONGEST: Final = "durable_longest"
"""The execution option that holds a transaction's own limit, a timedelta."""

_OWN_ISOLATION: Final = {"default_transaction_isolation": "read committed"}
"""For statements of durable that commit by themselves, whatever the role has by default."""

_FORMATS: Final = {"DateStyle": "ISO", "IntervalStyle": "postgres"}
"""The formats of times that psycopg reads; it has an error for others. asyncpg reads no text."""

_CHECKED_AFTER: Final = 1.0  # seconds without use; a connection in constant use shows by itself whether it answers
_RETURNED: Final = "durable.returned"


class Limits(NamedTuple):
    """Settings of a session: limits after which the server ends a statement, or a transaction that waits for its
    client; and the schemas of unqualified names."""

    statement: timedelta
    idle: timedelta
    search_path: str | None = None
    """Schemas that unqualified names stand for; None: those of the role, as in transactions of the application."""

    @classmethod
    def of(cls, longest: timedelta) -> Limits:
        """Return limits for transactions in which an application does other things for so long."""
        return cls(longest + GRACE, longest + GRACE)

    def for_own_statements(self) -> Limits:
        """Return the same for statements of durable alone: a function that somebody made elsewhere is not called."""
        return self._replace(search_path=OWN_PATH)

    @property
    def answer_within(self) -> float:
        return (self.statement + GRACE).total_seconds()

    def at_begin(self) -> str:
        """Return the SET LOCAL statement for one transaction."""
        values = ", ".join(f"set_config('{name}', '{value}', true)" for name, value in self.settings().items())
        return f"SELECT {values}"

    def settings(self) -> dict[str, str]:
        return {
            "statement_timeout": str(_milliseconds(self.statement)),
            "idle_in_transaction_session_timeout": str(_milliseconds(self.idle)),
            **({} if self.search_path is None else {"search_path": self.search_path, "lock_timeout": "0"}),
        }


def make_async_engine(
    url: URL, settings: Settings, limits: Limits, *, name: ConnectionName = UNNAMED, **options: Any
) -> AsyncEngine:
    _drivers()
    engine = create_async_engine(url, hide_parameters=True, **{"poolclass": FairAsyncPool, **options})
    loops.guards_itself(engine)
    _Guard(engine.sync_engine, settings, limits, name)
    return engine


def make_engine(
    url: URL, settings: Settings, limits: Limits, *, name: ConnectionName = UNNAMED, **options: Any
) -> Engine:
    _drivers()
    engine = create_engine(url, hide_parameters=True, **{"poolclass": FairPool, **options})
    _Guard(engine, settings, limits, name)
    return engine


class _Guard:
    """Listens to one engine's events."""

    def __init__(self, engine: Engine, settings: Settings, limits: Limits, name: ConnectionName) -> None:
        self._engine = engine
        self._name = name
        self._limits = limits
        self._connect_seconds = settings.connect_timeout.total_seconds()
        self._tcp_user_timeout = settings.tcp_user_timeout
        self._pooled = {"auto": None, "none": False, "transaction": True}[settings.pooler]
        left_in_use.watch(engine)
        event.listen(engine, "do_connect", self._connect)
        event.listen(engine, "connect", self._connected)
        event.listen(engine, "begin", self._begun)
        event.listen(engine, "checkout", self._checked_out)
        event.listen(engine, "checkin", self._checked_in)
        event.listen(engine, "close", self._closing)
        event.listen(engine, "handle_error", self._failed)

    def _connect(
        self, dialect: Dialect, entry: ConnectionPoolEntry, args: tuple[Any, ...], params: dict[str, Any]
    ) -> DBAPIConnection:
        """The first connection finds out whether there is a pooler; it is opened as is safe with one."""
        if self._pooled is None:
            first = self._open(dialect, args, params, pooled=True)
            try:
                self._pooled = is_pooled(first)
            except BaseException:  # cancelled, too: no pool knows this connection
                _abandon(_driver(first))
                raise
            if self._pooled:
                log.info("the database is behind a pooler: no prepared statements, limits by transaction")
                return first
            _abandon(_driver(first))
        return self._open(dialect, args, params, pooled=self._pooled)

    def _open(self, dialect: Dialect, args: Any, params: dict[str, Any], *, pooled: bool) -> DBAPIConnection:
        from durable.storage.answering import AsyncPsycopgConnection, PsycopgConnection, open_asyncpg

        is_asyncpg = dialect.driver == "asyncpg"
        own = self._asyncpg_options(params, pooled) if is_asyncpg else self._psycopg_options(params, pooled)
        opened: Any
        if not dialect.is_async:
            opened = PsycopgConnection.connect(*args, **own)
        else:
            own["async_creator_fn"] = open_asyncpg if is_asyncpg else AsyncPsycopgConnection.connect
            opened = dialect.connect(*args, **own)
        _driver(opened).answer_within = self._connect_seconds  # until it is a connection of the pool
        _driver(opened).is_pooled = pooled
        found: DBAPIConnection = opened
        return found

    def _asyncpg_options(self, params: dict[str, Any], pooled: bool) -> dict[str, Any]:
        own: dict[str, Any] = {"timeout": self._connect_seconds} | for_asyncpg(params)
        given = self._name.asyncpg(params, pooled=pooled) | own.get("server_settings", {})
        if pooled:
            unnamed = {"prepared_statement_name_func": lambda: "", "prepared_statement_cache_size": 0}
            return own | unnamed | {"statement_cache_size": 0, "server_settings": given}
        return own | {"server_settings": self._server_settings() | given}

    def _psycopg_options(self, params: dict[str, Any], pooled: bool) -> dict[str, Any]:
        from durable.storage.answering import CLIENT_KEEPALIVES

        user_timeout = _milliseconds(self._tcp_user_timeout)
        connecting = {
            "connect_timeout": max(2, int(self._connect_seconds)),
            "tcp_user_timeout": user_timeout,
            "client_encoding": "utf8",  # as asyncpg has it, whatever the database or the role has set
        }
        own = {**connecting, **CLIENT_KEEPALIVES, **self._name.psycopg(params, pooled=pooled), **params}
        if pooled:
            return own | {"prepare_threshold": None}
        options = " ".join(f"-c {name}={_escaped(value)}" for name, value in self._server_settings().items())
        return own | {"options": f"{options} {params.get('options', '')}".strip()}

    def _server_settings(self) -> dict[str, str]:
        """Return server settings by which the server notices a lost client, and frees its locks."""
        return {
            "tcp_keepalives_idle": "5",
            "tcp_keepalives_interval": "2",
            "tcp_keepalives_count": "3",
            "tcp_user_timeout": str(_milliseconds(self._tcp_user_timeout)),
            "client_connection_check_interval": "2000",
            "idle_session_timeout": "0",  # whatever the role has: a pool keeps its connections until they are used
            "array_nulls": "on",  # psycopg writes arrays as text
            **self._limits.settings(),
            **({} if self._limits.search_path is None else _OWN_ISOLATION),
        }

    def _connected(self, connection: DBAPIConnection, entry: ConnectionPoolEntry) -> None:
        driver = _driver(connection)
        if self._engine.dialect.is_async:
            loops.opened(entry, driver)
        driver.answer_within = self._limits.answer_within
        if _is_asyncpg(driver):
            driver.keep_alive(self._tcp_user_timeout.total_seconds())
        else:
            _set_formats(connection)
        entry.info[_RETURNED] = time.monotonic()

    def _begun(self, conn: Connection) -> None:
        own = conn.get_execution_options().get(LONGEST)
        limits = self._limits if own is None else Limits.of(own)._replace(search_path=self._limits.search_path)
        driver = _driver(conn.connection.dbapi_connection)
        if driver.answer_within != limits.answer_within:
            driver.answer_within = limits.answer_within
        settings = limits.at_begin() if self._pooled or own is not None else ""
        if _is_asyncpg(driver):
            driver.at_begin = settings
        elif settings:
            conn.exec_driver_sql(settings)

    def _checked_out(self, connection: DBAPIConnection, entry: ConnectionPoolEntry, _: object) -> None:
        """Ask a connection that idled. Raises DisconnectionError, upon which the pool opens another.

        Raises WiringError for one of another event loop.
        """
        if self._engine.dialect.is_async:
            loops.check(self._engine, entry, _driver(connection))
        if not _driver(connection).is_at_rest:
            raise DisconnectionError("a pooled connection has ended, or is amid a transaction that nobody has ended")
        if time.monotonic() - entry.info[_RETURNED] < _CHECKED_AFTER:
            return
        driver = _driver(connection)
        driver.answer_within = self._connect_seconds
        try:
            self._ping(connection)
        except Exception as error:
            raise InvalidatePoolError("a pooled connection does not answer") from error
        driver.answer_within = self._limits.answer_within

    def _ping(self, connection: DBAPIConnection) -> None:
        driver = _driver(connection)
        if _is_asyncpg(driver):
            await_only(driver.execute("SELECT 1"))  # in one round trip: that of SQLAlchemy is a transaction
        else:
            self._engine.dialect.do_ping(connection)

    def _checked_in(self, _: DBAPIConnection | None, entry: ConnectionPoolEntry) -> None:
        entry.info[_RETURNED] = time.monotonic()

    def _closing(self, connection: DBAPIConnection, _: object) -> None:
        """asyncpg says goodbye and waits for the answer."""
        _driver(connection).answer_within = 1.0

    def _failed(self, context: ExceptionContext) -> Exception | None:
        """Translate a timeout. The connection of asyncpg is still open after it."""
        if not isinstance(context.original_exception, TimeoutError) or context.connection is None:
            return None
        context.is_disconnect = True
        cause = OSError("no answer in time; the connection is given up")
        return OperationalError(None, None, cause, connection_invalidated=True)


def is_in_autocommit(place: Engine | Connection) -> bool:
    """Tell, without I/O, whether each statement there commits by itself."""
    level = place.get_execution_options().get("isolation_level") or place.dialect._on_connect_isolation_level
    return level == "AUTOCOMMIT"


def is_behind_pooler(conn: Connection) -> bool:
    """Tell, without I/O, whether this connection of our own engines was opened as one through a pooler."""
    return _driver(conn.connection.dbapi_connection).is_pooled


def is_pooled(connection: DBAPIConnection) -> bool:
    """A pooler tells its clients a process id of its own making: not that of the server which runs the statement."""
    driver: Any = _driver(connection)
    told = driver.get_server_pid() if hasattr(driver, "get_server_pid") else driver.info.backend_pid
    cursor = connection.cursor()
    try:
        cursor.execute("SELECT pg_backend_pid()")
        row = cursor.fetchone()
        cursor.close()
        connection.rollback()
    except TimeoutError as error:  # asyncpg's, without a word; its trace shows that it is the driver's
        error.args = error.args or (f"no answer within {driver.answer_within:g} s on a new connection",)
        raise
    return row is None or row[0] != told


def _abandon(driver: Answering) -> None:
    """Close without a word, and without waiting."""
    if _is_asyncpg(driver):
        driver.terminate()
    else:
        driver.pgconn.finish()


def _set_formats(connection: DBAPIConnection) -> None:
    """Let the server write dates and intervals as psycopg reads them, whatever the database or the role has set. The
    order of day and month in what the application writes stays. Every pooler keeps the first for its client, and not
    every one the second, which would stay with the server connection of others.
    """
    driver: Any = _driver(connection)
    formats = {name: driver.info.parameter_status(name) or _FORMATS[name] for name in _FORMATS}
    odd = [name for name, format in formats.items() if format.partition(",")[0] != _FORMATS[name]]
    if driver.is_pooled:
        odd = [name for name in odd if name == "DateStyle"]
    if odd:
        cursor = connection.cursor()
        cursor.execute("; ".join(f"SET {name} = {_FORMATS[name]}" for name in odd))
        cursor.close()
        connection.commit()


def _driver(connection: Any) -> Answering:
    """Sync psycopg's connection is the driver's own; the others are wrapped by SQLAlchemy."""
    found: Answering = getattr(connection, "driver_connection", connection)
    return found


def _is_asyncpg(driver: Answering) -> TypeIs[AsyncpgConnection]:
    return isinstance(driver, _drivers().AsyncpgConnection)


def _drivers() -> ModuleType:
    """Load the drivers with the first engine: most of what `import durable` would take.

    Raises InvalidSetting when psycopg finds no libpq.
    """
    from durable.storage import answering

    return answering


def _escaped(value: str) -> str:
    """Write a value for libpq's `options`, which separates them by spaces."""
    return value.replace("\\", "\\\\").replace(" ", "\\ ")


def _milliseconds(time: timedelta) -> int:
    return max(1, int(time.total_seconds() * 1_000))
