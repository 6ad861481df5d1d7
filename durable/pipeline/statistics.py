"""Statistics of files of Parquet, by which Spark leaves out whole parts of them: they are not true of every type.

    FLOAT, DOUBLE     statistics know nothing of NaN, which is larger than any number for Spark
    DECIMAL           compared by Spark as if every file had the same number of digits behind the point
    TIMESTAMP         Spark cuts the other side of a comparison to the milliseconds of a file that has these: by
                      `<` and `<>` it leaves out rows of the last one; by `<=`, `>=`, `>` and `=` none

Every row is read where a condition of somebody's is over such a column. Our own bounds of times are `<=` and `>=`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame
    from pyspark.sql.types import DataType

_AS_WRITTEN: Final = "columns as written"
"""Files may have columns of any name that is one word."""


def is_unordered(kind: DataType) -> bool:
    """True of a type whose statistics may leave out what any comparison accepts."""
    from pyspark.sql.types import FractionalType

    return isinstance(kind, FractionalType)


def is_misjudged(kind: DataType) -> bool:
    """True of a type, and of a struct with a field of one, whose statistics may leave out what a condition accepts."""
    from pyspark.sql.types import StructType, TimestampNTZType, TimestampType

    if isinstance(kind, StructType):
        return any(is_misjudged(field.dataType) for field in kind.fields)
    return is_unordered(kind) or isinstance(kind, TimestampType | TimestampNTZType)


def meeting(rows: DataFrame, condition: str) -> DataFrame:
    """Return the rows that meet a condition: no statistics that misjudge a column are compared with it."""
    from pyspark.sql import functions as F

    misjudged = [field.name for field in rows.schema.fields if is_misjudged(field.dataType)]
    if not misjudged:
        return rows.where(condition)
    kept = F.struct(*(F.col(quoted(name)) for name in misjudged))
    asked = rows.withColumn(_AS_WRITTEN, kept).withColumns({name: unjudged(F.col(quoted(name))) for name in misjudged})
    written = {name: F.col(_AS_WRITTEN).getField(name) for name in misjudged}
    return asked.where(condition).withColumns(written).drop(_AS_WRITTEN)


def unjudged(column: Column) -> Column:
    """Return the same column as an expression: no statistics are compared with it."""
    from pyspark.sql import functions as F

    return F.coalesce(column, column)


def quoted(column: str) -> str:
    """The name of this column as Spark reads it, whatever characters it has."""
    return f"`{column.replace('`', '``')}`"
