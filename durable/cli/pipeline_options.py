"""What the commands of `durable-agent pipeline` share: where Spark runs, and where the lake is."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Annotated

import typer

from durable.errors import InvalidSetting
from durable.pipeline.lake import Lake
from durable.pipeline.session import spark_session
from durable.settings import Settings

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

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
Service = Annotated[
    str | None,
    typer.Option("--service", metavar="NAME", help="whose history it is, where neither APP:BUS nor a node tells"),
]


def find_lake(place: str | None, settings: Settings) -> Lake:
    """The lake that is named here, or else in the settings. Raises InvalidSetting."""
    named = place or settings.lake
    if not named:
        raise InvalidSetting("lake: not set; give --lake PLACE or DURABLE_LAKE")
    return Lake(named)


def open_session(master: str | None, remote: str | None, *, debug: bool) -> SparkSession:
    """A session whose JVM says nothing on this terminal, unless everything is asked for."""
    with nullcontext() if debug else _errors_to_nowhere():
        return spark_session(master=master, remote=remote, app_name="durable-agent")


@contextmanager
def _errors_to_nowhere() -> Iterator[None]:
    """What a process that is started meanwhile writes on standard error goes into a file without a name."""
    sys.stderr.flush()
    kept = os.dup(2)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
