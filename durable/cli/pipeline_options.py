"""What the commands of `durable-agent pipeline` share: where Spark runs, where the lake is, and a progress bar."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from durable.errors import InvalidSetting
from durable.pipeline.lake import Lake
from durable.settings import Settings

Show = Callable[[int, int], None]

Master = Annotated[
    str | None, typer.Option("--master", metavar="URL", help="Spark's master, such as spark://host:7077 [local[*]]")
]
Remote = Annotated[
    str | None, typer.Option("--remote", metavar="URL", help="a Spark Connect server, such as sc://host:15002")
]
LakeUrl = Annotated[
    str | None,
    typer.Option("--lake", metavar="PLACE", help="a folder or an object store's URL, instead of DURABLE_LAKE"),
]


def find_lake(place: str | None, settings: Settings) -> Lake:
    """The lake that is named here, or else in the settings. Raises InvalidSetting."""
    named = place or settings.lake
    if not named:
        raise InvalidSetting("lake: not set; give --lake PLACE or DURABLE_LAKE")
    return Lake(named)


@contextmanager
def progress(what: str) -> Iterator[Show]:
    """A bar on a terminal, on standard error: `show(done, total)`."""
    if not sys.stderr.isatty():
        yield lambda done, total: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as drawn:
        task = drawn.add_task(what, total=None)
        yield lambda done, total: drawn.update(task, completed=done, total=total or None)
