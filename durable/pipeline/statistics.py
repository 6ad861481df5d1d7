"""Statistics of files of Parquet, by which Spark leaves out whole parts of them: they are not true of every type.

    FLOAT, DOUBLE     statistics know nothing of NaN, which is larger than any number for Spark
    DECIMAL           compared by Spark as if every file had the same number of digits behind the point

Every row is read where a condition is over such a column.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.types import DataType


def is_misjudged(kind: DataType) -> bool:
    """True of a type, and of a struct with a field of one, whose statistics may leave out what a condition accepts."""
    from pyspark.sql.types import FractionalType, StructType

    if isinstance(kind, StructType):
        return any(is_misjudged(field.dataType) for field in kind.fields)
    return isinstance(kind, FractionalType)


def unjudged(rows: DataFrame) -> DataFrame:
    """Return the same rows, with each such column as an expression: no statistics are compared with it."""
    from pyspark.sql import functions as F

    def itself(name: str) -> Any:
        column = F.col(quoted(name))
        return F.coalesce(column, column)

    misjudged = [field.name for field in rows.schema.fields if is_misjudged(field.dataType)]
    return rows.withColumns({name: itself(name) for name in misjudged}) if misjudged else rows


def quoted(column: str) -> str:
    """The name of this column as Spark reads it, whatever characters it has."""
    return f"`{column.replace('`', '``')}`"
