"""The rows that a lake has already, known by their keys rather than by the numbers of their transactions.

A database that was restored into another cluster numbers its transactions anew, so that a number no longer tells
whether its row was archived. An outcome is written once: its id, side, address, outcome and time are its key. A letter
has a row for each of its states, which are told apart by when it was resolved.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from typing import TYPE_CHECKING, Final, Self

from durable.pipeline import checksums, places
from durable.pipeline.columns import LETTER
from durable.pipeline.lake import Lake
from durable.pipeline.lake_tables import DAY_OF, LakeTable, Whose, file_schema

if TYPE_CHECKING:
    import pyarrow as pa

KEYS: Final[Mapping[LakeTable, tuple[str, ...]]] = {
    "history": ("id", "side", "address", "outcome", "finished_at"),
    "dead_letters": (*LETTER, "replay_count", "resolved_at"),
}


@dataclass(slots=True)
class KnownRows:
    """The keys of one database's rows in a lake, read day by day when they are asked for. Travels to tasks."""

    table_url: str
    table: LakeTable
    whose: Whose
    files: Mapping[date, list[str]]
    _read: dict[date, pa.Table] = field(default_factory=dict, compare=False)

    @classmethod
    def of(cls, lake: Lake, table: LakeTable, whose: Whose) -> Self:
        """Read the current state of the lake."""
        return cls(lake.table_url(table), table, whose, lake.files_by_day(table))

    def without(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        """Return the rows that the lake does not have. `rows` are of the table, in the form that Postgres has them."""
        import pyarrow as pa
        from pyarrow.compute import call_function

        days = rows.column(rows.schema.get_field_index(DAY_OF[self.table])).cast(pa.date32())
        left = []
        for day in days.unique():
            of_day = pa.Table.from_batches([rows.filter(call_function("equal", [days, day]))])
            left.append(unknown(of_day, self._keys(day.as_py()), KEYS[self.table]))
        return (
            pa.concat_tables(left).combine_chunks().to_batches()[0]
            if left and any(map(len, left))
            else rows.slice(0, 0)
        )

    def _keys(self, day: date) -> pa.Table:
        if day not in self._read:
            self._read.clear()  # shares go day by day, and a day may be large
            self._read[day] = self._read_day(day)
        return self._read[day]

    def _read_day(self, day: date) -> pa.Table:
        import pyarrow as pa

        named, schema = list(KEYS[self.table]), file_schema(self.table)
        if not self.files.get(day):
            return pa.schema([schema.field(name) for name in named]).empty_table()
        checksums.check(self.table_url, self.files[day])  # a damaged key would pass a row over that is not there
        files = places.ParquetFiles(self.table_url, self.files[day], schema)
        return files.to_table(columns=named, filter=self.whose.condition())


def unknown(rows: pa.Table, keys: pa.Table, named: Sequence[str]) -> pa.Table:
    """Return the rows whose values in the named columns are none of the keys."""
    import pyarrow as pa

    numbered = _joinable(rows.select(named)).append_column("row", pa.array(range(len(rows)), pa.int64()))
    fresh = numbered.join(_joinable(keys), list(named), join_type="left anti", use_threads=False)
    return rows.take(fresh["row"].sort())


def _joinable(keys: pa.Table) -> pa.Table:
    """Put a value where a key is NULL: NULLs equal no value in a join."""
    import pyarrow as pa
    from pyarrow.compute import call_function

    for index, name in enumerate(keys.schema.names):
        column = keys.column(index)
        if pa.types.is_timestamp(column.type):
            column = call_function("coalesce", [column.cast(pa.int64()), pa.scalar(0, pa.int64())])
        elif pa.types.is_binary(column.type):
            column = call_function("coalesce", [column, pa.scalar(b"", pa.binary())])
        keys = keys.set_column(index, name, column)
    return keys
