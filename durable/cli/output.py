"""What commands print: one JSON document, or text: tables on a terminal, aligned columns elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
from rich.console import Console, Group, JustifyMethod, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table as RichTable
from rich.text import Text

Cell = str | int | None
Show = Callable[[int, int], None]
"""How many are done, and how many there are."""
_NEVER_FOLDED = 20  # characters, such as those of a fingerprint, which somebody is going to copy


@dataclass(frozen=True, slots=True)
class Table:
    """Rows under a title. Numbers are aligned to the right; None is shown as nothing."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]


Block = str | Table


def print_json(document: object) -> None:
    """One document: datetimes as ISO 8601 in UTC, durations as the caller made them."""
    plain = _in_utc(msgspec.to_builtins(document, builtin_types=(datetime,)))
    print(msgspec.json.format(msgspec.json.encode(plain), indent=2).decode())


def _in_utc(document: Any) -> Any:
    """Drivers give times in the zone of the database, which is that of nobody who reads them."""
    match document:
        case dict():
            return {key: _in_utc(value) for key, value in document.items()}
        case list() | tuple():
            return [_in_utc(value) for value in document]
        case datetime() if document.tzinfo is not None:
            return document.astimezone(UTC)
        case _:
            return document


def print_blocks(blocks: Iterable[Block]) -> None:
    """Lines and tables, one after the other."""
    if sys.stdout.isatty():
        Console().print(rich(blocks))
    else:
        print("\n".join(_plain(block) for block in blocks))


def rich(blocks: Iterable[Block]) -> RenderableType:
    """The same for a terminal."""
    return Group(*(Text(safe(block)) if isinstance(block, str) else _rich_table(block) for block in blocks))


@contextmanager
def progress(verb: str) -> Iterator[Show]:
    """A bar on a terminal, on standard error, so that what is printed can go elsewhere."""
    if not sys.stderr.isatty():
        yield lambda done, total: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as drawn:
        task = drawn.add_task(verb, total=None)
        yield lambda done, total: drawn.update(task, completed=done, total=total or None)


@contextmanager
def phases(verb: str) -> Iterator[Callable[[str], Show]]:
    """A bar that names the phase which runs now: call it with a phase as each begins, and tell how far that is."""
    if not sys.stderr.isatty():
        yield lambda phase: lambda done, total: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as drawn:
        task = drawn.add_task(verb, total=None)

        def begin(phase: str) -> Show:
            drawn.reset(task, description=f"{verb}: {phase}", total=None)
            return lambda done, total: drawn.update(task, completed=done, total=total or None)

        yield begin


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
    for index, (column, is_numeric) in enumerate(zip(table.columns, _numeric(table), strict=True)):
        is_short = all(len(_shown(row[index])) <= _NEVER_FOLDED for row in table.rows)
        justify: JustifyMethod = "right" if is_numeric else "left"
        drawn.add_column(column, justify=justify, overflow="fold", no_wrap=is_short)
    for row in table.rows:
        drawn.add_row(*(Text(_shown(cell)) for cell in row))
    return drawn


def _plain(block: Block) -> str:
    if isinstance(block, str):
        return safe(block)
    lines = [list(block.columns), *([_shown(cell) for cell in row] for row in block.rows)]
    widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
    aligned = [
        "  ".join(
            cell.rjust(width) if is_numeric else cell.ljust(width)
            for cell, width, is_numeric in zip(line, widths, _numeric(block), strict=True)
        ).rstrip()
        for line in lines
    ]
    return "\n".join(["", block.title, *(f"  {line}" for line in aligned)])


def _numeric(table: Table) -> list[bool]:
    """Which of its columns hold numbers."""
    return [all(isinstance(row[index], int) for row in table.rows) for index in range(len(table.columns))]


def _shown(cell: Cell) -> str:
    return "" if cell is None else one_line(cell)
