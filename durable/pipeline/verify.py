"""Verifying: is what the database still has, and says is archived, in the lake, once and with the same ids?

    by day and side    counts and sums of ids on both sides, which other sets of ids have only by chance
    where they differ  the rows themselves: which of the database are missing in the lake, and which are there twice

The lake may hold more: what the database has let go of, and what other databases of this service have archived. A lake
that ends before what was archived was restored: what it had beyond its end is missing there, or gone altogether.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date, timedelta
from typing import TYPE_CHECKING

from pyspark.sql.functions import expr
from sqlalchemy import Connection

from durable.errors import InvalidSetting
from durable.pipeline.copying import opened
from durable.pipeline.lake import SOURCES, Lake, LakeTable
from durable.pipeline.origin import Origin
from durable.pipeline.session import spark_errors
from durable.pipeline.source import register
from durable.storage import archives
from durable.storage.archives import DayDigest
from durable.storage.outages import translated
from durable.storage.slices import Snapshot, exported_snapshot, join_snapshot

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """What was found of one table, below the offset of the lake."""

    table: str
    offset: int
    days: int
    rows: int
    missing: int
    """Rows of the database that the lake does not have."""
    twice: int
    """Rows that the lake has more often than the database."""
    gone: Mapping[date, int]
    """Rows that the lake had before it was restored, and the database has no more, by day."""

    @property
    def is_whole(self) -> bool:
        return not self.missing and not self.twice and not self.gone


@dataclass(frozen=True, slots=True, kw_only=True)
class Claimed:
    """What the lake must have of one table: all of `database` below `offset`, less what is `gone`."""

    database: str
    offset: int
    gone: Mapping[date, int]


def claimed(conn: Connection, lake: Lake, table: LakeTable, origin: Origin) -> Claimed:
    """What the database says is archived there. Raises InvalidSetting where it is not, or was another database's."""
    source = SOURCES[table]
    archive = archives.find(conn, origin.schema, source)
    if archive is None:
        raise InvalidSetting(f"{source} of this database is not archived; run: durable-agent pipeline archive")
    if archive.identity != archives.identity(conn, origin.schema):
        raise InvalidSetting(
            f"{source}: this is not the database that was archived into {archive.lake}; run: durable-agent pipeline "
            "archive, which says what to do"
        )
    low = lake.offset(archive.app_id, table)
    return Claimed(
        database=archives.database(conn, origin.schema),
        offset=max(low, archive.archived_below),
        gone=archives.gone(conn, origin.schema, source, low, archive.archived_below),
    )


def verify_history(
    spark: SparkSession, lake: Lake, origin: Origin, of: Claimed, since: date | None = None, until: date | None = None
) -> Verified:
    """History of these days; `since` is included, `until` is not."""
    offset = of.offset
    with opened(origin.url) as engine, translated(), exported_snapshot(engine) as snapshot:
        with engine.connect().execution_options(isolation_level="REPEATABLE READ") as conn:
            join_snapshot(conn, snapshot)
            here = archives.digests(conn, origin.schema, offset, since, until)
        days = sorted({each.day for each in here})
        there = _digests(spark, lake, origin, of, days)
        doubtful = sorted({each.day for each in here if each not in there})
        found = [_compared_day(spark, lake, origin, snapshot, of, day) for day in doubtful]
    return Verified(
        table="history",
        offset=offset,
        days=len(days),
        rows=sum(each.rows for each in here),
        missing=sum(missing for missing, _ in found),
        twice=sum(twice for _, twice in found),
        gone={day: rows for day, rows in of.gone.items() if (since or day) <= day < (until or date.max)},
    )


def verify_letters(spark: SparkSession, lake: Lake, origin: Origin, of: Claimed) -> Verified:
    """Every letter, in the state that it had when it was archived last."""
    offset = of.offset
    with opened(origin.url) as engine, translated(), exported_snapshot(engine) as snapshot:
        here = _here(spark, origin, snapshot, "dead_letters", "letter_id,xid,failed_at").where(f"xid < {offset}")
        there = _there(spark, lake, "dead_letters", origin, of)
        rows, days = here.count(), here.selectExpr("date(failed_at)").distinct().count()
        missing, twice = _compared(here.drop("failed_at"), there, ["letter_id", "xid"])
    return Verified(
        table="dead_letters", offset=offset, days=days, rows=rows, missing=missing, twice=twice, gone=of.gone
    )


def _digests(spark: SparkSession, lake: Lake, origin: Origin, of: Claimed, days: list[date]) -> set[DayDigest]:
    """As archives.digests() has them, of the lake."""
    if not days:
        return set()
    rows = (
        lake.read(spark, "history", days[0], days[-1] + timedelta(days=1))
        .where(_whose(origin, of))
        .groupBy("day", "side")
        .agg(
            expr("count(*) AS rows"),
            expr("sum(CAST(conv(left(hex(id), 16), 16, -10) AS decimal(20))) AS high"),
            expr("sum(CAST(conv(right(hex(id), 16), 16, -10) AS decimal(20))) AS low"),
            expr("sum(CAST(xid AS decimal(20))) AS xids"),
        )
    )
    with spark_errors():
        found = rows.collect()
    return {DayDigest(row.day, row.side, row["rows"], int(row.high), int(row.low), int(row.xids)) for row in found}


def _compared_day(
    spark: SparkSession, lake: Lake, origin: Origin, snapshot: Snapshot, of: Claimed, day: date
) -> tuple[int, int]:
    key = ["id", "side", "address", "outcome", "xid"]
    here = _here(spark, origin, snapshot, "envelope_history", ",".join([*key, "finished_at"])).where(
        f"xid < {of.offset} AND finished_at >= TIMESTAMP '{day} 00:00:00Z' "
        f"AND finished_at < TIMESTAMP '{day + timedelta(days=1)} 00:00:00Z'"
    )
    there = _there(spark, lake, "history", origin, of, day)
    return _compared(here.drop("finished_at"), there, key)


def _here(spark: SparkSession, origin: Origin, snapshot: Snapshot, table: str, columns: str) -> DataFrame:
    register(spark)
    options = {"url": origin.url, "schema": origin.schema, "table": table, "columns": columns}
    return spark.read.format("durable").options(snapshot=snapshot.name, **options).load()


def _there(
    spark: SparkSession, lake: Lake, table: LakeTable, origin: Origin, of: Claimed, day: date | None = None
) -> DataFrame:
    until = None if day is None else day + timedelta(days=1)
    rows = lake.read(spark, table, day, until)
    return rows.where(_whose(origin, of))


def _whose(origin: Origin, of: Claimed) -> str:
    """Rows of older versions of durable do not name their database."""
    return (
        f"service = '{_quoted(origin.service)}' AND xid < {of.offset} "
        f"AND (database = '{_quoted(of.database)}' OR database IS NULL)"
    )


def _compared(here: DataFrame, there: DataFrame, key: list[str]) -> tuple[int, int]:
    """How many rows of `here` are missing there, and how many are there more often."""
    counted = here.groupBy(*key).agg(expr("count(*) AS here"))
    matched = counted.join(there.groupBy(*key).agg(expr("count(*) AS there")), key, "left")
    sums = matched.selectExpr(
        "coalesce(sum(greatest(here - coalesce(there, 0), 0)), 0) AS missing",
        "coalesce(sum(greatest(coalesce(there, 0) - here, 0)), 0) AS twice",
    )
    with spark_errors():
        (row,) = sums.collect()
    return int(row.missing), int(row.twice)


def _quoted(text: str) -> str:
    return text.replace("\\", "\\\\").replace("'", "\\'")
