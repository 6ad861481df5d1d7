"""Archiving: history and dead letters into the lake, each row exactly once.

    low   the offset in the lake's own log                                     high   the horizon of one snapshot
          └──────────────── rows of the transactions [low, high) ───────────────────┘
    1. claim       the database notes `high`, the number of the commit, and how many rows of which days are archived
    2. write       tasks: COPY from Postgres ──> Parquet files in the lake, which are no part of it yet
    3. count       as many rows as the snapshot has, or nothing happens
    4. commit      the files and the offset `high`, in one commit of the lake             <- from here on it is done
    5. confirm     the database notes that it may let go of what is below `high`
    6. clean       files of attempts that died at or before 4 are removed

Who dies before 4 has done nothing; who dies after it has done everything, and the next run begins with 5. Of two who
archive the same rows the lake accepts one. Below the horizon no row can appear any more, so that a transaction which
commits late is in a later range rather than in none. Data goes from Postgres to the files without passing Spark: its
tasks return only the files' names, and few rows need no Spark at all.

A database that succeeds another one (restored from a dump, upgraded, failed over) begins a new generation of
transaction numbers. Numbers of earlier generations tell nothing of what was archived, so its first run reconciles:

    rows of earlier generations ──> those that the lake does not have, by their keys ──> one commit, up to the new base

A lake that is behind what was archived from here was restored itself. What Postgres still has is archived again, up to
where the lake had been, before anything new is; what is gone on both sides is named then, and kept as a gap with the
next commit: an audit must not take such rows for lost messages.
"""

from __future__ import annotations

import secrets
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import date, timedelta
from typing import TYPE_CHECKING, NamedTuple
from uuid import uuid4

from sqlalchemy import Connection, Engine

from durable.errors import DurableError
from durable.failpoints import failpoint
from durable.grammar import several
from durable.pipeline import lost_lives, readdressed, recovering
from durable.pipeline.beginning import NO_WISH, Wish, begin
from durable.pipeline.columns import COLUMNS
from durable.pipeline.compaction import compact
from durable.pipeline.copying import copy, opened
from durable.pipeline.files import TaskFiles
from durable.pipeline.foreign import Parted
from durable.pipeline.known import KnownRows
from durable.pipeline.lake import Lake
from durable.pipeline.lake_marks import Whole
from durable.pipeline.lake_tables import SOURCES, DataFile, LakeTable, Whose
from durable.pipeline.origin import Origin, hashed, locked
from durable.pipeline.progress import Show, collected
from durable.pipeline.session import spark_errors
from durable.pipeline.spans import NO_SPAN, Gap, Span, merged
from durable.storage import archives, horizons, slices
from durable.storage.archives import LakeEnd
from durable.storage.readiness import refuse_veil
from durable.storage.slices import Share, Snapshot, exported_snapshot, joined

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import SparkSession


_TASK_BLOCKS = 16_384  # 128 MiB: a task of a few seconds, and files of some ten MiB
_MOST_TASKS = 10_000
_QUIET = timedelta(minutes=1)  # of a service that has nothing to archive, until the lake says so
_FILE_DDL = "path string, day date, rows bigint, size bigint, stats string"

