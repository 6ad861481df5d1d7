"""The output of commands: one JSON document, or text: tables on a terminal, aligned columns elsewhere."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from typing import Any, Final
from uuid import UUID

import msgspec
from rich.console import Console, Group, JustifyMethod, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table as RichTable
from rich.text import Text

from durable.grammar import several
from durable.listed import Listed
from durable.plain import plain

Cell = str | int | date | UUID | None
Columns = Mapping[str, str | Callable[[Any], Cell]]
"""Titles of columns, each with a field of the rows or a function of them."""
Show = Callable[[int, int], None]
"""Called with the number done and the total."""
NOT_SHOWN: Final = "not_shown"
"""Part of a document that counts the rows which its lists leave out."""
_NEVER_FOLDED = 20  # characters, such as those of a fingerprint, which users copy

_as_json: ContextVar[bool] = ContextVar("as_json", default=False)
_debug: ContextVar[bool] = ContextVar("debug", default=False)
_app: ContextVar[str | None] = ContextVar("app", default=None)

_RECOMMENDED: Final = re.compile(r"(durable-agent [a-z -]+ )APP:BUS")
"""A command that a text recommends, whatever its application is called."""


@dataclass(frozen=True, slots=True)
class Table:
    """Rows under a title. Numbers are aligned to the right; times are in UTC; None is an empty cell."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    left: int = 0
    """Number of rows that are not shown."""

    @classmethod
    def of(cls, title: str, rows: Iterable[Any] | Listed[Any], columns: Columns) -> Table:
        """Make a table of mappings or objects."""
        shown, left = (rows.rows, rows.left) if isinstance(rows, Listed) else (rows, 0)
        return cls(title, list(columns), [[_value(row, column) for column in columns.values()] for row in shown], left)


Block = str | Table


def print_as_json(wanted: bool) -> None:
    """Choose between JSON and text for `emit`."""
    _as_json.set(wanted)


def is_json() -> bool:
    """Tell whether --json is given."""
    return _as_json.get()


def print_debug(wanted: bool) -> None:
    """Choose whether tracebacks and the output of started processes are shown."""
    _debug.set(wanted)


def is_debug() -> bool:
    """Tell whether --debug is given."""
    return _debug.get()


Lists = Mapping[str, Listed[Any]]
"""Lists of a document, by their names in it."""


def document_of(lists: Lists) -> dict[str, Any]:
    """Write the rows of these lists, and how many rows of each are left out."""
    left = {name: each.left for name, each in lists.items() if each.left}
    return {name: each.rows for name, each in lists.items()} | {NOT_SHOWN: left}


def lists_of(document: Mapping[str, Any], names: Iterable[str]) -> Lists:
    """Return these lists of a document, which may lack some."""
    found = {name: document.get(name, ()) for name in names}
    left = document.get(NOT_SHOWN, {})
    return {name: Listed(rows, len(rows) + left.get(name, 0)) for name, rows in found.items()}


def and_more(left: int) -> str:
    """Say how many rows are not shown, and how to see them."""
    return f"and {left:,} more: raise --limit"


def emit(document: object, *blocks: Block) -> None:
    """Print the result of a command: the document with --json, else the lines and tables.

    A document that is a list has no place for the number of rows that are left out: standard error has it.
    """
    if is_json():
        print_json(document)
        for block in blocks if isinstance(document, list) else ():
            if isinstance(block, Table) and block.left:
                print(f"{block.title}: {and_more(block.left)}", file=sys.stderr)
    else:
        print_blocks(blocks)


_has_printed: ContextVar[bool] = ContextVar("has_printed", default=False)


def begin() -> None:
    """Forget what an earlier command of this process has printed, and its application."""
    _has_printed.set(False)
    _app.set(None)


def name_app(app: str) -> None:
    """Let the commands that are recommended name this application."""
    _app.set(app)


def with_app(text: str) -> str:
    """The text, whose commands name the application of this command, if it has one."""
    app = _app.get()
    return text if app is None else _RECOMMENDED.sub(rf"\1{app}", text)


