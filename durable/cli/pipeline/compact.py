"""pipeline compact · vacuum: few large files instead of many small ones, and no files that nobody needs."""

from __future__ import annotations

from dataclasses import asdict
from datetime import timedelta
from typing import Annotated

import typer

from durable.cli.output import Cell, Table, progress
from durable.cli.pipeline.options import LakeUrl, find_lake
from durable.cli.pipeline.steps import Ended, Step
from durable.cli.target import Debug
from durable.errors import InvalidSetting
from durable.pipeline.lake import SOURCES
from durable.pipeline.session import needs_spark
from durable.settings import load_settings

Above = Annotated[int, typer.Option("--above", min=1, help="compact the days that have more files than this")]
Keep = Annotated[
    float | None,
    typer.Option("--keep", metavar="DAYS", help="days for which replaced files stay; default: pipeline_keep_replaced"),
]


def compact(lake: LakeUrl = None, above: Above = 2, debug: Debug = False) -> Step:
    """Make few large files of many small ones, day by day. Readers and archivers go on meanwhile."""
    found = find_lake(lake, load_settings())
    with needs_spark():
        from durable.pipeline.compaction import compact as compact_table
    yield
    found.require_any()
    done = []
    for table in SOURCES:
        with progress(f"compacting {table}") as show:
            done.append(compact_table(found, table, above=above, show=show))
    rows: list[list[Cell]] = [[each.table, each.days, each.files_before, each.files_after] for each in done]
    return Ended(
        {"lake": found.url, "tables": [asdict(each) for each in done]},
        [Table(f"compacted {found.url}", ["table", "days", "files before", "files after"], rows)],
    )


def vacuum(lake: LakeUrl = None, keep: Keep = None, debug: Debug = False) -> Step:
    """Delete files that compaction or erasure has replaced, once no query can still read them."""
    settings = load_settings()
    found = find_lake(lake, settings)
    kept = settings.pipeline_keep_replaced if keep is None else _days(keep)
    with needs_spark():
        from durable.pipeline.compaction import check_keep
        from durable.pipeline.compaction import vacuum as vacuum_table
    check_keep(kept)
    yield
    found.require_any()
    removed = {table: vacuum_table(found, table, kept) for table in SOURCES}
    rows: list[list[Cell]] = [[table, count] for table, count in removed.items()]
    return Ended(
        {"lake": found.url, "removed": removed}, [Table(f"removed from {found.url}", ["table", "files"], rows)]
    )


def _days(given: float) -> timedelta:
    if not 0 < given <= 36_500:
        raise InvalidSetting(f"--keep: {given:g} is no number of days; write such as 7")
    return timedelta(days=given)
