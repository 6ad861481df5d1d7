"""Options that the commands of `durable-agent pipeline` share: the places of the service, of its lake and of Spark.

@reading(place=load_place)   place: Place        APP:BUS --database --schema --lake --service
@reading(lake=load_lake)     lake: Lake          --lake
@reading(spark=SparkPlace)   spark: SparkPlace   --master --remote
"""

from __future__ import annotations

import logging
import os
import re
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Annotated

import typer

from durable.cli.command import reading
from durable.cli.output import is_debug
from durable.cli.target import Target, load_target
from durable.errors import InvalidSetting
from durable.pipeline.lake import Lake
from durable.pipeline.lake_tables import SOURCES
from durable.pipeline.origin import Origin, find_origin
from durable.pipeline.session import FEW_ROWS, check_session, needs_spark, spark_session
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


@dataclass(frozen=True, slots=True)
class Place:
    """The database of a service, and the lake of its history if one is named."""

    settings: Settings
    lake: Lake | None
    service: str | None

    def require_lake(self) -> Lake:
        """Return the lake. Raises InvalidSetting."""
        return _required(self.lake)

    def find_origin(self) -> Origin:
        """Find the service's tables. Raises InvalidSetting, SchemaMismatch, StorageUnavailable."""
        return find_origin(self.settings, self.service)


@reading(target=load_target)
def load_place(target: Target, lake: LakeUrl = None, service: Service = None) -> Place:
    """Load the settings; the lake and the service are those named here, or else those of the settings and the bus."""
    bus, settings = target
    named = bus.service if service is None and bus is not None else service
    return Place(settings, named_lake(lake, settings), named)


def load_lake(lake: LakeUrl = None) -> Lake:
    """Return the lake that is named here, or else in the settings. Raises InvalidSetting."""
    return find_lake(lake, load_settings())


def find_lake(url: str | None, settings: Settings) -> Lake:
    """Return the lake of this URL, or else of the settings. Raises InvalidSetting."""
    return _required(named_lake(url, settings))


def named_lake(url: str | None, settings: Settings) -> Lake | None:
    """Return the lake of this URL, or else of the settings, if there is one."""
    named = url or settings.lake
    return opened(named) if named else None


def opened(url: str) -> Lake:
    """Return the lake. Unless --debug is given, or RUST_LOG is set, the library of object stores, which loads when it
    is used, does not warn of each place in which it finds no credentials: the error of the command says so.
    """
    if not is_debug():
        os.environ.setdefault("RUST_LOG", "error")
    return Lake(url)


@dataclass(frozen=True, slots=True)
class SparkPlace:
    """The place of Spark: this process, unless another one is named."""

    master: Master = None
    remote: Remote = None

    @property
    def is_named(self) -> bool:
        return self.master is not None or self.remote is not None

    def check(self) -> None:
        """Raise InvalidSetting for what can be known before Spark is started."""
        check_session(self.master, self.remote)

    def few_rows(self, settings: Settings) -> int:
        """Return the number of rows that are read in this process, without Spark: none where Spark's place is named."""
        return 0 if self.is_named else settings.pipeline_local_rows

    def open_session(self, lakes: Sequence[Lake] | None = None) -> SparkSession:
        """Return the existing session, or one whose JVM is silent on this terminal, unless --debug is given.

        `lakes`: all that is going to be read, if that is known; few rows take a JVM that starts quickly. Raises
        InvalidSetting, with what the JVM complained of, when it does not start.
        """
        with needs_spark():
            from py4j.protocol import Py4JError
            from pyspark.errors import PySparkException
        _show_notes(is_debug())
        few = self.few_rows(load_settings())
        settings = FEW_ROWS if few and lakes is not None and row_count(lakes) <= few else {}
        with nullcontext() if is_debug() else _errors_aside() as aside:
            try:
                return spark_session(
                    master=self.master, remote=self.remote, app_name="durable-agent", settings=settings
                )
            except (PySparkException, Py4JError) as error:
                said = _complaint(aside) if aside else None
                raise InvalidSetting(f"Spark did not start: {said or error}; --debug shows all that it said") from error


def row_count(lakes: Iterable[Lake]) -> int:
    """Count the rows of these lakes by their logs."""
    each = {lake.url: lake for lake in lakes}.values()
    return sum(sum(lake.sizes(table).values()) for lake in each for table in SOURCES)


def _required(lake: Lake | None) -> Lake:
    if lake is None:
        raise InvalidSetting("lake: not set; give --lake PLACE or DURABLE_LAKE")
    return lake


def _show_notes(wanted: bool) -> None:
    """pyspark writes a page of JSON beside each error that it raises for an expression, and py4j each traceback of a
    call that a Ctrl-C has ended.
    """
    from pyspark.logger import PySparkLogger

    logging.getLogger("py4j").propagate = wanted
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
