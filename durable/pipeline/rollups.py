"""Results computed for each day, kept beside the history, so that a report over months reads only days that are new.

    LAKE/history     ──> of the days whose files have changed ──> LAKE/reports/{daily,minutes,nodes,conversations}
    LAKE/reports/... ──> of the days that are asked for ──> DataFrames, to be merged by durable.pipeline.transform

A day is known by the names of its files: the rows of its rollups carry them, and are replaced when they differ.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from typing import TYPE_CHECKING, Final

from durable.errors import InvalidSetting
from durable.pipeline.progress import Show
from durable.pipeline.session import needs_spark

__all__ = ["read"]

with needs_spark():
    import pyarrow as pa
    from deltalake import DeltaTable, write_deltalake
    from pyspark.sql import DataFrame

from durable.pipeline import transform
from durable.pipeline.lake import Lake
from durable.pipeline.unwritable import writing

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


ROLLUPS: Final[Mapping[str, Callable[[DataFrame], DataFrame]]] = {
    "daily": transform.daily,
    "minutes": transform.minutes,
    "nodes": transform.nodes,
    "conversations": transform.threads,
}
_DAYS_AT_ONCE: Final = 30


def bring_up_to_date(
    spark: SparkSession, lake: Lake, since: date | None, until: date | None, show: Show = lambda done, total: None
) -> int:
    """Compute what is new among these days, and forget those that the history has no more, as after a restore.

    Returns how many days that were. Raises as check_place() does.
    """
    check_place(lake)
    files, known = _files_by_day(lake), [_known(lake, each) for each in ROLLUPS]
    stale = sorted(
        day
        for day in set(files).union(*known)
        if (since is None or day >= since) and (until is None or day < until)
        if any(computed.get(day) != files.get(day) for computed in known)
    )
    for first in range(0, len(stale), _DAYS_AT_ONCE):
        show(first, len(stale))
        _replace(spark, lake, stale[first : first + _DAYS_AT_ONCE], files)
    show(len(stale), len(stale))
    return len(stale)


def check_place(lake: Lake) -> None:
    """Raise InvalidSetting for a lake with brackets in its path: delta-rs writes no table of its own there."""
    if "[" in lake.url or "]" in lake.url:
        raise InvalidSetting(f"lake {lake.url}: reports cannot be kept under a path with brackets; move the lake")


def read(
    spark: SparkSession, lake: Lake, rollup: str, since: date | None = None, until: date | None = None
) -> DataFrame:
    """The rows of these days."""
    days = [("day", ">=", since or date.min), ("day", "<", until or date.max)]
    table = DeltaTable(_url(lake, rollup)).to_pyarrow_table(filters=days)
    return spark.createDataFrame(table.drop_columns("files"))


def _replace(spark: SparkSession, lake: Lake, days: Sequence[date], files: Mapping[date, str]) -> None:
    """Each rollup of these days, in one commit each."""
    history = lake.read(spark, "history", days[0]).where(transform.is_of("day", days))
    for name, compute in ROLLUPS.items():
        rows = compute(history).toArrow()
        named = [files[day] for day in rows["day"].to_pylist()]
        predicate = "day IN ({})".format(", ".join(f"'{day}'" for day in days))
        table, url = rows.append_column("files", pa.array(named, pa.string())), _url(lake, name)
        with writing(url):
            known = predicate if DeltaTable.is_deltatable(url) else None
            write_deltalake(url, table, mode="overwrite", partition_by=["day"], predicate=known)


def _known(lake: Lake, rollup: str) -> dict[date, str]:
    """The days that were computed, and the files that they were computed from."""
    url = _url(lake, rollup)
    with writing(url):  # whoever looks for a table makes its folder
        is_there = DeltaTable.is_deltatable(url)
    if not is_there:
        return {}
    rows = DeltaTable(url).to_pyarrow_table(columns=["day", "files"])
    found = rows.group_by("day").aggregate([("files", "min")])
    return dict(zip(found["day"].to_pylist(), found["files_min"].to_pylist(), strict=True))


def _files_by_day(lake: Lake) -> dict[date, str]:
    """The days of the history, each with a name for the set of its files."""
    adds = pa.table(lake.opened("history").get_add_actions(flatten=True))
    by_day: dict[date, list[str]] = {}
    for day, path in zip(adds["partition.day"].to_pylist(), adds["path"].to_pylist(), strict=True):
        by_day.setdefault(day, []).append(path)
    return {day: hashlib.sha256("\n".join(sorted(paths)).encode()).hexdigest() for day, paths in by_day.items()}


def _url(lake: Lake, rollup: str) -> str:
    return f"{lake.url}/reports/{rollup}"
