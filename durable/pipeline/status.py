"""Status of the archive: offsets, the lag, and the transaction that holds it back. Needs no Spark."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date, datetime, timedelta
from typing import NamedTuple

from sqlalchemy import Connection

from durable.errors import InvalidSetting
from durable.pipeline.beginning import PUT_BACK
from durable.pipeline.copying import connection
from durable.pipeline.lake import Lake
from durable.pipeline.lake_tables import SOURCES, LakeTable
from durable.pipeline.own_lake import fault_of
from durable.pipeline.recovering import is_put_back_by_restore, known_gaps, newest_commit
from durable.storage import archives, horizons, migrator, purging
from durable.storage.archives import Archive, Commit
from durable.storage.horizons import Holder
from durable.storage.readiness import veil_of


@dataclass(frozen=True, slots=True, kw_only=True)
class TableStatus:
    """Status of one table. `offset` is that of the lake; None where it is not archived."""

    table: str
    lake: str | None
    offset: int | None
    confirmed: int | None
    """Below it maintenance may drop what is past its retention."""
    archived_at: datetime | None
    lag_rows: int
    lag_age: timedelta | None
    problem: str | None = None
    """Why nothing is archived and nothing dropped before an operator has said what to do."""
    gone: Mapping[date, int] = field(default_factory=dict)
    """Rows that the lake had before it was restored, and the database has no more, by day."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TableGap:
    """Time of which a table's lake lacks rows."""

    table: str
    begin: datetime
    end: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """Status of all archived tables. Rows at or above `horizon` cannot be archived now."""

    horizon: int
    holder: Holder | None
    tables: list[TableStatus]
    gaps: Sequence[TableGap] = ()
    """Times of rows that the lakes lack and the database has dropped, as the database knows them."""
    days_to_purge: Sequence[date] = ()
    """Days of archived history that are past their retention. Only a purge drops them."""


def read_status(url: str, schema: str, lake: Lake | None, keep: timedelta | None = None) -> Status:
    """Read the status of the archive, with the days to purge when `keep` is the retention of history.

    `lake` is needed only for its own offsets. Raises SchemaMismatch, StorageUnavailable and InvalidSetting.
    """
    with connection(url) as conn:
        migrator.check_version(conn, schema)
        noted = {table: _noted(conn, schema, table) for table in SOURCES}
    seen = {table: _seen(lake, table, *noted[table]) for table in SOURCES}
    with connection(url) as conn:
        tables = [_table(conn, schema, table, noted[table].archive, seen[table]) for table in SOURCES]
        is_archived = keep is not None and any(each.table == "history" and each.lake for each in tables)
        return Status(
            horizon=horizons.horizon(conn, schema),
            holder=horizons.holder(conn, schema),
            tables=tables,
            gaps=[
                TableGap(table=table, begin=gap.begin, end=gap.end)
                for table in SOURCES
                for gap in known_gaps(conn, schema, table)
            ],
            days_to_purge=purging.days_older_than(conn, schema, keep) if keep is not None and is_archived else (),
        )


class _Noted(NamedTuple):
    """Archive of a table as the database has noted it; None where the table is not archived now."""

    archive: Archive | None
    newest: Commit | None


class _Seen(NamedTuple):
    """Findings in the lake of an archived table; without a lake that is its own there are none."""

    offset: int | None = None
    commit_id: int | None = None
    fault: str | None = None
    is_put_back: bool = False


def _noted(conn: Connection, schema: str, table: LakeTable) -> _Noted:
    archive = archives.find(conn, schema, SOURCES[table])
    is_archived = archive is not None and archive.ended_at is None
    return _Noted(archive, newest_commit(conn, schema, table) if is_archived else None)


def _seen(lake: Lake | None, table: LakeTable, archive: Archive | None, newest: Commit | None) -> _Seen:
    if lake is None or archive is None or archive.ended_at is not None:
        return _Seen()
    offset = lake.offset(archive.app_id, table)
    if fault := fault_of(archive, table, lake, offset):
        if not lake.tables():
            raise InvalidSetting(f"lake {lake.url}: {fault}")
        return _Seen(fault=f"{lake.url}: {fault}")
    commit_id = lake.commit_id(archive.app_id, table)
    return _Seen(offset, commit_id, is_put_back=is_put_back_by_restore(lake, table, archive, newest))


def _table(conn: Connection, schema: str, table: LakeTable, archive: Archive | None, seen: _Seen) -> TableStatus:
    source = SOURCES[table]
    veil = veil_of(conn, schema)
    if archive is None or archive.ended_at is not None:
        lag = horizons.lag(conn, schema, source, 0 if archive is None else archive.archived_below)
        return TableStatus(
            table=table,
            lake=None,
            offset=None,
            confirmed=None,
            archived_at=None,
            lag_rows=lag.rows,
            lag_age=lag.age,
            problem=veil,
        )
    offset = archive.archived_below if seen.offset is None else seen.offset
    problem = veil or seen.fault or problem_of(conn, schema, archive, offset, seen.commit_id, source)
    if problem is None and seen.is_put_back:
        problem = PUT_BACK
    is_other = archive.identity != archives.identity(conn, schema)  # then no number says what was archived
    lag = horizons.lag(conn, schema, source, 0 if is_other else offset)
    return TableStatus(
        table=table,
        lake=archive.lake,
        offset=offset,
        confirmed=archive.archived_below,
        archived_at=archive.archived_at,
        lag_rows=lag.rows,
        lag_age=lag.age,
        problem=problem,
        gone=archives.gone(conn, schema, source, offset),
    )


def problem_of(
    conn: Connection, schema: str, archive: Archive, offset: int, commit_id: int | None, source: str, *, margin: int = 0
) -> str | None:
    """Return why nothing can be archived or dropped before an operator decides, with what to run; else None.

    `offset` and `commit_id` are those of the lake; `margin` is that of archives.is_numbered_anew().
    """
    if archive.identity != archives.identity(conn, schema) or archives.is_numbered_anew(conn, schema, source, margin):
        return (
            "this is not the database that was archived: it was restored, copied, upgraded or failed over; "
            "run: durable-agent pipeline archive --successor, or --new-lake if the other one still lives"
        )
    is_unknown = commit_id is not None and archives.claimed(conn, schema, source, [commit_id]) is None
    if is_unknown or offset > max(archive.claimed_below, archive.archived_below):
        return (
            "the lake has a commit that this database does not know: it was restored to an earlier state, or copied; "
            "run: durable-agent pipeline archive --successor, or --new-lake if the other one still lives"
        )
    if offset < max(archive.archived_below, archive.lost_below or 0):
        return (
            "the lake ends before what was archived: it was restored to an earlier state; "
            "run: durable-agent pipeline archive, which archives again what is still here"
        )
    return None
