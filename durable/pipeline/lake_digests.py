"""The digests of a lake: by tasks that read the files themselves, each some of them, here or on Spark's workers.

    files of the lake ──> shares of some hundred thousand rows ──> tasks: counts and sums by block ──> added up

A file that cannot be read, or is not there, is named; its rows are none. A file whose bytes, or whose statistics in the
log, are not those that were written is named, too: other readers would pass over rows, or read other ones. So are the
files of days without a digest, which only the lake has.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from durable.grammar import several
from durable.pipeline import checksums, places
from durable.pipeline.digests import row_blocks, row_digests
from durable.pipeline.lake import Lake
from durable.pipeline.lake_log import LakeFile, Statistics
from durable.pipeline.lake_tables import SOURCES, LakeTable, Whose, file_schema
from durable.pipeline.progress import Show, collected
from durable.pipeline.session import spark_errors
from durable.storage.archived_content import Block, Digest, Key
from durable.storage.sql import archive as archive_statements

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq
    from pyspark.sql import SparkSession

_SHARE_ROWS: Final = 500_000
_SHARE_FILES: Final = 64
_BATCH_ROWS: Final = 8_192
_WORD: Final = (1 << 64) - 1
_DDL: Final = "day date, side string, number int, rows bigint, digest decimal(20), file string, problem string"

ROW_KEYS: Final[Mapping[LakeTable, Sequence[str]]] = {
    table: archive_statements.KEYS[source] for table, source in SOURCES.items()
}
"""By what a row is known, and found in the other place."""

Spark = Callable[[], "SparkSession"]
"""Opens the session when it is first needed."""


class Rows(NamedTuple):
    """Selected rows of a table of the lake: those of one database below its offset."""

    table_url: str
    table: LakeTable
    whose: Whose
    below: int


@dataclass(slots=True)
class LakeDigests:
    """Digests of files of the lake, by block, and the files that are damaged, each with the reason."""

    blocks: dict[Block, Digest] = field(default_factory=dict)
    unreadable: dict[str, str] = field(default_factory=dict)
    without_checksum: set[str] = field(default_factory=set)
    files: int = 0
    """Files that were read, of so many days."""
    file_days: int = 0

    def add(self, block: Block, rows: int, digest: int) -> None:
        before = self.blocks.get(block, Digest(0, 0))
        self.blocks[block] = Digest(before.rows + rows, (before.digest + digest) & _WORD)

    def include(self, other: LakeDigests) -> None:
        for block, digest in other.blocks.items():
            self.add(block, *digest)
        self.unreadable |= other.unreadable
        self.without_checksum |= other.without_checksum


def lake_digests(
    spark: Spark, lake: Lake, of: Rows, days: Sequence[date], *, reads_all: bool, local_rows: int, show: Show
) -> LakeDigests:
    """The digests of these days, and the damaged files of these days, or with `reads_all` of all.

    Up to `local_rows` rows are read in this process, without Spark.
    """
    digested = frozenset(days)
    files = [file for file in lake_files(lake, of) if reads_all or file.day in digested]
    task = DigestTask(of, tuple(_shares(files)), digested)
    is_here = sum(file.rows or 0 for file in files) <= local_rows
    found = _digested_here(task, show) if is_here else _digested_on_spark(spark, task, show)
    found.files, found.file_days = len(files), len({file.day for file in files})
    return found


def _digested_on_spark(spark: Spark, task: DigestTask, show: Show) -> LakeDigests:
    found = LakeDigests()
    with spark_errors():
        session, count = spark(), len(task.shares)
        frame = session.range(0, count, 1, count).mapInArrow(task, _DDL)
        for row in collected(session, frame, count, show):
            if row.problem is not None:
                found.unreadable[row.file] = row.problem
            elif row.file is not None:
                found.without_checksum.add(row.file)
            else:
                found.add(Block(row.day, row.side, row.number), row["rows"], int(row.digest))
    return found


def lake_files(lake: Lake, of: Rows, day: date | None = None) -> list[LakeFile]:
    """The files of the table, or of a day."""
    return [file for file in lake.logged(of.table) if day is None or file.day == day]


def rows_of_blocks(lake: Lake, of: Rows, day: date, blocks: Sequence[int]) -> Iterator[tuple[Key, int]]:
    """The key of each row of these blocks of a day, and the digest of its content. Passes over unreadable files."""
    for file in lake_files(lake, of, day):
        for batch in readable_batches(of, file):
            chosen = batch.filter(_mask(row_blocks(batch, of.table), blocks))
            keys = zip(*(chosen.column(name).to_pylist() for name in ROW_KEYS[of.table]), strict=True)
            yield from zip(keys, map(int, row_digests(chosen, of.table)), strict=True)


@dataclass(frozen=True, slots=True)
class DigestTask:
    """Work of one Spark task on the numbers of some shares."""

    of: Rows
    shares: tuple[tuple[LakeFile, ...], ...]
    days: frozenset[date]
    """Of which there are digests; files of other days are read only."""

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for number in batch.column(0).to_pylist():
                yield _in_arrow(self.digest(number))

    def digest(self, number: int) -> LakeDigests:
        """Read one share."""
        found = LakeDigests()
        for file in self.shares[number]:
            found.include(self._of_file(file))
        return found

    def _of_file(self, file: LakeFile) -> LakeDigests:
        found = LakeDigests()
        try:
            content = places.read(self.of.table_url, file.path)
            expected = checksums.noted(self.of.table_url, file.path)
            statistics = _Statistics(file.statistics)
            for batch in _batches(content, self.of.table, file):
                statistics.add(batch)
                if file.day in self.days:
                    _count(found, _chosen(batch, self.of), self.of.table, file.day)
        except _UNREADABLE as error:
            return LakeDigests(unreadable={file.path: _reason(error)})
        flaw = _flaw(content, expected, file.size) or statistics.flaw()
        if flaw is not None:
            found.unreadable[file.path] = flaw
        elif expected is None:
            found.without_checksum.add(file.path)
        return found


_UNREADABLE = (OSError, ValueError, NotImplementedError)  # Arrow's errors are of these kinds


def _reason(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _shares(files: Sequence[LakeFile]) -> Iterator[tuple[LakeFile, ...]]:
    gathered: list[LakeFile] = []
    for file in files:
        if gathered and (len(gathered) == _SHARE_FILES or sum(each.rows or 0 for each in gathered) >= _SHARE_ROWS):
            yield tuple(gathered)
            gathered = []
        gathered.append(file)
    if gathered:
        yield tuple(gathered)


def _digested_here(task: DigestTask, show: Show) -> LakeDigests:
    found = LakeDigests()
    for number in range(len(task.shares)):
        show(number, len(task.shares))
        found.include(task.digest(number))
    show(len(task.shares), len(task.shares))
    return found


def _batches(content: bytes, table: LakeTable, file: LakeFile) -> Iterator[pa.RecordBatch]:
    """All rows of one file. Raises one of _UNREADABLE, also for text that could not be decoded later."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    with pq.ParquetFile(pa.BufferReader(content), pre_buffer=False) as parquet:
        _check_counts(parquet.metadata, file.rows)
        _check_columns(parquet.schema_arrow, table)
        for batch in parquet.iter_batches(batch_size=_BATCH_ROWS, use_threads=False):
            rows = _conforming(batch, table)
            rows.validate(full=True)
            yield rows


