"""What commands print: one JSON document, or text: tables on a terminal, aligned columns elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import zip_longest

import msgspec
from rich.console import Console, Group, RenderableType
from rich.table import Table as RichTable
from rich.text import Text

Cell = str | int | None


@dataclass(frozen=True, slots=True)
class Table:
    """Rows under a title. Numbers are aligned to the right; None is shown as nothing."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]


Block = str | Table


def print_json(document: object) -> None:
    """One document: datetimes as ISO 8601 with a zone, durations as the caller made them."""
    print(msgspec.json.format(msgspec.json.encode(document), indent=2).decode())


def print_blocks(blocks: Iterable[Block]) -> None:
    """Lines and tables, one after the other."""
    if sys.stdout.isatty():
        Console().print(rich(blocks))
    else:
        print("\n".join(_plain(block) for block in blocks))


def rich(blocks: Iterable[Block]) -> RenderableType:
    """The same for a terminal."""
    return Group(*(Text(safe(block)) if isinstance(block, str) else _rich_table(block) for block in blocks))


def age(duration: timedelta) -> str:
    """A duration in its largest whole unit, such as "12 s" or "3 h"."""
    seconds = max(0, int(duration.total_seconds()))
    for unit, size in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds // size} {unit}"
    return f"{seconds} s"


def one_line(text: object) -> str:
    """The text without line breaks and without what a terminal would obey."""
    return safe(" ".join(str(text).split()))


def safe(text: str) -> str:
    """Names and reasons come from peers: no escape sequence of theirs may reach a terminal."""
    return "".join(char if char.isprintable() or char == "\n" else "\N{REPLACEMENT CHARACTER}" for char in text)


def _rich_table(table: Table) -> RichTable:
    drawn = RichTable(title=Text(table.title, style="bold"), title_justify="left")
    for column, cells in zip_longest(table.columns, zip(*table.rows, strict=True), fillvalue=()):
        drawn.add_column(str(column), justify="right" if _is_numeric(cells) else "left", overflow="fold")
    for row in table.rows:
        drawn.add_row(*(Text(_shown(cell)) for cell in row))
    return drawn


def _plain(block: Block) -> str:
    if isinstance(block, str):
        return safe(block)
    columns = list(zip(*[table_row(row) for row in (block.columns, *block.rows)], strict=True))
    numeric = [_is_numeric(cells) for cells in zip(*block.rows, strict=True)] or [False] * len(columns)
    widths = [max(map(len, column)) for column in columns]
    lines = [
        "  ".join(
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(line, widths, numeric, strict=True)
        ).rstrip()
        for line in zip(*columns, strict=True)
    ]
    return "\n".join([f"\n{block.title}", *(f"  {line}" for line in lines)])


def table_row(row: Iterable[Cell]) -> list[str]:
    return [_shown(cell) for cell in row]


def _shown(cell: Cell) -> str:
    return "" if cell is None else one_line(cell)


def _is_numeric(cells: Iterable[Cell]) -> bool:
    return all(isinstance(cell, int) for cell in cells)