Spark = Callable[[], "SparkSession"]
"""Opens the session when it is first needed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Archived:
    """Result of one run for one table: rows of the transactions [low, high)."""

    table: str
    low: int
    high: int
    rows: int = 0
    files: int = 0
    size: int = 0
    known: int = 0
    """Rows of earlier generations that the lake had already."""
    gone: Mapping[date, int] = field(default_factory=dict)
    """Rows that the lake had before it was restored, and the database has no more, by day."""
    foreign: Sequence[Gap] = ()
    """Times of which only the lake had rows, archived in a lost life of the database, and has lost some of them."""
    lost: Mapping[date, int] = field(default_factory=dict)
    """Rows that a successor found in the lake alone, and which are listed there, by day."""
    was_restored: bool = False
    """True if the lake ended before the end that the database knew."""


def archive(
    spark: Spark,
    lake: Lake,
    table: LakeTable,
    origin: Origin,
    *,
    wish: Wish = NO_WISH,
    local_rows: int = 200_000,
    compact_above: int | None = 100,
    show: Show = lambda done, total: None,
) -> Archived:
    """Bring what was written since the last time into the lake.

    The rows of a database that has taken the place of another one are archived unless the lake has them. Up to
    `local_rows` rows are read in this process, without Spark. Days with more than `compact_above` files are compacted
    afterwards.

    Raises ArchiveConflict when somebody else archives this database; InvalidSetting when it is archived elsewhere, or
    is not the database that was archived; StorageUnavailable.
    """
    schema, source = origin.schema, SOURCES[table]
    with _telling_of_move(lake) as moved_from, opened(origin.url) as engine, locked(engine, schema) as conn:
        begun, left, former = begin(engine, conn, lake, table, origin, wish)
        moved_from += [] if former is None else [former]
        low, base = lake.offset(begun.app_id, table), archives.generation_base(conn, schema)
        whose = Whose(origin.service, archives.database(conn, schema))
        running = horizons.running(conn, schema)
        before = lake.span(table, whose)
        if low < base and table == "dead_letters":
            recovering.renew_letters(conn, lake, origin, whose)
        noted = archives.foreign(conn, schema, source, begun.lake_id)
        if noted and (begun.lost_below is not None or not lost_lives.has_list(lake, table, whose)):
            Parted(lake, table, whose, since=0, below=low).name_noted(conn, origin, noted)
        end = LakeEnd(begun.lake_id, low, before.until)  # an archiver that is killed leaves the lake with another one
        foreign = recovering.note_foreign_gaps(conn, origin, table, end)
        dropped = [] if begun.lost_below is None else recovering.note_dropped_gaps(conn, origin, table, end)
        begins_at = horizons.begins_at(conn, schema)
        with exported_snapshot(engine) as snapshot:
            run = _Run(conn, engine, spark, local_rows, lake, table, origin, whose, begun.app_id, snapshot, show)
            with joined(engine, snapshot) as seen:
                horizon = horizons.horizon(seen, schema)
            if table == "history":  # before the rows: an audit meanwhile must know where they went
                readdressed.note(conn, schema, lake, whose)
            done = run.repeat(low, base, begun.lost_below or 0)
            reached = done[-1].high if done else low
            gone = archives.gone(conn, schema, source, reached)
            recovering.note_gone(conn, origin, table, gone, before.until, archives.lost_ends(conn, schema, source))
            gaps = recovering.gaps(conn, origin, table, before.until)
            span = Span(begins_at, begun.complete_until(horizon, running), gaps)
            done.append(run.archive(reached, horizon, span))
        archives.note_look(conn, schema, source, running, horizon)
        if begun.lost_below is not None:
            archives.settle(conn, schema, source)
        for part in done:
            run.clean(part)
        if compact_above is not None and any(part.files for part in done):
            compact(lake, table, above=compact_above)
    return Archived(
        table=table,
        low=low,
        high=done[-1].high,
        rows=sum(part.rows for part in done),
        files=sum(len(part.files) for part in done),
        size=sum(file.size for part in done for file in part.files),
        known=sum(part.known for part in done),
        gone=dict(sorted((Counter(left) + Counter(gone)).items())),
        foreign=merged([*foreign, *(gap for gap in dropped if gap.begin.date() not in gone)]),
        lost=lost_lives.by_day(lake, table, whose) if wish.is_successor else {},
        was_restored=begun.lost_below is not None,
    )


@contextmanager
def _telling_of_move(lake: Lake) -> Iterator[list[str]]:
    """End an error with what has become of the database, whose former lake is put into the list when it has moved."""
    moved_from: list[str] = []
    try:
        yield moved_from
    except DurableError as error:
        if not moved_from:
            raise
        raise type(error)(
            f"{error}; the database has moved to lake {lake.url} all the same: run the same command again, which goes "
            f"on there, or go back by --new-lake --lake {moved_from[0]}"
        ) from error.__cause__


class _Part(NamedTuple):
    """Archived part of the transactions [low, high)."""

    low: int
    high: int
    rows: int = 0
    known: int = 0
    files: Sequence[DataFile] = ()


@dataclass(frozen=True)
class _Run:
    """Attempt of an archive run, within one snapshot."""

    conn: Connection
    engine: Engine
    spark: Spark
    local_rows: int
    lake: Lake
    table: LakeTable
    origin: Origin
    whose: Whose
    app_id: str
    snapshot: Snapshot
    show: Show

    @property
    def _app(self) -> str:
        return hashed(self.app_id)

    def repeat(self, low: int, base: int, lost_below: int) -> list[_Part]:
        """Archive again what the lake has lost, and what of earlier generations it does not have.

        The end of what was lost is the end of a part, so that it can be told how many rows came back.
        """
        parts: list[_Part] = []
        for high in sorted({end for end in (base, lost_below) if end > low}):
            first = 0 if not parts and low < base else low
            parts.append(self.archive(low, high, NO_SPAN, first=first, reconciles=high <= base))
            low = high
        return parts

    def archive(self, low: int, high: int, span: Span, *, first: int | None = None, reconciles: bool = False) -> _Part:
        """Bring the rows of these transactions into the lake, from `first` on; with `reconciles` only those that it
        does not have.
        """
        schema, source = self.origin.schema, SOURCES[self.table]
        first = low if first is None else first
        with joined(self.engine, self.snapshot) as seen:
            found = slices.survey(seen, schema, source, first, high)
            refuse_veil(seen, schema)  # its locks keep policies as they were for the survey
        rows = sum(each.rows for each in found)
        if not rows and span is not NO_SPAN and not self._has_marks(span):
            return _Part(low, low)
        commit_id = secrets.randbits(62)
        archives.claim(self.conn, schema, source, high, commit_id)
        shares = slices.of_survey(schema, found, first, high, _task_count(found)) if rows else []
        name = f"{self._app}-{low}-{uuid4().hex[:8]}"
        with self.lake.removed_unless_written(self.table, name):
            written = self._write(shares, rows, name, reconciles=reconciles)
            files = [file for file in written if file.path]
            known = sum(file.rows for file in written if not file.path)
            self._check(files, rows - known)
            counts: Counter[date] = Counter()
            for file in files:
                counts[file.day] += file.rows
            archives.note_commit(self.conn, schema, source, low, high, counts)
        failpoint("A1")
        with self.lake.removed_unless_committed(self.table, files):
            self.lake.commit(
                self.table,
                files,
                app_id=self.app_id,
                low=low,
                high=high,
                commit_id=commit_id,
                whole=Whole(self.whose, span),
            )
        failpoint("A2")
        archives.confirm(self.conn, schema, source, high)
        return _Part(low, high, rows - known, known, files)

    def _has_marks(self, span: Span) -> bool:
        """Tell whether an audit would gain from a mark that no row has come since, or from one of a gap."""
        _, until, gaps = self.lake.span(self.table, self.whose)
        if merged([*gaps, *span.gaps]) != gaps:
            return True
        return span.until is not None and (until is None or span.until - until > _QUIET)

    def _write(self, shares: list[Share], rows: int, name: str, *, reconciles: bool) -> Sequence[DataFile]:
        """The files, and one without a path for the rows of each share that the lake has already."""
        task = ArchiveTask(
            origin=self.origin,
            whose=self.whose,
            table_url=self.lake.table_url(self.table),
            table=self.table,
            shares=tuple(shares),
            snapshot=self.snapshot.name,
            name=name,
            known=KnownRows.of(self.lake, self.table, self.whose) if reconciles else None,
        )
        if rows <= self.local_rows:
            return _written_here(task, self.show)
        with spark_errors():
            spark = self.spark()
            numbered = spark.range(0, len(shares), 1, len(shares))
            files = collected(spark, numbered.mapInArrow(task, _FILE_DDL), len(shares), self.show)
        return [DataFile(row.path, row.day, row.rows, row.size, row.stats) for row in files]

    def _check(self, files: Sequence[DataFile], rows: int) -> None:
        """Compare the number of rows written with those counted. No known cause makes them differ, so a difference
        archives none.
        """
        written = sum(file.rows for file in files)
        if written != rows:
            raise DurableError(
                f"{self.table}: the tasks wrote {several(written, 'rows')} of {rows:,}; nothing was archived"
            )

    def clean(self, part: _Part) -> None:
        """Remove what attempts of this table have left behind that began at this offset, or before it.

        The offset has passed them, so that none of them can be committed any more, even if its driver still lives.
        """
        for day in {file.day for file in part.files}:
            for path in self.lake.unlisted(self.table, day):
                if _is_left_behind(path, self._app, part.low):
                    self.lake.remove(self.table, path)


def _task_count(found: Sequence[slices.Survey]) -> int:
    blocks = sum(each.extent.end - each.extent.first for each in found)
    return min(-(-blocks // _TASK_BLOCKS), _MOST_TASKS)


def _is_left_behind(path: str, app: str, low: int) -> bool:
    """Tell whether a file was left behind by an earlier attempt. Only names of the form
    part-<app>-<low>-<attempt>-<task>-<n>.parquet are durable's.
    """
    parts = path.rpartition("/")[2].split("-")
    return len(parts) == 6 and parts[:2] == ["part", app] and parts[2].isdecimal() and int(parts[2]) <= low


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchiveTask:
    """Work of one Spark task: read and write each of some shares, and return their files."""

    origin: Origin
    whose: Whose
    table_url: str
    table: LakeTable
    shares: tuple[Share, ...]
    snapshot: str
    name: str
    known: KnownRows | None = None
    """What is passed over, because the lake has it."""

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        import pyarrow as pa

        for batch in batches:
            for number in batch.column(0).to_pylist():
                files = self.write(number)
                yield pa.RecordBatch.from_pydict(
                    {
                        "path": pa.array([file.path for file in files], pa.string()),
                        "day": pa.array([file.day for file in files], pa.date32()),
                        "rows": pa.array([file.rows for file in files], pa.int64()),
                        "size": pa.array([file.size for file in files], pa.int64()),
                        "stats": pa.array([file.stats for file in files], pa.string()),
                    }
                )

    def write(self, number: int) -> list[DataFile]:
        """Read and write one share."""
        share, name = self.shares[number], f"{self.name}-{_attempt(number)}"
        columns = [column.sql for column in COLUMNS[SOURCES[self.table]]]
        known = 0
        with TaskFiles(self.table_url, self.table, self.whose, name) as writing:
            for rows in copy(self.origin.url, share, columns, snapshot=self.snapshot):
                fresh = rows if self.known is None else self.known.without(rows)
                known += rows.num_rows - fresh.num_rows
                if fresh.num_rows:
                    writing.add(fresh)
        return [*writing.files, *([DataFile("", date.min, known, 0, "")] if known else [])]


def _attempt(number: int) -> int:
    """A number that no other attempt of any task has within its run."""
    if "pyspark" not in sys.modules:
        return number
    from pyspark import TaskContext

    context = TaskContext.get()
    return context.taskAttemptId() if context is not None else number


def _written_here(task: ArchiveTask, show: Show) -> list[DataFile]:
    files: list[DataFile] = []
    for number in range(len(task.shares)):
        show(number, len(task.shares))
        files += task.write(number)
    show(len(task.shares), len(task.shares))
    return files
