"""Purging: whole days of history leave the database, once they are in the lake and were compared with it.

    a day ── older than the retention ── below the offset of the lake ── the same in the lake ──> detached and dropped
                  else it stays              else nothing is purged        else nothing is purged

Rows are not deleted one by one. The database looks once more, under the lock of the drop, and refuses a day that holds
a row which is not archived. Dead letters are not purged here: they go when they were resolved, archived, and are past
their retention, by the nodes' maintenance.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import date, timedelta
from typing import TYPE_CHECKING

from sqlalchemy import Connection
from tenacity import Retrying, retry_if_exception_type, stop_after_delay, wait_fixed

from durable.errors import DurableError, InvalidSetting
from durable.pipeline.copying import opened
from durable.pipeline.lake import SOURCES, Lake
from durable.pipeline.origin import Origin, locked
from durable.pipeline.progress import Show
from durable.pipeline.verify import Verified, claimed, verify_history
from durable.storage import archives
from durable.storage.archives import Archive

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_SHORTEST = timedelta(hours=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Purged:
    """The days that were dropped, and what was found when they were compared with the lake."""

    days: list[date]
    verified: Verified | None


def purge(
    spark: Callable[[], SparkSession],
    lake: Lake,
    origin: Origin,
    keep: timedelta,
    *,
    show: Show = lambda done, total: None,
) -> Purged:
    """Drop the days of history that ended longer ago than `keep`. `spark` is asked for a session if there are any.

    Raises InvalidSetting when one of them is not archived whole, DurableError when the lake does not have what it
    should; nothing is dropped then.
    """
    if keep < _SHORTEST:
        raise InvalidSetting(f"--keep: {keep} is below an hour, in which messages may still be under way")
    with opened(origin.url) as engine, locked(engine, origin.schema) as conn:
        archive = _archive(conn, lake, origin)
        days = archives.days_older_than(conn, origin.schema, keep)
        if not days:
            return Purged(days=[], verified=None)
        _refuse_unarchived(conn, lake, origin, archive, days)
        of = claimed(conn, lake, "history", origin)
        verified = verify_history(spark(), lake, origin, of, days[0], days[-1] + timedelta(days=1))
        if not verified.is_whole:
            raise DurableError(
                f"the lake lacks {verified.missing:,} rows of these days and has {verified.twice:,} too often; "
                "nothing was purged, see: durable-agent pipeline verify"
            )
        for done, day in enumerate(days):
            show(done, len(days))
            _drop(conn, origin.schema, day, done)
    return Purged(days=days, verified=verified)


def _drop(conn: Connection, schema: str, day: date, done: int) -> None:
    """Wait some seconds for transactions that use the history just now."""
    try:
        _patiently(archives.drop_day, conn, schema, day)
    except DurableError as error:
        raise DurableError(f"{done} days were dropped, {day} was not: {error}") from error


_patiently = Retrying(
    retry=retry_if_exception_type(DurableError), wait=wait_fixed(0.1), stop=stop_after_delay(10), reraise=True
)


def _archive(conn: Connection, lake: Lake, origin: Origin) -> Archive:
    """The archive of the history, which must be in this lake."""
    source = SOURCES["history"]
    archive = archives.find(conn, origin.schema, source)
    if archive is None:
        raise InvalidSetting(f"{source} of this database is not archived; run: durable-agent pipeline archive")
    if not lake.exists("history") or lake.create("history") != archive.lake_id:
        raise InvalidSetting(f"lake {lake.table_url('history')}: {source} is archived into {archive.lake}; name that")
    archives.confirm(conn, origin.schema, source, lake.offset(archive.app_id, "history"))
    return archive


def _refuse_unarchived(conn: Connection, lake: Lake, origin: Origin, archive: Archive, days: list[date]) -> None:
    offset = lake.offset(archive.app_id, "history")
    unarchived = archives.unarchived_days(conn, origin.schema, offset, days[-1] + timedelta(days=1))
    found = [day for day in days if day in unarchived]
    if found:
        raise InvalidSetting(
            f"--keep: it would pass what is archived: {unarchived[found[0]]:,} rows of {found[0]} are not in the lake; "
            "run: durable-agent pipeline archive, or keep more"
        )
