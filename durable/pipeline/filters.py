"""Spark's filters as conditions of Postgres, where both mean the same; no I/O.

    =  <=>  <  <=  >  >=  IN  IS NULL  IS NOT NULL      of a column with a value

Texts are compared by their bytes, as Spark does, whatever the database's collation. What is JSON in Postgres is text
in Spark, written in another order than it was given in: its filters stay with Spark.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from psycopg import sql
from pyspark.sql.datasource import (
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    IsNull,
    LessThan,
    LessThanOrEqual,
)

from durable.storage.sql.times import FIRST, LAST

_COMPARISONS: Mapping[type[Filter], str] = {
    EqualTo: "=",
    EqualNullSafe: "IS NOT DISTINCT FROM",
    LessThan: "<",
    LessThanOrEqual: "<=",
    GreaterThan: ">",
    GreaterThanOrEqual: ">=",
}
_ID_BYTES = 16


def condition(asked: Filter, kinds: Mapping[str, str]) -> str | None:
    """The same in SQL, given the type of each column; None where Spark must do it."""
    attribute: tuple[str, ...] = getattr(asked, "attribute", ())
    if len(attribute) != 1 or kinds.get(attribute[0]) in (None, "jsonb"):
        return None
    name, kind = attribute[0], kinds[attribute[0]]
    match asked:
        case IsNull():
            return f'"{name}" IS NULL'
        case IsNotNull():
            return f'"{name}" IS NOT NULL'
        case In(value=values):
            literals = [_literal(value, kind) for value in values]
            return (
                None
                if None in literals or not literals
                else f"{_column(name, kind)} IN ({', '.join(map(str, literals))})"
            )
        case _ if type(asked) in _COMPARISONS:
            literal = _literal(getattr(asked, "value", None), kind)
            return None if literal is None else f"{_column(name, kind)} {_COMPARISONS[type(asked)]} {literal}"
        case _:
            return None


def _column(name: str, kind: str) -> str:
    return f'"{name}" COLLATE "C"' if kind == "text" else f'"{name}"'


def _literal(value: Any, kind: str) -> str | None:
    """Write a value as SQL; None for a value that the column cannot hold, or that is no value at all."""
    match kind, value:
        case "uuid", bytes() | bytearray() if len(value) == _ID_BYTES:
            return f"'{bytes(value).hex()}'::uuid"
        case "bytea", bytes() | bytearray():
            return f"'\\x{bytes(value).hex()}'::bytea"
        case "text", str() if "\0" not in value:
            return sql.Literal(value).as_string(None)
        case "timestamptz", datetime() if value.tzinfo is not None and FIRST < value < LAST:  # else rows have others
            return f"'{value.isoformat()}'::timestamptz"
        case "boolean", bool():
            return "true" if value else "false"
        case "bigint" | "integer", int() if not isinstance(value, bool):
            return str(value)
        case _:
            return None
