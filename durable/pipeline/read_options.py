"""Options of a read of the data source, and the schema that the caller may give."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Self

from pyspark.sql.types import StructType

from durable.errors import InvalidSetting
from durable.grammar import suggestion
from durable.pipeline.columns import COLUMNS, READABLE, Column
from durable.settings import load_settings
from durable.storage.sql.archive import BY_TRANSACTION

_OF_STREAMS = ("max_rows", "start")
_OF_BATCHES = ("snapshot",)
_KNOWN = ("url", "schema", "table", "columns", "snapshot", "partitions", "max_rows", "start")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadOptions:
    """Options of one read."""

    url: str = field(repr=False)
    schema: str
    table: str
    columns: tuple[Column, ...]
    snapshot: str | None
    partitions: int | None
    max_rows: int | None
    is_latest: bool

    @classmethod
    def parse(cls, options: Mapping[str, str]) -> Self:
        """Parse the options. Raises InvalidSetting, which names the option and the values allowed."""
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


def check_kind(options: Mapping[str, str], *, is_stream: bool) -> None:
    """Raise InvalidSetting where an option is of the other kind of read, which alone obeys it."""
    others, kind = (_OF_BATCHES, "a batch") if is_stream else (_OF_STREAMS, "a stream")
    for name in options:
        if name.lower() in others:
            raise InvalidSetting(f"option {name}: only of {kind}; leave it out")


def checked(schema: StructType, table: str) -> StructType:
    """Return Spark's schema, which may be the caller's own. Raises InvalidSetting where a column is not the table's."""
    known = {column.name: column for column in COLUMNS[table]}
    for wanted in schema.fields:
        column = known.get(wanted.name)
        if column is None:
            raise InvalidSetting(_no_column(table, wanted.name))
        kind, expected = wanted.dataType.simpleString(), column.spark_type.lower()
        if kind != expected:
            raise InvalidSetting(
                f"column {wanted.name}: {table} has it as {expected}, the schema that was given as {kind}; "
                "leave the schema out, and cast"
            )
        if column.is_nullable and not wanted.nullable:
            raise InvalidSetting(f"column {wanted.name}: may be NULL in {table}; leave NOT NULL out of the schema")
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
    """Return the select list for the columns of this schema."""
    known = {column.name: column.sql for column in COLUMNS[options.table]}
    return [known[name] for name in schema.fieldNames()]
