"""The application's Postgres, as the agents use it: short transactions, and errors sorted by what can be done.

Storage functions are synchronous, take the caller's connection and never commit. An agent runs them by
`await database.transaction(function, ...)`; a unit of work calls the same functions on its session's connection. So
each statement exists once, whatever the driver and whether the caller is async or not.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from datetime import timedelta
from typing import Concatenate, ParamSpec, TypeVar

from pydantic import SecretStr
from sqlalchemy import Connection, Engine
from sqlalchemy.engine import URL
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncEngine
from sqlalchemy.pool import QueuePool
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, wait_exponential_jitter

from durable import database_url
from durable.database_url import DatabaseUrl, check_environment
from durable.errors import InvalidMessage, InvalidSetting, SchemaMismatch, StorageUnavailable
from durable.settings import Settings
from durable.statistics import PoolStatistics
from durable.storage import loops
from durable.storage.connection_names import UNNAMED, ConnectionName
from durable.storage.engines import Limits, is_behind_pooler, make_async_engine
from durable.storage.isolation import Buried, SavepointsNeeded, commit, hear_of_burials, try_by_try, without_savepoints
from durable.storage.outages import described, keeping_cancellation, translated
from durable.tasks.cancelling import end_if_cancelled
from durable.telemetry import log

P = ParamSpec("P")
T = TypeVar("T")

AGENTS_LONGEST_IDLE = timedelta(seconds=5)
"""Their transactions wait for nothing but the database."""


class Database:
    """Connections for the agents: a small pool of their own, so that no application can starve them."""

    def __init__(self, settings: Settings, name: ConnectionName = UNNAMED, *, buried: Buried | None = None) -> None:
        self.schema = settings.db_schema
        self._buried = buried
        self._is_waited_for = False
        self._longest = 4 * settings.statement_timeout.total_seconds()
        self.engine: AsyncEngine = make_async_engine(
            async_url(settings),
            settings,
            Limits(settings.statement_timeout, AGENTS_LONGEST_IDLE).for_own_statements(),
            isolation_level="READ COMMITTED",  # whatever the role has by default: a claim must see what is free now
            pool_size=settings.agent_pool_size,
            max_overflow=2,
            pool_use_lifo=True,  # one that was used a moment ago has its plans, and is not asked whether it answers
            pool_timeout=settings.statement_timeout.total_seconds(),
            name=name,
        )

    async def transaction(
        self, work: Callable[Concatenate[Connection, str, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Run `work(connection, schema, ...)` in a transaction of its own and return what it returns, committed.

        It is run again, in a new transaction, when the database refuses a row that it would have put aside.

        Raises StorageUnavailable when the database cannot be used, lacks something of durable, or does not answer
        (whether a commit took place is then unknown), InvalidMessage when it refuses the data, and WiringError in an
        event loop other than that of the first transaction.
        """
        async with self._bounded():
            with suppress(SavepointsNeeded):
                return await self._run(without_savepoints(work), *args, **kwargs)
            return await self._run(try_by_try(work), *args, **kwargs)

    async def statement(
        self, work: Callable[Concatenate[Connection, str, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """transaction(), of one statement while the database refuses no row: it commits by itself, without the round
        trips of BEGIN and COMMIT. Behind a pooler it has them, because the limits of the statement come with BEGIN.
        """
        async with self._bounded():
            with suppress(SavepointsNeeded):
                return await self._run_alone(without_savepoints(work), *args, **kwargs)
            return await self._run(try_by_try(work), *args, **kwargs)

    @asynccontextmanager
    async def _bounded(self) -> AsyncIterator[None]:
        loops.enter(self.engine)
        with keeping_cancellation(), translated(self.schema):
            # Each wait within has a limit of its own; this one holds for all of them together.
            limit = asyncio.timeout(self._longest)
            try:
                async with limit:
                    yield
            except Exception as error:
                if limit.expired():  # the ROLLBACK may have failed and taken the place of its TimeoutError
                    raise TimeoutError(f"the transaction was not done within {self._longest:g} s") from error
                raise

    async def _run(self, work: Callable[Concatenate[Connection, str, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        def run(conn: Connection) -> T:
            self._prepare(conn)
            conn.begin()
            result = work(conn, self.schema, *args, **kwargs)
            commit(conn)
            return result

        async with self.engine.connect() as conn:
            return await conn.run_sync(run)

    async def _run_alone(
        self, work: Callable[Concatenate[Connection, str, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        def run(conn: Connection) -> T:
            self._prepare(conn)
            if not is_behind_pooler(conn):
                conn.execution_options(isolation_level="AUTOCOMMIT")
            result = work(conn, self.schema, *args, **kwargs)
            commit(conn)
            return result

        async with self.engine.connect() as conn:
            return await conn.run_sync(run)

    def _prepare(self, conn: Connection) -> None:
        if self._buried is not None:
            hear_of_burials(conn, self._buried)

    async def transaction_with_retry(
        self, work: Callable[Concatenate[Connection, str, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """transaction(), again and again for as long as the database cannot be used, or refuses it, 0.1 s to 5 s apart.

        For what an agent must write and never gives up. The work may run twice: its fence makes that harmless. A
        trigger or a right of the application may refuse it, and lets it pass when that is put right.
        """

        def tell(attempt: RetryCallState) -> None:
            end_if_cancelled()  # the error may have replaced it
            error = attempt.outcome.exception() if attempt.outcome else None
            level = logging.DEBUG if self._is_waited_for else logging.WARNING  # once for each outage
            self._is_waited_for = True
            why = described(error) if isinstance(error, DBAPIError) else error
            log.log(level, "what is done waits to be written down, attempt %d: %s", attempt.attempt_number, why)

        patiently = AsyncRetrying(
            retry=retry_if_exception_type((StorageUnavailable, SchemaMismatch, InvalidMessage, DBAPIError)),
            wait=wait_exponential_jitter(multiplier=0.1, max=5, jitter=0.1),
            before_sleep=tell,
        )
        result: T = await patiently(self.transaction, work, *args, **kwargs)
        self._is_waited_for = False
        return result

    async def ping(self) -> None:
        """Raise StorageUnavailable unless the database answers."""
        await self.transaction(answer)

    def pool(self) -> PoolStatistics:
        return pool_statistics(self.engine)

    async def close(self) -> None:
        await loops.close(self.engine)


def pool_statistics(engine: AsyncEngine | Engine) -> PoolStatistics:
    """Return the statistics of a pool; zeros for one that does not count, such as NullPool."""
    pool = engine.pool
    return PoolStatistics(pool.size(), pool.checkedout()) if isinstance(pool, QueuePool) else PoolStatistics(0, 0)


def answer(conn: Connection, schema: str) -> None:
    """The least work that shows that the database is there."""
    conn.exec_driver_sql("SELECT 1")


def configured_url(settings: Settings) -> DatabaseUrl:
    if settings.database_url is None:
        raise InvalidSetting("database_url: not set; give Bus(..., database=...) or the variable DURABLE_DATABASE_URL")
    return _parsed(settings.database_url, "database_url")


def async_url(settings: Settings) -> URL:
    """Return the URL for async sessions and agents: asyncpg unless it names psycopg."""
    url = configured_url(settings)
    if url.driver == "psycopg":
        return _of_sqlalchemy(url, "psycopg")
    database_url.check_for_asyncpg(url)
    return _of_sqlalchemy(url, "asyncpg")


def sync_url(settings: Settings) -> URL:
    """Return the URL for sync sessions and the command line: psycopg."""
    return _of_sqlalchemy(configured_url(settings), "psycopg")


def _of_sqlalchemy(url: DatabaseUrl, driver: str) -> URL:
    """Return SQLAlchemy's form, which has several hosts among the parameters."""
    query = dict(url.query)
    (host, port), *others = url.hosts
    if others:
        query["host"], query["port"] = (",".join(map(str, each)) for each in zip(*url.hosts, strict=True))
        host, port = "", None
    return URL.create(f"postgresql+{driver}", url.user, url.password, host or None, port, url.database, query)


def lock_url(settings: Settings) -> str:
    """Return the URL for the node's own connection, in libpq's form: never through a pooler."""
    return _lock_url(settings).libpq()


def lock_engine_url(settings: Settings) -> URL:
    """Return the same for an engine."""
    return _of_sqlalchemy(_lock_url(settings), "psycopg")


def _lock_url(settings: Settings) -> DatabaseUrl:
    if settings.lock_database_url is not None:
        return _parsed(settings.lock_database_url, "lock_database_url")
    return configured_url(settings)


def _parsed(url: SecretStr, setting: str) -> DatabaseUrl:
    return check_environment(database_url.parse(url.get_secret_value(), setting), os.environ)


def channel(schema: str) -> str:
    """The LISTEN/NOTIFY channel on which work without an owner is announced."""
    return f"durable_{schema}"[:63]
