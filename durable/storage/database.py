"""The application's Postgres, as the agents use it: short transactions, and errors sorted by what can be done.

Storage functions are synchronous, take the caller's connection and never commit. An agent runs them by
`await database.transaction(function, ...)`; a unit of work calls the same functions on its session's connection. So
each statement exists once, whatever the driver and whether the caller is async or not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Concatenate, ParamSpec, TypeVar

from sqlalchemy import Connection, Engine, event
from sqlalchemy.engine import URL, make_url
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.exc import (
    DataError,
    DBAPIError,
    InterfaceError,
    OperationalError,
    SQLAlchemyError,
    StatementError,
)
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine
from sqlalchemy.pool import ConnectionPoolEntry, QueuePool
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, wait_exponential_jitter

from durable.cancelling import end_if_cancelled
from durable.errors import InvalidMessage, InvalidSetting, StorageUnavailable
from durable.settings import Settings
from durable.statistics import PoolStatistics
from durable.telemetry import log

P = ParamSpec("P")
T = TypeVar("T")

AGENTS_LONGEST_IDLE = timedelta(seconds=5)
"""Their transactions wait for nothing but the database."""

_BAD_DATA = "22"  # SQLSTATE class: data exception
_TRANSIENT = ("08", "25", "28", "3D", "40", "53", "55", "57", "58")
# connection · transaction state · authorization · no such database · serialization and deadlock · resources · lock not
# available · operator · system: all of them may be gone at the next try

_OUTAGE = ("08", "28", "3D", "53", "57P", "58")  # of these, what no statement brings about


class Database:
    """Connections for the agents: a small pool of their own, so that no application can starve them."""

    def __init__(self, settings: Settings) -> None:
        self.schema = settings.db_schema
        self.engine: AsyncEngine = create_async_engine(
            async_url(settings), pool_size=settings.agent_pool_size, max_overflow=2, pool_timeout=10
        )
        end_idle_transactions(self.engine.sync_engine, AGENTS_LONGEST_IDLE)
        close_left_behind(self.engine.sync_engine)

    async def transaction(
        self, work: Callable[Concatenate[Connection, str, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Run `work(connection, schema, ...)` in a transaction of its own and return what it returns, committed.

        Raises StorageUnavailable when the database cannot be used (whether a commit took place is then unknown) and
        InvalidMessage when it refuses the data.
        """
        with translated():
            async with self.engine.begin() as conn:
                return await conn.run_sync(work, self.schema, *args, **kwargs)

    async def insist(self, work: Callable[Concatenate[Connection, str, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """transaction(), again and again for as long as the database cannot be used, 0.1 s to 5 s apart.

        For what an agent must write and never gives up. The work may run twice: its fence makes that harmless.
        """

        def tell(attempt: RetryCallState) -> None:
            end_if_cancelled()  # the error may have replaced it
            error = attempt.outcome.exception() if attempt.outcome else None
            log.warning("%s waits for the database, attempt %d: %s", work.__name__, attempt.attempt_number, error)

        patiently = AsyncRetrying(
            retry=retry_if_exception_type(StorageUnavailable),
            wait=wait_exponential_jitter(multiplier=0.1, max=5, jitter=0.1),
            before_sleep=tell,
        )
        return await patiently(self.transaction, work, *args, **kwargs)

    async def ping(self) -> None:
        """Raise StorageUnavailable unless the database answers."""
        await self.transaction(answer)

    def pool(self) -> PoolStatistics:
        return pool_statistics(self.engine)

    async def close(self) -> None:
        await self.engine.dispose()


def pool_statistics(engine: AsyncEngine | Engine) -> PoolStatistics:
    """Of an engine whose pool does not count, such as NullPool, nothing."""
    pool = engine.pool
    return PoolStatistics(pool.size(), pool.checkedout()) if isinstance(pool, QueuePool) else PoolStatistics(0, 0)


def answer(conn: Connection, schema: str) -> None:
    """The least work that shows that the database is there."""
    conn.exec_driver_sql("SELECT 1")


def end_idle_transactions(engine: Engine, longest_idle: timedelta) -> None:
    """Let the server end a transaction that idles for so long: its node is paused, and others wait for its locks.

    By SET on each new connection rather than in its URL: a pooler refuses start-up parameters that it does not know.
    """
    statement = f"SET idle_in_transaction_session_timeout = {int(longest_idle.total_seconds() * 1_000)}"

    @event.listens_for(engine, "connect")
    def _connected(connection: DBAPIConnection, _: object) -> None:
        cursor = connection.cursor()
        cursor.execute(statement)
        cursor.close()
        connection.commit()


def close_left_behind(engine: Engine) -> None:
    """Close each connection that is given back after the engine was disposed of.

    Its pool is nobody's any more: it would stay open for as long as the garbage collector lets it.
    """

    @event.listens_for(engine, "connect")
    def _connected(_: DBAPIConnection, entry: ConnectionPoolEntry) -> None:
        entry.info["pool"] = engine.pool

    @event.listens_for(engine, "checkin")
    def _returned(_: DBAPIConnection | None, entry: ConnectionPoolEntry) -> None:
        if entry.info.get("pool") is not engine.pool:
            entry.invalidate()


def is_outage(error: BaseException | None) -> bool:
    """Is the database away, or going: no connection, a restart, no resources? Causes of the error count, too.

    A statement that was refused, cancelled, or met a lock or a deadlock is none: what sent it has a part in that.
    """
    while error is not None:
        if isinstance(error, PoolTimeout):
            return True
        if isinstance(error, DBAPIError):
            state = getattr(error.orig, "sqlstate", None) or ""
            broken = error.connection_invalidated or isinstance(error, OperationalError | InterfaceError)
            return state.startswith(_OUTAGE) if state else broken
        error = error.__cause__ or error.__context__
    return False


@contextmanager
def translated() -> Iterator[None]:
    """The drivers' errors as durable's, by SQLSTATE; what is neither bad data nor passing is left as it is."""
    try:
        yield
    except DBAPIError as error:
        state = getattr(error.orig, "sqlstate", None) or ""
        if state.startswith(_BAD_DATA) or isinstance(error, DataError) or isinstance(error.orig, ValueError):
            raise InvalidMessage(f"the database refuses the data: {error.orig}") from error
        if error.connection_invalidated or not state or state.startswith(_TRANSIENT):
            raise StorageUnavailable(f"the database cannot be used: {error.orig}") from error
        raise
    except (OSError, TimeoutError, PoolTimeout) as error:
        raise StorageUnavailable(f"the database cannot be used: {error}") from error
    except StatementError as error:  # a value that the driver cannot encode
        raise InvalidMessage(f"the driver refuses the data: {error.orig}") from error
    except UnicodeEncodeError as error:  # psycopg's and the headers' encoders raise it bare
        raise InvalidMessage(f"the text cannot be encoded: {error}") from error


def configured_url(settings: Settings) -> URL:
    if settings.database_url is None:
        raise InvalidSetting("database_url: not set; give Bus(..., database=...) or the variable DURABLE_DATABASE_URL")
    try:
        return make_url(settings.database_url.get_secret_value())
    except SQLAlchemyError:
        raise InvalidSetting("database_url: not a database URL") from None


def async_url(settings: Settings) -> URL:
    """For async sessions and the agents: asyncpg unless the URL names psycopg."""
    url = configured_url(settings)
    return url if url.drivername == "postgresql+psycopg" else url.set(drivername="postgresql+asyncpg")


def sync_url(settings: Settings) -> str:
    """For sync sessions and migrations: psycopg."""
    return configured_url(settings).set(drivername="postgresql+psycopg").render_as_string(hide_password=False)


def lock_url(settings: Settings) -> str:
    """For the node's own connection, as libpq wants it: never through a pooler."""
    if settings.lock_database_url is not None:
        url = make_url(settings.lock_database_url.get_secret_value())
    else:
        url = configured_url(settings)
    return url.set(drivername="postgresql").render_as_string(hide_password=False)


def channel(schema: str) -> str:
    """The LISTEN/NOTIFY channel on which work without an owner is announced."""
    return f"durable_{schema}"[:63]
