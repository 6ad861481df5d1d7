"""A SQL statement: its text, and why the statements in this folder are written so.

Rules that hold throughout:
- Batches travel as arrays through unnest: one statement for any number of envelopes.
- A claim is a CTE with FOR UPDATE SKIP LOCKED. `WHERE id IN (SELECT ... LIMIT)` may be planned so that it runs the
  sub-select again for each row, and then updates everything.
- A change to an owned row names owner and epoch: that is the fence. It returns how many rows it met.
- What finishes an envelope also writes its history: `WITH done AS (DELETE ... RETURNING *) INSERT ...`.
- The insert into received_ids, or undated_ids, is the check for duplicates. A check before an insert has a race.
- Parameters of bytea[] are written as ByteArrays: a statement also runs on connections of the application, and psycopg
  writes such an array as the setting standard_conforming_strings of the session says.
- A statement that chooses its rows by itself is Batched, so that the row which the database refuses can be found
  (durable.storage.isolation).

`{schema}` is quoted here and was checked against Settings.db_schema's pattern.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Final, NamedTuple

from sqlalchemy import Connection, CursorResult, Dialect, TextClause, bindparam, text
from sqlalchemy.types import NullType, TypeDecorator

_BYTE_ARRAYS: Final = re.compile(r"CAST\(:(\w+) AS bytea\[\]\)")


class ByteArrays(TypeDecorator[Sequence[bytes | None]]):
    """Values of a bytea[], in the one form that Postgres reads the same way in every session."""

    impl = NullType
    cache_ok = True

    def process_bind_param(self, value: Sequence[bytes | None] | None, dialect: Dialect) -> Any:
        if dialect.driver != "psycopg" or value is None:  # asyncpg sends no text
            return value
        return [None if each is None else f"\\x{each.hex()}" for each in value]


_AS_BYTE_ARRAYS: Final = ByteArrays()


class Compiled(NamedTuple):
    """A statement as a driver takes it. `names`: of its parameters, in order; None where it takes them by name."""

    sql: str
    names: Sequence[str] | None


class Statement:
    """SQL statement, to be completed by the schema that holds the tables."""

    def __init__(self, sql: str) -> None:
        self._sql = sql
        self._byte_arrays = frozenset(_BYTE_ARRAYS.findall(sql))
        self._compiled: dict[tuple[str, str, str], Compiled] = {}

    def run(self, conn: Connection, schema: str, params: Mapping[str, Any]) -> CursorResult[Any]:
        """Execute it past SQLAlchemy's compiler, which computes as long as the driver: for what every message needs."""
        dialect = conn.dialect
        compiled = self._compiled.get((schema, dialect.driver, dialect.paramstyle)) or self._compile(schema, dialect)
        if self._byte_arrays:
            arrays = {name: _AS_BYTE_ARRAYS.process_bind_param(params[name], dialect) for name in self._byte_arrays}
            params = {**params, **arrays}
        values = params if compiled.names is None else tuple([params[name] for name in compiled.names])
        return conn.exec_driver_sql(compiled.sql, values)

    def _compile(self, schema: str, dialect: Dialect) -> Compiled:
        made: Any = self.within(schema).compile(dialect=dialect)
        compiled = Compiled(made.string, made.positiontup)
        self._compiled[schema, dialect.driver, dialect.paramstyle] = compiled
        return compiled

    @lru_cache(maxsize=64)  # noqa: B019  statements are module constants and live as long as the process
    def within(self, schema: str) -> TextClause:
        arrays = [bindparam(name, type_=_AS_BYTE_ARRAYS) for name in self._byte_arrays]
        return text(self._sql.replace("{schema}", f'"{schema}"')).bindparams(*arrays)


class Batched:
    """A statement over the next rows of a table, and the same over those of them that are named.

    `picked` chooses rows, with `{only}` behind its conditions and `{lock}` where it locks; `then` works on `picked`.
    `key` are the columns that name a row, and `only` narrows the choice to the keys in the parameters :only_0, :only_1.
    """

    def __init__(self, picked: str, then: str, *, key: str, only: str) -> None:
        def statement(narrowed: str, lock: str) -> str:
            return picked.replace("{only}", narrowed).replace("{lock}", lock)

        self.whole = Statement(f"WITH picked AS MATERIALIZED ({statement('', _LOCK)}){then}")
        self.named = Statement(f"WITH picked AS MATERIALIZED ({statement(f' AND {only}', _LOCK)}){then}")
        self.keys = Statement(f"SELECT {key} FROM ({statement('', '')}) AS picked")


_LOCK: Final = "FOR UPDATE SKIP LOCKED"


def by_key(address: str) -> str:
    """Narrow a statement to some rows of a table of work."""
    named = "unnest(CAST(:only_0 AS uuid[]), CAST(:only_1 AS text[])) AS named (id, address)"
    return f"(id, {address}) IN (SELECT named.id, named.address FROM {named})"
