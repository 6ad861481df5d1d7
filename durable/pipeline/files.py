"""The Parquet files that one task writes: one for each day, and for each side of a day.

    Arrow batches ──> parted by day and side ──> gathered into row groups ──> part-<name>-<n>.parquet

A day is a partition of the lake; a file of one side has statistics that let a reader of the other side pass it over.
Within a row group the rows of one message type lie together, and the page index says where.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from datetime import UTC, date, datetime
from typing import TYPE_CHECKING, Any, Final

from durable.errors import DurableError
from durable.pipeline import checksums
from durable.pipeline.checksums import Summed
from durable.pipeline.lake_tables import DAY_OF, DataFile, LakeTable, Whose, file_schema
from durable.pipeline.places import created
from durable.pipeline.unwritable import writing

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

_GROUP_ROWS = 1 << 17
_GROUP_BYTES = 64 << 20
_MOST_OPEN: Final = 64  # files of a task; each gathers a row group in memory
_FEW_VALUES: Final = (
    "service",
    "database",
    "side",
    "outcome",
    "address",
    "message_type",
    "source",
    "content_type",
    "attempts",
    "interruptions",
    "node_id",
    "exception_type",
    "resolution",
    "fingerprint",
)
"""Columns whose values come again and again: the others are not worth a dictionary."""

_STATISTICS: Final = (
    "service",
    "database",
    "side",
    "outcome",
    "address",
    "message_type",
    "finished_at",
    "failed_at",
    "xid",
)
"""By which readers pass files over."""


@dataclass(slots=True)
class _OpenFile:
    path: str
    day: date
    stream: Summed
    writer: pq.ParquetWriter
    described: list[pq.FileMetaData]
    """One, when the writer is closed."""
    closing: ExitStack
    gathered: list[pa.RecordBatch] = field(default_factory=list)
    gathered_rows: int = 0
    gathered_bytes: int = 0
    rows: int = 0

    def add(self, batch: pa.RecordBatch) -> None:
        self.gathered.append(batch)
        self.gathered_rows += batch.num_rows
        self.gathered_bytes += batch.nbytes
        if self.gathered_rows >= _GROUP_ROWS or self.gathered_bytes >= _GROUP_BYTES:
            self.flush()

    def flush(self) -> None:
        """Write what was gathered as one row group."""
        import pyarrow as pa

        if self.gathered:
            rows = _by_type(pa.Table.from_batches(self.gathered))
            self.writer.write_table(rows, row_group_size=self.gathered_rows)
            self.rows += self.gathered_rows
            self.gathered, self.gathered_rows, self.gathered_bytes = [], 0, 0


class TaskFiles:
    """Takes the rows of one task as Postgres gives them. `files` is complete when the context has ended.

    Few files are open at once: one that has had no rows for the longest time is finished, and its day gets another.
    """

    def __init__(self, table_url: str, table: LakeTable, whose: Whose | None, name: str) -> None:
        """Open files for rows. `whose`: the service and the database of the rows that add() takes. `name` must be given
        to no other attempt of any task: a file is never written over.
        """
        self._table_url = table_url
        self._table: LakeTable = table
        self._whose = whose
        self._begun_count = 0
        self._name = name
        self._schema = file_schema(table)
        self._open: dict[tuple[date, str], _OpenFile] = {}
        self._closing = ExitStack()
        self.files: list[DataFile] = []

    def __enter__(self) -> TaskFiles:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self.files += [self._finished(file) for file in self._open.values()]
        finally:
            # What was written without an end is no part of the lake. Of a writer that failed Arrow has no metadata.
            with suppress(DurableError, OSError, RuntimeError):
                self._closing.close()

    def add(self, batch: pa.RecordBatch) -> None:
        """Add rows in the form that Postgres has them."""
        import pyarrow as pa

        whose = [pa.repeat(pa.scalar(name, pa.string()), batch.num_rows) for name in self._whose or ()]
        self.add_whole(pa.RecordBatch.from_arrays([*whose, *batch.columns], schema=self._schema))

    def add_whole(self, batch: pa.RecordBatch) -> None:
        """Add rows in the form that the lake has them."""
        for key, rows in self._by_day_and_side(batch):
            file = self._open.pop(key, None) or self._begun(*key)
            self._open[key] = file  # the last one in the dict is the one that was written to last
            with writing(f"{self._table_url}/{file.path}"):
                file.add(rows)
            if len(self._open) > _MOST_OPEN:
                self.files.append(self._finished(self._open.pop(next(iter(self._open)))))

    def _by_day_and_side(self, batch: pa.RecordBatch) -> Iterator[tuple[tuple[date, str], pa.RecordBatch]]:
        import pyarrow as pa
        from pyarrow.compute import call_function

        days = batch.column(DAY_OF[self._table]).cast(pa.date32())
        sides = batch.column("side")
        for day in days.unique():
            for side in sides.unique():
                here = call_function(
                    "and", [call_function("equal", [days, day]), call_function("equal", [sides, side])]
                )
                rows = batch if here.true_count == batch.num_rows else batch.filter(here)
                if rows.num_rows:
                    yield (day.as_py(), side.as_py()), rows

    def _begun(self, day: date, side: str) -> _OpenFile:
        import pyarrow.parquet as pq

        path = f"day={day}/part-{self._name}-{self._begun_count}.parquet"
        self._begun_count += 1
        closing = self._closing.enter_context(ExitStack())
        stream = Summed(closing.enter_context(created(self._table_url, path)))
        few: Any = [name for name in self._schema.names if name in _FEW_VALUES]
        described: list[pq.FileMetaData] = []
        writer = pq.ParquetWriter(
            stream,
            self._schema,
            compression="zstd",
            use_dictionary=few,
            write_page_index=True,
            metadata_collector=described,
        )
        closing.callback(_close, writer)
        return _OpenFile(path, day, stream, writer, described, closing)

    def _finished(self, file: _OpenFile) -> DataFile:
        with writing(f"{self._table_url}/{file.path}"):
            file.flush()
            _close(file.writer)
            size = file.stream.tell()
            file.closing.close()
        checksums.note(self._table_url, file.path, file.stream.checksum())
        return DataFile(file.path, file.day, file.rows, size, _statistics(file.described[0]))


def _close(writer: pq.ParquetWriter) -> None:
    try:
        writer.close()
    finally:
        writer.is_open = False  # or it would be closed again when it is freed, with a traceback on the standard error


def _by_type(rows: pa.Table) -> pa.Table:
    """Put rows of one message type together, in the order in which they came."""
    from pyarrow.compute import call_function

    types = rows["message_type"].combine_chunks().dictionary_encode()
    return rows if len(types.dictionary) == 1 else rows.take(call_function("sort_indices", [types.indices]))


def _statistics(metadata: pq.FileMetaData) -> str:
    """Return the statistics of a file for Delta, as JSON."""
    low: dict[str, Any] = {}
    high: dict[str, Any] = {}
    nulls: dict[str, int] = {}
    for index, name in enumerate(metadata.schema.names):
        if name in _STATISTICS:
            found = [metadata.row_group(group).column(index).statistics for group in range(metadata.num_row_groups)]
            if all(each is not None and each.has_min_max for each in found):
                low[name] = _in_json(min(each.min for each in found))
                high[name] = _in_json(max(each.max for each in found))
                nulls[name] = sum(each.null_count for each in found)
    return json.dumps({"numRecords": metadata.num_rows, "minValues": low, "maxValues": high, "nullCount": nulls})


def _in_json(value: Any) -> Any:
    return value.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ") if isinstance(value, datetime) else value
