"""pipeline compact · vacuum: few large files instead of many small ones, and no files that nobody needs."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from durable.cli.arguments import parse_days
from durable.cli.command import reading
from durable.cli.output import Table, progress
from durable.cli.pipeline.options import load_lake
from durable.cli.pipeline.steps import Ended, Step
from durable.pipeline.lake import Lake
from durable.pipeline.lake_tables import SOURCES
from durable.pipeline.session import needs_spark
from durable.settings import load_settings

Above = Annotated[int, typer.Option("--above", min=1, help="compact the days that have more files than this")]
Keep = Annotated[
    float | None,
    typer.Option("--keep", metavar="DAYS", help="days for which replaced files stay; default: pipeline_keep_replaced"),
]


@reading(lake=load_lake)
def compact(lake: Lake, above: Above = 2) -> Step:
    """Make few large files of many small ones, day by day. Readers and archivers go on meanwhile."""
    with needs_spark():
        from durable.pipeline.compaction import compact as compact_table
    yield
    lake.require_any()
    done = []
    for table in SOURCES:
        with progress(f"compacting {table}") as show:
            done.append(compact_table(lake, table, above=above, show=show))
    columns = {"table": "table", "days": "days", "files before": "files_before", "files after": "files_after"}
    return Ended(
        {"lake": lake.url, "tables": [asdict(each) for each in done]},
        [Table.of(f"compacted {lake.url}", done, columns)],
    )


@reading(lake=load_lake)
def vacuum(lake: Lake, keep: Keep = None) -> Step:
    """Delete files that compaction or erasure has replaced, once no query can still read them."""
    kept = load_settings().pipeline_keep_replaced if keep is None else parse_days(keep, option="--keep")
    with needs_spark():
        from durable.pipeline.compaction import check_keep
        from durable.pipeline.compaction import vacuum as vacuum_table
    check_keep(kept)
    yield
    lake.require_any()
    removed = {table: vacuum_table(lake, table, kept) for table in SOURCES}
    return Ended(
        {"lake": lake.url, "removed": removed},
        [Table(f"removed from {lake.url}", ["table", "files"], [*removed.items()])],
    )
