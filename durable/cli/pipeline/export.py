"""pipeline export: the lake's tables in another format, for readers that do not know Delta."""

from __future__ import annotations

from dataclasses import asdict
from enum import StrEnum
from typing import Annotated

import typer

from durable.cli.command import reading
from durable.cli.output import Table
from durable.cli.pipeline.options import load_lake
from durable.cli.pipeline.steps import Ended, Step
from durable.errors import InvalidSetting
from durable.pipeline.lake import Lake
from durable.pipeline.lake_tables import SOURCES, LakeTable
from durable.pipeline.session import needs_spark


class Format(StrEnum):
    ICEBERG = "iceberg"


_COLUMNS = ("table", "files", "added", "removed", "metadata")
FormatName = Annotated[Format, typer.Option("--format", help="iceberg: metadata about the same files, no copies")]


@reading(lake=load_lake)
def export(lake: Lake, target: FormatName = Format.ICEBERG) -> Step:
    """Update the Iceberg tables in LAKE/iceberg to the state of the lake. Run it after archive, compact and erase."""
    with needs_spark():
        from durable.pipeline.iceberg import export as export_table
    yield
    tables: list[LakeTable] = [table for table in SOURCES if lake.exists(table)]
    if not tables:
        raise InvalidSetting(f"lake {lake.url}: the lake is empty; fill it with durable-agent pipeline archive")
    done = [export_table(lake, table) for table in tables]
    return Ended(
        {"lake": lake.url, "format": target.value, "tables": [asdict(each) for each in done]},
        [Table.of(f"exported {lake.url} as {target.value}", done, {column: column for column in _COLUMNS})],
    )
