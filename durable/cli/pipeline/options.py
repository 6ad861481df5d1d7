"""Options that the commands of `durable-agent pipeline` share: the places of Spark and of the lake."""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import IO, TYPE_CHECKING, Annotated

import typer

from durable.errors import InvalidSetting
from durable.pipeline.lake import SOURCES, Lake
from durable.pipeline.session import FEW_ROWS, needs_spark, spark_session
from durable.settings import Settings, load_settings

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Master = Annotated[
    str | None, typer.Option("--master", metavar="URL", help="master of Spark, such as spark://host:7077 [local[*]]")
]
Remote = Annotated[
    str | None, typer.Option("--remote", metavar="URL", help="a Spark Connect server, such as sc://host:15002")
]
LakeUrl = Annotated[
    str | None,
    typer.Option("--lake", metavar="PLACE", help="folder, or URL of an object store, instead of DURABLE_LAKE"),
]
Service = Annotated[
    str | None,
    typer.Option("--service", metavar="NAME", help="service of the history, where neither APP:BUS nor a node names it"),
]

_ERROR = re.compile(r'^(?:Exception in thread "main" (?:[\w.$]+: )?|\S+ \S+ ERROR \S+ )(.+)$', re.MULTILINE)


def find_lake(place: str | None, settings: Settings) -> Lake:
    """The lake that is named here, or else in the settings. Raises InvalidSetting."""
    named = place or settings.lake
    if not named:
        raise InvalidSetting("lake: not set; give --lake PLACE or DURABLE_LAKE")
    return Lake(named)


def open_session(
    master: str | None, remote: str | None, *, debug: bool, lakes: Sequence[Lake] | None = None
) -> SparkSession:
    """The session that is there, or one whose JVM says nothing on this terminal, unless everything is asked for.

    `lakes`: all that is going to be read, if that is known; few rows take a JVM that starts quickly. Raises
    InvalidSetting, with what the JVM complained of, when it does not start.
    """
    with needs_spark():
        from py4j.protocol import Py4JError
        from pyspark.errors import PySparkException
    _show_queries(debug)
    few = few_rows(load_settings(), master, remote)
    settings = FEW_ROWS if few and lakes is not None and row_count(lakes) <= few else {}
    with nullcontext() if debug else _errors_aside() as aside:
        try:
            return spark_session(master=master, remote=remote, app_name="durable-agent", settings=settings)
        except (PySparkException, Py4JError) as error:
            said = _complaint(aside) if aside else None
            raise InvalidSetting(f"Spark did not start: {said or error}; --debug shows all that it said") from error


def few_rows(settings: Settings, master: str | None, remote: str | None) -> int:
    """Return the number of rows that are read in this process, without Spark: none where Spark's place is named."""
    return settings.pipeline_local_rows if master is None and remote is None else 0


def row_count(lakes: Iterable[Lake]) -> int:
    """Count the rows of these lakes by their logs."""
    each = {lake.url: lake for lake in lakes}.values()
    return sum(sum(lake.sizes(table).values()) for lake in each for table in SOURCES)


def _show_queries(wanted: bool) -> None:
    """pyspark writes a page of JSON beside each error that it raises for an expression."""
    from pyspark.logger import PySparkLogger

    for name in ("SQLQueryContextLogger", "DataFrameQueryContextLogger"):
        PySparkLogger.getLogger(name).disabled = not wanted


@contextmanager
def _errors_aside() -> Iterator[IO[bytes]]:
    """Collect the standard error of processes that are started meanwhile in a file without a name."""
    sys.stderr.flush()
    kept = os.dup(2)
    with tempfile.TemporaryFile() as aside:
        os.dup2(aside.fileno(), 2)
        try:
            yield aside
        finally:
            os.dup2(kept, 2)
            os.close(kept)


def _complaint(aside: IO[bytes]) -> str | None:
    """The first error of what a JVM wrote there."""
    aside.seek(0)
    found = _ERROR.search(aside.read().decode(errors="replace"))
    return found[1] if found else None
