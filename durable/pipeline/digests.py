"""Digests of rows of the lake, equal to those that Postgres computes: contents are compared without moving them.

    Postgres    sha256(record_send(ROW(...)))    ──> 64 bits of each row ──> their sum, for each block
    lake        the same bytes, out of Arrow     ──> 64 bits of each row ──> their sum, for each block

A record is the number of its columns, and for each of them the type, the length and the value as Postgres sends it; a
NULL has the length -1. Of an erasure a record has only whether there was one. A block is a part of the rows of one side
of a day, chosen by their ids.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

from durable.pipeline.columns import COLUMNS, Column
from durable.pipeline.lake_tables import SOURCES, LakeTable
from durable.storage.sql.archive import BLOCKS, ERASURE

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa

_TYPES: Final = {"uuid": 2950, "bigint": 20, "integer": 23, "boolean": 16, "timestamptz": 1184}
_BYTES: Final = 17  # bytea, and all that is sent as one
_EPOCH_OF_POSTGRES: Final = 946_684_800_000_000  # 2000, in microseconds since 1970
_SLICE_BYTES: Final = 32 << 20
_NULL_LENGTH: Final = -1


def row_digests(rows: pa.RecordBatch, table: LakeTable) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """The digest of each row of the lake; columns that are not Postgres's do not count."""
    import numpy as np

    found = [_digest(record) for part in _parts(rows) for record in _records(part, COLUMNS[SOURCES[table]])]
    return np.frombuffer(b"".join(found), dtype=">u8").astype(np.uint64)


def row_blocks(rows: pa.RecordBatch, table: LakeTable) -> np.ndarray[Any, np.dtype[np.int32]]:
    """The number of the block of each row."""
    import numpy as np

    if table == "dead_letters":
        numbers = _filled(rows.column("letter_id"), 0).to_numpy(zero_copy_only=False)
    else:
        last = [each[-1] if each else 0 for each in rows.column("id").to_pylist()]
        numbers = np.array(last, dtype=np.int64)
    blocks: np.ndarray[Any, np.dtype[np.int32]] = np.bitwise_and(numbers, BLOCKS - 1).astype(np.int32)
    return blocks


def _digest(record: bytes) -> bytes:
    return hashlib.sha256(record).digest()[:8]


def _parts(rows: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Cut records into slices that fit into one Arrow array each."""
    count = max(1, -(-rows.nbytes // _SLICE_BYTES))
    size = max(1, -(-rows.num_rows // count))
    for first in range(0, rows.num_rows, size):
        yield rows.slice(first, size)


def _records(rows: pa.RecordBatch, columns: Sequence[Column]) -> list[bytes]:
    """Each row as Postgres's record_send() gives it."""
    import pyarrow as pa
    from pyarrow.compute import call_function

    fields = [
        _field(rows.column(each.name).is_valid(), "boolean")
        if each.name == ERASURE
        else _field(rows.column(each.name), each.kind)
        for each in columns
    ]
    head = pa.repeat(pa.scalar(struct.pack(">i", len(columns)), pa.large_binary()), rows.num_rows)
    joined = call_function("binary_join_element_wise", [head, *fields, pa.scalar(b"", pa.large_binary())])
    return list(joined.to_pylist())


def _field(values: pa.Array, kind: str) -> pa.Array:
    """Encode one column of all records."""
    import pyarrow as pa
    from pyarrow.compute import call_function

    number = _TYPES.get(kind, _BYTES)
    sent = _sent(values, kind)
    lengths = _big_endian(_filled(call_function("binary_length", [sent]), 0), ">i4")
    empty = pa.scalar(b"", pa.large_binary())
    of_type = pa.scalar(struct.pack(">I", number), pa.large_binary())
    whole = call_function("binary_join_element_wise", [of_type, lengths, _filled(sent, b""), empty])
    null = pa.scalar(struct.pack(">Ii", number, _NULL_LENGTH), pa.large_binary())
    return call_function("if_else", [values.is_valid(), whole, null])


def _sent(values: pa.Array, kind: str) -> pa.Array:
    """Encode values as Postgres sends them."""
    import pyarrow as pa
    from pyarrow.compute import call_function

    match kind:
        case "bigint":
            return _big_endian(_filled(values, 0), ">i8")
        case "integer":
            return _big_endian(_filled(values, 0), ">i4")
        case "timestamptz":
            micros = _filled(values.cast(pa.int64()), 0)
            return _big_endian(call_function("subtract", [micros, pa.scalar(_EPOCH_OF_POSTGRES)]), ">i8")
        case "boolean":
            return _big_endian(_filled(values.cast(pa.int8()), 0), "i1")
        case _:
            return values.cast(pa.large_binary())


def _big_endian(numbers: pa.Array, kind: str) -> pa.Array:
    import numpy as np
    import pyarrow as pa

    width = np.dtype(kind).itemsize
    sent = numbers.to_numpy(zero_copy_only=False).astype(kind).tobytes()
    fixed = pa.FixedSizeBinaryArray.from_buffers(pa.binary(width), len(numbers), [None, pa.py_buffer(sent)])
    return fixed.cast(pa.large_binary())


def _filled(values: pa.Array, value: object) -> pa.Array:
    import pyarrow as pa

    return values.fill_null(pa.scalar(value, values.type)) if values.null_count else values
