"""Archiving: history and dead letters into the lake, each row exactly once.

    low   the offset in the lake's own log                                     high   the horizon of one snapshot
          └──────────────── rows of the transactions [low, high) ───────────────────┘
    1. claim       the database notes `high`
    2. write       tasks: COPY from Postgres ──> Parquet files in the lake, which are no part of it yet
    3. count       as many rows as the snapshot has, or nothing happens
    4. commit      the files and the offset `high`, in one commit of the lake             <- from here on it is done
    5. confirm     the database notes that it may let go of what is below `high`
    6. clean       files of attempts that died at or before 4 are removed

Who dies before 4 has done nothing; who dies after it has done everything, and the next run begins with 5. Of two who
archive the same rows the lake accepts one. Below the horizon no row can appear any more, so that a transaction which
commits late is in a later range rather than in none. Data goes from Postgres to the files without passing Spark: its
tasks return only the files' names.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import date
from typing import TYPE_CHECKING
from uuid import uuid4

from sqlalchemy import Connection, Engine

from durable.errors import DurableError, InvalidSetting
from durable.failpoints import failpoint
from durable.pipeline.columns import COLUMNS
from durable.pipeline.copying import copy, opened
from durable.pipeline.files import TaskFiles
from durable.pipeline.lake import SOURCES, DataFile, Lake, LakeTable
from durable.pipeline.origin import Origin, locked
from durable.pipeline.progress import Show, collected
from durable.pipeline.session import spark_errors
from durable.storage import archives, slices
from durable.storage.archives import Archive, Place
from durable.storage.slices import Share, Snapshot, exported_snapshot, join_snapshot

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import SparkSession


_TASK_BLOCKS = 16_384  # 128 MiB: a task of a few seconds, and files of some ten MiB
_MOST_TASKS = 10_000
_FILE_DDL = "path string, day date, rows bigint, size bigint, stats string"


@dataclass(frozen=True, slots=True, kw_only=True)
class Archived:
    """What one run did for one table: rows of the transactions [low, high)."""

    table: str
    low: int
    high: int
    rows: int
    files: int
    size: int


def archive(
    spark: SparkSession,
    lake: Lake,
    table: LakeTable,
    origin: Origin,
    *,
    is_new_lake: bool = False,
    show: Show = lambda done, total: None,
) -> Archived:
    """Bring what was written since the last time into the lake. `is_new_lake` leaves the earlier lake behind.

    Raises ArchiveConflict when somebody else archives this database; InvalidSetting when it is archived elsewhere, or
    was restored to an earlier state; StorageUnavailable.
    """
    with opened(origin.url) as engine, locked(engine, origin.schema) as conn:
        begun = _begun(conn, lake, table, origin, is_new_lake=is_new_lake)
        low = _low(conn, lake, table, origin, begun)
        with exported_snapshot(engine) as snapshot:
            run = _Run(spark, lake, table, origin, begun.app_id, low, snapshot)
            found = run.survey(engine)
            rows = sum(each.rows for each in found)
            if not rows:
                return Archived(table=table, low=low, high=low, rows=0, files=0, size=0)
            archives.claim(conn, origin.schema, SOURCES[table], snapshot.horizon)
            files = run.write(run.share_out(found), show)
        run.check(files, rows)
        failpoint("A1")
        lake.commit(table, files, app_id=begun.app_id, low=low, high=snapshot.horizon)
        failpoint("A2")
        archives.confirm(conn, origin.schema, SOURCES[table], snapshot.horizon)
        run.clean({file.day for file in files})
    size = sum(file.size for file in files)
    return Archived(table=table, low=low, high=snapshot.horizon, rows=rows, files=len(files), size=size)


def _begun(conn: Connection, lake: Lake, table: LakeTable, origin: Origin, *, is_new_lake: bool) -> Archive:
    """From here on maintenance drops nothing of the table that is not archived."""
    source, lake_id = SOURCES[table], lake.create(table)
    app_id = archives.app_id(conn, origin.schema, origin.service, source)
    place = Place(origin.service, app_id, lake.table_url(table), lake_id)
    begun = archives.begin(conn, origin.schema, source, place)
    if begun.lake_id != lake_id and is_new_lake:
        archives.move(conn, origin.schema, source, place)
        begun = archives.begin(conn, origin.schema, source, place)
    if begun.service != origin.service:
        raise InvalidSetting(
            f"service: {source} of this database is archived as {begun.service!r}; leave --service out"
        )
    if begun.lake_id != lake_id:
        raise InvalidSetting(
            f"lake {lake.table_url(table)}: {source} of this database is archived into {begun.lake}; "
            "name that lake, or begin anew in this one with --new-lake"
        )
    return begun


def _low(conn: Connection, lake: Lake, table: LakeTable, origin: Origin, begun: Archive) -> int:
    """Where this run begins. What an earlier one committed without living to say so is said now."""
    low = lake.offset(begun.app_id, table)
    if low > max(begun.claimed_below, begun.archived_below):
        raise InvalidSetting(
            f"lake {lake.table_url(table)}: is at transaction {low}, and this database remembers none beyond "
            f"{begun.claimed_below}: it was restored to an earlier state, and its transactions are numbered as those "
            "before; archive it into another lake, with --new-lake"
        )
    archives.confirm(conn, origin.schema, SOURCES[table], low)
    return low


class _Run:
    """One attempt over one range of transactions."""

    def __init__(
        self,
        spark: SparkSession,
        lake: Lake,
        table: LakeTable,
        origin: Origin,
        app_id: str,
        low: int,
        snapshot: Snapshot,
    ) -> None:
        self._spark, self._lake, self._origin = spark, lake, origin
        self._table: LakeTable = table
        self._snapshot = snapshot
        self._low = low
        self._app = f"{zlib.crc32(app_id.encode()):08x}"
        self._name = f"{self._app}-{low}-{uuid4().hex[:8]}"

    def survey(self, engine: Engine) -> list[slices.Survey]:
        """Where the rows are, as the snapshot has them; in a transaction that ends at once, and its locks with it."""
        with engine.connect().execution_options(isolation_level="REPEATABLE READ") as conn:
            join_snapshot(conn, self._snapshot)
            return slices.survey(conn, self._origin.schema, SOURCES[self._table], self._low, self._snapshot.horizon)

    def share_out(self, found: Sequence[slices.Survey]) -> list[Share]:
        blocks = sum(each.extent.end - each.extent.first for each in found)
        count = min(-(-blocks // _TASK_BLOCKS), _MOST_TASKS)
        return slices.of_survey(self._origin.schema, found, self._low, self._snapshot.horizon, count)

    def write(self, shares: list[Share], show: Show) -> list[DataFile]:
        task = ArchiveTask(
            origin=self._origin,
            table_url=self._lake.table_url(self._table),
            table=self._table,
            shares=tuple(shares),
            snapshot=self._snapshot.name,
            name=self._name,
        )
        with spark_errors():
            numbered = self._spark.range(0, len(shares), 1, len(shares))
            rows = collected(self._spark, numbered.mapInArrow(task, _FILE_DDL), len(shares), show)
        return [DataFile(row.path, row.day, row.rows, row.size, row.stats) for row in rows]

    def check(self, files: Sequence[DataFile], rows: int) -> None:
        """Nothing that this code knows of can make them differ; then it is better to archive nothing."""
        written = sum(file.rows for file in files)
        if written != rows:
            for file in files:
                self._lake.remove(self._table, file.path)
            raise DurableError(f"{self._table}: the tasks wrote {written:,} rows of {rows:,}; nothing was archived")

    def clean(self, days: set[date]) -> None:
        """Remove what attempts of this table have left behind that began at this offset, or before it.

        The offset has passed them, so that none of them can be committed any more, even if its driver still lives.
        """
        for day in days:
            for path in self._lake.unlisted(self._table, day):
                if _is_left_behind(path, self._app, self._low):
                    self._lake.remove(self._table, path)


def _is_left_behind(path: str, app: str, low: int) -> bool:
    """Names are part-<app>-<low>-<attempt>-<task>-<n>.parquet; others are not ours."""
    parts = path.rpartition("/")[2].split("-")
    return len(parts) == 6 and parts[:2] == ["part", app] and parts[2].isdecimal() and int(parts[2]) <= low


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchiveTask:
    """What a worker does with the numbers of some shares: it reads and writes each, and returns its files."""

    origin: Origin
    table_url: str
    table: LakeTable
    shares: tuple[Share, ...]
    snapshot: str
    name: str

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for number in batch.column(0).to_pylist():
                yield self._written(self.shares[number])

    def _written(self, share: Share) -> pa.RecordBatch:
        import pyarrow as pa
        from pyspark import TaskContext

        context = TaskContext.get()
        attempt = context.taskAttemptId() if context is not None else 0
        columns = [column.sql for column in COLUMNS[SOURCES[self.table]]]
        with TaskFiles(self.table_url, self.table, self.origin.service, f"{self.name}-{attempt}") as writing:
            for rows in copy(self.origin.url, share, columns, snapshot=self.snapshot):
                writing.add(rows)
        files = writing.files
        return pa.RecordBatch.from_pydict(
            {
                "path": pa.array([file.path for file in files], pa.string()),
                "day": pa.array([file.day for file in files], pa.date32()),
                "rows": pa.array([file.rows for file in files], pa.int64()),
                "size": pa.array([file.size for file in files], pa.int64()),
                "stats": pa.array([file.stats for file in files], pa.string()),
            }
        )
