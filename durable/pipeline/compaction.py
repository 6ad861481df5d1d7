"""Keeping a lake quick: small files become large ones, and files that no reader needs any more are removed.

    archive, every few minutes ──> many small files of a day ──> compact() ──> few large ones
                                                                    │
                         the small ones stay for readers of older versions, until vacuum() finds them past `keep`

Both are commits of the lake, which appends do not disturb and which disturb no reader: a query goes on with the files
that it has begun with. Rows, offsets and spans stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Final

from durable.errors import InvalidSetting
from durable.pipeline import checksums, places
from durable.pipeline.lake import Lake
from durable.pipeline.lake_tables import LakeTable, file_schema
from durable.pipeline.leftovers import remove_erased
from durable.pipeline.progress import Show
from durable.pipeline.unwritable import writing

TARGET_BYTES: Final = 128 << 20
_HOUR: Final = timedelta(hours=1)
_SHORTEST: Final = _HOUR


@dataclass(frozen=True, slots=True, kw_only=True)
class Compacted:
    """Result of the compaction of one table."""

    table: str
    days: int
    files_before: int
    files_after: int


def compact(lake: Lake, table: LakeTable, *, above: int = 2, show: Show = lambda done, total: None) -> Compacted:
    """Rewrite the days that have more than `above` files into files of some 128 MiB.

    A day that another process compacts at the same time is left to it.
    """
    from deltalake import WriterProperties
    from deltalake.exceptions import CommitFailedError, DeltaError

    crowded = {day: files for day, files in sorted(lake.files_by_day(table).items()) if len(files) > above}
    days = after = 0
    for done, (day, files) in enumerate(crowded.items()):
        show(done, len(crowded))
        after += len(files)
        checksums.check(lake.table_url(table), files)
        try:
            with writing(f"{lake.table_url(table)}/day={day}"):
                metrics = lake.opened(table).optimize.compact(
                    partition_filters=[("day", "=", str(day))],
                    target_size=TARGET_BYTES,
                    writer_properties=WriterProperties(compression="ZSTD"),
                )
        except CommitFailedError:
            remove_erased(lake, table)  # an erasure may have been first, and this has written what it has erased
        except DeltaError as error:
            raise places.ParquetFiles(lake.table_url(table), files, file_schema(table)).named(error) from error
        else:
            after += metrics["numFilesAdded"] - metrics["numFilesRemoved"]
            days += 1
            _note_checksums(lake, table, {*lake.files_by_day(table).get(day, ())} - {*files})
    show(len(crowded), len(crowded))
    return Compacted(table=table, days=days, files_before=sum(map(len, crowded.values())), files_after=after)


def _note_checksums(lake: Lake, table: LakeTable, written: Iterable[str]) -> None:
    """Note those of files that the Delta library has written; archivers note those of their own."""
    for path in written:
        checksums.note_lacking(lake.table_url(table), path)


def vacuum(lake: Lake, table: LakeTable, keep: timedelta) -> int:
    """Remove the files that have been no part of the table for `keep`, and those that dead writers have left with
    content that was erased since; returns how many.

    `keep` ends with a whole hour: the Delta library counts no less. Readers of a version that is older than that may
    miss them. Raises InvalidSetting when `keep` is below an hour.
    """
    check_keep(keep)
    if not lake.exists(table):
        return 0
    from deltalake.exceptions import CommitFailedError

    hours, removed = -(-keep // _HOUR), remove_erased(lake, table)
    with suppress(CommitFailedError), writing(lake.table_url(table)):
        removed += len(lake.opened(table).vacuum(hours, dry_run=False, enforce_retention_duration=False))
    checksums.remove_stray(lake.table_url(table))
    return removed


def check_keep(keep: timedelta) -> None:
    """Raise InvalidSetting when it is below an hour."""
    if keep < _SHORTEST:
        raise InvalidSetting(f"keep: {keep} is below an hour, in which a query may still read files that were replaced")
