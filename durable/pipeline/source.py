"""The Spark data source `durable`: durable's tables as DataFrames, and DataFrames into the outbox.

    register(spark)                        not needed where durable is installed from a wheel, but for filters
    with consistent(url) as options:                                        one snapshot for all tasks
        spark.read.format("durable").options(**options).option("table", "envelope_history").load()

    spark.readStream.format("durable").option("url", url).option("table", "envelope_history").load()

    option       of a read
    url          the database; default: DURABLE_DATABASE_URL
    schema       the schema that holds durable's tables; default: durable
    table        envelope_history (default) · dead_letters · outgoing_envelopes · incoming_envelopes
    columns      those to read, with commas between them; default: all. Others do not leave the database.
    snapshot     what consistent() gives: without it the table is read by one task, in one statement
    partitions   into how many tasks the table is shared out; default: 8 within a snapshot, 1 without; 4 of a stream
    max_rows     of a stream: about how many rows a micro-batch has
    start        of a stream without a checkpoint: earliest (default) or latest

Readers are in reader and stream, writers in writer; read_options has what a read may be asked for.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
)
from pyspark.sql.types import StructType

from durable.pipeline.copying import opened
from durable.pipeline.read_options import ReadOptions, check_kind, checked
from durable.pipeline.reader import EnvelopeReader, FilteringReader
from durable.pipeline.stream import EnvelopeStreamReader
from durable.pipeline.writer import EnvelopeStreamWriter, EnvelopeWriter
from durable.storage.outages import translated
from durable.storage.slices import exported_snapshot

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["EnvelopeSource", "consistent", "register"]


_PUSHING_WORKER: Final = "pyspark.sql.worker.data_source_pushdown_filters"
"""Spark's worker that asks a reader for its filters. Where they are disabled it refuses a reader that would answer."""


class EnvelopeSource(DataSource):
    """`format("durable")`."""

    @classmethod
    def name(cls) -> str:
        return "durable"

    def schema(self) -> str:
        return ", ".join(column.ddl for column in ReadOptions.parse(self.options).columns)

    def reader(self, schema: StructType) -> DataSourceReader:
        check_kind(self.options, is_stream=False)
        options = ReadOptions.parse(self.options)
        kind = FilteringReader if _PUSHING_WORKER in sys.modules else EnvelopeReader
        return kind(options, checked(schema, options.table))

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        check_kind(self.options, is_stream=True)
        options = ReadOptions.parse(self.options)
        return EnvelopeStreamReader(options, checked(schema, options.table))

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        return EnvelopeWriter(self.options, schema, overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:
        return EnvelopeStreamWriter(self.options, schema, overwrite)


def register(spark: SparkSession) -> None:
    """Make `format("durable")` known to this session, with filters that are answered by Postgres, and the session to
    this thread: Spark looks for sources in the active session of a thread, and a new thread has none.

    A session knows it already where durable is installed from a wheel, and then without such filters.
    """
    spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")
    session: Any = getattr(spark, "_jsparkSession", None)
    if session is not None:  # over Spark Connect there are no threads of the JVM
        session.setActiveSession(session)
    if not _is_known(session):
        spark.dataSource.register(EnvelopeSource)


def _is_known(session: Any) -> bool:
    """Spark logs a warning where a source is registered once more. Over Spark Connect nobody here would see it."""
    return session is not None and bool(session.sessionState().dataSourceManager().dataSourceExists("durable"))


@contextmanager
def consistent(url: str) -> Iterator[dict[str, str]]:
    """Return options for reads that all see the same state of the database, by any number of tasks, while this context
    lasts.

    Vacuum is held back meanwhile. Raises StorageUnavailable.
    """
    with opened(url) as engine, translated(), exported_snapshot(engine) as snapshot:
        yield {"url": url, "snapshot": snapshot.name}
