"""History for the pipeline's tests: a few rows by hand, or any number of them, and lakes that hold them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
from pyspark.sql import DataFrame, SparkSession

from durable.pipeline.lake import Lake
from durable.pipeline.lake_tables import DataFile, LakeTable, arrow_schema

BEGAN = datetime(2026, 1, 1, tzinfo=UTC)
SHOP, BILLING = "shop", "billing"
TO_BILLING = "tcp://billing:2302"


def at(seconds: float) -> datetime:
    return BEGAN + timedelta(seconds=seconds)


def message_id(number: int) -> UUID:
    return UUID(int=number)


def sent(number: int, **changes: Any) -> dict[str, Any]:
    """The sender's row of a message: sent a second after the one before, acknowledged 10 ms later."""
    row = _row(number) | {
        "side": "outgoing",
        "outcome": "sent",
        "service": SHOP,
        "address": TO_BILLING,
        "finished_at": at(number + 0.010),
    }
    return row | changes


def handled(number: int, **changes: Any) -> dict[str, Any]:
    """The receiver's row of it: stored after 5 ms, handled after 25."""
    row = _row(number) | {
        "side": "incoming",
        "outcome": "handled",
        "service": BILLING,
        "address": "main",
        "received_at": at(number + 0.005),
        "finished_at": at(number + 0.025),
    }
    return row | changes


def letter(number: int, **changes: Any) -> dict[str, Any]:
    row = _row(number) | {
        "letter_id": number,
        "side": "incoming",
        "service": BILLING,
        "address": "main",
        "failed_at": at(number + 0.025),
        "exception_type": "LookupError",
        "reason": "no such customer",
        "fingerprint": "c1901199ced90889",
        "body": b"{}",
        "replayable": True,
    }
    return row | changes


def _row(number: int) -> dict[str, Any]:
    return {
        "id": message_id(number),
        "message_type": "orders.placed",
        "source": SHOP,
        "correlation_id": message_id(number),
        "sent_at": at(number),
        "attempts": 0,
        "interruptions": 0,
        "node_id": 1,
        "xid": 1,
    }


def table(rows: Sequence[Mapping[str, Any]], of: LakeTable = "history") -> pa.Table:
    """These rows as the lake holds them."""
    return pa.Table.from_pylist([_as_stored(row) for row in rows], schema=arrow_schema(of))


def frame(spark: SparkSession, rows: Sequence[Mapping[str, Any]], of: LakeTable = "history") -> DataFrame:
    return spark.createDataFrame(table(rows, of))


def _as_stored(row: Mapping[str, Any]) -> dict[str, Any]:
    moment = row.get("finished_at") or row["failed_at"]
    plain = {name: value.bytes if isinstance(value, UUID) else value for name, value in row.items()}
    return {"day": moment.date(), **plain}


# ---------------------------------------------------------------- many rows


def many(numbers: np.ndarray, side: str) -> pa.Table:
    """Rows like sent() and handled(), a thousand a second, all of the first day."""
    is_sent = side == "outgoing"
    count = len(numbers)
    ids = np.zeros((count, 16), np.uint8)
    ids[:, 8:] = numbers.astype(">u8").view(np.uint8).reshape(count, 8)
    packed = pa.FixedSizeBinaryArray.from_buffers(pa.binary(16), count, [None, pa.py_buffer(ids.tobytes())])
    began = int(BEGAN.timestamp() * 1_000_000) + numbers * 1_000
    columns: dict[str, Any] = {
        "service": SHOP if is_sent else BILLING,
        "id": packed.cast(pa.binary()),
        "side": side,
        "outcome": "sent" if is_sent else "handled",
        "address": TO_BILLING if is_sent else "main",
        "message_type": "orders.placed",
        "source": SHOP,
        "correlation_id": packed.cast(pa.binary()),
        "sent_at": began,
        "received_at": None if is_sent else began + 5_000,
        "finished_at": began + (10_000 if is_sent else 25_000),
        "attempts": 0,
        "interruptions": 0,
        "node_id": 1,
        "xid": numbers,
        "day": BEGAN.date(),
    }
    schema = arrow_schema("history")
    return pa.table([_column(columns.get(field.name), field.type, count) for field in schema], schema=schema)


def _column(value: Any, kind: pa.DataType, count: int) -> pa.Array:
    """A value for all rows, or one for each."""
    if isinstance(value, pa.Array):
        return value
    if isinstance(value, np.ndarray):
        return pa.array(value).cast(kind)
    return pa.repeat(pa.scalar(value, kind), count)


# ---------------------------------------------------------------- lakes


def fill(lake: Lake, *tables: pa.Table, of: LakeTable = "history") -> Lake:
    """Write these rows and commit them, as archive does."""
    lake.create(of)
    folder = Path(lake.table_url(of))
    for number, rows in enumerate(tables):
        low = lake.offset("tests", of)
        files = [
            _write(folder, day, rows.filter(ds.field("day") == day).drop_columns("day"), f"{low}-{number}")
            for day in sorted(set(rows["day"].unique().to_pylist()))
        ]
        lake.commit(of, files, app_id="tests", low=low, high=low + 1)
    return lake


def _write(folder: Path, day: date, rows: pa.Table, name: str) -> DataFile:
    path = folder / f"day={day}" / f"part-{name}.parquet"
    path.parent.mkdir(exist_ok=True)
    pq.write_table(rows, path, compression="zstd", row_group_size=250_000)
    return DataFile(
        str(path.relative_to(folder)), day, len(rows), path.stat().st_size, f'{{"numRecords": {len(rows)}}}'
    )
