"""A simulated server as a driver of SQLAlchemy: the sessions of units of work and handlers are real, down to here.

Each connection is one of the process that opens it, to the database of its service.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, Final

from sqlalchemy import NullPool, Pool, text
from sqlalchemy.dialects import registry
from sqlalchemy.engine.default import DefaultDialect
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine
from sqlalchemy.util.concurrency import await_only

from tests.simulation.process import current
from tests.simulation.rows import Effect, Sent
from tests.simulation.server import Connection, ServerError
from tests.simulation.sql import does_sql
from tests.simulation.sql.registry import Params
from tests.simulation.tables import Transaction

SENT: Final = text("INSERT INTO sent VALUES (:number, :lane, :key, :position)")
EFFECT: Final = text("INSERT INTO effects VALUES (:number, :lane, :key, :position)")


@does_sql(SENT.text)
def insert_sent(tx: Transaction, p: Params) -> int:
    tx.put("sent", tx.store.next("sent"), Sent(**p))
    return 1


@does_sql(EFFECT.text)
def insert_effect(tx: Transaction, p: Params) -> int:
    tx.put("effects", tx.store.next("effects"), Effect(**p))
    return 1


class Error(Exception):
    """An error of the driver."""

    def __init__(self, cause: ServerError) -> None:
        super().__init__(str(cause))
        self.sqlstate = cause.sqlstate
        self.is_lost = cause.is_lost


class DatabaseError(Error):
    pass


class OperationalFault(DatabaseError):
    pass


_DBAPI: Final = SimpleNamespace(
    paramstyle="named",
    Error=Error,
    InterfaceError=type("InterfaceError", (Error,), {}),
    DatabaseError=DatabaseError,
    DataError=type("DataError", (DatabaseError,), {}),
    OperationalError=OperationalFault,
    IntegrityError=type("IntegrityError", (DatabaseError,), {}),
    InternalError=type("InternalError", (DatabaseError,), {}),
    ProgrammingError=type("ProgrammingError", (DatabaseError,), {}),
    NotSupportedError=type("NotSupportedError", (DatabaseError,), {}),
    Binary=bytes,
)


class Cursor:
    arraysize = 1

    def __init__(self, connection: DriverConnection) -> None:
        self._connection = connection
        self._rows: list[Any] = []
        self.rowcount = -1
        self.description: Sequence[tuple[Any, ...]] | None = None

    def execute(self, sql: str, params: Mapping[str, Any] | None = None) -> None:
        if self._connection.savepoint(sql):
            return
        try:
            statement, found = self._connection.server_side.execute(sql, params or {})
        except ServerError as error:
            raise OperationalFault(error) from error
        if isinstance(found, int):
            self.rowcount = found
            return
        self._rows, self.rowcount = list(found), len(found)
        self.description = [(name, None, None, None, None, None, None) for name in statement.columns]

    def fetchall(self) -> list[Any]:
        rows, self._rows = self._rows, []
        return rows

    def fetchone(self) -> Any:
        return self._rows.pop(0) if self._rows else None

    def fetchmany(self, size: int = 1) -> list[Any]:
        rows, self._rows = self._rows[:size], self._rows[size:]
        return rows

    def close(self) -> None:
        self._rows = []


class DriverConnection:
    """A connection, as SQLAlchemy sees that of a driver."""

    def __init__(self, server_side: Connection) -> None:
        self.server_side = server_side
        server_side.is_session = True
        self._savepoints: dict[str, Any] = {}

    def cursor(self, *_: Any, **__: Any) -> Cursor:
        return Cursor(self)

    def savepoint(self, sql: str) -> bool:
        """Run a statement about savepoints; False for another one."""
        words = sql.split()
        if words[0] not in ("SAVEPOINT", "RELEASE", "ROLLBACK"):
            return False
        transaction = self.server_side.transaction
        if transaction is not None and not transaction.is_over:
            if words[0] == "SAVEPOINT":
                self._savepoints[words[-1]] = transaction.mark()
            elif words[0] == "ROLLBACK":
                transaction.back_to(self._savepoints[words[-1]])
        return True

    def commit(self) -> None:
        try:
            await_only(self.server_side.commit())
        except ServerError as error:
            raise OperationalFault(error) from error

    def rollback(self) -> None:
        self.server_side.rollback()

    def close(self) -> None:
        self.server_side.close()


class Dialect(DefaultDialect):
    name = "simulated"
    driver = "simulated"
    is_async = True
    supports_statement_cache = True
    default_paramstyle = "named"

    @classmethod
    def import_dbapi(cls) -> Any:
        return _DBAPI

    @classmethod
    def get_pool_class(cls, url: Any) -> type[Pool]:
        return NullPool

    def create_connect_args(self, url: Any) -> Any:
        return (), {}

    def initialize(self, connection: Any) -> None:
        pass

    def connect(self, *_: Any, **__: Any) -> Any:
        process = current()
        try:
            return DriverConnection(await_only(process.server.connect(process)))
        except ServerError as error:
            raise OperationalFault(error) from error

    def is_disconnect(self, e: Exception, connection: Any, cursor: Any) -> bool:
        return getattr(e, "is_lost", False)


registry.register("simulated", __name__, "Dialect")


def make_engine() -> AsyncEngine:
    """An engine for all processes: its connections are those of the process in whose context they are opened."""
    return create_async_engine("simulated://")
