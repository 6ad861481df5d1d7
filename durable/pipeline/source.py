"""The Spark data source `durable`: durable's tables as DataFrames, and DataFrames into the outbox.

    register(spark)
    with consistent(url) as options:                                        one snapshot for all tasks
        spark.read.format("durable").options(**options).option("table", "envelope_history").load()

    spark.readStream.format("durable").option("url", url).option("table", "envelope_history").load()

    option       of a read
    url          the database; default: DURABLE_DATABASE_URL
    schema       the schema that holds durable's tables; default: durable
    table        envelope_history (default) · dead_letters · outgoing_envelopes · incoming_envelopes
    columns      those to read, with commas between them; default: all. Others do not leave the database.
    snapshot     what consistent() gives: without it the table is read by one task, in one statement
    partitions   slices, each a task of its own; default: 8 within a snapshot, 1 without; 4 of a stream
    max_rows     of a stream: about how many rows a micro-batch has
    start        of a stream without a checkpoint: earliest (default) or latest

Only what both of Spark's sides need is here: readers are in reader and stream, the writers in writer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
)
from pyspark.sql.types import StructType

from durable.errors import InvalidSetting
from durable.pipeline.columns import COLUMNS, READABLE, Column
from durable.settings import load_settings, suggestion
from durable.storage.archive_statements import BY_TRANSACTION

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_KNOWN = ("url", "schema", "table", "columns", "snapshot", "partitions", "max_rows", "start")


class EnvelopeSource(DataSource):
    """`format("durable")`."""

    @classmethod
    def name(cls) -> str:
        return "durable"

    def schema(self) -> str:
        return ", ".join(column.ddl for column in ReadOptions.parse(self.options).columns)

    def reader(self, schema: StructType) -> DataSourceReader:
        from durable.pipeline.reader import EnvelopeReader

        options = ReadOptions.parse(self.options)
        return EnvelopeReader(options, checked(schema, options.table))

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        from durable.pipeline.stream import EnvelopeStreamReader

        options = ReadOptions.parse(self.options)
        return EnvelopeStreamReader(options, checked(schema, options.table))

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        from durable.pipeline.writer import EnvelopeWriter

        return EnvelopeWriter(self.options, schema, overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:
        from durable.pipeline.writer import EnvelopeStreamWriter

        return EnvelopeStreamWriter(self.options, schema, overwrite)


def register(spark: SparkSession) -> None:
    """Make `format("durable")` known to this session, with filters that are answered by Postgres."""
    spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")
    spark.dataSource.register(EnvelopeSource)


@contextmanager
def consistent(url: str) -> Iterator[dict[str, str]]:
    """Options for reads that all see the same state of the database, by any number of tasks, while this lasts.

    Vacuum is held back meanwhile. Raises StorageUnavailable.
    """
    from durable.pipeline.copying import opened
    from durable.storage.database import translated
    from durable.storage.slices import exported_snapshot

    with opened(url) as engine, translated(), exported_snapshot(engine) as snapshot:
        yield {"url": url, "snapshot": snapshot.name}


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadOptions:
    """What a read was asked for."""

    url: str
    schema: str
    table: str
    columns: tuple[Column, ...]
    snapshot: str | None
    partitions: int | None
    max_rows: int | None
    is_latest: bool

    @classmethod
    def parse(cls, options: Mapping[str, str]) -> Self:
        """Raises InvalidSetting, which names the option and what it may be."""
        for name in options:
            if name.lower() not in _KNOWN:
                raise InvalidSetting(f"option {name}: unknown{suggestion(name.lower(), _KNOWN)}")
        given = {name.lower(): value for name, value in options.items()}
        overrides = {"database_url": given.get("url"), "db_schema": given.get("schema")}
        settings = load_settings(**{name: value for name, value in overrides.items() if value is not None})
        if settings.database_url is None:
            raise InvalidSetting("option url: missing; give the database's URL, or set DURABLE_DATABASE_URL")
        table = given.get("table", "envelope_history")
        if table not in READABLE:
            raise InvalidSetting(f"option table: {table!r} is not one of {', '.join(READABLE)}")
        return cls(
            url=settings.database_url.get_secret_value(),
            schema=settings.db_schema,
            table=table,
            columns=_chosen(table, given.get("columns")),
            snapshot=given.get("snapshot"),
            partitions=_count("partitions", given.get("partitions")),
            max_rows=_count("max_rows", given.get("max_rows")),
            is_latest=_start(given.get("start", "earliest")),
        )

    def check_transactions(self) -> None:
        """Raise InvalidSetting unless the table notes the transaction that wrote a row."""
        if self.table not in BY_TRANSACTION:
            raise InvalidSetting(
                f"option table: {self.table} cannot be read as a stream, because its rows go when their work is done; "
                f"use one of {', '.join(BY_TRANSACTION)}"
            )


def checked(schema: StructType, table: str) -> StructType:
    """Spark's schema, which may be the caller's own. Raises InvalidSetting where a column is not the table's."""
    known = {column.name: column for column in COLUMNS[table]}
    for field in schema.fields:
        column = known.get(field.name)
        if column is None:
            raise InvalidSetting(_no_column(table, field.name))
        kind, expected = field.dataType.simpleString(), column.spark_type.lower()
        if kind != expected:
            raise InvalidSetting(
                f"column {field.name}: {table} has it as {expected}, the schema that was given as {kind}; "
                "leave the schema out, and cast"
            )
        if column.is_nullable and not field.nullable:
            raise InvalidSetting(f"column {field.name}: may be NULL in {table}; leave NOT NULL out of the schema")
    return schema


def _chosen(table: str, names: str | None) -> tuple[Column, ...]:
    if names is None:
        return COLUMNS[table]
    known = {column.name: column for column in COLUMNS[table]}
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    for name in wanted:
        if name not in known:
            raise InvalidSetting(f"option columns: {_no_column(table, name)}")
    if not wanted or len(set(wanted)) < len(wanted):
        raise InvalidSetting("option columns: name each column once, such as id,outcome,finished_at")
    return tuple(known[name] for name in wanted)


def _no_column(table: str, name: str) -> str:
    names = [column.name for column in COLUMNS[table]]
    advice = suggestion(name, names) or f"; it has {', '.join(names)}"
    return f"{table} has no column {name!r}{advice}"


def _count(name: str, given: str | None) -> int | None:
    if given is None:
        return None
    if not given.isdecimal() or int(given) < 1:
        raise InvalidSetting(f"option {name}: must be a whole number above 0, not {given!r}")
    return int(given)


def _start(given: str) -> bool:
    if given not in ("earliest", "latest"):
        raise InvalidSetting(f"option start: must be earliest or latest, not {given!r}")
    return given == "latest"


def selected(options: ReadOptions, schema: StructType) -> list[str]:
    """How the columns of this schema are selected."""
    known = {column.name: column.sql for column in COLUMNS[options.table]}
    return [known[name] for name in schema.fieldNames()]