def _flaw(content: bytes, checksum: str | None, size: int) -> str | None:
    if len(content) != size:
        return f"it has {len(content):,} bytes, and the lake's log says {size:,}"
    if checksum is not None and checksums.of(content) != checksum:
        return checksums.DIFFERS
    return None


class _Statistics:
    """Compares what the log says of the columns of a file, by which readers pass it over, with its rows."""

    def __init__(self, logged: Mapping[str, Statistics]) -> None:
        self._logged = logged
        self._nulls: Counter[str] = Counter()
        self._beyond: str | None = None

    def add(self, rows: pa.RecordBatch) -> None:
        from pyarrow.compute import call_function

        for name in self._logged.keys() & set(rows.schema.names):
            column, (low, high, _) = rows.column(name), self._logged[name]
            self._nulls[name] += column.null_count
            if low is None and high is None:
                continue
            if _kind(column.type) == "timestamp":
                column = column.cast("int64")
            least, most = call_function("min_max", [column]).as_py().values()
            if least is not None and ((low is not None and least < low) or (high is not None and most > high)):
                self._beyond = name

    def flaw(self) -> str | None:
        for name, (_, _, nulls) in sorted(self._logged.items()):
            if name == self._beyond or (name in self._nulls and nulls not in (None, self._nulls[name])):
                return f"the lake's log has other statistics of its column {name}"
        return None


