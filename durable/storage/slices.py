"""Parts of tables that tasks read at the same time, each with one COPY.

By blocks, for a whole table: each leaf is cut into ranges of ctid. Rows move between blocks, and between leaves, while
a table is read; so this is right only within one snapshot, which the driver exports and every task joins.

    with exported_snapshot(engine) as snapshot:        slices(conn, ...)  ──>  task: JOIN SNAPSHOT, COPY slice
                                                                          ──>  task: JOIN SNAPSHOT, COPY slice

By transactions, for a range that has no gaps any more: a row keeps the transaction that wrote it, wherever it lies.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import NamedTuple

from sqlalchemy import Connection, Engine

from durable.storage import archive_statements as statements

_LAST_BLOCK = 2**32 - 2


class Snapshot(NamedTuple):
    """A state of the database that others may join for as long as its transaction lasts."""

    name: str
    horizon: int
    """Every transaction below it is finished: nothing can be added there any more."""


@dataclass(frozen=True, slots=True)
class Slice:
    """Some rows of one relation: those of these blocks and of these transactions, where they are given."""

    relation: str
    """As it stands in SQL: quoted, and with its schema."""
    blocks: tuple[int, int] | None = None
    xids: tuple[int, int] | None = None
    filters: tuple[str, ...] = ()
    """Conditions in SQL, which must hold too."""

    def select(self, columns: Sequence[str]) -> str:
        """The query that reads it."""
        conditions = [*self._conditions(), *self.filters]
        where = f" WHERE {' AND '.join(conditions)}" if conditions else ""
        return f"SELECT {', '.join(columns)} FROM {self.relation}{where}"

    def _conditions(self) -> Iterator[str]:
        if self.blocks is not None:
            first, end = self.blocks
            yield f"ctid >= '({first},0)'::tid AND ctid < '({end},0)'::tid"
        if self.xids is not None:
            low, high = self.xids
            yield f"xid >= {low} AND xid < {high}"


class Survey(NamedTuple):
    """The rows of a range of transactions that one leaf holds, and the blocks that they lie in."""

    leaf: str
    rows: int
    first_block: int
    last_block: int

    @property
    def blocks(self) -> int:
        return self.last_block - self.first_block + 1


@contextmanager
def exported_snapshot(engine: Engine) -> Iterator[Snapshot]:
    """A snapshot, for as long as the context lasts. It holds no lock on any table; it holds vacuum back."""
    with engine.connect().execution_options(isolation_level="REPEATABLE READ") as conn:
        conn.execute(statements.HOLD_SNAPSHOT.within(""))
        name, horizon = conn.execute(statements.EXPORT_SNAPSHOT.within("")).one()
        yield Snapshot(name, horizon)


def join_snapshot(conn: Connection, snapshot: Snapshot) -> None:
    """See what it saw. To be called first in a transaction at REPEATABLE READ."""
    conn.exec_driver_sql(join_sql(snapshot.name))


def join_sql(name: str) -> str:
    return statements.JOIN_SNAPSHOT.within("").text.replace("{snapshot}", name.replace("'", "''"))


def relation(schema: str, table: str) -> str:
    return f'"{schema}"."{table}"'


def by_blocks(conn: Connection, schema: str, table: str, count: int) -> list[Slice]:
    """The whole table in about so many slices of about equal size, and one for each leaf at least."""
    leaves = conn.execute(statements.READ_LEAVES.within(schema), {"table": relation(schema, table)}).all()
    total = sum(blocks for _, blocks in leaves)
    return [
        Slice(relation(schema, leaf), blocks=cut)
        for leaf, blocks in leaves
        for cut in _cut(0, blocks, count * blocks // total if total else 1, end=_LAST_BLOCK)
    ]


def by_transactions(schema: str, table: str, low: int, high: int, count: int) -> list[Slice]:
    """The rows of these transactions, in up to so many slices."""
    whole = Slice(relation(schema, table))
    return [replace(whole, xids=cut) for cut in _cut(low, high, min(count, high - low), end=high)]


def of_survey(schema: str, found: Sequence[Survey], low: int, high: int, count: int) -> list[Slice]:
    """What was found, in about so many slices of about as many blocks each."""
    total = sum(each.blocks for each in found)
    return [
        Slice(relation(schema, each.leaf), blocks=cut, xids=(low, high))
        for each in found
        for cut in _cut(each.first_block, each.last_block + 1, count * each.blocks // total, end=each.last_block + 1)
    ]


def survey(conn: Connection, schema: str, table: str, low: int, high: int) -> list[Survey]:
    """Where the rows of these transactions lie."""
    found = statements.BY_TRANSACTION[table].survey.within(schema)
    rows = conn.execute(found, {"low": low, "high": high})
    return [Survey(leaf, count, int(first), int(last)) for leaf, count, first, last in rows]


def _cut(start: int, stop: int, count: int, *, end: int) -> list[tuple[int, int]]:
    """[start, stop) in `count` ranges of about one size; the last of them goes on to `end`."""
    count = max(count, 1)
    bounds = [start + (stop - start) * index // count for index in range(count)]
    return list(zip(bounds, [*bounds[1:], end], strict=True))
