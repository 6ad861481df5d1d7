"""Rows of the lake without the content of chosen messages: files are written anew, and take the place of the old ones.

    file ──> is it as it was written? ──no──> DurableError: damage may hide the rows that are looked for
                   │ yes
                   └──> are there rows of these ids or keys? ──no──> stays
                                   │ yes
                                   └──> the same rows, content emptied ──> new files ──> one commit: old out, new in

What is emptied is what the database empties, with the same values, so that both still compare as equal.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from itertools import chain
from typing import TYPE_CHECKING, Any, Final
from uuid import UUID

from durable.errors import DurableError
from durable.pipeline import places
from durable.pipeline.checksums import Compared
from durable.pipeline.files import TaskFiles
from durable.pipeline.lake import Lake
from durable.pipeline.lake_tables import DataFile, LakeTable, Whose, file_schema

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.dataset as ds

EMPTIED: Final[Mapping[LakeTable, Mapping[str, Any]]] = {
    "history": dict.fromkeys(("partition_key", "error", "headers", "body")),
    "dead_letters": {
        **dict.fromkeys(("partition_key", "traceback", "message_digest", "resolution_reason", "edited_body")),
        **dict.fromkeys(("ordering_key", "fair_key")),
        "headers": "{}",
        "body": b"",
        "reason": "erased",
        "replayable": False,
    },
}
"""The columns that hold content, and what they hold afterwards."""

_BATCH_ROWS: Final = 1 << 14


@dataclass(frozen=True, slots=True)
class Wanted:
    """The rows whose content goes: of these ids or keys, unless it has gone before."""

    ids: Sequence[UUID] = ()
    keys: Sequence[str] = ()
    whose: Sequence[Whose] = ()
    """Owners of the rows; none: of any owner. Rows of the first version, which name no database, are of each database
    of their service."""

    def condition(self) -> ds.Expression:
        import pyarrow as pa
        import pyarrow.dataset as ds

        chosen = ds.field("id").isin(pa.array([each.bytes for each in self.ids], pa.binary())) | ds.field(
            "partition_key"
        ).isin(pa.array(list(self.keys), pa.string()))
        found = chosen & ds.field("erasure_id").is_null()
        if not self.whose:
            return found
        databases = pa.array([whose.database for whose in self.whose], pa.string())
        owned = ds.field("database").isin(databases) | ds.field("database").is_null()
        return found & (ds.field("service") == self.whose[0].service) & owned

    def mask(self, rows: pa.RecordBatch) -> pa.Array:
        """Return the mask of the matching rows."""
        import pyarrow as pa
        import pyarrow.compute

        pc: Any = pyarrow.compute  # its functions are made at run time, and no type checker knows them
        by_id = pc.is_in(rows["id"], value_set=pa.array([each.bytes for each in self.ids], pa.binary()))
        by_key = pc.is_in(rows["partition_key"], value_set=pa.array(list(self.keys), pa.string()))
        found = pc.and_(pc.or_(by_id, by_key), pc.is_null(rows["erasure_id"]))
        if self.whose:
            databases = pa.array([whose.database for whose in self.whose], pa.string())
            owned = pc.or_(pc.is_in(rows["database"], value_set=databases), pc.is_null(rows["database"]))
            found = pc.and_(pc.and_(found, owned), pc.equal(rows["service"], self.whose[0].service))
        return pc.fill_null(found, False)


def count(lake: Lake, table: LakeTable, wanted: Wanted, compared: Compared) -> Counter[Whose]:
    """Count the matching rows of the table, by service and database."""
    found: Counter[Whose] = Counter()
    for path in _sound_paths(lake, table, compared):
        rows = _dataset(lake, table, path).to_table(columns=["service", "database"], filter=wanted.condition())
        found.update(Whose(row["service"], row["database"]) for row in rows.to_pylist())
    return found


def count_erased(lake: Lake, table: LakeTable, below: Mapping[UUID, int]) -> Counter[UUID] | None:
    """Count the rows of the table that these erasures have emptied, of the transactions below those named.

    None when a file cannot be read; verify() names it.
    """
    import pyarrow.dataset as ds

    found: Counter[UUID] = Counter()
    paths = [*lake.sizes(table)]
    if not (paths and below):
        return found
    data = places.ParquetFiles(lake.table_url(table), paths, file_schema(table))
    erased = ds.field("erasure_id").is_valid()
    try:
        for rows in data.to_batches(columns=["erasure_id", "xid"], filter=erased):
            for erasure, xid in zip(*(column.to_pylist() for column in rows.columns), strict=True):
                found[UUID(bytes=erasure)] += xid < below.get(UUID(bytes=erasure), 0)
    except DurableError:
        return None
    return found


def erased_rows(lake: Lake, table: LakeTable, columns: Sequence[str], compared: Compared) -> Iterator[pa.RecordBatch]:
    """Yield these columns of the rows of the table that were emptied."""
    import pyarrow.dataset as ds

    for path in _sound_paths(lake, table, compared):
        yield from _dataset(lake, table, path).to_batches(
            columns=list(columns), filter=ds.field("erasure_id").is_valid()
        )


def rewritten(
    lake: Lake, table: LakeTable, wanted: Wanted, erasure_id: UUID, name: str, compared: Compared
) -> tuple[list[tuple[date, str]], list[DataFile]]:
    """The files that hold such rows, and those that are to take their place; no commit has done so yet."""
    replaced: list[tuple[date, str]] = []
    written: list[DataFile] = []
    by_day = lake.files_by_day(table)
    compared.check(lake.table_url(table), chain.from_iterable(by_day.values()))
    for day, paths in by_day.items():
        for path in paths:
            data = _dataset(lake, table, path)
            if data.count_rows(filter=wanted.condition()):
                with TaskFiles(lake.table_url(table), table, None, f"{name}-{len(replaced)}") as writing:
                    for rows in data.to_batches(batch_size=_BATCH_ROWS):
                        writing.add_whole(_emptied(rows, table, wanted, erasure_id))
                replaced.append((day, path))
                written += writing.files
    return replaced, written


def _emptied(rows: pa.RecordBatch, table: LakeTable, wanted: Wanted, erasure_id: UUID) -> pa.RecordBatch:
    import pyarrow as pa
    from pyarrow.compute import call_function

    mask = wanted.mask(rows)
    for name, value in {**EMPTIED[table], "erasure_id": erasure_id.bytes}.items():
        index = rows.schema.get_field_index(name)
        emptied = pa.scalar(value, rows.schema.field(name).type)
        column = call_function("if_else", [mask, emptied, rows.column(index)])
        rows = rows.set_column(index, rows.schema.field(name), column)
    return rows


def _sound_paths(lake: Lake, table: LakeTable, compared: Compared) -> list[str]:
    """The files of the table, all of which are as they were written."""
    paths = [*lake.sizes(table)]
    compared.check(lake.table_url(table), paths)
    return paths


def _dataset(lake: Lake, table: LakeTable, path: str) -> places.ParquetFiles:
    return places.ParquetFiles(lake.table_url(table), [path], file_schema(table))
