"""Purging: what is past its retention leaves the database, once it is in the lake and was compared with it.

    whole days of history    ─┬─ below the offset of the lake ── the same in the lake ──> dropped
    letters that were resolved┘        else nothing is purged     else nothing is purged

Nodes drop nothing of what is archived: so nothing goes that was not compared. Days are not deleted row by row, and the
database looks once more, under the lock of the drop, and refuses a day that holds a row which is not archived.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date, timedelta
from typing import Final, NamedTuple

from sqlalchemy import Connection
from tenacity import Retrying, retry_if_exception_type, stop_after_delay, wait_fixed

from durable.errors import DurableError, InvalidSetting
from durable.grammar import several
from durable.pipeline.copying import opened
from durable.pipeline.lake import Lake
from durable.pipeline.lake_digests import Spark
from durable.pipeline.lake_tables import SOURCES, LakeTable
from durable.pipeline.origin import Origin, alone, locked
from durable.pipeline.own_lake import require_own
from durable.pipeline.progress import Show
from durable.pipeline.status import problem_of
from durable.pipeline.verify import Verified, claimed, verify
from durable.storage import archives, purging

_SHORTEST = timedelta(hours=1)
_ADVICE: Final = "and may ask the history which messages were handled: purge when it has ended, by the same command"


class Retention(NamedTuple):
    """Time for which the database keeps archived rows."""

    history: timedelta
    dead_letters: timedelta
    """After they were resolved."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Purged:
    """Result of a purge: the dropped days and rows."""

    days: Sequence[date]
    rows: int = 0
    """Of history."""
    letters: int = 0


def purge(
    spark: Spark,
    lake: Lake,
    origin: Origin,
    keep: Retention,
    *,
    local_rows: int = 200_000,
    show: Show = lambda done, total: None,
) -> Purged:
    """Drop the days of history, and the resolved letters, that are older than this.

    Up to `local_rows` rows of the lake are read in this process, without Spark. Raises InvalidSetting when a day is not
    archived whole, DurableError when the lake does not hold what it should, ArchiveConflict while a replay is at work;
    nothing is dropped then.
    """
    if keep.history < _SHORTEST:
        raise InvalidSetting(f"--keep: {keep.history} is below an hour, in which messages may still be under way")
    with opened(origin.url) as engine, locked(engine, origin.schema) as conn, alone(conn, origin.schema, _ADVICE):
        work = _Purge(conn, spark, lake, origin, local_rows, show)
        history = work.old_history(keep.history)
        letters = work.old_letters(keep.dead_letters)
        dropped = work.drop_history(history) if history is not None else 0
        if letters is not None:
            letters = purging.drop_resolved_letters(conn, origin.schema, letters, keep.dead_letters)
    return Purged(days=history.days if history else [], rows=dropped, letters=letters or 0)


class _OldHistory(NamedTuple):
    """Rows that may be dropped: they were compared with the lake."""

    days: Sequence[date]
    until: date
    offset: int
    rows: int


class _Purge:
    """Single run of a purge, under the archiver's lock."""

    def __init__(self, conn: Connection, spark: Spark, lake: Lake, origin: Origin, local_rows: int, show: Show) -> None:
        self._conn, self._spark, self._lake, self._origin = conn, spark, lake, origin
        self._local_rows, self._show = local_rows, show

    def old_history(self, keep: timedelta) -> _OldHistory | None:
        """The days that are past this retention; None when there are none."""
        conn, schema = self._conn, self._origin.schema
        offset = self._offset("history")
        until = purging.first_day_kept(conn, schema, keep)
        days = purging.days_older_than(conn, schema, keep)
        if not days and not purging.stray_rows(conn, schema, offset, until):
            return None
        self._refuse_unarchived(offset, until)
        return _OldHistory(days, until, offset, self._compared("history", until).rows)

    def old_letters(self, keep: timedelta) -> int | None:
        """The offset below which letters are archived; None when none is past this retention."""
        offset = self._offset("dead_letters")
        if not purging.resolved_letters(self._conn, self._origin.schema, offset, keep):
            return None
        self._compared("dead_letters", None)
        return offset

    def drop_history(self, old: _OldHistory) -> int:
        """Drop it, and return how many rows went."""
        for done, day in enumerate(old.days):
            self._show(done, len(old.days))
            _drop(self._conn, self._origin.schema, day, done)
        purging.drop_stray_rows(self._conn, self._origin.schema, old.offset, old.until)
        purging.drop_attempts(self._conn, self._origin.schema, old.until)
        return old.rows

    def _offset(self, table: LakeTable) -> int:
        """Return the offset of the archive of this table, which must be in this lake."""
        source = SOURCES[table]
        archive = archives.find(self._conn, self._origin.schema, source)
        if archive is None or archive.ended_at is not None:
            raise InvalidSetting(f"{source} of this database is not archived; run: durable-agent pipeline archive")
        require_own(archive, table, self._lake, self._lake.offset(archive.app_id, table))
        self._lake.create(table)  # a lake of an earlier version gets the columns that it lacks
        offset = self._lake.offset(archive.app_id, table)
        commit_id = self._lake.commit_id(archive.app_id, table)
        problem = problem_of(self._conn, self._origin.schema, archive, offset, commit_id, source)
        if problem is not None:
            raise InvalidSetting(f"{source}: rows were not purged: {problem}")
        archives.confirm(self._conn, self._origin.schema, source, offset)
        return offset

    def _refuse_unarchived(self, offset: int, until: date) -> None:
        unarchived = purging.unarchived_days(self._conn, self._origin.schema, offset, until)
        for day, rows in unarchived.items():
            raise InvalidSetting(
                f"--keep: not all rows are archived: the lake lacks {several(rows, 'rows')} of {day}; "
                "run: durable-agent pipeline archive, or keep more"
            )

    def _compared(self, table: LakeTable, until: date | None) -> Verified:
        claim = claimed(self._origin, self._lake, table)
        verified = verify(
            self._spark,
            self._lake,
            self._origin,
            claim,
            until=until,
            local_rows=self._local_rows,
            show=self._show,
        )
        if not verified.is_whole:
            raise DurableError(
                f"{table}: the lake lacks {several(verified.missing, 'rows')} of what is to be purged, has "
                f"{verified.twice:,} too often, {verified.differing:,} with another content, and "
                f"{several(len(verified.unreadable), 'files')} that cannot be read as "
                "written; nothing was purged, see: durable-agent pipeline verify"
            )
        return verified


def _drop(conn: Connection, schema: str, day: date, done: int) -> None:
    """Drop one day, after a wait of some seconds for transactions that use the history just now."""
    try:
        _patiently(purging.drop_day, conn, schema, day)
    except DurableError as error:
        raise DurableError(f"{several(done, 'days', 'were')} dropped, {day} was not: {error}") from error


_patiently = Retrying(
    retry=retry_if_exception_type(DurableError), wait=wait_fixed(0.1), stop=stop_after_delay(10), reraise=True
)
