"""The columns that leave Postgres: each as it is selected, as Arrow holds it, and as Spark names its type.

    Postgres      selected as          Arrow                  Spark
    uuid          uuid_send(x)         binary                 BINARY       16 bytes, in the order of the text
    text          x                    string                 STRING
    bigint        x                    int64                  BIGINT
    integer       x                    int32                  INT
    boolean       x                    bool                   BOOLEAN
    timestamptz   x, from 1900 on      timestamp[us, UTC]     TIMESTAMP    (durable.storage.sql.times)
    bytea         x                    binary                 BINARY
    jsonb         CAST(x AS text)      string                 STRING

They follow durable.storage.tables, so that a column which is added there is here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import BigInteger, Boolean, DateTime, Integer, LargeBinary, MetaData, Text, Uuid
from sqlalchemy.dialects.postgresql import JSONB

from durable.storage import tables
from durable.storage.sql.times import in_range

if TYPE_CHECKING:
    import pyarrow

READABLE: Final = ("envelope_history", "dead_letters", "outgoing_envelopes", "incoming_envelopes")
"""The tables that the pipeline reads."""

LETTER: Final = ("letter_id", "id", "failed_at")
"""What a letter of one database is known by, in all of its states. Its number alone does not tell: a database that was
restored gives the numbers of lost letters to new ones."""

_UUID: Final = "uuid"
_DDL: Final[dict[str, str]] = {
    _UUID: "BINARY",
    "text": "STRING",
    "bigint": "BIGINT",
    "integer": "INT",
    "boolean": "BOOLEAN",
    "timestamptz": "TIMESTAMP",
    "bytea": "BINARY",
    "jsonb": "STRING",
}
_KINDS: Final[tuple[tuple[type[Any], str], ...]] = (  # BigInteger is an Integer
    (Uuid, _UUID),
    (Text, "text"),
    (BigInteger, "bigint"),
    (Integer, "integer"),
    (Boolean, "boolean"),
    (DateTime, "timestamptz"),
    (LargeBinary, "bytea"),
    (JSONB, "jsonb"),
)


@dataclass(frozen=True, slots=True)
class Column:
    """Column of a table: `kind` is its type in Postgres."""

    name: str
    kind: str
    is_nullable: bool

    @property
    def sql(self) -> str:
        """Return the column as written in a SELECT."""
        match self.kind:
            case "uuid":
                return f'uuid_send("{self.name}") AS "{self.name}"'
            case "jsonb":
                return f'CAST("{self.name}" AS text) AS "{self.name}"'
            case "timestamptz":
                quoted = f'"{self.name}"'
                return f"{in_range(quoted)} AS {quoted}"
            case _:
                return f'"{self.name}"'

    @property
    def ddl(self) -> str:
        """Return the column as written in Spark's schemas."""
        return f"{self.name} {self.spark_type}{'' if self.is_nullable else ' NOT NULL'}"

    @property
    def spark_type(self) -> str:
        return _DDL[self.kind]

    @property
    def arrow(self) -> pyarrow.Field:
        import pyarrow as pa

        types = {
            "bigint": pa.int64(),
            "integer": pa.int32(),
            "boolean": pa.bool_(),
            "timestamptz": pa.timestamp("us", tz="UTC"),
            "bytea": pa.binary(),
            _UUID: pa.binary(),
        }
        return pa.field(self.name, types.get(self.kind, pa.string()), nullable=self.is_nullable)


def _kind(of: Any) -> str:
    return next(kind for known, kind in _KINDS if isinstance(of, known))


def _columns() -> dict[str, tuple[Column, ...]]:
    defined = tables.define(MetaData())
    return {
        name: tuple(Column(str(each.name), _kind(each.type), bool(each.nullable)) for each in defined[name].columns)
        for name in READABLE
    }


COLUMNS: Final = _columns()
"""The columns of each readable table, in the table's order."""
