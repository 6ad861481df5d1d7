"""Columns of a row that have another value in the lake than in the database."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import date
from typing import TYPE_CHECKING, Any
from uuid import UUID

from durable.pipeline.columns import COLUMNS
from durable.pipeline.copying import copy
from durable.pipeline.lake import Lake
from durable.pipeline.lake_digests import ROW_KEYS, Rows, lake_files, readable_batches
from durable.pipeline.lake_tables import DAY_OF, SOURCES
from durable.pipeline.origin import Origin
from durable.storage.archived_content import Key
from durable.storage.slices import Slice, Snapshot, relation
from durable.storage.sql.archive import ERASURE
from durable.storage.sql.times import FIRST, LAST

if TYPE_CHECKING:
    import pyarrow as pa


def differing_columns(
    lake: Lake, of: Rows, origin: Origin, snapshot: Snapshot, day: date, keys: Sequence[Key]
) -> dict[Key, list[str]]:
    """The names of the columns that differ, for each of these rows of a day."""
    wanted = set(keys)
    here = dict(_keyed(_of_database(of, origin, snapshot, day, keys), of, wanted))
    there = dict(_keyed(_of_lake(lake, of, day), of, wanted))
    names = [column.name for column in COLUMNS[SOURCES[of.table]]]
    return {key: [name for name in names if row[name] != there[key][name]] for key, row in here.items() if key in there}


def _keyed(batches: Iterator[pa.RecordBatch], of: Rows, wanted: set[Key]) -> Iterator[tuple[Key, dict[str, Any]]]:
    for batch in batches:
        keys = list(zip(*(batch.column(name).to_pylist() for name in ROW_KEYS[of.table]), strict=True))
        for index, key in enumerate(keys):
            if key in wanted:
                row = batch.slice(index, 1)
                yield key, {name: _value(name, row.column(name)) for name in row.schema.names}


def _value(name: str, one: pa.Array) -> object:
    """A time as its microseconds: not every time of Postgres is a datetime. Of an erasure whether there was one."""
    import pyarrow as pa

    if name == ERASURE:
        return one[0].is_valid
    return one.cast(pa.int64())[0].as_py() if pa.types.is_timestamp(one.type) else one[0].as_py()


def _of_lake(lake: Lake, of: Rows, day: date) -> Iterator[pa.RecordBatch]:
    for file in lake_files(lake, of, day):
        yield from readable_batches(of, file)


def _of_database(
    of: Rows, origin: Origin, snapshot: Snapshot, day: date, keys: Sequence[Key]
) -> Iterator[pa.RecordBatch]:
    source = SOURCES[of.table]
    begin, time = f"CAST('{day} 00:00:00+00' AS timestamptz)", DAY_OF[of.table]
    filters = [f"{ROW_KEYS[of.table][0]} IN ({', '.join(_literal(key[0]) for key in keys)})"]
    if day > FIRST.date():
        filters.append(f"{time} >= {begin}")
    if day < LAST.date():
        filters.append(f"{time} < {begin} + interval '24 hours'")
    columns = [column.sql for column in COLUMNS[source]]
    whole = Slice(relation(origin.schema, source), filters=tuple(filters))
    return copy(origin.url, (whole,), columns, snapshot=snapshot.name)


def _literal(first: bytes | int) -> str:
    """An id, or the number of a letter."""
    return f"'{UUID(bytes=first)}'" if isinstance(first, bytes) else str(first)
