"""The tables of a lake: their columns, whose rows they have, and the files that they consist of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from durable.pipeline.columns import COLUMNS

if TYPE_CHECKING:
    import pyarrow
    import pyarrow.dataset as ds

LakeTable = Literal["history", "dead_letters"]
SOURCES: Final[Mapping[LakeTable, str]] = {"history": "envelope_history", "dead_letters": "dead_letters"}
"""Which table of Postgres each table of the lake is filled from."""

DAY_OF: Final[Mapping[LakeTable, str]] = {"history": "finished_at", "dead_letters": "failed_at"}
"""The column whose UTC date is the partition."""


@dataclass(frozen=True, slots=True)
class DataFile:
    """A Parquet file that is to become part of the lake: `stats` are Delta's, as JSON."""

    path: str
    """Relative to its table."""
    day: date
    rows: int
    size: int
    stats: str


class Whose(NamedTuple):
    """Owner of rows: a service and one of its databases."""

    service: str
    database: str

    def condition(self) -> ds.Expression:
        """Choose the rows of this owner: those of the first version name no database."""
        import pyarrow.dataset as ds

        is_own = (ds.field("database") == self.database) | ds.field("database").is_null()
        return (ds.field("service") == self.service) & is_own


def spark_schema(table: LakeTable) -> str:
    """The columns of a table of the lake, as Spark's schemas are written: whose they are, those of Postgres, `day`."""
    columns = ", ".join(column.ddl.removesuffix(" NOT NULL") for column in COLUMNS[SOURCES[table]])
    return f"service STRING, database STRING, {columns}, day DATE"


def arrow_schema(table: LakeTable) -> pyarrow.Schema:
    """The same for Arrow."""
    import pyarrow as pa

    columns = [column.arrow.with_nullable(True) for column in COLUMNS[SOURCES[table]]]
    whose = [pa.field("service", pa.string()), pa.field("database", pa.string())]
    return pa.schema([*whose, *columns, pa.field("day", pa.date32())])


def file_schema(table: LakeTable) -> pyarrow.Schema:
    """Return the schema of a file: the day is in its path."""
    whole = arrow_schema(table)
    return whole.remove(whole.get_field_index("day"))
