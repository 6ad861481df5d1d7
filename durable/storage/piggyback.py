"""Piggyback: the last statement of a transaction goes to the server together with its COMMIT.

    without     statement --> answer --> COMMIT --> answer
    with it     EXECUTE statement; COMMIT --> answer          where the first fails, the server runs no second

So what durable adds to a transaction costs it no round trip. asyncpg alone can do it: several statements in one text,
which has no parameters. So the statement is prepared on the connection, where its plan is kept, and its values are
literals. It is done on connections that durable has opened and no pooler shares.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any
from uuid import UUID

from sqlalchemy import Connection
from sqlalchemy.engine import Dialect

from durable.storage.engines import own_asyncpg
from durable.storage.sql.statement import Statement


def _unchanged(error: Exception) -> Exception:
    return error


def send_with_commit(
    conn: Connection,
    schema: str,
    statement: Statement,
    values: Mapping[str, Any],
    *,
    named: Callable[[Exception], Exception] = _unchanged,
) -> bool:
    """Send a statement together with the COMMIT that is next on this connection; a ROLLBACK forgets it.

    False when the connection cannot, or has one to send; then the statement is to be executed as any other. Nobody sees
    the rows that it returns. The values are seen by whoever reads the server's log and activity: no bodies, no texts of
    the application.
    """
    driver = own_asyncpg(conn)
    if driver is None or driver.is_pooled or driver.piggyback is not None or not driver.is_amid_transaction:
        return False
    sql, names = _numbered(statement, schema, conn.dialect)
    driver.take_along(sql, ", ".join(literal(values[name]) for name in names), named)
    return True


@lru_cache(maxsize=64)
def _numbered(statement: Statement, schema: str, dialect: Dialect) -> tuple[str, Sequence[str]]:
    """The text with $1, $2, ... and the names that they stand for."""
    compiled: Any = statement.within(schema).compile(dialect=dialect)
    return str(compiled), tuple(compiled.positiontup)


def literal(value: object) -> str:
    """Return a value as SQL, of the type that the driver would give it.

    >>> literal("it's"), literal([1, 2]), literal(True)
    ("E'it''s'", 'ARRAY[1, 2]', 'true')
    """
    match value:
        case bool():
            return "true" if value else "false"
        case int():
            return str(value)
        case str():
            return _text(value)
        case UUID():
            return f"'{value}'::uuid"
        case [*_]:
            return f"ARRAY[{', '.join(map(literal, value))}]"
        case _:
            raise TypeError(f"no literal of type {type(value).__name__}")


def _text(value: str) -> str:
    """A text with escapes, which means the same whatever standard_conforming_strings says."""
    if "\0" in value:
        raise ValueError("a text with a NUL")
    escaped = value.replace("\\", "\\\\").replace("'", "''")
    return f"E'{escaped}'"