def _conforming(batch: pa.RecordBatch, table: LakeTable) -> pa.RecordBatch:
    """Give rows the columns of today: files of older versions lack some, which are NULL."""
    import pyarrow as pa

    schema = file_schema(table)
    columns = [
        batch.column(field.name).cast(field.type)
        if field.name in batch.schema.names
        else pa.nulls(batch.num_rows, field.type)
        for field in schema
    ]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _chosen(batch: pa.RecordBatch, of: Rows) -> pa.RecordBatch:
    from pyarrow.compute import call_function

    database = batch.column("database")
    conditions = [
        call_function("equal", [batch.column("service"), of.whose.service]),
        call_function("less", [batch.column("xid"), of.below]),
        call_function("or_kleene", [call_function("equal", [database, of.whose.database]), database.is_null()]),
    ]
    mask = conditions[0]
    for condition in conditions[1:]:
        mask = call_function("and", [mask, condition])
    return batch.filter(mask)


def _check_counts(metadata: pq.FileMetaData, expected: int | None) -> None:
    """Arrow would believe damaged counts, and read for ever."""
    if metadata.num_rows != sum(metadata.row_group(number).num_rows for number in range(metadata.num_row_groups)):
        raise ValueError("the counts of its footer contradict each other")
    if expected is not None and metadata.num_rows != expected:
        raise ValueError(f"it holds {several(metadata.num_rows, 'rows')}, and the lake's log says {expected:,}")


def _check_columns(schema: pa.Schema, table: LakeTable) -> None:
    """A damaged name would pass for a column that an older version lacks, and a damaged type for its neighbour."""
    expected = file_schema(table)
    for found in schema:
        if found.name not in expected.names:
            raise ValueError(f"its column {found.name!r} is none of the table's")
        if _kind(found.type) != _kind(expected.field(found.name).type):
            raise ValueError(f"its column {found.name} has the type {found.type}")


def _kind(of: pa.DataType) -> str:
    """The type without what other writers, such as OPTIMIZE on Spark, choose as they like."""
    import pyarrow.types as types

    if types.is_timestamp(of):
        return "timestamp"
    return str(of).removeprefix("large_").removesuffix("_view")


def readable_batches(of: Rows, file: LakeFile) -> Iterator[pa.RecordBatch]:
    """The rows of one file; those behind damage are none."""
    try:
        for batch in _batches(places.read(of.table_url, file.path), of.table, file):
            yield _chosen(batch, of)
    except _UNREADABLE:
        return  # lake_digests() has named it


def _count(found: LakeDigests, batch: pa.RecordBatch, table: LakeTable, day: date) -> None:
    if not batch.num_rows:
        return
    sums: dict[tuple[str, int], list[int]] = defaultdict(lambda: [0, 0])
    sides = batch.column("side").to_pylist()
    for side, block, digest in zip(
        sides, row_blocks(batch, table).tolist(), row_digests(batch, table).tolist(), strict=True
    ):
        entry = sums[side, block]
        entry[0] += 1
        entry[1] += digest
    for (side, block), (rows, digest) in sums.items():
        found.add(Block(day, side, block), rows, digest)


def _mask(blocks: np.ndarray[Any, Any], wanted: Sequence[int]) -> pa.Array:
    import numpy as np
    import pyarrow as pa

    return pa.array(np.isin(blocks, list(wanted)))


def _in_arrow(found: LakeDigests) -> pa.RecordBatch:
    from decimal import Decimal

    import pyarrow as pa

    blocks = [*found.blocks.items()]
    files: list[tuple[str, str | None]] = [*found.unreadable.items()]
    files += [(path, None) for path in found.without_checksum]
    none = [None] * len(files)
    return pa.RecordBatch.from_pydict(
        {
            "day": pa.array([*(block.day for block, _ in blocks), *none], pa.date32()),
            "side": pa.array([*(block.side for block, _ in blocks), *none], pa.string()),
            "number": pa.array([*(block.number for block, _ in blocks), *none], pa.int32()),
            "rows": pa.array([*(digest.rows for _, digest in blocks), *none], pa.int64()),
            "digest": pa.array([*(Decimal(digest.digest) for _, digest in blocks), *none], pa.decimal128(20)),
            "file": pa.array([*([None] * len(blocks)), *(path for path, _ in files)], pa.string()),
            "problem": pa.array([*([None] * len(blocks)), *(reason for _, reason in files)], pa.string()),
        }
    )
