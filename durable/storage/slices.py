"""Parts of tables that tasks read at the same time: each task has a share, which is a slice of a leaf or several.

By blocks, for a whole table: the blocks of all leaves, laid end to end, are cut into shares of one size, whatever the
size of each leaf. Rows move between blocks, and between leaves, while a table is read; so this is right only within
one snapshot, which the driver exports and every task joins. VACUUM FULL and CLUSTER put even the rows of the snapshot
elsewhere, into another file, and a day that is dropped or truncated has none of them any more: a task reads blocks of
the file that they were planned for, or of none.

    with exported_snapshot(engine) as snapshot:        shares(conn, ...)  ──>  task: JOIN SNAPSHOT, COPY each slice
                                                                          ──>  task: JOIN SNAPSHOT, COPY each slice

By transactions, for a range that has no gaps any more: a row keeps the transaction that wrote it, wherever it lies.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import NamedTuple, TypeAlias

from sqlalchemy import Connection, Engine
from sqlalchemy.exc import DataError, ProgrammingError

from durable.errors import StorageUnavailable
from durable.storage.sql import archive as statements


class Snapshot(NamedTuple):
    """A state of the database that others may join for as long as its transaction lasts."""

    name: str


@dataclass(frozen=True, slots=True)
class Slice:
    """Some rows of one relation: those of these blocks and of these transactions, where they are given."""

    relation: str
    """The name as it stands in SQL: quoted, and with its schema."""
    blocks: tuple[int, int] | None = None
    file: int | None = None
    """The number of the file in which these blocks lie."""
    xids: tuple[int, int] | None = None
    filters: tuple[str, ...] = ()
    """Conditions in SQL, which must hold too."""

    def select(self, columns: Sequence[str]) -> str:
        """The query that reads it."""
        conditions = [*self._conditions(), *self.filters]
        where = f" WHERE {' AND '.join(conditions)}" if conditions else ""
        return f"SELECT {', '.join(columns)} FROM {self.relation}{where}"

    def hold_file(self) -> str:
        """The statement that keeps the rows in their file to the end of a transaction."""
        return statements.HOLD_FILE.format(relation=self.relation)

    def read_file(self) -> str:
        """The query for the number of the file in which the rows are now."""
        return statements.READ_FILE.format(relation=self.relation.replace("'", "''"))

    def _conditions(self) -> Iterator[str]:
        if self.blocks is not None:
            first, end = self.blocks
            yield f"ctid >= '({first},0)'::tid AND ctid < '({end},0)'::tid"
        if self.xids is not None:
            low, high = self.xids
            yield f"xid >= {low} AND xid < {high}"


Share: TypeAlias = tuple[Slice, ...]
"""The slices that one task reads."""


class Extent(NamedTuple):
    """Blocks of one leaf, without `end`, and its file."""

    leaf: str
    first: int
    end: int
    file: int


class Survey(NamedTuple):
    """The rows of a range of transactions that one leaf holds, and the blocks that they lie in."""

    leaf: str
    rows: int
    first_block: int
    last_block: int
    file: int

    @property
    def extent(self) -> Extent:
        return Extent(self.leaf, self.first_block, self.last_block + 1, self.file)


@contextmanager
def exported_snapshot(engine: Engine) -> Iterator[Snapshot]:
    """A snapshot, for as long as the context lasts. It holds no lock on any table; it holds vacuum back."""
    with engine.connect().execution_options(isolation_level="REPEATABLE READ") as conn:
        conn.execute(statements.HOLD_SNAPSHOT.within(""))
        yield Snapshot(conn.execute(statements.EXPORT_SNAPSHOT.within("")).scalar_one())


def join_snapshot(conn: Connection, snapshot: Snapshot) -> None:
    """See what it saw. To be called first in a transaction at REPEATABLE READ.

    Raises StorageUnavailable when the snapshot is over.
    """
    try:
        conn.exec_driver_sql(join_sql(snapshot.name))
    except (ProgrammingError, DataError) as error:
        raise StorageUnavailable(
            f"snapshot {snapshot.name}: is over, or never was in this database; take a new one"
        ) from error


@contextmanager
def joined(engine: Engine, snapshot: Snapshot) -> Iterator[Connection]:
    """A connection that sees what the snapshot saw. Its transaction, and the locks of it, end with the context."""
    with engine.connect().execution_options(isolation_level="REPEATABLE READ") as conn:
        join_snapshot(conn, snapshot)
        yield conn


def join_sql(name: str) -> str:
    return statements.JOIN_SNAPSHOT.within("").text.replace("{snapshot}", name.replace("'", "''"))


def relation(schema: str, table: str) -> str:
    return f'"{schema}"."{table}"'


def by_blocks(conn: Connection, schema: str, table: str, count: int) -> list[Share]:
    """The whole table, as the snapshot of this transaction has it, in up to so many shares; none is empty unless the
    table is, which is one share.

    Raises StorageUnavailable when a leaf was dropped since the snapshot, or was written into another file.
    """
    leaves = conn.execute(statements.READ_LEAVES.within(schema), {"schema": schema, "table": table}).all()
    for leaf, file, _, file_now in leaves:
        if file_now != file:
            raise _moved(relation(schema, leaf), is_gone=file_now is None)
    shared = _shared([Extent(leaf, 0, blocks, file) for leaf, file, blocks, _ in leaves], count)
    return [tuple(_slice(schema, each) for each in share) for share in shared]


def refuse_other_file(part: Slice, file_now: int | None) -> None:
    """Raise StorageUnavailable unless the blocks of this slice lie in this file."""
    if part.file != file_now:
        raise _moved(part.relation, is_gone=False)


def by_transactions(schema: str, table: str, low: int, high: int, count: int) -> list[Share]:
    """The rows of these transactions, in up to so many shares."""
    count = max(min(count, high - low), 1)
    bounds = [low + (high - low) * number // count for number in range(count + 1)]
    return [(Slice(relation(schema, table), xids=xids),) for xids in pairwise(bounds)]


def of_survey(schema: str, found: Sequence[Survey], low: int, high: int, count: int) -> list[Share]:
    """Return the surveyed rows in up to this many shares of about as many blocks each."""
    shared = _shared([each.extent for each in found], count)
    return [tuple(replace(_slice(schema, each), xids=(low, high)) for each in share) for share in shared]


def survey(conn: Connection, schema: str, table: str, low: int, high: int) -> list[Survey]:
    """Find the blocks with the rows of these transactions."""
    found = statements.BY_TRANSACTION[table].survey.within(schema)
    rows = conn.execute(found, {"low": low, "high": high})
    return [Survey(leaf, count, int(first), int(last), file) for leaf, file, count, first, last in rows]


def _moved(relation: str, *, is_gone: bool) -> StorageUnavailable:
    how = "was dropped" if is_gone else "was written into another file (VACUUM FULL, CLUSTER, TRUNCATE, pg_repack)"
    return StorageUnavailable(
        f"{relation}: {how} meanwhile, and the rows of the snapshot are elsewhere or gone; nothing of it was read: run "
        "the same again, within a new snapshot"
    )


def _slice(schema: str, of: Extent) -> Slice:
    return Slice(relation(schema, of.leaf), blocks=(of.first, of.end), file=of.file)


def _shared(extents: Sequence[Extent], count: int) -> list[list[Extent]]:
    """Lay blocks end to end, and cut them into this many shares of about one size."""
    extents = [each for each in extents if each.first < each.end]
    ends = list(accumulate(each.end - each.first for each in extents))
    total = ends[-1] if ends else 0
    count = max(min(count, total), 1)
    return [
        [
            each._replace(first=max(each.first, each.end - end + low), end=min(each.end, each.end - end + high))
            for each, end in zip(extents, ends, strict=True)
            if low < end and high > end - (each.end - each.first)
        ]
        for low, high in pairwise(total * number // count for number in range(count + 1))
    ]
