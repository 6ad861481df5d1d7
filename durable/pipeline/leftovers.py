"""Files with erased content that no commit names: writers have left them that died, or whose commit was refused.

    orphan of a table ──> holds rows whose content the table has erased since ─────────> removed
                     ├──> is of this database's archiver, whose lock is held here ─────> removed
                     ├──> cannot be read, and was written to within the last hour ─────> its writer may live: stays
                     └──> anything else ───────────────────────────────────────────────> stays

Of a writer that is at work no file is removed that could still become part of the table: rows that are erased in the
table, and not in the file, were read before the erasure, whose commit replaced the files that they were read from. So
the commit of a compaction or another erasure that holds such rows is refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

from durable.errors import DurableError
from durable.pipeline import checksums, places
from durable.pipeline.blanking import Wanted, erased_rows
from durable.pipeline.checksums import Compared
from durable.pipeline.lake import Lake
from durable.pipeline.lake_digests import ROW_KEYS
from durable.pipeline.lake_tables import LakeTable, file_schema
from durable.pipeline.places import StoredFile

if TYPE_CHECKING:
    import pyarrow as pa

_BUSY: Final = timedelta(hours=1)
"""A file that nobody has written to for so long, and that cannot be read, is of a writer that died."""
_ARCHIVED: Final = re.compile(r"part-(?P<app>[0-9a-f]{8})-\d+-[0-9a-f]{8}-\d+-\d+\.parquet")
_REWRITTEN: Final = re.compile(
    r"part-(?P<app>[0-9a-f]{8})-\d+-x[0-9a-f]{7}-\d+-\d+\.parquet"  # by an erasure
    r"|part-\d{5}-[0-9a-f-]{36}-c\d+.*\.parquet(#\d+)?"  # by a compaction; the number while it is written
)


@dataclass(frozen=True, slots=True)
class Scrubbed:
    """Result of a search for files with erased content."""

    removed: int = 0
    busy: int = 0
    """Files that another process may be writing now."""

    def __add__(self, other: Scrubbed) -> Scrubbed:
        return Scrubbed(self.removed + other.removed, self.busy + other.busy)


def remove_erased(lake: Lake, table: LakeTable) -> int:
    """Remove the orphans that hold rows whose content the table has erased since; returns how many."""
    return _remove(lake, table, _Judge(lake, table, Compared())).removed


def remove_all(lake: Lake, table: LakeTable, apps: Sequence[str], wanted: Wanted, compared: Compared) -> Scrubbed:
    """Remove these, those of this database's archivers, and those that hold wanted rows.

    `apps`: the names under which files of this database are written. Its lock must be held, and the table must have no
    wanted row any more.
    """
    return _remove(lake, table, _Judge(lake, table, compared, apps, wanted))


def _remove(lake: Lake, table: LakeTable, judge: _Judge) -> Scrubbed:
    done = Scrubbed()
    for file in lake.orphans(table):
        verdict = judge.of(file)
        if verdict.removed:
            lake.remove(table, file.path)
        done += verdict
    return done


_REMOVED, _STAYS, _BUSY_NOW = Scrubbed(removed=1), Scrubbed(), Scrubbed(busy=1)


class _Judge:
    """Decides about one orphan after another."""

    def __init__(
        self,
        lake: Lake,
        table: LakeTable,
        compared: Compared,
        apps: Sequence[str] = (),
        wanted: Wanted | None = None,
    ) -> None:
        self._lake, self._compared, self._apps, self._wanted = lake, compared, apps, wanted
        self._table: LakeTable = table
        self._table_url = lake.table_url(table)
        self._columns = ("service", "database", *ROW_KEYS[table])

    @cached_property
    def _erased(self) -> set[tuple[Any, ...]]:
        """The keys of the rows that the table has erased. Raises DurableError, which names it, for a damaged file."""
        return {*self._keys(erased_rows(self._lake, self._table, self._columns, self._compared))}

    def of(self, file: StoredFile) -> Scrubbed:
        name = file.path.rpartition("/")[2]
        archived, rewritten = _ARCHIVED.fullmatch(name), _REWRITTEN.fullmatch(name)
        known = archived or rewritten
        if known is not None and known["app"] in self._apps:
            return _REMOVED
        erased = self._erased
        try:
            return _REMOVED if self._holds(file, erased) else _STAYS
        except FileNotFoundError:
            return _STAYS  # its writer has removed it
        except (OSError, ValueError, DurableError):  # Arrow's errors are of these kinds, or in one line
            if rewritten is None:  # an archiver of another database holds no row of this one
                return _STAYS
        return _BUSY_NOW if datetime.now(UTC) - file.modified < _BUSY else _REMOVED

    def _holds(self, file: StoredFile, erased: set[tuple[Any, ...]]) -> bool:
        """Tell whether a file holds rows that are erased, or wanted."""
        for rows in self._rows(file):
            if self._wanted is not None and self._wanted.mask(rows).true_count:
                return True
            whole = rows.filter(rows["erasure_id"].is_null())
            if not erased.isdisjoint(self._keys([whole.select(self._columns)])):
                return True
        return False

    def _rows(self, file: StoredFile) -> Iterator[pa.RecordBatch]:
        """The rows of a file that has the columns of the table; none of another file. Raises DurableError where its
        bytes are not those that were written: it counts as one that cannot be read.
        """
        import pyarrow.parquet as pq

        with places.opened(self._table_url, file.path) as stream, pq.ParquetFile(stream, pre_buffer=False) as parquet:
            if not {*self._columns, "partition_key"} <= set(parquet.schema_arrow.names):
                return
        checksums.check(self._table_url, [file.path])
        yield from places.ParquetFiles(self._table_url, [file.path], file_schema(self._table)).to_batches()

    def _keys(self, batches: Sequence[pa.RecordBatch] | Iterator[pa.RecordBatch]) -> Iterator[tuple[Any, ...]]:
        for rows in batches:
            yield from zip(*(rows.column(name).to_pylist() for name in self._columns), strict=True)
