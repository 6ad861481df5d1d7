"""pipeline export: the lake's tables in another format, for readers that do not know Delta."""

from __future__ import annotations

from dataclasses import asdict
from enum import StrEnum
from typing import Annotated

import typer

from durable.cli.output import Cell, Table, print_blocks, print_json
from durable.cli.pipeline.options import LakeUrl, find_lake
from durable.cli.target import Debug, Json
from durable.errors import InvalidSetting
from durable.pipeline.lake import SOURCES, LakeTable
from durable.pipeline.session import needs_spark
from durable.settings import load_settings


class Format(StrEnum):
    ICEBERG = "iceberg"


FormatName = Annotated[Format, typer.Option("--format", help="iceberg: metadata about the same files, no copies")]


def export(lake: LakeUrl = None, target: FormatName = Format.ICEBERG, json: Json = False, debug: Debug = False) -> None:
    """Update the Iceberg tables in LAKE/iceberg to the state of the lake. Run it after archive, compact and erase."""
    found = find_lake(lake, load_settings())
    with needs_spark():
        from durable.pipeline.iceberg import export as export_table
    tables: list[LakeTable] = [table for table in SOURCES if found.exists(table)]
    if not tables:
        raise InvalidSetting(f"lake {found.url}: the lake is empty; fill it with durable-agent pipeline archive")
    done = [export_table(found, table) for table in tables]
    if json:
        print_json({"lake": found.url, "format": target.value, "tables": [asdict(each) for each in done]})
    else:
        rows: list[list[Cell]] = [[e.table, e.files, e.added, e.removed, e.metadata] for e in done]
        columns = ["table", "files", "added", "removed", "metadata"]
        print_blocks([Table(f"exported {found.url} as {target.value}", columns, rows)])
