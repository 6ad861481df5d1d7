"""Parts of a DataFrame that are of equal size by count of rows, one after another in the order of one of its columns.

    order_by, sorted by Spark, numbered ──> the value at which each chunk begins ──> chunk: [begin, next begin)

Only the column of order is sorted. Rows are told apart by it, so it ends in what tells them apart, such as an id. Its
values are any that Spark has: a text of it is bytes here, and a time a number; Python need not know either.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, Final

from durable.pipeline.session import spark_errors
from durable.pipeline.statistics import is_unordered

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame
    from pyspark.sql.types import DataType, StructType

_PARTITION_BITS: Final = 33  # of a monotonically increasing id of Spark's; above are those of the partition


def chunks(rows: DataFrame, by: str, *, total: int, size: int) -> Iterator[DataFrame]:
    """The `total` rows in chunks of this size, the last of which may be smaller; `by` is a column of structs."""
    bounds: list[Any] = [None]
    if total > size:
        with spark_errors():
            bounds += _beginnings(rows, by, size)
    for low, high in pairwise([*bounds, None]):
        if total:
            yield _between(rows, by, low, high)


def _beginnings(rows: DataFrame, by: str, size: int) -> list[Any]:
    """The values at which all chunks but the first begin."""
    from pyspark.sql import functions as F

    # Kept for as long as it is asked: sorted once more, its partitions might end elsewhere.
    numbered = rows.select(by).orderBy(by).withColumn("number", F.monotonically_increasing_id()).persist()
    try:
        # Sorted here: few rows as they are, Spark would take two more jobs for each.
        partition = F.shiftright("number", _PARTITION_BITS).alias("partition")
        counted = sorted((int(row[0]), int(row[1])) for row in numbered.groupBy(partition).count().collect())
        begins = numbered.where(F.col("number").isin(_numbers_of(counted, size)))
        kind = rows.schema[by].dataType
        found = begins.select("number", _plain(F.col(by), kind).alias(by)).toArrow().sort_by("number")
    finally:
        numbered.unpersist()
    return list(found[by].to_pylist())


def _plain(column: Column, kind: DataType) -> Column:
    """Return a value as one that Python has, too, from which _literal() makes the same value again."""
    from pyspark.sql import functions as F
    from pyspark.sql import types as T

    match kind:
        case T.StructType(fields=fields):
            whole = F.struct(*(_plain(column.getField(each.name), each.dataType).alias(each.name) for each in fields))
            return F.when(column.isNotNull(), whole)
        case T.StringType():
            return column.cast("binary")
        case T.TimestampType():
            return F.unix_micros(column)
        case T.TimestampNTZType():
            return F.unix_micros(column.cast("timestamp"))
        case T.DateType():
            return F.unix_date(column)
        case _:
            return column


def _numbers_of(partitions: Sequence[tuple[int, int]], size: int) -> list[int]:
    """Return Spark's numbers of the rows size, 2 * size and so on, in partitions with these numbers and counts."""
    ends = accumulate(count for _, count in partitions)
    found = []
    for (partition, count), end in zip(partitions, ends, strict=True):
        begin = end - count
        first = max(size, -(-begin // size) * size)
        found += [(partition << _PARTITION_BITS) + row - begin for row in range(first, end, size)]
    return found


def _between(rows: DataFrame, by: str, low: Any, high: Any) -> DataFrame:
    from pyspark.sql import functions as F

    kind: Any = rows.schema[by].dataType
    if low is not None:
        rows = rows.where(_first_field(by, kind, low, is_low=True)).where(F.col(by) >= _struct(low, kind))
    if high is not None:
        rows = rows.where(_first_field(by, kind, high, is_low=False)).where(F.col(by) < _struct(high, kind))
    return rows


def _first_field(by: str, kind: StructType, bound: Any, *, is_low: bool) -> Column:
    """Return the condition on the first field alone: Parquet files are read by it, and never by a struct."""
    from pyspark.sql import functions as F

    name = kind.fieldNames()[0]
    if is_unordered(kind.fields[0].dataType) or _is_misread(bound[name], kind.fields[0].dataType):
        return F.lit(True)
    first = _literal(bound[name], kind.fields[0].dataType)
    column = F.col(by).getField(name)
    if bound[name] is None:
        return F.lit(True) if is_low else column.isNull()
    return column >= first if is_low else column.isNull() | (column <= first)


def _is_misread(value: Any, kind: DataType) -> bool:
    """Tell a text that is not UTF-8: Spark compares another one with the statistics of files."""
    return kind.typeName() == "string" and value is not None and value.decode(errors="replace").encode() != value


def _struct(value: Any, kind: Any) -> Column:
    from pyspark.sql import functions as F

    return F.struct(*(_literal(value[each.name], each.dataType).alias(each.name) for each in kind.fields))


def _literal(value: Any, kind: DataType) -> Column:
    """Write a literal of what _plain() gives: a number by its text, which keeps its last digit."""
    from pyspark.sql import functions as F
    from pyspark.sql import types as T

    if isinstance(value, dict):
        return _struct(value, kind)
    if value is None or isinstance(value, bytes):
        return F.lit(None if value is None else bytearray(value)).cast(kind)
    match kind:
        case T.TimestampType() | T.TimestampNTZType():
            return F.timestamp_micros(F.lit(value)).cast(kind)
        case T.DateType():
            return F.date_from_unix_date(F.lit(value))
        case _:
            return F.lit(str(value)).cast(kind)
