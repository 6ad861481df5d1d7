"""The agents' connections to a simulated server: each transaction runs the real storage function over a `Light`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import Any, Concatenate, Final, ParamSpec, TypeVar, cast

from sqlalchemy import Connection as SqlConnection
from sqlalchemy import TextClause
from sqlalchemy.exc import DBAPIError, OperationalError
from sqlalchemy.util.concurrency import greenlet_spawn

from durable.settings import Settings
from durable.statistics import PoolStatistics
from durable.storage.database import Database
from durable.storage.outages import keeping_cancellation, translated
from tests.simulation.server import Connection, ServerError
from tests.simulation.sql.registry import DIALECT

P = ParamSpec("P")
T = TypeVar("T")

_POOL: Final = PoolStatistics(0, 0)


class Result:
    """The part of SQLAlchemy's Result that storage functions use."""

    def __init__(self, rows: list[Any], rowcount: int) -> None:
        self._rows = rows
        self.rowcount = rowcount

    def __iter__(self) -> Iterator[Any]:
        return iter(self._rows)

    def all(self) -> list[Any]:
        return self._rows

    def scalars(self) -> list[Any]:
        return [row[0] for row in self._rows]

    def first(self) -> Any:
        return self._rows[0] if self._rows else None

    def one(self) -> Any:
        (row,) = self._rows
        return row

    def scalar_one(self) -> Any:
        return self.one()[0]


class Light:
    """The part of SQLAlchemy's Connection that storage functions use."""

    dialect = DIALECT

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def execute(self, clause: TextClause, params: Mapping[str, Any] | None = None) -> Result:
        return self._run(clause.text, params or {})

    def exec_driver_sql(self, sql: str, params: Mapping[str, Any] | None = None) -> Result:
        return self._run(sql, params or {})

    def _run(self, sql: str, params: Mapping[str, Any]) -> Result:
        try:
            statement, found = self._connection.execute(sql, params)
        except ServerError as error:
            raise wrapped(error) from error
        if isinstance(found, int):
            return Result([], found)
        make = statement.row._make if statement.columns else tuple
        return Result([make(row) for row in found], len(found))

    @contextmanager
    def begin_nested(self) -> Iterator[None]:
        transaction = self._connection.transaction
        mark = transaction.mark() if transaction is not None else {}
        try:
            yield
        except BaseException:
            if transaction is not None and not transaction.is_over:
                transaction.back_to(mark)
            raise


def wrapped(error: ServerError) -> DBAPIError:
    """The error as SQLAlchemy raises it."""
    return OperationalError(None, None, error, connection_invalidated=error.is_lost)


class SimulatedDatabase(Database):
    """The database of the agents of one process."""

    def __init__(self, settings: Settings, connect: Callable[[], Any]) -> None:
        self.schema = settings.db_schema
        self._is_waited_for = False
        self._connect = connect

    @asynccontextmanager
    async def _bounded(self) -> AsyncIterator[None]:
        with keeping_cancellation(), translated(self.schema):
            try:
                yield
            except ServerError as error:
                raise wrapped(error) from error

    async def _run(self, work: Callable[Concatenate[SqlConnection, str, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        connection: Connection = await self._connect()
        try:
            conn = cast(SqlConnection, Light(connection))
            result = await greenlet_spawn(partial(work, conn, self.schema, *args, **kwargs))
            await connection.commit()
            return result
        finally:
            connection.close()

    async def statement(
        self, work: Callable[Concatenate[SqlConnection, str, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        return await self.transaction(work, *args, **kwargs)

    def pool(self) -> PoolStatistics:
        return _POOL

    async def close(self) -> None:
        pass
