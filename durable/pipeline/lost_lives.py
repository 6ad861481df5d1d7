"""Rows of lost lives: the lake has them, and the database that wrote them was put back to before them.

    archive --successor ──> LAKE/lost/history-<database>.parquet         the keys of such rows, and no content
                            LAKE/lost/dead_letters-<database>.parquet            │
                                                      audit <────────────────────┘

The rows stay in the lake: they tell what happened. What they tell of is undone in their database, so that they are no
end of a message. Each `--successor` writes the list anew, and passes over rows that the database has again. A lake that
was put back to before that, or is of an older version, gets its list from the times that the database has noted.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from datetime import date
from typing import TYPE_CHECKING, Final

from durable.errors import DurableError
from durable.pipeline import known, places
from durable.pipeline.columns import LETTER
from durable.pipeline.lake import Lake
from durable.pipeline.lake_tables import DAY_OF, LakeTable, Whose, file_schema, spark_schema
from durable.pipeline.unwritable import in_one_line
from durable.storage.days import midnight

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

KEYS: Final[dict[LakeTable, Sequence[str]]] = {"history": known.KEYS["history"], "dead_letters": LETTER}
"""Of a letter those of all its states: where the lake loses the newest one, the database still has the letter."""

_FOLDER: Final = "lost"


def has_list(lake: Lake, table: LakeTable, whose: Whose) -> bool:
    """Tell whether the lake has a list of this database; it may be empty."""
    return _path(table, whose) in paths(lake, table)


def read(lake: Lake, table: LakeTable, whose: Whose) -> pa.Table:
    """Return the keys of the lost rows of a database that the lake names so far. Raises DurableError for a file that
    cannot be read.
    """
    return _read(lake, table, [_path(table, whose)] if has_list(lake, table, whose) else [])


def damage(lake: Lake, table: LakeTable, whose: Whose) -> dict[str, str]:
    """Return the file of a database that cannot be read, as its path within the lake, and why."""
    try:
        read(lake, table, whose)
    except DurableError as error:
        return {_path(table, whose): in_one_line(str(error.__context__ or error))}
    return {}


def by_day(lake: Lake, table: LakeTable, whose: Whose) -> dict[date, int]:
    """Count the lost rows of a database that the lake names so far, by day."""
    import pyarrow as pa

    days = read(lake, table, whose).column(DAY_OF[table]).cast(pa.date32())
    return dict(sorted((each["values"], each["counts"]) for each in days.value_counts().to_pylist()))


def write(lake: Lake, table: LakeTable, whose: Whose, lost: pa.Table) -> None:
    """Let the lake name these rows, and no others of this database."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    named = lost.select(KEYS[table]).append_column("service", pa.repeat(whose.service, len(lost)))
    with places.replaced(lake.url, _path(table, whose)) as stream:
        pq.write_table(named.select(_schema(table).names).cast(_schema(table)), stream, compression="zstd")


def keys(lakes: Iterable[Lake], table: LakeTable, since: date | None = None) -> pa.Table:
    """Read the keys of this day and later ones that any of these lakes names, with the service."""
    import pyarrow as pa
    import pyarrow.dataset as ds

    of_days = None if since is None else ds.field(DAY_OF[table]) >= midnight(since)
    return pa.concat_tables(
        [_schema(table).empty_table(), *(_read(lake, table, paths(lake, table), of_days) for lake in lakes)]
    )


def rows(spark: SparkSession, lakes: Iterable[Lake], table: LakeTable) -> DataFrame | None:
    """Read the keys that any of these lakes names, each once, with the service; None where there are none."""
    files = {places.hadoop(f"{lake.url}/{path}") for lake in lakes for path in paths(lake, table)}
    if not files:
        return None
    wanted = ", ".join(each for each in spark_schema(table).split(", ") if each.split()[0] in _schema(table).names)
    return spark.read.schema(wanted).option("__globPaths__", "false").parquet(*sorted(files)).distinct()


def paths(lake: Lake, table: LakeTable) -> list[str]:
    """List the files of all databases, as paths within the lake."""
    names = places.names(lake.url, _FOLDER)
    return [f"{_FOLDER}/{name}" for name in names if name.startswith(f"{table}-") and name.endswith(".parquet")]


def _path(table: LakeTable, whose: Whose) -> str:
    name = hashlib.sha256(f"{whose.service}:{whose.database}".encode()).hexdigest()[:32]
    return f"{_FOLDER}/{table}-{name}.parquet"


def _read(lake: Lake, table: LakeTable, files: Sequence[str], condition: object = None) -> pa.Table:
    schema = _schema(table)
    if not files:
        return schema.empty_table()
    return places.ParquetFiles(lake.url, files, schema).to_table(filter=condition)


def _schema(table: LakeTable) -> pa.Schema:
    import pyarrow as pa

    whole = file_schema(table)
    return pa.schema([whole.field(name) for name in ("service", *KEYS[table])])
