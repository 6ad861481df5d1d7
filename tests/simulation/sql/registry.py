"""The statements that the simulation knows, by their text. Another one is an error of the simulation."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from sqlalchemy import create_mock_engine

from durable.storage.sql.statement import Statement
from tests.simulation.tables import Transaction

SCHEMA: Final = "durable"
DIALECT: Final = create_mock_engine("postgresql+psycopg://", lambda *_: None).dialect
DIALECT.driver = "memory"  # which takes each value as it is
"""The driver that the simulation seems to have: it takes parameters by their names."""

Params = Mapping[str, Any]
Rows = Sequence[tuple[Any, ...]]
Work = Callable[[Transaction, Params], Rows | int]
"""Returns the rows of a statement, or how many it met."""


class Known(NamedTuple):
    """A statement: its name in durable, its work, and the columns of its rows."""

    name: str
    work: Work
    columns: tuple[str, ...]
    row: Any


class UnknownStatement(BaseException):
    """durable has run a statement that the simulation does not know."""


_known: dict[str, Known] = {}
_unknown: set[str] = set()


def does(statement: Statement, columns: str = "") -> Callable[[Work], Work]:
    """Register the function that does what this statement does."""
    clause = statement.within(SCHEMA)
    return does_sql(str(clause), columns, str(clause.compile(dialect=DIALECT)))


def does_sql(sql: str, columns: str = "", compiled: str = "") -> Callable[[Work], Work]:
    names = tuple(columns.split())

    def register(work: Work) -> Work:
        name = getattr(work, "__name__", "statement")
        row = namedtuple("Row", names, rename=True) if names else tuple
        _known[sql] = _known[compiled or sql] = Known(name, work, names, row)
        return work

    return register


def known(sql: str) -> Known:
    """The statement with this text. Raises UnknownStatement."""
    found = _known.get(sql)
    if found is None:
        _unknown.add(sql)
        raise UnknownStatement(f"the simulation does not know this statement:\n{sql}")
    return found


def take_unknown() -> list[str]:
    """Return the unknown statements since the last call: the task that ran one keeps its error to itself."""
    found = sorted(_unknown)
    _unknown.clear()
    return found


def statements() -> Mapping[str, Known]:
    return _known