def print_error(message: str, exit_code: int) -> None:
    """Print the error of a command as its document, unless it has printed one already."""
    if not _has_printed.get():
        print_json({"error": message, "exit_code": exit_code})


def print_json(document: object) -> None:
    """Print one document: datetimes as ISO 8601 in UTC, durations as given."""
    found = _in_utc(msgspec.to_builtins(document, builtin_types=(datetime,), enc_hook=plain))
    text = _writable(msgspec.json.format(msgspec.json.encode(found), indent=2).decode())
    _has_printed.set(True)
    print(text)


def _writable(document: str) -> str:
    """The same document, in characters of standard output alone."""
    try:
        document.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        return json.dumps(json.loads(document), indent=2)
    return document


def _in_utc(document: Any) -> Any:
    """Convert times to UTC: drivers return them in the time zone of the database."""
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
    """Print lines and tables in turn. Lines are not wrapped, so that SQL and ids can be copied."""
    if sys.stdout.isatty():
        for block in blocks:
            Console().print(rich([block]), soft_wrap=isinstance(block, str))
    else:
        print(with_app("\n".join(_plain(block) for block in blocks)))


def rich(blocks: Iterable[Block]) -> RenderableType:
    """Render lines and tables for a terminal."""
    return Group(*(Text(with_app(safe(block))) if isinstance(block, str) else _rich_table(block) for block in blocks))


@contextmanager
def progress(verb: str) -> Iterator[Show]:
    """Draw a bar on standard error if that is a terminal; standard output can be redirected."""
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
    """Write a duration in its largest whole unit, such as "12 s" or "3 h"."""
    seconds = max(0, int(duration.total_seconds()))
    for unit, size in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds // size} {unit}"
    return f"{seconds} s"


def counted(count: int, noun: str) -> str:
    """Write a count with its noun, such as "1 letter" or "no letter"."""
    return several(count, f"{noun}s") if count else f"no {noun}"


def done_of(done: int, total: int, noun: str) -> str:
    """Write how many of a total are done, such as "2 of 3 letters"."""
    return f"{done:,} of {counted(total, noun)}" if total else counted(total, noun)


def utc(moment: datetime) -> str:
    """Write a time to the second, in UTC."""
    return f"{moment.astimezone(UTC):%Y-%m-%d %H:%M:%SZ}"


def one_line(text: object) -> str:
    """Remove line breaks, and characters that a terminal would obey."""
    return safe(" ".join(str(text).split()))


def safe(text: str) -> str:
    """Replace characters that a terminal would obey: names and reasons come from peers."""
    return "".join(char if char.isprintable() or char == "\n" else "\N{REPLACEMENT CHARACTER}" for char in text)


def _rich_table(table: Table) -> RichTable:
    drawn = RichTable(title=Text(table.title, style="bold"), title_justify="left")
    for index, (column, is_numeric) in enumerate(zip(table.columns, _numeric(table), strict=True)):
        is_short = all(len(_shown(row[index])) <= _NEVER_FOLDED for row in table.rows)
        justify: JustifyMethod = "right" if is_numeric else "left"
        drawn.add_column(column, justify=justify, overflow="fold", no_wrap=is_short)
    for row in table.rows:
        drawn.add_row(*(Text(_shown(cell)) for cell in row))
    if table.left:
        drawn.caption, drawn.caption_justify = Text(and_more(table.left)), "left"
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
    left = [and_more(block.left)] if block.left else []
    return "\n".join(["", block.title, *(f"  {line}" for line in (*aligned, *left))])


def _numeric(table: Table) -> list[bool]:
    """Tell for each column whether it holds numbers."""
    return [all(isinstance(row[index], int) for row in table.rows) for index in range(len(table.columns))]


def _value(row: Any, column: str | Callable[[Any], Cell]) -> Cell:
    if callable(column):
        return column(row)
    value: Cell = row[column] if isinstance(row, Mapping) else getattr(row, column)
    return value


def _shown(cell: Cell) -> str:
    if isinstance(cell, datetime):
        return utc(cell)
    return "" if cell is None else one_line(cell)
