"""Positions of rows among each other, as bytes that sort in the same order: Postgres compares them, and so does Python.

    column of order    position
    NULL               00                                               before all others, as in Spark's ascending order
    a number, a time   01, and 8 bytes (a decimal: 16), big-endian, with the sign turned round
    a text, bytes      01, and the bytes, in which 00 is written as 00 01, and 00 00 behind them
    a struct           those of its fields, one after another

Rows that are level stand as they lie in the DataFrame: by partition, and within it by row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute

if TYPE_CHECKING:
    from pyspark.sql.types import DataType

pc: Any = pyarrow.compute  # its functions are made at run time, and no type checker knows them

SORTABLE: Final = (
    *("tinyint", "smallint", "int", "bigint", "float", "double", "boolean"),
    *("date", "timestamp", "timestamp_ntz", "string", "binary"),
)
"""The types of Spark's that can be a column of order, besides decimals and structs of such columns."""
_SIGN: Final = np.uint64(1 << 63)


def is_sortable(kind: DataType) -> bool:
    """Tell whether a column of this type can be a column of order."""
    from pyspark.sql.types import StructType

    if isinstance(kind, StructType):
        return all(is_sortable(field.dataType) for field in kind.fields)
    name = kind.simpleString()
    return name in SORTABLE or name.startswith("decimal(")


def positions(order: pa.Array | None, *, partition: int, first_row: int, count: int) -> pa.Array:
    """The positions of `count` rows of a partition, from its row `first_row` on; without a column of order they are
    where they lie."""
    rows = np.arange(first_row, first_row + count, dtype=np.uint64)
    lie = _joined(pa.array([partition.to_bytes(4, "big")] * count, pa.binary()), _words(rows))
    return lie if order is None else _joined(encoded(order), lie)


def encoded(column: pa.Array) -> pa.Array:
    """The values of a column as bytes that sort as they do."""
    if pa.types.is_struct(column.type):
        fields = column.flatten()  # with the NULLs of the struct itself
        return _joined(*map(encoded, fields)) if fields else pa.array([b""] * len(column), pa.binary())
    marks = pc.if_else(pc.is_valid(column), pa.scalar(b"\x01"), pa.scalar(b"\x00"))
    return pc.if_else(pc.is_valid(column), _joined(marks, _value(column)), marks)


def _value(column: pa.Array) -> pa.Array:
    """Encode values without regard to NULLs, which have any bytes."""
    kind = column.type
    if pa.types.is_decimal(kind):
        return _decimals(column)
    if pa.types.is_floating(kind):
        return _words(_sortable_bits(column))
    if pa.types.is_temporal(kind):
        column = column.cast(pa.int32()).cast(pa.int64()) if pa.types.is_date32(kind) else column.cast(pa.int64())
    elif not (pa.types.is_integer(kind) or pa.types.is_boolean(kind)):
        return _texts(column)
    numbers = pc.fill_null(column.cast(pa.int64()), 0).to_numpy(zero_copy_only=False)
    return _words(numbers.view(np.uint64) ^ _SIGN)


def _sortable_bits(column: pa.Array) -> Any:
    """Encode floats in Spark's order: -0.0 is 0.0, and NaN comes last."""
    numbers = pc.fill_null(column.cast(pa.float64()), 0.0).to_numpy(zero_copy_only=False) + 0.0
    bits = np.where(np.isnan(numbers), np.nan, numbers).view(np.uint64)
    return np.where(np.isnan(numbers), ~np.uint64(0), np.where(bits & _SIGN, ~bits, bits ^ _SIGN))


def _decimals(column: pa.Array) -> pa.Array:
    """All of a column have one scale, so that their unscaled numbers sort as they do."""
    whole = pa.concat_arrays([column.cast(pa.decimal128(38, column.type.scale))])
    words = np.frombuffer(whole.buffers()[1], dtype="<u8")[2 * whole.offset : 2 * (whole.offset + len(whole))]
    low, high = words.astype(np.uint64).reshape(-1, 2).T
    return _joined(_words(high ^ _SIGN), _words(low))


def _texts(column: pa.Array) -> pa.Array:
    """Closed, so that what stands behind a text does not count before its end."""
    return _joined(pc.replace_substring(column.cast(pa.binary()), "\x00", "\x00\x01"), pa.scalar(b"\x00\x00"))


def _words(numbers: Any) -> pa.Array:
    """Unsigned numbers of 64 bits as 8 bytes each."""
    data = pa.py_buffer(np.ascontiguousarray(numbers).astype(">u8").tobytes())
    return pa.Array.from_buffers(pa.binary(8), len(numbers), [None, data]).cast(pa.binary())


def _joined(*parts: Any) -> pa.Array:
    return parts[0] if len(parts) == 1 else pc.binary_join_element_wise(*parts, b"")
